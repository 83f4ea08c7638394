"""What a study would train, without training it: models, cost, and from a few steps about how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mupscale.core import Width
from mupscale.engine import NotStackable, RunStack
from mupscale.study.training import Ground
from mupscale.study.tree import Stretch, list_stretches
from mupscale.system import rough_time
from mupscale.train import Seeds, Silence, TrainingRun, join_processes, matmul_precision

_STEPS = 5  # that are measured, after as many that are not
_PROBED = 32  # runs in a probe, at most; more cost in proportion


def describe_stages(stages: Mapping[str, Sequence[Stretch]], ground: Ground, engine: str | None = None) -> str:
    """A row for every stage: its finished models, its cost beyond what earlier stages have trained, and its share.

    engine: also about how long it takes, measured with this engine.
    """
    trained: set[str] = set()
    rows: list[tuple[str, int, float, float | None]] = []
    for name, leaves in stages.items():
        new = [stretch for stretch in list_stretches(leaves) if stretch.key not in trained and stretch.start is None]
        trained |= {stretch.key for stretch in new}
        cost = math.fsum(ground.cost(stretch) for stretch in new)
        seconds = None if engine is None else measure_stage(new, ground, engine)
        rows.append((name, len({leaf.key for leaf in leaves}), cost, seconds))
    total, unit, wide = math.fsum(row[2] for row in rows), ground.unit, max(len(name) for name in stages) + 4
    lines = [
        f"{name:<{wide}}{count:>5} {'model' if count == 1 else 'models':<6}  {cost:9.3g} {unit}  {cost / total:6.1%}"
        f"{_about(seconds, engine)}"
        for name, count, cost, seconds in rows
    ]
    spent = [seconds for *_, seconds in rows]
    known = None if None in spent else math.fsum(each or 0.0 for each in spent)
    lines.append(f"{'together':<{wide}}{'':>12}  {total:9.3g} {unit}{'':8}{_about(known, engine)}")
    if engine is not None and known is None:
        lines.append("too big: one run does not fit into memory, so take a smaller batch or width")
    return "\n".join(line.rstrip() for line in lines)


def _about(seconds: float | None, engine: str | None) -> str:
    return "" if engine is None else f"{'too big' if seconds is None else rough_time(seconds):>12}"


def measure_stage(stretches: Sequence[Stretch], ground: Ground, engine: str) -> float | None:
    """Seconds for all of these, those of one size as one program; None if not one fits into memory."""
    total = 0.0
    for label in dict.fromkeys(Width.of(one.width).label for one in stretches):
        same = [one for one in stretches if Width.of(one.width).label == label]
        steps = sum(one.steps for one in same)
        count = min(len(same), _PROBED)
        seconds = None
        while count and seconds is None:
            try:
                seconds = _probe(same[0], ground, engine, count)
            except torch.OutOfMemoryError:
                count //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if seconds is None:
            return None
        total += seconds * steps
    return total


def _probe(stretch: Stretch, ground: Ground, engine: str, count: int) -> float:
    """Seconds of one step of one run, where so many train at once."""
    alone = replace(stretch, parent=None, start=None, change=None, noise=0.0, how="copies")
    alone = replace(alone, steps=max(2 * _STEPS, stretch.steps, stretch.schedule.warmup + stretch.schedule.decay))
    recipe = replace(ground.recipe_of(alone, Path()), compile=False, out=None)
    with join_processes(recipe.device, recipe.parallel) as processes, matmul_precision(recipe.precision):
        if engine != "serial":
            try:
                recipes = [replace(recipe, seeds=Seeds(init=number)) for number in range(count)]
                stack = RunStack(recipes, processes.device, ground.data.to(processes.device, recipe.dtype()))
                stack.advance(_STEPS)
                return _timed(lambda: stack.advance(_STEPS), processes.device) / count
            except NotStackable:
                if engine == "vectorised":
                    raise
        run = TrainingRun(recipe, processes, Silence(), ground.data)
        run.begin(resume=False)
        for _ in range(_STEPS):
            run.advance()
        return _timed(lambda: [run.advance() for _ in range(_STEPS)], processes.device)


def _timed(steps: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    steps()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _STEPS
