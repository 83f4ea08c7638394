"""What more layers or experts would do to a checkpoint, before it happens: where old ones lie, how new ones start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mupscale.core import Plan, Shape
from mupscale.growth import Deepen
from mupscale.hf.describe import (
    Config,
    ExpertCounts,
    Times,
    check_depth,
    depth_operator,
    experts_config,
    experts_of,
    layers_of,
    plan_experts_files,
    plan_layers,
)
from mupscale.hf.files import NewTensor, Source
from mupscale.hf.verification import find_record
from mupscale.system import name_of_group, pattern_of_name, text_table

__all__ = ["DepthOverview", "overview_of_depth", "overview_of_experts"]

_COPIED = {"stack": "all layers again on top", "interleaved": "each behind its layer"}


@dataclass(frozen=True)
class DepthOverview:
    """What every tensor of the files with more layers, or with experts, is made of, and in words what that means.

    what: that the model gets. new_numbers: how many parameters it has more.
    """

    what: str
    sentences: tuple[str, ...]
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
    start = "write nothing into the residual stream yet, so they change nothing at first"
    if how != "identity":
        start = f"are copies, {_COPIED[how]}, which changes the function"
    sentences = (
        f"layers {before} → {layers} ({how}): the trained ones become layers {_ranges(old)} of the large model, whose "
        "numbers the table of new tensors has",
        f"new layers {start}",
        "more layers change no learning rate",
    )
    return DepthOverview("more layers", sentences, plan, new_numbers)


def overview_of_experts(source: Source, asked: ExpertCounts, shapes: Mapping[str, Shape]) -> DepthOverview:
    """What becomes of this checkpoint, which first grows to these shapes, as a mixture of so many experts."""
    plan, few = plan_experts_files(shapes, source.config, asked), experts_of(source.config)[0]
    numbers = [sum(map(math.prod, some)) for some in (shapes.values(), (e.wide for e in plan.parameters.values()))]
    changed = "no output" if asked.keeps_function(source.config) else "the outputs"
    sentences = (
        f"experts {few} → {asked.experts}, of which a token uses {asked.top_k}: a checkpoint of "
        f"{experts_config(source.config, asked)['model_type']}",
        f"experts are copies of {'the feed-forward layer' if few == 1 else 'experts'}, which changes {changed}",
    )
    return DepthOverview("experts", sentences, plan, numbers[1] - numbers[0])


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
