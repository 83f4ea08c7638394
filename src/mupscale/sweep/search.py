"""A sweep: take trials, train them together, tell what came of them, until nothing is left; alone or among many."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from mupscale.data import Data
from mupscale.engine import NotStackable, Outcome, PointCallback, train_many
from mupscale.sweep.space import Cell, Space, Sweep, Trial
from mupscale.sweep.storage import PATIENCE
from mupscale.sweep.study import Held, Study, fate
from mupscale.sweep.workers import GRACE, Worker, here, is_alive
from mupscale.system import Interrupted, MupscaleError, replace_text
from mupscale.train import MAY_CHANGE, Recipe

Note = Callable[[str], None]
_POINTS = 40  # of a trial's curve
_REPORT_EVERY = 5.0  # seconds between two reports of where trials stand, beside those at rungs
_TPE_BATCHES = 5  # TPE learns between batches, so it takes its trials in so many


@dataclass(frozen=True)
class Task:
    """What is swept: a space, and the recipes (one for each of the sweep's seeds) that a cell of it stands for.

    name: the study's. width: at which trials train. start: the width they are upscaled from, None from scratch.
    measure: whose loss is minimised. trials: how many random and tpe take. data: the recipes' own, where it is loaded
    already.
    """

    name: str
    width: Any
    start: Any
    space: Space
    recipes: Callable[[Cell], list[Recipe]]
    steps: int
    measure: Literal["train", "held-out"] = "train"
    sampler: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median", "halving"] = "none"
    engine: Literal["auto", "vectorised", "serial"] = "auto"
    seed: int = 0
    data: Data | None = None

    def facts(self) -> dict[str, Any]:
        """What a study of this name must agree in, beside its space and steps; folders may lie elsewhere."""
        recipes = self.recipes(self.space.cells[-1])
        free = {*MAY_CHANGE, "from", "noise", "seeds", "grow", "steps"}
        recipe = {name: value for name, value in recipes[0].to_json().items() if name not in free}
        recipe["optimizer"]["init_args"].pop("lr", None)
        seeds = [asdict(one.seeds) for one in recipes]
        return {"width": self.width, "start": self.start, "measure": self.measure, "recipe": recipe, "seeds": seeds}


def run_sweep(
    task: Task,
    storage: str,
    *,
    worker: bool = False,
    folder: Path | None = None,
    at_once: int | None = None,
    grace: float = GRACE,
    patience: float = PATIENCE,
    note: Note | None = None,
    watch: PointCallback | None = None,
    begin: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Create or join the task's study in this storage, work until no trial is left, and return all that was found.

    Any number of these may run at once, on any machines that reach the storage. Trials that others have are waited
    for; those of workers that died (no sign of life for `grace` seconds) are trained once more. folder: where an
    interrupted stack of trials is kept, to go on from. at_once: how many trials to take together (default: all
    that are left, shared among the workers). patience: seconds for which the storage may be locked or gone.
    watch: told at every point of the trials' curves. begin: told at first how many trials are left, and of how many.
    """
    if at_once is not None and at_once < 1:
        raise MupscaleError(f"at_once is {at_once}, but at least 1 trial must be taken at a time")
    study = Study(
        storage,
        task.name,
        task.space,
        task.facts(),
        steps=task.steps,
        sampler=task.sampler,
        trials=task.trials,
        pruner=task.pruner,
        seed=task.seed,
        patience=patience,
    )
    if begin is not None:
        begin(max(0, study.wanted - len(study.results())), study.wanted)
    with Worker(study, grace) as me:
        search = _Search(task, study, me, folder, at_once, note or _on_stderr, watch, worker)
        if worker:
            search.note(f"{task.name}: worker {me.id} joins; {study.open()} trials are open")
        search.go()
    seeds = len(task.recipes(task.space.cells[0]))
    return Sweep(
        task.name,
        task.width,
        task.start,
        task.space,
        study.results(),
        seeds,
        task.measure,
        task.sampler,
        task.pruner,
        study.seconds(),
    )


@dataclass
class _Search:
    """One worker's part of a sweep."""

    task: Task
    study: Study
    me: Worker
    folder: Path | None
    at_once: int | None
    note: Note
    watch: PointCallback | None = None
    worker: bool = False
    said: set[str] = field(default_factory=set)
    engine: str = ""

    def go(self) -> None:
        """Until every trial is done, by us or by others."""
        self.engine = self.task.engine
        for batch in _left_behind(self.folder, self.study, self.me, self.worker):
            self._work(batch)
        while True:
            self.study.check()
            if self.me.bury():
                self._say(f"{self.task.name}: a worker died or left; its trials are trained again")
            self.study.enqueue(self._given_up)
            count = self.study.open()
            if count:
                held = self.study.take(self._share(count), self.me.id)
                if held:
                    self._work(_Batch(self.task.name, self.me, held, self.folder))
                continue
            running = sum(fate(trial) == "running" for trial in self.study.all())
            if not running:
                return
            self._say(
                f"{self.task.name}: waiting for {running} trial{'' if running == 1 else 's'} that other workers have"
            )
            time.sleep(min(1.0, self.me.grace / 10))

    def _share(self, count: int) -> int:
        if self.at_once is not None:
            return min(count, self.at_once)
        if self.engine == "serial":  # one after another anyway: so that nothing waits, and little is lost
            return 1
        if self.task.sampler == "tpe":
            count = min(count, max(1, math.ceil(self.study.wanted / _TPE_BATCHES)))
        return math.ceil(count / (1 + self.me.others()))

    def _given_up(self, cell: Cell) -> None:
        self._say(
            f"{self.task.name}: the trial with lr {cell.lr:g} and noise {cell.noise:g} is given up, since two workers "
            f"died at it: try less memory (a smaller at_once), or leave it out"
        )

    def _say(self, text: str) -> None:
        """Each sentence once."""
        if text not in self.said:
            self.said.add(text)
            self.note(text)

    # ------------------------------------------------------------------------------------------- a batch of trials

    def _work(self, batch: _Batch) -> None:
        """Train a batch and tell what came of it; whatever happens, no trial is left hanging."""
        try:
            if batch.results is None:
                with self._kept_or_given_back(batch):
                    try:
                        batch.finished(self._train(batch))
                    except NotStackable as error:
                        if self.task.engine == "vectorised":
                            raise
                        self._say(f"{self.task.name}: one run at a time: {error}")
                        self.engine = "serial"
                        self._give_back(batch)
                        batch.forget()
                        return
            self._tell(batch)
        finally:
            if batch.told:
                batch.forget()

    @contextmanager
    def _kept_or_given_back(self, batch: _Batch) -> Iterator[None]:
        """Interrupted: a stack that was saved waits for the same command, other trials are free for everybody."""
        try:
            batch.begin()
            yield
        except BaseException as error:
            if isinstance(error, Interrupted) and batch.stack is not None and batch.stack.exists():
                self.me.state = "paused"
                raise
            with suppress(MupscaleError):
                self._give_back(batch)
            batch.forget()
            raise

    def _give_back(self, batch: _Batch) -> None:
        for number in sorted(batch.mine):
            self.study.make_void(number, "given back")

    def _train(self, batch: _Batch) -> list[Trial]:
        """The batch as one call of the engine: every cell with all its seeds."""
        recipes = [self.task.recipes(one.cell) for one in batch.held]
        owner = [row for row, some in enumerate(recipes) for _ in some]
        course = _Course(self, batch, owner)
        began = time.monotonic()
        rule = self.study.rule
        outcomes = train_many(
            [recipe for some in recipes for recipe in some],
            engine="vectorised" if self.engine == "auto" else self.engine,  # type: ignore[arg-type]
            points=_POINTS,
            rungs=[] if rule is None else rule.steps(self.task.steps),
            prune=None if rule is None else course.decide,
            evaluate=self.task.measure == "held-out",
            save=batch.stack,
            on_point=course.tell,
            note=self.note,
            data=self.task.data,
        )
        batch.seconds = (time.monotonic() - began) / len(batch.held)
        by_row = [[o for o, row in zip(outcomes, owner, strict=True) if row == r] for r in range(len(batch.held))]
        return [as_trial(one.cell, some, self.task.measure) for one, some in zip(batch.held, by_row, strict=True)]

    def _tell(self, batch: _Batch) -> None:
        assert batch.results is not None
        late = [
            one
            for one, result in zip(batch.held, batch.results, strict=True)
            if one.number in batch.mine and not self.study.finish(one.number, result, batch.seconds)
        ]
        batch.told = True
        if late:
            self.note(
                f"{self.task.name}: {len(late)} of {len(batch.held)} trials had been given to another worker, since "
                f"this one gave no sign of life; their results here are dropped"
            )


def as_trial(cell: Cell, outcomes: Sequence[Outcome], measure: str) -> Trial:
    """A cell's trial from its seeds: diverged if one of them did, pruned if one was stopped, else finished."""
    states = [outcome.status for outcome in outcomes]
    status = next((word for word in ("diverged", "pruned") if word in states), "finished")
    scores = [outcome.scores.get("loss") if measure == "held-out" else outcome.loss for outcome in outcomes]
    if status == "finished" and not all(score is not None and math.isfinite(score) for score in scores):
        status = "diverged"
    by_seed = [score for score in scores if score is not None]
    if status == "pruned":
        by_seed = [outcome.curve[-1][1] for outcome in outcomes if outcome.curve]
    shared = set.intersection(*({step for step, _ in outcome.curve} for outcome in outcomes))
    curve = [(s, fmean(loss for o in outcomes for step, loss in o.curve if step == s)) for s in sorted(shared)]
    return Trial(
        cell.lr,
        cell.noise,
        status,  # type: ignore[arg-type]
        fmean(by_seed) if status == "finished" else None,
        by_seed,
        curve,
        max(outcome.step for outcome in outcomes),
        math.fsum(outcome.flops or 0.0 for outcome in outcomes),
    )


class _Course:
    """A batch on its way: what the engine tells goes to the storage, what the pruner stops goes to the engine."""

    def __init__(self, search: _Search, batch: _Batch, owner: Sequence[int]) -> None:
        self.search, self.batch, self.owner = search, batch, owner
        self.values: dict[int, dict[int, float]] = {}  # by rung and run
        self.stopped: set[int] = set()
        self.reported = time.monotonic()

    def tell(self, step: int, values: Mapping[int, float]) -> None:
        """Where trials stand, for whoever looks on; a storage that is gone for a while does not stop the training."""
        if self.search.watch is not None:
            self.search.watch(step, values)
        if time.monotonic() - self.reported < _REPORT_EVERY:
            return
        with suppress(MupscaleError):
            self._report(step, values)
        self.reported = time.monotonic()

    def decide(self, step: int, values: Mapping[int, float]) -> Collection[int]:
        """The runs to stop at a rung; all go on where the storage cannot be asked."""
        seen = self.values.setdefault(step, {})
        seen.update(values)
        rows = {self.owner[run] for run in values} - self.stopped
        try:
            self._report(step, {run: loss for run, loss in seen.items() if self.owner[run] in rows})
            numbers = {self.batch.held[row].number: row for row in rows}
            self.stopped |= {numbers[number] for number in self.search.study.behind(numbers, step)}
        except MupscaleError as error:
            self.search.note(f"nothing is stopped at step {step}: {error}")
        return [run for run in values if self.owner[run] in self.stopped]

    def _report(self, step: int, values: Mapping[int, float]) -> None:
        rows: dict[int, list[float]] = {}
        for run, loss in values.items():
            rows.setdefault(self.owner[run], []).append(loss)
        self.search.study.report({self.batch.held[row].number: fmean(some) for row, some in rows.items()}, step)


# ------------------------------------------------------------------------------------------------ kept in a folder


class _Batch:
    """Trials that are trained together; with a folder, also a note of them there and the stack's own file."""

    def __init__(self, study: str, me: Worker, held: Sequence[Held], folder: Path | None) -> None:
        self.study, self.worker, self.held = study, me.id, list(held)
        self.path = None if folder is None else folder / f"{study}.{me.id}.batch.json"
        self.stack = None if folder is None else folder / f"{study}.{me.id}.stack.safetensors"
        self.mine = {one.number for one in held}
        self.results: list[Trial] | None = None
        self.seconds, self.told = 0.0, False

    def begin(self) -> None:
        """Note what is about to be trained."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def finished(self, results: list[Trial]) -> None:
        """Note what came of it, before the storage is told: it may be gone."""
        self.results = results
        with suppress(MupscaleError):  # a full disk: the storage may yet be elsewhere
            self._write()

    def forget(self) -> None:
        """The storage knows it all."""
        for path in (self.path, self.stack):
            if path is not None:
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is None or self.stack is None:
            return
        values = {
            "study": self.study,
            "worker": self.worker,
            "place": here(),
            "pid": os.getpid(),
            "trials": [[one.number, *one.cell] for one in self.held],
            "stack": self.stack.name,
            "results": None if self.results is None else [asdict(result) for result in self.results],
            "seconds": self.seconds,
        }
        try:
            replace_text(self.path, json.dumps(values) + "\n")
        except OSError as error:
            raise MupscaleError(f"{self.path} cannot be written: {error.strerror or error}; free some space") from None

    @classmethod
    def read(cls, path: Path, me: Worker) -> _Batch | None:
        """A batch that an earlier worker left; None if it is of no use."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            held = [Held(int(number), Cell(float(lr), float(noise))) for number, lr, noise in values["trials"]]
            batch = cls(str(values["study"]), me, held, path.parent)
            batch.stack = path.parent / Path(str(values["stack"])).name
            if values["results"] is not None:
                curve = [[(int(s), float(v)) for s, v in result.pop("curve")] for result in values["results"]]
                batch.results = [Trial(**r, curve=c) for r, c in zip(values["results"], curve, strict=True)]
            batch.seconds, batch.worker = float(values["seconds"]), str(values["worker"])
            working = values["place"] == here() and is_alive(int(values["pid"])) and me.at_work(batch.worker)
            return None if working else batch
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _left_behind(folder: Path | None, study: Study, me: Worker, worker: bool) -> Iterator[_Batch]:
    """Batches that workers of this folder could not finish, made ours: those with a stack to go on from, or results.

    Trials without either are begun anew. For one worker among many that is once, as for any whose worker died; but a
    sweep that somebody runs alone, and starts again, was as likely stopped by hand: it may be so any number of times.
    """
    for path in sorted(folder.glob(f"{study.name}.*.batch.json")) if folder is not None else []:
        batch = _Batch.read(path, me)
        if batch is None or batch.study != study.name or batch.path is None or batch.stack is None:
            continue
        if batch.results is None and not batch.stack.exists():
            for number in () if worker else sorted(study.keep(batch.held, me.id)):
                study.make_void(number, "given back")
            path.unlink(missing_ok=True)
            continue
        try:
            path.rename(batch.path)  # of several workers that start at once, one succeeds
        except FileNotFoundError:
            continue
        batch.worker, batch.mine = me.id, study.keep(batch.held, me.id)
        if batch.mine:
            yield batch
        else:
            batch.forget()


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
