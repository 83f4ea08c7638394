"""Miniatures of two large models: few blocks of each kind, and small widths; and what they show of the models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mupscale.core import Entry, Plan, Role
from mupscale.planning.from_modules import build_plan, find_role
from mupscale.planning.full_size import is_large
from mupscale.planning.growth_checks import How
from mupscale.planning.model_calls import call_arguments
from mupscale.planning.precision import in_double
from mupscale.planning.resized_models import Resizing, Thinned
from mupscale.planning.tracing import in_float64, run_in_float64, tensors_in
from mupscale.planning.width_dims import all_tensors
from mupscale.system import MupscaleError

_ROWS = 64  # of a table, at least
_MOST = 2  # miniatures that are tried


@dataclass(frozen=True)
class Miniature:
    """Two small models that are to each other what two large ones are.

    inputs: a batch for them. originals: by the names of their tensors, the large models' that are like them.
    """

    narrow: nn.Module
    wide: nn.Module
    inputs: Any
    originals: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, narrow: nn.Module, wide: nn.Module, inputs: Any) -> Miniature:
        """Two models as they are, or with fewer blocks and rows of tables if they are large."""
        made = next(find_miniatures(narrow, wide, inputs, narrower=False), None) if is_large(narrow, wide) else None
        return made or cls(narrow, wide, inputs, {name: [name] for name in all_tensors(narrow)})

    def given(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The roles that were given for the large models, by name."""
        told = {name: find_role(roles, names[0]) for name, names in self.originals.items()}
        return {escape(name): role for name, role in told.items() if role is not None}

    def at_full_size(
        self, shown: Plan, narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role], how: How
    ) -> Plan:
        """The plan of the large models that this one of the small ones shows."""
        learnt = self.roles(shown, roles)
        planned = build_plan(narrow, wide, roles=learnt, how=how, assume=True)
        past = None if shown.past_norms is None else self.by_original(shown.past_norms)
        planned = planned if past is None else planned.with_initial("past_norms", past)
        return replace(planned, tried_by=shown.tried_by)

    def roles(self, shown: Plan, given: Mapping[str, Role]) -> dict[str, Role]:
        """By pattern, what was given, and else what a plan of the small models shows."""
        by_name = self.by_original(roles_of(shown))
        told = {name: role for name in by_name if (role := find_role(given, name)) is not None}
        return {escape(name): role for name, role in {**by_name, **told}.items()} | dict(given)

    def patterns(self, learnt: Mapping[str, Role], given: Mapping[str, Role]) -> dict[str, Role]:
        """By pattern, roles of the small models as those of the large ones; what was given comes behind."""
        found = {own: role for own in self.originals if (role := find_role(learnt, own)) is not None}
        return {escape(name): role for name, role in self.by_original(found).items()} | dict(given)

    def by_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """By the names of the large models, what is known by the small ones'."""
        return {name: value for own, value in values.items() for name in self.originals.get(own, ())}


def find_miniatures(narrow: nn.Module, wide: nn.Module, inputs: Any, *, narrower: bool = True) -> Iterator[Miniature]:
    """Miniatures of two models that run on the batch, the smallest first; none where nothing can be made smaller.

    narrower: whether widths are smaller, too, and not only lists of blocks and tables.
    """
    with suppress(MupscaleError):
        sizes = Resizing(narrow, wide)
        thinned = [sizes.thinned(), sizes.thinned(inner=False), Thinned()]
        factors = [Fraction(1, d) for d in sizes.divisors()[: _MOST * narrower]] + [Fraction(1)]
        rows = _rows(inputs)
        short = sizes.shorter_tables(rows)
        batch = tree_map(lambda x: x % rows if short and _is_whole(x) else x, inputs)
        tried = 0
        for blocks in [each for i, each in enumerate(thinned) if each not in thinned[:i]]:
            for factor in factors if blocks.kept or short else factors[:-1]:
                if tried < _MOST and (pair := _runnable_pair(sizes, factor, blocks, short, batch)) is not None:
                    tried += 1
                    originals: dict[str, list[str]] = {}
                    for name in all_tensors(narrow):
                        originals.setdefault(blocks.name_in_miniature(name), []).append(name)
                    yield Miniature(*pair, batch, originals)


def _rows(inputs: Any) -> int:
    """How many rows of tables are enough for a batch, or a longer one of its kind, whatever its tokens are."""
    return max([_ROWS, *(4 * n for t in tensors_in(call_arguments(inputs)) for n in t.shape[1:])])


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _runnable_pair(
    sizes: Resizing, factor: Fraction, blocks: Thinned, short: Mapping[int, int], inputs: Any
) -> tuple[nn.Module, nn.Module] | None:
    try:
        narrow, wide = (sizes.copy(model, factor, blocks, short) for model in (sizes.narrow, sizes.wide))
        with torch.no_grad():
            for model in (narrow, wide):
                run_in_float64(*in_float64(model, in_double(inputs)))
    except Exception:  # whatever a model raises whose sizes do not go together
        return None
    return narrow, wide


def roles_of(plan: Plan) -> dict[str, Role]:
    """What a plan says of every parameter and buffer, under all its names.

    >>> import mupscale as mu
    >>> print(roles_of(mu.plan(nn.Linear(3, 4), nn.Linear(3, 8)))["weight"])
    Role(out=0)
    """
    entries = {**plan.buffers, **plan.parameters}
    return {alias: _role(name, entry) for name, entry in entries.items() for alias in entry.names or (name,)}


def _role(name: str, entry: Entry) -> Role:
    blocks = [{entry.axes[d].block for d in side if entry.axes[d].times != 1} or {1} for side in (entry.out, entry.in_)]
    sections = {entry.axes[d].sections for d in entry.axes if entry.axes[d].sections}
    if max(map(len, blocks)) > 1 or len(sections) > 1:
        raise MupscaleError(f"'{name}' is copied in several orders, which no role can tell")
    return Role(
        out=entry.out,
        in_=entry.in_,
        out_block=blocks[0].pop(),
        in_block=blocks[1].pop(),
        out_sections=next(iter(sections), ()),
        fold=entry.fold,
        offset=entry.offset,
        keep=None if entry.fold == 1 and entry.keep == 1 else entry.keep,
        last=any(axis.last for axis in entry.axes.values()),
    )
