"""All widths of one architecture, its depth being one: initial values under μP, and plans from one to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mupscale.core import Plan, Role, Width, WidthLike, naming
from mupscale.family.tried_members import TriedMembers
from mupscale.growth import Operator, is_replica
from mupscale.planning import (
    count_draws,
    default_init_at,
    find_width_dims,
    initial_means,
    initial_std,
    rescale_spread,
    warn_of_growing_outputs,
    with_initial,
)

_DRAWS = 4  # freshly built models that the initialisation is measured on; of large ones two will do
_MOST_NUMBERS = 1 << 22  # of a model that is not large


def _parts(sizes: Mapping[str, int]) -> list[list[str]]:
    """Parameters in parts that have no more numbers than the largest of them, or than a small model."""
    most, parts, held = max(*sizes.values(), _MOST_NUMBERS // _DRAWS), list[list[str]](), math.inf
    for name, size in sizes.items():
        if held + size > most:
            parts, held = [*parts, []], 0
        parts[-1].append(name)
        held += size
    return parts


class WidthMembers(TriedMembers):
    """The members of a family that have one depth; arguments are those of `Family`.

    tried: what is known to have been tried already.
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        base: Width,
        init_at: Width | None = None,
        roles: Mapping[str, Role] | None = None,
        inputs: Any = None,
        tried: set[frozenset[str]] | None = None,
    ) -> None:
        super().__init__(build, base, roles, inputs)
        self._base_model = self.sketch(base)
        self._width_dims = find_width_dims(self.sketch, self._base)
        self.init_at = init_at or default_init_at(self._base, self._base_model, self._width_dims)
        self._plans: dict[tuple[Width, Width, int], Plan] = {}  # by both widths, and how much had been tried then
        self._measured: dict[str, float] | None = None
        self._means: dict[str, tuple[float, ...]] = {}
        if tried is not None:
            self.tried = tried
        elif inputs is not None:
            self.learn(inputs)
            probes = self._probes(inputs)
            told = probes.given(roles or {})
            plan = self._between_probes(probes, "copies")
            warn_of_growing_outputs(probes.narrow, probes.wide, plan, probes.inputs, told)
            self._pairs.clear()

    def plan(self, width: WidthLike | nn.Module) -> Plan:
        """μP at this width (or for this model): every factor relative to the base. Made once for each width.

        With a batch (`inputs`, or `check`) it says that small members have been tried.
        """
        if isinstance(width, nn.Module):
            return self._noting_trial(self.between(self._base_model, width, how="mup"), self._base, width)
        return self._mup(self._base, Width.of(width))

    def _mup(self, start: Width, width: Width) -> Plan:
        """Every factor at a width relative to another; made once, as every draw at a width needs it."""
        key = start, width, len(self.tried)
        if key not in self._plans:
            first = self._base_model if start == self._base else self.sketch(start)
            self._plans[key] = self._noting_trial(self.between(first, self.sketch(width), how="mup"), start, width)
        return self._plans[key]

    def widening(
        self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module, *, grow: Operator | None = None
    ) -> Plan:
        """The plan for growing one member into another, by copies or as `grow` does it.

        It knows the family's initial values, which are the unit of noise and what fresh units are drawn from.
        """
        wide_model = self._at(wide)
        copies = grow is None or grow.needs_multiples
        plan = self.between(self._at(narrow), wide_model, how="copies" if copies else "fresh")
        entries = self.between(self.sketch(self.init_at), wide_model, how="mup").parameters
        past_norms = self.past_norms if plan.norms else None
        plan = with_initial(plan, entries, self.initial_std(), self._means)
        return self._noting_trial(plan.with_initial("past_norms", past_norms), narrow, wide)

    def growth_plan(self, narrow: WidthLike, wide: WidthLike, grow: Operator) -> Plan:
        """The plan of a growth by this operator, for which neither member needs memory."""
        if is_replica(grow):  # for which initial values are not needed, and so not measured
            return self._noting_trial(self.between(self._at(narrow), self._at(wide), how="copies"), narrow, wide)
        return self.widening(narrow, wide, grow=grow)

    def _noting_trial(self, plan: Plan, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> Plan:
        return replace(plan, tried_by="small members" if self.has_tried(narrow, wide) else None)

    def init_untried(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """What `init` does, without a word about what was not tried: for callers that try it, or have."""
        model = self.drawn(width, seed)
        self._rescale(naming.parameters(model), width, seed)
        return model

    def init_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """What `init_untried` gives, with values for the parameters that are named alone."""
        model = self.drawn_part(width, seed, part)
        parameters = naming.parameters(model)
        self._rescale({name: parameters[name] for name in part}, width, seed)
        return model

    @torch.no_grad()
    def _rescale(self, parameters: Mapping[str, nn.Parameter], width: WidthLike, seed: int) -> None:
        """From the author's initial values to those under μP, in place.

        What is random and has no width is that of a draw at `init_at`; a std of 0 is a constant.
        """
        if Width.of(width) == self.init_at:
            return
        entries = self._mup(self.init_at, Width.of(width)).parameters
        measured = self.initial_std()
        reference: dict[str, nn.Parameter] = {}
        if any(std > 0 and not entries[name].axes for name, std in measured.items()):
            reference = naming.parameters(self.drawn(self.init_at, seed))
        for name, p in parameters.items():
            entry = entries[name]
            fold, offset = float(entry.fold), float(entry.offset)
            if measured[name] == 0:
                p.mul_(fold).add_(offset * (fold - 1))
            elif not entry.axes:
                p.copy_(reference[name])
            else:
                rescale_spread(p, measured[name] * entry.init, fold, centred=self._means[name] != (0.0,))

    def _at(self, width: WidthLike | nn.Module) -> nn.Module:
        return width if isinstance(width, nn.Module) else self.sketch(width)

    def initial_std(self) -> dict[str, float]:
        """Std of the author's initialisation at `init_at`, over a few draws; 0 for what is not random."""
        if self._measured is not None:
            return self._measured
        sizes = {name: p.numel() for name, p in naming.parameters(self.sketch(self.init_at)).items()}
        if sum(sizes.values()) <= _MOST_NUMBERS:
            draws = self._draws(range(_DRAWS))
            draws += self._draws(range(_DRAWS, count_draws(draws, self._width_dims)))
            self._measured = initial_std(draws)
            self._means = initial_means(draws, self._measured)
            return self._measured
        self._measured = {}
        for part in _parts(sizes):
            models = (naming.parameters(self.drawn_alone(self.init_at, seed, part)) for seed in range(2))
            draws = [{name: parameters[name] for name in part} for parameters in models]
            measured = initial_std(draws)
            self._measured |= measured
            self._means |= initial_means(draws, measured)
        return self._measured

    def _draws(self, seeds: Iterable[int]) -> list[dict[str, nn.Parameter]]:
        return [naming.parameters(self.drawn(self.init_at, seed)) for seed in seeds]
