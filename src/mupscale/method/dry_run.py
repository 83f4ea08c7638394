"""A dry run: what each stage would train, its FLOPs, and, from a few measured steps, about how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mupscale.core import WholeWidth, Width
from mupscale.engine import NotStackable, RunStack
from mupscale.method.contender_types import ComparisonSetup
from mupscale.method.contenders import CONTENDERS, STAGES
from mupscale.method.method_run import MethodRun
from mupscale.method.protocol import Protocol
from mupscale.method.settings import Method
from mupscale.method.summary import Choice
from mupscale.system import rough_time, show
from mupscale.train import Recipe, Seeds, Silence, TrainingRun, join_processes, matmul_precision

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_STEPS = 5  # that are measured, after as many that are not
_PROBED = 32  # runs in a probe, at most; more cost in proportion


@dataclass(frozen=True)
class PlannedStage:
    """A stage before it is trained: how many runs at which width, for how many steps each."""

    name: str
    runs: int
    width: WholeWidth
    steps: int


def outline_stages(protocol: Protocol, method: Method) -> list[PlannedStage]:
    """The stages of a run of the method: tuning, then the contenders; none of them pruned.

    As is mostly so, tuning is taken to choose some noise, another learning rate than the base model's, and a third one
    without noise. Plain transfer beside an extrapolated one is left out.

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10, grow=[Growth(at=4, width=16)],
    ... )
    >>> method = Method(widths=[4], upscaled_lrs=[0.05, 0.1], noises=[0.3], baselines=[])
    >>> for stage in outline_stages(Protocol(recipe, Path("runs/demo")), method):
    ...     print(stage.name, stage.runs, stage.width, stage.steps)
    small-width-4 1 4 4
    sweep-2-width-4 4 8 8
    base 3 8 4
    upscaled 3 16 8
    """
    return [*_outline_tuning(protocol, method), *_outline_contenders(protocol, method)]


def _outline_tuning(protocol: Protocol, method: Method) -> Iterator[PlannedStage]:
    base, after = protocol.base_steps, protocol.wide_steps
    widths = sorted(method.widths, key=lambda width: Width.of(width).size)
    if method.lrs:
        runs = len(method.sweep_1().cells) * method.sweep_seeds
        yield PlannedStage(f"sweep-1-width-{Width.of(widths[-1]).label}", runs, widths[-1], base)
    for width in widths:
        yield PlannedStage(f"small-width-{Width.of(width).label}", method.sweep_seeds, width, base)
        runs = _trials(method) * method.sweep_seeds
        yield PlannedStage(f"sweep-2-width-{Width.of(width).label}", runs, protocol.upscaled_width(width), after)


def _outline_contenders(protocol: Protocol, method: Method) -> Iterator[PlannedStage]:
    lr = _lr(protocol)
    choice = Choice(base_lr=lr, lr=lr / 2, noise=1.0, unit=protocol.growth.unit)
    comparison = ComparisonSetup(protocol, choice, lr / 4 if method.has_own_rates else None, method.baselines)
    for stage in STAGES:
        recipes: list[Recipe] = []
        for one in CONTENDERS:
            if one.stage != stage or (training := one.plan_if_asked(comparison)) is None or training.shares:
                continue
            recipes.append(training.make_recipe(0))
            if one.own_sweep:
                runs, name = _trials(method) * method.sweep_seeds, one.sweep_name(training.width)
                yield PlannedStage(name, runs, training.width, training.steps)
        if recipes:
            yield PlannedStage(stage, len(recipes) * method.seeds, recipes[0].width, recipes[0].steps)


def _trials(method: Method) -> int:
    """Of a sweep over learning rates and noises."""
    return len(method.sweep_2().cells) if method.sampler == "grid" else int(method.trials or 0)


def estimate_run(recipe: Recipe, method: Method, folder: str | Path) -> str:
    """The table that `mupscale run --dry-run` prints, a line for each stage of `outline_stages`; nothing is written.

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd, grow = Spec("torch.optim.SGD", {"lr": 0.1}), [Growth(at=10, width=8)]
    >>> recipe = Recipe(model, data, sgd, width=4, base=4, steps=20, batch=4, grow=grow, device="cpu")
    >>> method = Method(widths=[2], upscaled_lrs=[0.1], noises=[1.0], baselines=[], seeds=1)
    >>> print("\\n".join(line[:54].rstrip() for line in estimate_run(recipe, method, "runs/none").splitlines()))
    stage                     runs         width     steps
    small-width-2                1             2        10
    sweep-2-width-2              2             4        10
    base                         1             4        10
    upscaled                     1             8        10
    all
    """
    protocol = MethodRun(recipe, method, Path(folder), show).protocol
    stages = outline_stages(protocol, method)
    lines = [f"{'stage':<24}{'runs':>6}{'width':>14}{'steps':>10}{'FLOPs':>12}{'about':>12}"]
    all_flops, all_seconds = list[float | None](), list[float | None]()
    for stage in stages:
        each, seconds = protocol.flops_per_step(stage.width), measure_step(protocol, stage, method)
        all_flops.append(None if each is None else each * stage.steps * stage.runs)
        all_seconds.append(None if seconds is None else seconds * stage.steps)
        shown = (str(stage.runs), Width.of(stage.width).label, f"{stage.steps:,}")
        lines.append(_line(stage.name, *shown, all_flops[-1], all_seconds[-1]))
    lines.append(_line("all", "", "", "", _sum(all_flops), _sum(all_seconds)))
    if None in all_seconds:
        lines.append("too big: one run does not fit into memory, so take a smaller batch or width")
    return "\n".join(lines)


def _line(name: str, runs: str, width: str, steps: str, flops: float | None, seconds: float | None) -> str:
    cost = "unknown" if flops is None else short_flops(flops)
    time_left = "too big" if seconds is None else rough_time(seconds)
    return f"{name:<24}{runs:>6}{width:>14}{steps:>10}{cost:>12}{time_left:>12}"


def _sum(parts: Sequence[float | None]) -> float | None:
    counted = [part for part in parts if part is not None]
    return math.fsum(counted) if len(counted) == len(parts) else None


def measure_step(protocol: Protocol, stage: PlannedStage, method: Method) -> float | None:
    """Seconds of a step of all the stage's runs, from a few steps of some of them; None if not one fits into memory."""
    count = min(stage.runs, _PROBED)
    while count:
        try:
            return _probe(protocol, stage, method, count)
        except torch.OutOfMemoryError:
            count //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def _probe(protocol: Protocol, stage: PlannedStage, method: Method, count: int) -> float:
    steps = max(stage.steps, 2 * _STEPS)
    recipe = replace(protocol.fresh(stage.width, _lr(protocol), steps, 0), compile=False)
    with join_processes(recipe.device, recipe.parallel) as processes, matmul_precision(recipe.precision):
        if method.engine != "serial":
            try:
                recipes = [replace(recipe, seeds=Seeds(init=number)) for number in range(count)]
                stack = RunStack(recipes, processes.device, protocol.data.to(processes.device, recipe.dtype()))
                stack.advance(_STEPS)
                return _timed(lambda: stack.advance(_STEPS), processes.device) * stage.runs / count
            except NotStackable:
                if method.engine == "vectorised":
                    raise
        run = TrainingRun(recipe, processes, Silence(), protocol.data)
        run.begin(resume=False)
        for _ in range(_STEPS):
            run.advance()
        return _timed(lambda: [run.advance() for _ in range(_STEPS)], processes.device) * stage.runs


def _timed(steps: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    steps()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _STEPS


def _lr(protocol: Protocol) -> float:
    return float(protocol.recipe.optimizer.init_args["lr"])


def short_flops(flops: float) -> str:
    """FLOPs for people.

    >>> short_flops(5.87e9)
    '5.87 G'
    """
    power = max((p for p in range(len(_PREFIXES)) if flops >= 1000.0**p), default=0)
    return f"{flops / 1000.0**power:.3g} {_PREFIXES[power]}".rstrip()
