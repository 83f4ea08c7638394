"""Training one run after another with the ordinary loop: the fallback for runs that cannot be stacked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mupscale.engine.outcomes import Outcome, Status, curve_and_scores
from mupscale.engine.training_job import TrainingJob
from mupscale.system import Interrupted
from mupscale.train import RunFolder, StopRequest, TrainingRun, join_processes, matmul_precision


def train_one_by_one(job: TrainingJob, stop: StopRequest) -> None:
    """Train all remaining runs."""
    for number in job.remaining:
        recipe = job.recipes[number]
        if recipe.out is None:
            rarely = replace(recipe.evaluation, every=0)
            recipe = replace(recipe, log_every=job.point_spacing(recipe), evaluation=rarely)
        listener = _Listener()
        with matmul_precision(recipe.precision), join_processes(recipe.device, recipe.parallel) as processes:
            run = TrainingRun(recipe, processes, listener, job.data)
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
    return _outcome(job, number, run, status, listener)


def _outcome(job: TrainingJob, number: int, run: TrainingRun, status: Status, listener: _Listener) -> Outcome:
    recipe = job.recipes[number]
    curve, scores = curve_and_scores(RunFolder(recipe.out).records() if recipe.out is not None else listener.records)
    step = run.losses.diverged_at(run.step) if status == "diverged" else run.step
    cost = None if run.flops_per_example is None else run.flops_per_example * recipe.batch
    flops = None if cost is None else run.flops - cost * max(0, run.step - step)
    return Outcome(recipe, status, step, curve, scores if job.needs_scores(recipe) else {}, flops)


class _Listener:
    """Collects the records of a run, and prints nothing."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.point: float | None = None  # the training loss of a point that is not reported yet

    def update(self, record: dict[str, Any], speed: float) -> None:
        """A record of metrics."""
        self.records.append(record)
        if record["kind"] == "train":
            self.point = record["loss"]

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
