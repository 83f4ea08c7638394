"""A dry run: what each stage would train, its FLOPs, and, from a few measured steps, about how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mupscale.engine import NotStackable, Stack
from mupscale.method.settings import Method
from mupscale.method.stages import Protocol, label, size
from mupscale.method.workshop import Workshop
from mupscale.train import Recipe, Seeds, Silence, TrainingRun, Width, join_processes, matmul_precision

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_STEPS = 5  # that are measured, after as many that are not
_PROBED = 32  # runs in a probe, at most; more cost in proportion


@dataclass(frozen=True)
class Planned:
    """A stage before it is trained: how many runs at which width, for how many steps each."""

    name: str
    runs: int
    width: Width
    steps: int


def outline(protocol: Protocol, method: Method) -> list[Planned]:
    """The stages of a run of the method, none of them pruned, and no plain transfer beside an extrapolated one.

    With (b′), (c′), (c″) and (e′), trained where another learning rate is best without noise, as it mostly is.
    """
    base, after = protocol.base_steps, protocol.wide_steps
    n, wide = protocol.recipe.width, protocol.wide
    widths = sorted(method.widths, key=size)
    made: list[Planned] = []
    if method.lrs:
        count = len(method.sweep_1().cells) * method.sweep_seeds
        made.append(Planned(f"sweep-1-width-{label(widths[-1])}", count, widths[-1], base))
    trials = len(method.sweep_2().cells) if method.sampler == "grid" else int(method.trials or 0)
    for width in widths:
        made.append(Planned(f"small-width-{label(width)}", method.sweep_seeds, width, base))
        count = trials * method.sweep_seeds
        made.append(Planned(f"sweep-2-width-{label(width)}", count, protocol.upscaled_width(width), after))
    made.append(Planned("base", method.seeds, n, base))
    scratch = ("scratch" in method.baselines) + 2 * ("scratch-drop" in method.baselines)
    if scratch:
        steps = after + protocol.equal_cost(base, n, wide)
        made.append(Planned("scratch", scratch * method.seeds, wide, steps))
    if "continued" in method.baselines:
        made.append(Planned("continued", 3 * method.seeds, n, protocol.equal_cost(after, wide, n)))
        if not protocol.exact_is_a_beginning:
            made.append(Planned("exact", method.seeds, n, after))
    upscaled = 1 + method.has_own_rates
    made.append(Planned("upscaled", upscaled * method.seeds, wide, after))
    if "naive" in method.baselines:
        made.append(Planned("naive", method.seeds, wide, after))
    if "net2net" in method.baselines:
        made.append(Planned(f"net2net-width-{label(wide)}", trials * method.sweep_seeds, wide, after))
        made.append(Planned("net2net", method.seeds, wide, after))
    return made


def estimate(recipe: Recipe, method: Method, folder: Path) -> str:
    """The table that `mupscale run --dry-run` prints; nothing is written."""
    protocol = Workshop(recipe, method, folder, print).protocol
    stages = outline(protocol, method)
    lines = [f"{'stage':<24}{'runs':>6}{'width':>14}{'steps':>10}{'FLOPs':>12}{'about':>12}"]
    all_flops, all_seconds = list[float | None](), list[float | None]()
    for stage in stages:
        each, pace = protocol.flops_per_step(stage.width), seconds_per_step(protocol, stage, method)
        all_flops.append(None if each is None else each * stage.steps * stage.runs)
        all_seconds.append(None if pace is None else pace * stage.steps)
        shown = (str(stage.runs), label(stage.width), f"{stage.steps:,}")
        lines.append(_line(stage.name, *shown, all_flops[-1], all_seconds[-1]))
    lines.append(_line("all", "", "", "", _sum(all_flops), _sum(all_seconds)))
    if None in all_seconds:
        lines.append("too big: one run does not fit into memory, so take a smaller batch or width")
    return "\n".join(lines)


def _line(name: str, runs: str, width: str, steps: str, flops: float | None, seconds: float | None) -> str:
    cost = "unknown" if flops is None else scaled(flops)
    time_left = "too big" if seconds is None else duration(seconds)
    return f"{name:<24}{runs:>6}{width:>14}{steps:>10}{cost:>12}{time_left:>12}"


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.fsum(known) if len(known) == len(parts) else None


def seconds_per_step(protocol: Protocol, stage: Planned, method: Method) -> float | None:
    """Measured: a step of all the stage's runs, from a few steps of some of them; None if not one fits into memory."""
    count = min(stage.runs, _PROBED)
    while count:
        try:
            return _probe(protocol, stage, method, count)
        except torch.OutOfMemoryError:
            count //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def _probe(protocol: Protocol, stage: Planned, method: Method, count: int) -> float:
    steps = max(stage.steps, 2 * _STEPS)
    recipe = replace(protocol.fresh(stage.width, _lr(protocol), steps, 0), compile=False)
    with join_processes(recipe.device, recipe.parallel) as processes, matmul_precision(recipe.precision):
        if method.engine != "serial":
            try:
                recipes = [replace(recipe, seeds=Seeds(init=number)) for number in range(count)]
                stack = Stack(recipes, processes.device, protocol.data.to(processes.device, recipe.dtype()))
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


def scaled(flops: float) -> str:
    """FLOPs for people, such as 5.87 G."""
    power = max((p for p in range(len(_PREFIXES)) if flops >= 1000.0**p), default=0)
    return f"{flops / 1000.0**power:.3g} {_PREFIXES[power]}".rstrip()


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
