"""Small members of a family, run on a batch: what it shows of their roles, and whether their plans stand the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mupscale.core import Plan, Role, Width, WidthLike, naming
from mupscale.family.built_members import BuiltMembers
from mupscale.planning import (
    How,
    Miniature,
    Resizing,
    Trials,
    build_plan,
    check_plan_by_running,
    find_past_norms,
    find_uneven,
    is_large,
    learn_roles,
    roles_for_any_width,
    with_keeps,
)
from mupscale.system import MupscaleError, not_advising

_PROBE_WIDTH = 8  # the least width of the models that are run to learn or check roles


class TriedMembers(BuiltMembers):
    """Members of which small ones have been tried, in the sizes that `tried` has."""

    def __init__(
        self,
        build: Callable[..., nn.Module],
        base: WidthLike,
        roles: Mapping[str, Role] | None = None,
        inputs: Any = None,
    ) -> None:
        super().__init__(build, base, roles, inputs)
        self.tried: set[frozenset[str]] = set()
        self._width_dims: Mapping[str, set[int]] = {}
        self._trials: Trials | None = None
        self._pairs: dict[tuple[Width, Width], tuple[nn.Module, nn.Module]] = {}  # while they are learnt from

    def has_tried(self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> bool:
        """Whether small members have grown as these two differ: of a width with several sizes, in the same ones."""
        few, many = (self.width_of(member) for member in (narrow, wide))
        if not self.tried or len(self._base.sizes) == 1:
            return bool(self.tried)
        differing = None if few is None or many is None else {n for n, k in many.ratio_to(few).items() if k != 1}
        return differing is not None and (not differing or frozenset(differing) in self.tried)

    def check_widths(self, inputs: Any, sizes: Iterable[str] | None = None) -> None:
        """An error unless small members of these sizes widen exactly on a batch, or a stronger one of its kind."""
        growing = frozenset(self._base.sizes if sizes is None else sizes)
        if not growing:
            return
        trials = inputs if isinstance(inputs, Trials) else Trials(self._probes(inputs, sizes=growing).inputs)
        self._check_at(1, trials, growing)
        self.tried.add(growing)
        if trials is not inputs:
            trials.warn(self.roles)
            self._pairs.clear()

    @not_advising("inputs")  # which are given
    def _check_at(self, times: int, trials: Trials, sizes: Iterable[str] | None = None) -> None:
        probes = self._probes(trials.given, times, sizes)
        check_plan_by_running(probes.narrow, probes.wide, self._between_probes(probes, "copies"), trials)

    def _probes(self, inputs: Any, times: int = 1, sizes: Iterable[str] | None = None) -> Miniature:
        """Two small members of the family, one twice as wide as the other; with few blocks if they are large."""
        small = self._smaller(self._base.times(max(1, math.ceil(_PROBE_WIDTH / self._base.size)))).times(times)
        wide = small.times(2, sizes)
        if (small, wide) not in self._pairs:
            with torch.random.fork_rng(devices=[]):
                self._pairs[small, wide] = self.build(small), self.build(wide)
        return Miniature.of(*self._pairs[small, wide], inputs)

    def _smaller(self, width: Width) -> Width:
        """This width, or, where members are large, the least part of it at which everything is so much smaller."""
        whole = self.sketch(width)
        for divisor in (128, 64, 32, 16, 8, 4, 2) if is_large(whole) else ():
            with suppress(Exception):  # no model can be built at this width
                small = Width.of(width.times(Fraction(1, divisor)).plain, whole=True)
                if small.size >= _PROBE_WIDTH:
                    pair = Resizing(self.sketch(small), whole)
                    if pair.ratio == divisor and pair.is_uniform:
                        return small
        return width

    @cached_property
    def can_draw_parts(self) -> bool:
        """Whether parts have the values of the whole, as a small member shows.

        Each parameter is made alone, while all others write into the memory that they share: whoever starts as
        another's values finds them lost, if they can be lost in any part.
        """
        with suppress(Exception):  # whatever an author's code says to parameters that share their memory
            small = self._smaller(self._base)
            whole = naming.parameters(self.drawn(small, 0))
            for name, p in whole.items():
                made = naming.parameters(self.drawn_part(small, 0, (name,)))
                if made.keys() != whole.keys() or not torch.equal(made[name], p):
                    return False
            return not naming.plain_tensors_without_memory(self.sketch(small))
        return False

    def _between_probes(self, probes: Miniature, how: How) -> Plan:
        return self.between(probes.narrow, probes.wide, how=how, tried=True, roles=probes.given(self.roles or {}))

    def learn(self, inputs: Any) -> None:
        """Where module types and names mislead, take the roles from runs of small members of the family."""
        probes = self._probes(inputs)
        given, trials = self.roles, Trials(probes.inputs)
        self._trials = trials
        with suppress(Exception):  # whatever the modules mislead to; the run may tell
            self.check_widths(trials)
        if not self.tried:
            narrow, wide = probes.narrow, probes.wide
            if uneven := find_uneven(narrow, wide):
                raise MupscaleError(
                    f"{uneven} does not grow by a whole multiple. If a size is rounded up, build it as a multiple of "
                    f"the width, or use a base at which it is not rounded{self._even_bases()}. The base may differ "
                    "from the width of the model that grows"
                )
            learnt = learn_roles(narrow, wide, trials, probes.given(self.roles or {}))
            any_width = roles_for_any_width(narrow, wide, with_keeps(narrow, wide, learnt, trials))
            self.roles = probes.patterns(any_width, self.roles or {})
            self._check_at(2, trials)  # at another width, too, since roles are for all of them
            self.check_widths(trials)
        trials.renamed(probes.originals).warn(given)

    def _even_bases(self) -> str:
        """Two multiples of the base, if there are any, from which all sizes double at every width that is tried."""
        even = list[str]()
        for base in (self._base.times(factor) for factor in (Fraction(3, 2), 2, 3, 4, 6, 8)):
            with suppress(Exception):  # no model can be built at this width
                members = [self.sketch(Width.of(base, whole=True).times(k)) for k in (1, 2, 4)]
                even += [str(base)] if not any(find_uneven(*pair) for pair in pairwise(members)) else []
        return f", such as {' or '.join(even[:2])}" if even else ""

    def between(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        *,
        how: How,
        tried: bool = False,
        roles: Mapping[str, Role] | None = None,
    ) -> Plan:
        """The plan from one member to another, by the roles that are known, or by these."""
        tried = tried or self.inputs is not None or bool(self.tried)
        return build_plan(
            narrow, wide, roles=self.roles if roles is None else roles, how=how, is_width=self._is_width, assume=tried
        )

    def _is_width(self, name: str, dim: int) -> bool:
        return dim in self._width_dims.get(name, ())

    @cached_property
    def past_norms(self) -> Mapping[str, tuple[int, ...]] | None:
        """What a run of two small members shows; None without a batch."""
        if self._trials is None:
            return None
        probes = self._probes(self._trials.given)
        fresh = self._between_probes(probes, "fresh")
        past = find_past_norms(probes.narrow, probes.wide, fresh, self._trials.best)
        return None if past is None else probes.by_original(past)
