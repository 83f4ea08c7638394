"""What a plan is tried on: the batch that was given and, where that leaves something unseen, a stronger one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Role, naming
from mupscale.planning.certain_outputs import is_certain_output
from mupscale.planning.from_modules import find_role
from mupscale.planning.full_size import Shapes, in_full_precision, is_large
from mupscale.planning.miniature_pairs import find_miniatures
from mupscale.planning.precision import in_double
from mupscale.planning.stronger_batches import (
    Leaves,
    all_alike,
    check_not_empty,
    find_tables,
    has_equal_slices,
    has_one_position,
    strengthened,
)
from mupscale.planning.tracing import in_float64, run_in_float64
from mupscale.planning.unseen_units import Seen, growing_weights, run_and_see, seen_by, without_effect
from mupscale.system import UncheckedPlan, name_of_group, pattern_of_name, warn

_SHOWN = 5  # groups of parameters that a message names


class Trials:
    """A batch, in float64, and what it and a stronger one show of two models; they are looked at once.

    strong: the stronger batch, where the given one shows too little and the models take another that shows more.
    unseen: growing parameters that change no output on any of them, and that are no certain gains or biases.
    parts: those of which a good part does not. given_shows_all: whether the given batch shows some of each.
    shapes: of the two models' outputs, where large ones were run.

    >>> narrow, wide = (nn.Sequential(nn.Linear(2, n), nn.Linear(n, 1)) for n in (4, 8))
    >>> trials = Trials(torch.zeros(3, 2)).look(narrow, wide)
    >>> bool(trials.best[0].any()), trials.unseen
    (True, [])
    """

    def __init__(self, inputs: Any) -> None:
        check_not_empty(inputs)
        self.given = in_double(inputs)
        self.strong: Any = None
        self.unseen: list[str] = []
        self.parts: list[str] = []
        self.shapes: tuple[Shapes, Shapes] | tuple[()] = ()
        self.given_shows_all = False
        self._has_looked = False

    @classmethod
    def of(cls, inputs: Any) -> Trials:
        """The trials, or those that a batch makes.

        >>> trials = Trials(torch.ones(1))
        >>> Trials.of(trials) is trials
        True
        """
        return inputs if isinstance(inputs, cls) else cls(inputs)

    @property
    def batches(self) -> list[Any]:
        """The given one, and the stronger one if there is one."""
        return [self.given] if self.strong is None else [self.given, self.strong]

    @property
    def best(self) -> Any:
        """The one that shows most."""
        return self.batches[-1]

    def look(self, narrow: nn.Module, wide: nn.Module, gradients: Mapping[str, Tensor] | None = None) -> Trials:
        """Find what the batch does not show of the models, and a stronger one that shows it.

        gradients: of the narrow model with generic weights on the given batch, where they are known.
        """
        if not self._has_looked:
            self._has_looked = True
            if is_large(narrow, wide) and (mini := next(find_miniatures(narrow, wide, self.given), None)) is not None:
                with in_full_precision():
                    seen_small = Trials(mini.inputs).look(mini.narrow, mini.wide).renamed(mini.originals)
                self.strong, self.unseen, self.parts = seen_small.strong, seen_small.unseen, seen_small.parts
                return self
            pair = _Pair(narrow, wide)
            if (seen := pair.see(self.given, gradients)) is not None:
                search = _Strengthening(pair, self.given, seen)
                self.given_shows_all = not (seen.unseen or search.is_short or search.is_dull)
                self.strong, seen = search.best, search.seen
                absent = [name for name in seen.unseen if name in seen.absent]
                effective = set(absent).difference(without_effect(narrow, self.batches, absent))
                self.unseen = [n for n in seen.unseen if n not in effective and not pair.is_certain(n)]
                self.parts = [] if search.is_free else seen.parts
        return self

    def renamed(self, originals: Mapping[str, Sequence[str]]) -> Trials:
        """What was seen of a miniature as of the model that it is one of. originals: by name, what is like it there."""
        for names in (self.unseen, self.parts):
            names[:] = [original for name in names for original in originals.get(name, (name,))]
        return self

    def warn(self, roles: Mapping[str, Role] | None = None) -> None:
        """Say which parameters no batch has shown. roles: those that the user gave, who knows.

        >>> narrow, wide = (nn.Sequential(nn.Linear(2, n), nn.Linear(n, 1)) for n in (4, 8))
        >>> Trials(torch.ones(3, 2)).look(narrow, wide).warn()
        """
        unseen, parts = ([n for n in names if find_role(roles or {}, n) is None] for names in (self.unseen, self.parts))
        if unseen or parts:
            some = [_listed(unseen)] * bool(unseen) + [f"a part of {_listed(parts)}"] * bool(parts)
            stronger = "" if self.strong is None else ", nor on a stronger one that was drawn"
            warn(
                f"the batch does not show whether the plan is right for {' and '.join(some)}: it changes no output on "
                f"the batch{stronger}, so only module types and names decide. Pass inputs= on which it matters (longer "
                "ones; models in train() for what only training uses), or roles= for it",
                UncheckedPlan,
            )


class _Pair:
    """Two models, of which batches show more or less."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.narrow, self.wide, self.growing = narrow, wide, growing_weights(narrow, wide)

    def see(self, batch: Any, gradients: Mapping[str, Tensor] | None = None) -> Seen | None:
        """What a batch shows; None where the narrow model does not take it. gradients: where they are known."""
        ours = naming.parameters(self.narrow)
        if gradients is not None and all(ours[name].requires_grad for name in self.growing):
            return seen_by(gradients, {name: p.shape for name, p in ours.items()}, self.growing)
        try:
            return run_and_see(self.narrow, batch, self.growing)
        except Exception:  # whatever a model raises on what it was not made for
            return None

    def is_certain(self, name: str) -> bool:
        """Whether a parameter's growing axis has its units, whatever it is used for: of a gain, or an added token."""
        path, _, local = name.rpartition(".")
        module, tensor, dims = (
            naming.modules(self.narrow)[path],
            naming.parameters(self.narrow)[name],
            self.growing[name],
        )
        return len(dims) == 1 and is_certain_output(module, local, tensor, dims[0])

    @torch.no_grad()
    def is_taken_by_wide(self, batch: Any) -> bool:
        """Whether the wide model runs on a batch, too."""
        model, values = in_float64(self.wide, batch, like=self.narrow)
        try:
            run_in_float64(model, values)
        except Exception:  # as above
            return False
        return True


class _Strengthening:
    """The search for a batch that leaves less unseen than the given one, if that leaves anything.

    best: the batch, or None. seen: what both show together. is_free: whether all of the batch could be changed, so that
    what is still unseen has no effect on any batch.
    """

    def __init__(self, pair: _Pair, given: Any, seen: Seen) -> None:
        self.pair, self.best, self.seen, self.is_free = pair, None, seen, True
        leaves = Leaves(given)
        self.is_short = any(map(has_one_position, leaves.tensors))
        self.is_dull = False
        may_be_dull = any(all_alike(t) or has_equal_slices(t) for t in leaves.tensors)
        if not (seen.lacking or self.is_short or may_be_dull):
            return
        tables = find_tables(in_float64(pair.narrow, given, generic=1)[0], leaves)
        drawn = [t for i, t in enumerate(leaves.tensors) if t.is_floating_point() or i in tables]
        lead = leaves.lead(tables)
        self.is_dull = any(all_alike(t) or (t is lead and has_equal_slices(t)) for t in drawn)
        if not (seen.lacking or self.is_short or self.is_dull):
            return
        self.lacks = self.is_dull + self.is_short, seen.lacking
        if not self._try(seen, leaves, tables, timid=False):
            self._try(seen, leaves, tables, timid=True)
        self.is_free = len(drawn) == len(leaves.tensors) and not self.lacks[0]

    def _try(self, seen: Seen, leaves: Leaves, tables: Mapping[int, int], timid: bool) -> bool:
        """Try batches until one leaves nothing unseen; whether the models took any."""
        is_taken = False
        for stronger in strengthened(leaves, tables, timid):
            if not (seen.lacking or self.is_dull or stronger.is_longer):
                continue  # it has what is there already
            shown = self.pair.see(stronger.batch)
            if shown is None:
                continue
            is_taken = True
            together = seen | shown
            lacks = int(self.is_short and not stronger.is_longer), together.lacking
            if lacks < self.lacks and self.pair.is_taken_by_wide(stronger.batch):
                self.best, self.seen, self.lacks = stronger.batch, together, lacks
                if not any(lacks):
                    break
        return is_taken


def _listed(names: Collection[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of_name(name), []).append(name)
    shown = [f"'{name_of_group(group)}'" for group in list(groups.values())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else "")
