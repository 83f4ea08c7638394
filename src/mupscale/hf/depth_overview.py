"""What more layers would do to a checkpoint, before it happens: where old layers lie, and what new ones start with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mupscale.core import Plan, Shape
from mupscale.growth import Deepen, NewTensor
from mupscale.hf.describe import (
    Config,
    Times,
    check_depth,
    depth_operator,
    layers_of,
    plan_layers,
)
from mupscale.hf.files import Source
from mupscale.hf.verification import find_record
from mupscale.system import name_of_group, pattern_of_name, text_table

__all__ = ["DepthOverview", "overview_of_depth"]

_COPIED = {"stack": "all layers again on top", "interleaved": "each behind its layer"}


@dataclass(frozen=True)
class DepthOverview:
    """How many layers there are, before and after, and what every tensor of the deep files is made of.

    old: where the trained layers lie among the new ones. new_numbers: how many entries new tensors have.
    """

    layers: tuple[int, int]
    how: Deepen
    old: tuple[int, ...]
    plan: Plan
    new_numbers: int

    def table(self) -> str:
        """New tensors that start alike, by their layers."""
        merged: dict[tuple[str, str], list[str]] = {}
        for name, source in self.plan.sources.items():
            if source.is_new:
                merged.setdefault((pattern_of_name(name), _start(NewTensor.of(name, self.plan, 0))), []).append(name)
        rows = [(name_of_group(names), str(len(names)), start) for (_, start), names in merged.items()]
        return text_table(("new tensors", "count", "start as"), rows, left=1)

    def summary(self) -> list[str]:
        """In a few sentences."""
        before, after = self.layers
        lines = [f"layers {before} → {after} ({self.how}): the trained ones are layers {_ranges(self.old)}"]
        if self.how == "identity":
            lines.append("new layers write nothing into the residual stream yet, so they change nothing at first")
        else:
            lines.append(f"new layers are copies, {_COPIED[self.how]}, which changes the function")
        lines.append("more layers change no learning rate")
        return lines


def overview_of_depth(
    source: Source, layers: int, how: Deepen, times: Times, shapes: Mapping[str, Shape]
) -> DepthOverview:
    """What becomes of this checkpoint, which first becomes wider by `times`, to these shapes."""
    record = find_record(source)
    check_depth(source.config, how, layers, source.tensors, source.folder)
    first: Config = source.config if record is None else record.first_config
    times = times if record is None else record.times * times
    before = layers_of(source.config) or 0
    old = [n for n, place in enumerate(depth_operator(how).places(before, layers)) if not place.is_new]
    plan = plan_layers(shapes, how, layers, first, times)
    new_numbers = sum(math.prod(entry.wide) for entry in plan.parameters.values() if entry.source.is_new)
    return DepthOverview((before, layers), how, tuple(old), plan, new_numbers)


def _start(tensor: NewTensor | None) -> str:
    if tensor is None:
        return "copies"
    return f"{tensor.mean:g}" if tensor.std == 0 else f"{tensor.mean:g} ± {tensor.std:.3g}".removeprefix("0 ")


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
