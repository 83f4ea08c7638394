"""What a study would train, without training it: models, cost, and from a few steps about how long it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from mupscale.core import Width
from mupscale.engine import NotStackable, RunStack
from mupscale.study.training import Ground, group_programs
from mupscale.study.tree import Stretch, list_stretches, list_waves
from mupscale.system import Display, MupscaleError, rough_time
from mupscale.train import Seeds, TrainingRun, join_processes, matmul_precision

_STEPS = 5  # that are measured, after as many that are not
_PROBED = 32  # runs in a probe, at most; more cost in proportion
_PATIENCE = 10.0  # seconds for a probe; beyond that, a smaller size tells the time, in proportion to FLOPs
_LONG = 1.0  # seconds after which no further step is taken


def describe_stages(stages: Mapping[str, Sequence[Stretch]], ground: Ground, engine: str) -> str:
    """A row for every stage: its finished models, its cost beyond what earlier stages have trained, share and time.

    engine: with which a few steps of every size are measured.
    """
    trained: set[str] = set()
    rows: list[tuple[str, int, float, float | None]] = []
    with Stopwatch(ground, engine) as clock:
        for name, leaves in stages.items():
            new = [one for one in list_stretches(leaves) if one.key not in trained and one.start is None]
            trained |= {one.key for one in new}
            cost = math.fsum(ground.cost(one) for one in new)
            rows.append((name, len({leaf.key for leaf in leaves}), cost, clock.measure(new)))
    total, unit, wide = math.fsum(row[2] for row in rows), ground.unit, max(len(name) for name in stages) + 4
    lines = [
        f"{name:<{wide}}{count:>5} {'model' if count == 1 else 'models':<6}  {cost:9.3g} {unit}  {cost / total:6.1%}"
        f"{_about(seconds)}"
        for name, count, cost, seconds in rows
    ]
    spent = [seconds for *_, seconds in rows]
    known = None if None in spent else math.fsum(each or 0.0 for each in spent)
    lines.append(f"{'together':<{wide}}{'':>12}  {total:9.3g} {unit}{'':8}{_about(known)}")
    lines.append(clock.remark(known))
    lines += describe_epochs([leaf for leaves in stages.values() for leaf in leaves], ground)
    return "\n".join(line.rstrip() for line in lines)


def describe_epochs(leaves: Sequence[Stretch], ground: Ground) -> list[str]:
    """A line on how often models go over the data, if one does so more than once."""
    steps = max(sum(stretch.steps for stretch in leaf.path) for leaf in leaves)
    epochs = ground.data.describe_epochs(steps * ground.recipe.batch)
    return [f"The model with the most steps trains for {epochs}."] if epochs else []


def _about(seconds: float | None) -> str:
    return f"{'?' if seconds is None else rough_time(seconds):>12}"


class Speed(NamedTuple):
    """Of runs that train at once: seconds that they take to begin, and that a step of all of them takes."""

    start: float
    step: float

    def times(self, runs: float, cost: float = 1.0) -> Speed:
        """Of so many times the runs, whose steps cost so many times as much."""
        return Speed(self.start * runs, self.step * runs * cost)


@dataclass
class Stopwatch:
    """Measures a few steps of each size, and as a context shows which.

    speeds: by the cost of a step of one run, its width, and how many run at once. Few at once have a speed of their
    own: a step of one or three small models takes as long as one of thirty.
    """

    ground: Ground
    engine: str
    speeds: dict[tuple[float, str, int], Speed] = field(default_factory=dict)
    failure: str = ""
    display: Display = field(default_factory=lambda: Display((), visible=False))

    def __enter__(self) -> Stopwatch:
        columns = ["To estimate the time: a few steps of {task.fields[size]}", "time"]
        self.display = Display(columns, transient=True, lines="stderr", first_line_at_once=True, size="each size")
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()

    @cached_property
    def evaluation_steps(self) -> float:
        """What an evaluation takes, in training steps: a forward pass is about a third of a step."""
        batch = self.ground.recipe.evaluation.batch or self.ground.recipe.batch
        return sum(len(x) for x, _ in self.ground.data.evaluation(batch)) / self.ground.recipe.batch / 3

    def measure(self, stretches: Sequence[Stretch]) -> float | None:
        """Seconds for all of these, in the programs that a trainer makes of them; None if not one fits into memory.

        The time to begin counts twice: what else a program does beside its steps takes about as long. It looks how much
        memory a run takes, and writes its models.
        """
        total, evaluated = 0.0, self.evaluation_steps if self.ground.measure == "held-out" else 0.0
        asked = {stretch.key for stretch in stretches}
        for wave in list_waves(stretches):
            for same in group_programs(stretch for stretch in wave if stretch.key in asked).values():
                size = Width.of(same[0].width).phrase
                self.display.update(len(self.speeds), f"To estimate the time: a few steps of {size} …", size=size)
                speed = self._speed(same)
                if speed is None:
                    return None
                each = self.ground.cost_per_step(same[0].width)  # at the recipe's batch
                total += 2 * speed.start + speed.step * (self.ground.cost(same[0]) / each + evaluated)
        return total

    def remark(self, seconds: float | None) -> str:
        """What the times are, or why there are none."""
        if self.failure:
            return f"There is no estimate of the time, because a step failed: {self.failure}"
        if seconds is None:
            return "Too big: one run does not fit into memory, so use a smaller batch or width."
        return "Times are estimates for this machine, from a few steps of each size. They include evaluation."

    def _speed(self, same: Sequence[Stretch]) -> Speed | None:
        """Of one program with these runs."""
        cost, width = self.ground.cost_per_step(same[0].width), Width.of(same[0].width).label
        runs = count = min(len(same), _PROBED)
        key, known = (cost, width, runs), [key for key in self.speeds if key[0] <= cost]
        if key not in self.speeds and known and self.ground.unit == "FLOPs":
            nearest = max(known, key=lambda key: (key[0], -abs(key[2] - runs)))
            likely = self.speeds[nearest].times(len(same) / nearest[2], cost / nearest[0])
            each = likely.step / len(same)  # too much, where a small size's steps are all overhead
            if 2 * each > _PATIENCE:
                return likely
            count = min(count, int(_PATIENCE / (2 * each)))
        while count:
            try:
                if key not in self.speeds:
                    speed = _probe(same[0], self.ground, self.engine, count)
                    self.speeds[key] = speed.times(runs / count)
                return self.speeds[key].times(len(same) / runs)
            except torch.OutOfMemoryError:
                count //= 2
            except MupscaleError as error:  # which the run itself would say, too
                self.failure = str(error)
                return None
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return None


def _probe(stretch: Stretch, ground: Ground, engine: str, count: int) -> Speed:
    """Measure so many runs that train at once."""
    alone = replace(stretch, parent=None, start=None, change=None, noise=0.0, how="copies", batch=None, tuned_at=None)
    alone = replace(alone, steps=max(2 * _STEPS, stretch.steps, stretch.schedule.warmup + stretch.schedule.decay))
    recipe = replace(ground.recipe_of(alone, Path()), compile=False, out=None, callbacks=[])
    with join_processes(recipe.device, recipe.parallel) as processes, matmul_precision(recipe.precision):
        if engine != "serial":
            try:
                recipes = [replace(recipe, seeds=Seeds(init=number)) for number in range(count)]
                data = ground.data.to(processes.device, recipe.dtype())
                RunStack(recipes[:1], processes.device, data)  # what is slow once in a process
                began = time.perf_counter()
                stack = RunStack(recipes, processes.device, data)
                start = time.perf_counter() - began
                return Speed(start, _time_step(lambda: stack.advance(1), processes.device))
            except NotStackable:
                if engine == "vectorised":
                    raise
        run = TrainingRun(recipe, processes, [], ground.data)
        began = time.perf_counter()
        run.begin(resume=False)
        start = time.perf_counter() - began
        return Speed(start, _time_step(run.advance, processes.device)).times(count)


def _time_step(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step, after some that do not count; of slow ones fewer are taken."""
    seconds = 0.0
    for _ in ("warm-up", "measured"):
        began, taken = time.perf_counter(), 0
        while taken < _STEPS and (not taken or time.perf_counter() - began < _LONG):
            step()
            taken += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - began) / taken
    return seconds
