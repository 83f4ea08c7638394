"""What the bookkeeping of a sweep costs a trial: studies of 100, 1,000 and 10,000 trials whose training takes no time.

Eight workers share each study, one trial at a time, on SQLite and on a journal; `--storage URL` for a database, such as
postgresql+psycopg://user@host/studies. Nothing is trained, so all of it is asking, noting and storing. With
`--measured N` one process notes all but the last N trials of each study beforehand, and those are measured alone: what
a trial costs where so many are there already, in minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from mupscale.study import Cell, Space, SweepJob, Tried
from mupscale.study.search import SweepSearch, TrialBatch, Worker
from mupscale.study.trials import Storage, SweepTrials
from mupscale.train import Recipe, Spec

CURVE = [(step, 1.0 / step) for step in range(1, 41)]
FORK = multiprocessing.get_context("fork")  # so that torch is loaded once


class Untrained(SweepSearch):
    """A worker whose training takes no time."""

    def _train(self, batch: TrialBatch) -> list[Tried]:
        return [Tried(*cell, [cell.lr], curve=CURVE, steps=40, cost=1.0) for cell in batch.cells.values()]


def open_study(task: SweepJob, place: str) -> SweepTrials:
    """Its study, created or joined."""
    return SweepTrials(task, Storage(place, patience=600.0))


def job(trials: int) -> SweepJob:
    """A grid of so many learning rates."""

    def recipes(cell: Cell) -> list[Recipe]:
        sgd = Spec("torch.optim.SGD", {"lr": cell.lr})
        model = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7})
        return [Recipe(model, Spec("mupscale.data.CoverTypeSample"), sgd, width=8, base=8, batch=20, steps=40)]

    rates = tuple(0.001 * (1 + number) for number in range(trials))
    return SweepJob(f"{trials}-trials-{time.time_ns()}", 8, None, Space(rates), recipes, steps=40)


def work(task: SweepJob, place: str, start: Any, spent: Any) -> None:
    """One worker, from its first trial to the last of the study."""
    study = open_study(task, place)
    start.wait()
    before = time.process_time()
    with Worker(study) as me:
        Untrained(study, me, None, at_once=1, note=lambda text: None).run()
    with spent.get_lock():
        spent.value += time.process_time() - before


def note_trials(task: SweepJob, place: str, count: int) -> None:
    """Store so many trials of a study as workers that are gone would have left them."""
    from optuna.trial import TrialState, create_trial

    study = open_study(task, place)
    result = {"status": "finished", "by_seed": [1.0], "curve": CURVE, "steps": 40, "flops": 1.0, "seconds": 0.0}
    for cell in task.space.cells[:count]:
        attributes = {"cell": list(cell), "worker": "gone", "company": 1, "result": result}
        values = dict(CURVE[:: len(CURVE) - 1])
        trial = create_trial(
            state=TrialState.COMPLETE,
            value=cell.lr,
            params=cell._asdict(),
            distributions=study.ranges,
            user_attrs=attributes,
            intermediate_values=values,
        )
        study.storage.optuna.create_new_trial(study.id, trial)


def measure(trials: int, place: str, workers: int, measured: int | None) -> None:
    """Print what a study of so many trials takes, or its last few."""
    task, start, spent = job(trials), FORK.Barrier(workers + 1), FORK.Value("d")
    open_study(task, place)
    count = trials if measured is None else min(measured, trials)
    if count < trials:
        note_trials(task, place, trials - count)
    processes = [FORK.Process(target=work, args=(task, place, start, spent)) for _ in range(workers)]
    for process in processes:
        process.start()
    start.wait()
    began = time.monotonic()
    for process in processes:
        process.join()
    seconds, cpu = time.monotonic() - began, spent.value
    study = open_study(task, place)
    done, begun = len(study.read_results().trials), len(study.known)
    assert done == trials
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(
        f"  {trials:6,} trials: {seconds:7.1f} s, {1000 * seconds / count:5.1f} ms a trial "
        f"({1000 * cpu / count:.1f} of CPU), {begun - done} begun twice, {memory} MB in the largest worker so far",
        flush=True,
    )


def main(words: Sequence[str] | None = None) -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--storage", help="a storage to measure in place of SQLite and a journal")
    parser.add_argument("--measured", type=int, help="how many of them are measured (default: all)")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        places = [options.storage] if options.storage else [f"{folder}/study.db", f"journal:{folder}/study.log"]
        for place in places:
            print(f"{options.workers} workers on {place.split(':')[0] if ':' in place else 'sqlite'}")
            for trials in options.trials:
                measure(trials, place, options.workers, options.measured)


if __name__ == "__main__":
    main()
