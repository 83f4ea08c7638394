"""Train many runs: as one program where that works, one after another where it does not; the numbers are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mupscale.data import Data
from mupscale.engine.stackable import NotStackable
from mupscale.engine.stacked_training import train_in_stacks
from mupscale.engine.training_job import (
    Outcome,
    PointCallback,
    PruneCallback,
    TrainingJob,
    check_folders,
    curve_and_scores,
    read_outcome,
)
from mupscale.system import Display, Interrupted, MupscaleError, remove, show
from mupscale.train import (
    Callback,
    Recipe,
    RunFolder,
    StopRequest,
    TrainingRun,
    catch_stop_signals,
    join_processes,
    matmul_precision,
)


def train_one_by_one(job: TrainingJob, stop: StopRequest) -> None:
    """Train all remaining runs."""
    for number in job.remaining:
        recipe = job.recipes[number]
        if recipe.out is None:
            rarely = replace(recipe.evaluation, every=0)
            recipe = replace(recipe, log_every=job.point_spacing(recipe), evaluation=rarely)
        listener = _Listener()
        with matmul_precision(recipe.precision), join_processes(recipe.device, recipe.parallel) as processes:
            run = TrainingRun(recipe, processes, [listener], job.data)
            try:
                run.begin(job.resume)
                job.outcomes[number] = _train_run(job, number, run, listener, stop)
            finally:
                run.close()
        job.save_outcomes()
        stop.check()


def _train_run(job: TrainingJob, number: int, run: TrainingRun, listener: _Listener, stop: StopRequest) -> Outcome:
    """Train one run from where it stands to its end, reporting every point."""
    recipe = job.recipes[number]
    status: Any = "finished" if run.step >= recipe.steps else None
    while status is None:
        status = run.advance(stop.asked)
        if listener.point is not None:
            values, listener.point = {number: listener.point}, None
            job.report_point(run.step, values)
            if status is None and job.runs_to_prune(recipe, run.step, values):
                status = "pruned"
    run.end(status)
    if status == "interrupted":
        raise Interrupted(f"interrupted after step {run.step} of {recipe.steps}")
    curve, scores = curve_and_scores(RunFolder(recipe.out).records() if recipe.out is not None else listener.records)
    step = run.losses.diverged_at(run.step) if status == "diverged" else run.step
    cost = None if run.flops_per_example is None else run.flops_per_example * recipe.batch
    flops = None if cost is None else run.flops - cost * max(0, run.step - step)
    return Outcome(recipe, status, step, curve, scores if job.needs_scores(recipe) else {}, flops)


class _Listener(Callback):
    """Collects the records of a run."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.point: float | None = None  # the training loss of a point that is not reported yet

    def metrics(self, run: Any, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        if record["kind"] == "train":
            self.point = record["loss"]


Engine = Literal["auto", "vectorised", "serial"]


def train_many(
    recipes: Sequence[Recipe],
    *,
    engine: Engine = "auto",
    points: int = 40,
    rungs: Sequence[int] = (),
    prune: PruneCallback | None = None,
    evaluate: bool = False,
    save: Path | None = None,
    on_point: PointCallback | None = None,
    resume: bool = False,
    note: Callable[[str], None] | None = None,
    memory: int | None = None,
    data: Data | None = None,
) -> list[Outcome]:
    """Train all of these recipes; outcomes come in their order.

    A recipe with a folder (out) becomes a run like any other, with its metrics and a checkpoint at its end; `resume`
    skips those that are finished and trains the others, else a folder that holds a run is refused.
    engine: auto falls back to one at a time, and says why; vectorised does not. points: of a curve, where there is no
    folder. rungs, prune: where runs may be stopped early, and which. save: a file for what is done so far, from which
    the same call goes on after an interruption or a kill. memory: bytes that a stack may take; what is free if not
    given. data: the recipes' own, where it is loaded already.

    >>> from mupscale.engine import train_many
    >>> from mupscale.train import Recipe, Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd = [Spec("torch.optim.SGD", {"lr": lr}) for lr in (0.1, 1e30)]
    >>> recipes = [Recipe(model, data, optimizer, width=8, base=8, batch=20, steps=20) for optimizer in sgd]
    >>> [outcome.status for outcome in train_many(recipes)]
    ['finished', 'diverged']
    """
    if points < 1:
        raise MupscaleError(f"points is {points}, but a curve has at least one")
    if data is not None and any(recipe.data != recipes[0].data for recipe in recipes):
        raise MupscaleError("the runs differ in data, so one that is loaded already cannot be given for all of them")
    note = note or partial(show, stream="stderr")
    job = TrainingJob(list(recipes), points, rungs, prune, evaluate, save, on_point, note, memory, data)
    job.resume = job.load_saved() or resume
    if job.resume:
        read = ((number, read_outcome(job.recipes[number])) for number in job.remaining)
        job.outcomes |= {number: outcome for number, outcome in read if outcome is not None}
    check_folders([recipes[number] for number in job.remaining], job.resume)
    try:
        with catch_stop_signals() as stop:
            if engine != "serial" and job.remaining:
                try:
                    train_in_stacks(job, stop)
                except NotStackable as error:
                    if engine == "vectorised":
                        raise
                    job.note(f"one run at a time: {error}")
            train_one_by_one(job, stop)
    except Interrupted:
        if not job.remaining:  # too late to stop in the middle: the same call has all of this
            job.save_outcomes(complete=True)
        raise
    if save is not None:
        remove(save)
    return [job.outcomes[number] for number in range(len(recipes))]


class ManyRuns:
    """For `train_many(on_point=…)`: how far so many runs of so many steps are, all at once or some after others."""

    def __init__(self, steps: int, runs: int, display: Display) -> None:
        self.steps, self.runs, self.display = steps, runs, display
        self.over, self.together, self.step = 0, 0, 0  # runs that are done, those that train now, and their step

    def __call__(self, step: int, values: Mapping[int, float]) -> None:
        """A point of the runs that train now: the lowest loss among them is shown."""
        if step <= self.step:  # others have begun
            self.over, self.together = self.over + self.together, 0
        self.step, self.together = step, max(self.together, len(values))
        finite = [value for value in values.values() if math.isfinite(value)]
        if not finite:
            return
        runs = max(self.runs, self.over + self.together)
        before = f"{self.over} of {runs} runs done, " if self.over else ""
        shown = f"loss {min(finite):.4f}"
        done = (self.over * self.steps + self.together * step) / runs
        self.display.update(done, f"{before}step {step}/{self.steps}  {shown}", shown=shown)


@contextmanager
def lowest_loss_bar(steps: int, runs: int = 1, *, visible: bool = True) -> Iterator[ManyRuns]:
    """A bar of the steps of so many runs, with the lowest loss among them and the time left, gone when they end.

    Where stderr is no terminal, a line now and then.
    """
    columns = ("wide bar", "count", "{task.fields[shown]}", "time", "left", "time left")
    with Display(columns, steps, visible=visible, transient=True, lines="stdout", shown="") as display:
        yield ManyRuns(steps, runs, display)
