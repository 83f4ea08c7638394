"""A sweep from its first trial to its last: take trials, train them, store the results, until none is left."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from mupscale.engine import NotStackable, Outcome, PointCallback, train_many
from mupscale.sweep.callbacks import BatchCallbacks, Note
from mupscale.sweep.space import Cell, Sweep, Trial
from mupscale.sweep.storage import PATIENCE
from mupscale.sweep.study import Study
from mupscale.sweep.sweep_job import SweepJob
from mupscale.sweep.trial_batches import TrialBatch, adopt_batches
from mupscale.sweep.workers import GRACE, Worker
from mupscale.system import Interrupted, MupscaleError, show

_POINTS = 40  # of a trial's curve
_LOOK_EVERY = 1.0  # seconds
_TPE_BATCHES = 5  # TPE learns between batches, so it takes its trials in so many
_FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)  # not the user's mistakes


def run_sweep(
    job: SweepJob,
    storage: str,
    *,
    worker: bool = False,
    folder: Path | None = None,
    at_once: int | None = None,
    grace: float = GRACE,
    patience: float = PATIENCE,
    retries: int | None = None,
    note: Note | None = None,
    on_point: PointCallback | None = None,
    on_start: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Create or join the job's study in this storage, train until no trial is left, and return all results.

    Any number of these may run at once, on any machines that reach the storage. Trials that others have are waited
    for; those of workers that died (no sign of life for `grace` seconds) are trained again, `retries` times at most
    (default: without limit), from the second death on in ever smaller company, since that may be what they died of.
    A trial whose training fails is tried alone, and given up only if it fails there, too; a sweep that lacks a trial
    in the end is an error. folder: where an interrupted stack of trials is kept, to go on from. at_once: how many
    trials to train at once (default: all that are left, shared among the workers). patience: seconds for which the
    storage may be locked or gone. on_point: called at every point of the trials' curves. on_start: called with how
    many trials are left, and of how many.

    >>> import tempfile
    >>> from mupscale.sweep import Space, SweepJob, run_sweep
    >>> from mupscale.train import Recipe, Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> def recipes(cell):
    ...     sgd = Spec("torch.optim.SGD", {"lr": cell.lr})
    ...     return [Recipe(model, data, sgd, width=8, base=8, batch=20, steps=20)]
    >>> job = SweepJob("rates", 8, None, Space((0.1, 1e30)), recipes, steps=20)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep = run_sweep(job, f"journal:{folder}/study.log")
    >>> [(trial.lr, trial.status) for trial in sweep.trials]
    [(0.1, 'finished'), (1e+30, 'diverged')]
    """
    if at_once is not None and at_once < 1:
        raise MupscaleError(f"at_once is {at_once}, but at least 1 trial must be taken at a time")
    study = open_study(job, storage, patience, retries)
    if on_start is not None:
        on_start(max(0, study.wanted - len(study.results())), study.wanted)
    with Worker(study, grace) as me:
        search = SweepSearch(job, study, me, folder, at_once, note or _print_to_stderr, on_point, worker)
        if worker:
            search.note(f"{job.name}: worker {me.id} joins; {study.count_open()} trials are open")
        search.run()
    _check_complete(study)
    return _finished_sweep(job, study)


def open_study(job: SweepJob, storage: str, patience: float, retries: int | None) -> Study:
    """The job's study, created or joined."""
    return Study(
        storage,
        job.study_name,
        job.space,
        job.description(),
        steps=job.steps,
        sampler=job.sampler,
        trials=job.trials,
        pruner=job.pruner,
        seed=job.seed,
        patience=patience,
        retries=retries,
    )


def _check_complete(study: Study) -> None:
    """Refuse a sweep of which trials are missing: its best trial may be one of them."""
    given_up = study.attempts.given_up
    if not given_up:
        return
    shown = [f"lr {cell.lr:g} and noise {cell.noise:g} ({why})" for cell, why in list(given_up.items())[:3]]
    more = f", and {len(given_up) - len(shown)} more" if len(given_up) > len(shown) else ""
    raise MupscaleError(
        f"{study.name} is not complete, and nothing is chosen from it: {len(given_up)} of {study.wanted} trials are "
        f"missing: {', '.join(shown)}{more}; the same command tries what failed again; more attempts where workers "
        f"die: --study.retries; less memory: --study.engine serial; or leave these values out under another name"
    )


def _finished_sweep(job: SweepJob, study: Study) -> Sweep:
    return Sweep(
        job.name,
        job.width,
        job.start,
        job.space,
        study.results(),
        seeds=len(job.recipes(job.space.cells[0])),
        measure=job.measure,
        sampler=job.sampler,
        pruner=job.pruner,
        seconds=study.seconds(),
    )


@dataclass
class SweepSearch:
    """One worker's part of a sweep."""

    job: SweepJob
    study: Study
    me: Worker
    folder: Path | None
    at_once: int | None
    note: Note
    on_point: PointCallback | None = None
    worker: bool = False
    noted: set[str] = field(default_factory=set)
    engine: str = ""
    looked: float = -math.inf  # when it last looked around
    trained: int = 0  # batches that came to an end
    failed: int = 0  # trials that failed by themselves

    def run(self) -> None:
        """Train until every trial is done, by this worker or by others."""
        self.engine = self.job.engine
        for batch in adopt_batches(self.folder, self.study, self.me, self.worker):
            self._complete(batch)
        while True:
            self._look_around()
            count = self.study.count_untaken() or self.study.count_open()
            if count:
                trials = self.study.take(self._share(count), self.me.id, self._offset(count))
                if trials:
                    self._complete(TrialBatch(self.job.study_name, self.me, trials, self.folder))
                continue
            running = self.study.count_running()
            if not running:
                return
            plural = "" if running == 1 else "s"
            self._note_once(f"{self.job.name}: waiting for {running} trial{plural} that other workers have")
            time.sleep(min(1.0, self.me.grace / 10))
            self.looked = -math.inf

    def _look_around(self) -> None:
        """Now and then, see whether the study is still the same, and whether workers died."""
        if time.monotonic() - self.looked < min(_LOOK_EVERY, self.me.grace / 10):
            return
        self.study.check_description()
        if self.me.end_abandoned_trials():
            self._note_once(f"{self.job.name}: a worker died or left; its trials are trained again")
        self.looked = time.monotonic()

    def _offset(self, count: int) -> int:
        """Where among the open cells to begin, so that workers seldom begin the same."""
        return secrets.randbelow(count) if self.me.count_others() else 0

    def _share(self, count: int) -> int:
        """How many of the open trials to take at once."""
        if self.at_once is not None:
            return min(count, self.at_once)
        if self.engine == "serial":  # one after another anyway: so that nothing waits, and little is lost
            return 1
        if self.job.sampler == "tpe":
            count = min(count, max(1, math.ceil(self.study.wanted / _TPE_BATCHES)))
        return math.ceil(count / (1 + self.me.count_others()))

    def _note_once(self, text: str) -> None:
        if text not in self.noted:
            self.noted.add(text)
            self.note(text)

    # ------------------------------------------------------------------------------------------- a batch of trials

    def _complete(self, batch: TrialBatch) -> None:
        """Train a batch and store its results; whatever happens, no trial stays taken by nobody."""
        try:
            if batch.results is None:
                with self._kept_or_given_back(batch):
                    try:
                        batch.finish(self._train(batch))
                    except NotStackable as error:
                        if self.job.engine == "vectorised":
                            raise
                        self._note_once(f"{self.job.name}: one run at a time: {error}")
                        self.engine = "serial"
                        self._give_back(batch)
                        batch.remove_files()
                        return
                    except _FAILURES as error:
                        self._note_failure(batch, error)
                        batch.remove_files()
                        return
            self.trained += 1
            self._store(batch)
        finally:
            if batch.stored:
                batch.remove_files()

    @contextmanager
    def _kept_or_given_back(self, batch: TrialBatch) -> Iterator[None]:
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
            batch.remove_files()
            raise

    def _give_back(self, batch: TrialBatch, why: str = "given back") -> None:
        for number in sorted(batch.own):
            self.study.make_void(number, why)

    def _note_failure(self, batch: TrialBatch, error: Exception) -> None:
        """Training failed: in company, each is tried in smaller company; alone, it is given up with its error.

        Where two fail by themselves and none was ever trained, the cause is hardly the trial: that ends the sweep.
        """
        what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if len(batch.trials) > 1:
            self._note_once(f"{self.job.name}: {len(batch.trials)} trials at once failed, so fewer: {what}")
            self._give_back(batch, "in company")
            return
        self.failed += 1
        if self.failed > 1 and not self.trained:
            raise error
        cell = batch.trials[0].cell
        self.note(f"{self.job.name}: the trial with lr {cell.lr:g} and noise {cell.noise:g} failed: {what}")
        for number in batch.own:
            self.study.mark_failed(number, what)

    def _train(self, batch: TrialBatch) -> list[Trial]:
        """The batch as one call of the engine: every cell with all its seeds."""
        recipes = [self.job.recipes(trial.cell) for trial in batch.trials]
        trial_of_run = [index for index, some in enumerate(recipes) for _ in some]
        callbacks = BatchCallbacks(self.study, batch.trials, trial_of_run, self.note, self.on_point)
        began = time.monotonic()
        rule = self.study.rule
        outcomes = train_many(
            [recipe for some in recipes for recipe in some],
            engine="vectorised" if self.engine == "auto" else self.engine,  # type: ignore[arg-type]
            points=_POINTS,
            rungs=[] if rule is None else rule.steps(self.job.steps),
            prune=None if rule is None else callbacks.prune,
            evaluate=self.job.measure == "held-out",
            save=batch.stack,
            on_point=callbacks.report_point,
            note=self.note,
            data=self.job.data,
        )
        batch.seconds = (time.monotonic() - began) / len(batch.trials)
        in_order = iter(outcomes)
        by_trial = [[next(in_order) for _ in some] for some in recipes]
        return [
            combine_seeds(trial.cell, some, self.job.measure)
            for trial, some in zip(batch.trials, by_trial, strict=True)
        ]

    def _store(self, batch: TrialBatch) -> None:
        assert batch.results is not None
        late = [
            trial
            for trial, result in zip(batch.trials, batch.results, strict=True)
            if trial.number in batch.own and not self.study.finish(trial.number, result, batch.seconds)
        ]
        batch.stored = True
        if late:
            self.note(
                f"{self.job.name}: {len(late)} of {len(batch.trials)} trials had been given to another worker, since "
                f"this one gave no sign of life; their results here are dropped"
            )


def combine_seeds(cell: Cell, outcomes: Sequence[Outcome], measure: str) -> Trial:
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


def _print_to_stderr(text: str) -> None:
    show(text, stream="stderr")
