"""Runs trained one after another by the ordinary loop: the fallback for what cannot be one program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mupscale.engine.jobs import Work
from mupscale.engine.outcomes import Outcome, Status, told_by
from mupscale.system import Interrupted
from mupscale.train import RunFolder, StopRequest, TrainingRun, join_processes, matmul_precision


def train_one_by_one(work: Work, stop: StopRequest) -> None:
    """Train what is left."""
    for number in work.left:
        recipe = work.recipes[number]
        if recipe.out is None:
            rarely = replace(recipe.evaluation, every=0)
            recipe = replace(recipe, log_every=work.spacing(recipe), evaluation=rarely)
        listener = _Listener()
        with matmul_precision(recipe.precision), join_processes(recipe.device, recipe.parallel) as processes:
            run = TrainingRun(recipe, processes, listener, work.data)
            try:
                run.begin(work.resume)
                work.outcomes[number] = _follow(work, number, run, listener, stop)
            finally:
                run.close()
        work.keep()


def _follow(work: Work, number: int, run: TrainingRun, listener: _Listener, stop: StopRequest) -> Outcome:
    """One run from where it stands to its end, heard at every point."""
    recipe = work.recipes[number]
    status: Any = "finished" if run.step >= recipe.steps else None
    while status is None:
        status = run.advance(stop.asked)
        if listener.point is not None:
            values, listener.point = {number: listener.point}, None
            work.told(run.step, values)
            if status is None and work.stopped(recipe, run.step, values):
                status = "pruned"
    run.end(status)
    if status == "interrupted":
        raise Interrupted(f"interrupted after step {run.step} of {recipe.steps}")
    return _outcome(work, number, run, status, listener)


def _outcome(work: Work, number: int, run: TrainingRun, status: Status, listener: _Listener) -> Outcome:
    recipe = work.recipes[number]
    curve, scores = told_by(RunFolder(recipe.out).records() if recipe.out is not None else listener.records)
    step = run.losses.diverged_at(run.step) if status == "diverged" else run.step
    cost = None if run.flops_per_example is None else run.flops_per_example * recipe.batch
    flops = None if cost is None else run.flops - cost * max(0, run.step - step)
    return Outcome(recipe, status, step, curve, scores if work.scored(recipe) else {}, flops)


class _Listener:
    """Keeps what a run tells, and prints nothing."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.point: float | None = None  # the training loss of a point that nobody has heard of yet

    def update(self, record: dict[str, Any], speed: float) -> None:
        """A record of metrics."""
        self.records.append(record)
        if record["kind"] == "train":
            self.point = record["loss"]

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
