"""A sweep from its first trial to its last: take trials, train them as one program, store the results; and which
workers do so, each of which leaves a sign of life in the storage."""

from __future__ import annotations

import math
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean

from mupscale.engine import NotStackable, Outcome, PointCallback, train_many
from mupscale.study.space import Cell, Sweep, SweepJob, Tried
from mupscale.study.training import Note
from mupscale.study.trials import ENDED, PATIENCE, Storage, SweepTrials, trial_state
from mupscale.system import (
    Interrupted,
    MupscaleError,
    clear_leftovers,
    is_process_alive,
    machine_name,
    move,
    parse_record,
    read_json,
    remove,
    show,
    write_json,
)

GRACE = 60.0  # seconds without a sign of life after which a worker counts as dead
_PREFIX = "worker/"  # of the study's attributes with signs of life
_POINTS = 40  # of a trial's curve
_LOOK_EVERY = 1.0  # seconds
_REPORT_EVERY = 5.0  # seconds between two reports of where trials stand, beside those at rungs
_TPE_BATCHES = 5  # TPE learns between batches, so it takes its trials in so many
_FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)  # not the user's mistakes
_GIVEN_BACK = {"void": "given back"}


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
    >>> from mupscale.study import Space, SweepJob, run_sweep
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
    trials = SweepTrials(job, Storage(storage, patience), retries)
    if on_start is not None:
        ended = sum(trial_state(trial) in ENDED for trial in trials.known)
        on_start(max(0, trials.wanted - ended), trials.wanted)
    with Worker(trials, grace) as me:
        search = SweepSearch(trials, me, folder, at_once, note or partial(show, stream="stderr"), on_point, worker)
        if worker:
            search.note(f"{job.name}: worker {me.id} joins; {trials.count_open()} trials are open")
        search.run()
    trials.check_complete()
    return trials.read_results()


@dataclass
class SweepSearch:
    """One worker's part of a sweep."""

    trials: SweepTrials
    me: Worker
    folder: Path | None
    at_once: int | None
    note: Note
    on_point: PointCallback | None = None
    worker: bool = False
    engine: str = ""
    looked: float = -math.inf  # when it last looked around
    trained: int = 0  # batches that came to an end
    failed: int = 0  # trials that failed by themselves

    def __post_init__(self) -> None:
        self.job, self.note_once = self.trials.job, cache(self.note)

    def run(self) -> None:
        """Train until every trial is done, by this worker or by others."""
        self.engine = self.job.engine
        for batch in self._adopt_batches():
            self._complete(batch)
        while True:
            self._look_around()
            if not self.trials.count_open():
                self.trials.refresh()
            if count := self.trials.count_open():
                # workers begin at different cells, so that they seldom begin the same
                offset = secrets.randbelow(count) if self.me.count_others() else 0
                taken = self.trials.take(self._share(count), self.me.id, offset)
                if taken:
                    self._complete(TrialBatch.begin(self.job.study_name, self.me.id, taken, self.folder))
                continue
            running = len(self.trials.running)
            if not running:
                return
            plural = "" if running == 1 else "s"
            self.note_once(f"{self.job.name}: waiting for {running} trial{plural} that other workers have")
            time.sleep(min(1.0, self.me.grace / 10))
            self.looked = -math.inf

    def _look_around(self) -> None:
        """Now and then, see whether the study is still the same, and whether workers died."""
        if time.monotonic() - self.looked < min(_LOOK_EVERY, self.me.grace / 10):
            return
        self.trials.check_description()
        if self.me.end_abandoned_trials():
            self.note_once(f"{self.job.name}: a worker died or left; its trials are trained again")
            self.trials.refresh()
        self.looked = time.monotonic()

    def _share(self, count: int) -> int:
        if self.at_once is not None:
            return min(count, self.at_once)
        if self.engine == "serial":  # one after another anyway: so that nothing waits, and little is lost
            return 1
        if self.job.sampler == "tpe":
            count = min(count, max(1, math.ceil(self.trials.wanted / _TPE_BATCHES)))
        return math.ceil(count / (1 + self.me.count_others()))

    def _adopt_batches(self) -> Iterator[TrialBatch]:
        """Take over batches that workers of this folder could not finish: those with a stack to go on from, or results.

        Trials without either are begun anew. For one worker among many that is once, as for any whose worker died; but
        a sweep that somebody runs alone, and starts again, was as likely stopped by hand: it may be so any number of
        times.
        """
        if self.folder is None:
            return
        clear_leftovers(self.folder)
        for path in sorted(self.folder.glob(f"{self.job.study_name}.*.batch.json")):
            batch = TrialBatch.read(path)
            if batch is None or batch.study != self.job.study_name:
                continue
            if batch.place == machine_name() and is_process_alive(batch.pid) and self.me.is_working(batch.worker):
                continue  # it is still at it
            if batch.results is None and not batch.has_stack:
                for number in [] if self.worker else sorted(self.trials.take_over(batch.cells, self.me.id)):
                    self.trials.drop(number, **_GIVEN_BACK)
                remove(path)
                continue
            batch.worker, batch.place, batch.pid = self.me.id, machine_name(), os.getpid()
            assert batch.path is not None
            try:
                move(path, batch.path)  # of several workers that start at once, one succeeds
            except FileNotFoundError:
                continue
            if self.trials.take_over(batch.cells, self.me.id):
                yield batch
            else:
                batch.remove_files()

    # ------------------------------------------------------------------------------------------- a batch of trials

    def _complete(self, batch: TrialBatch) -> None:
        """Train a batch and store its results; whatever happens, no trial stays taken by nobody."""
        if batch.results is None:
            try:
                batch.write()
                batch.results = self._train(batch)
                with suppress(MupscaleError):  # a full disk: the storage may yet be elsewhere
                    batch.write()  # before they go to the storage, which may be out of reach
            except BaseException as error:
                if isinstance(error, Interrupted) and batch.has_stack:  # it waits for the same command
                    self.me.state = "paused"
                    raise
                why = self._find_reason(batch, error)
                with suppress(MupscaleError) if why is None else nullcontext():
                    for number in batch.cells:
                        self.trials.drop(number, **(why or _GIVEN_BACK))
                batch.remove_files()
                if why is None:
                    raise
                return
        self.trained += 1
        numbered = zip(batch.cells, batch.results, strict=True)
        stored = [self.trials.finish(number, result, batch.seconds) for number, result in numbered]
        if late := stored.count(False):
            self.note(
                f"{self.job.name}: {late} of {len(stored)} trials had been given to another worker, since this one "
                f"gave no sign of life; their results here are dropped"
            )
        batch.remove_files()

    def _find_reason(self, batch: TrialBatch, error: BaseException) -> dict[str, str] | None:
        """Why a batch has no results, as its trials keep it; None where the error ends the sweep.

        Where training failed in company, each trial is tried in smaller company; alone, it is given up with its error.
        Where two fail by themselves and none was ever trained, the cause is hardly the trial.
        """
        what = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if isinstance(error, NotStackable):
            if self.job.engine == "vectorised":
                return None
            self.note_once(f"{self.job.name}: one run at a time: {error}")
            self.engine = "serial"
            return _GIVEN_BACK
        if not isinstance(error, _FAILURES):
            return None
        if len(batch.trials) > 1:
            self.note_once(f"{self.job.name}: {len(batch.trials)} trials at once failed, so fewer: {what}")
            return {"void": "in company"}
        self.failed += 1
        if self.failed > 1 and not self.trained:
            return None
        ((_, lr, noise),) = batch.trials
        self.note(f"{self.job.name}: the trial with lr {lr:g} and noise {noise:g} failed: {what}")
        return {"error": what}

    def _train(self, batch: TrialBatch) -> list[Tried]:
        """The batch as one call of the engine: every cell with all its seeds."""
        recipes, trials, rule = [self.job.recipes(cell) for cell in batch.cells.values()], self.trials, self.trials.rule
        numbers = [number for number, some in zip(batch.cells, recipes, strict=True) for _ in some]  # of every run
        at_rungs: dict[int, dict[int, float]] = {}  # losses by rung and run: one run at a time they come one by one
        pruned: set[int] = set()
        began = reported_at = time.monotonic()

        def mean_over_seeds(losses: Mapping[int, float]) -> dict[int, float]:
            by_trial: dict[int, list[float]] = {}
            for run, loss in losses.items():
                by_trial.setdefault(numbers[run], []).append(loss)
            return {number: fmean(some) for number, some in by_trial.items()}

        def report(step: int, losses: Mapping[int, float]) -> None:
            """Store where trials stand, now and then; a storage out of reach for a while does not stop the training."""
            nonlocal reported_at
            if self.on_point is not None:
                self.on_point(step, losses)
            if time.monotonic() - reported_at >= _REPORT_EVERY:
                with suppress(MupscaleError):
                    trials.report(mean_over_seeds(losses), step)
                reported_at = time.monotonic()

        def prune(step: int, losses: Mapping[int, float]) -> list[int]:
            """The runs to stop at a rung; none where the storage is out of reach."""
            at_rungs.setdefault(step, {}).update(losses)
            running = {numbers[run] for run in losses} - pruned
            try:
                means = mean_over_seeds(at_rungs[step])
                trials.report({number: means[number] for number in running}, step)
                pruned.update(running & trials.find_behind(step))
            except MupscaleError as error:
                self.note(f"nothing is stopped at step {step}: {error}")
            return [run for run in losses if numbers[run] in pruned]

        outcomes = iter(
            train_many(
                [recipe for some in recipes for recipe in some],
                engine="vectorised" if self.engine == "auto" else self.engine,  # type: ignore[arg-type]
                points=_POINTS,
                rungs=[] if rule is None else rule.steps(self.job.steps),
                prune=None if rule is None else prune,
                evaluate=self.job.measure == "held-out",
                save=batch.stack_path,
                on_point=report,
                note=self.note,
                data=self.job.data,
            )
        )
        batch.seconds = (time.monotonic() - began) / len(batch.trials)
        by_trial = [[next(outcomes) for _ in some] for some in recipes]
        return [combine_seeds(cell, some, self.job) for cell, some in zip(batch.cells.values(), by_trial, strict=True)]


def combine_seeds(cell: Cell, outcomes: Sequence[Outcome], job: SweepJob) -> Tried:
    """A cell's result from its seeds: diverged if one of them did, stopped if one was, else finished."""
    states = [outcome.status for outcome in outcomes]
    is_stopped = "pruned" in states and "diverged" not in states
    scores = [outcome.scores.get("loss") if job.measure == "held-out" else outcome.loss for outcome in outcomes]
    if is_stopped:
        scores = [outcome.curve[-1][1] for outcome in outcomes if outcome.curve]
    losses = [score if score is not None and math.isfinite(score) else None for score in scores]
    steps = (min if is_stopped else max)(outcome.step for outcome in outcomes)  # where the one stood that was stopped
    shared = set.intersection(*({step for step, _ in outcome.curve} for outcome in outcomes))
    curve = [(s, fmean(loss for o in outcomes for step, loss in o.curve if step == s)) for s in sorted(shared)]
    cost = math.fsum(outcome.flops or 0.0 for outcome in outcomes)
    return Tried(*cell, losses, steps / job.steps if is_stopped else 1.0, curve, steps, cost)


# ------------------------------------------------------------------------------------------------ on disk


@dataclass
class TrialBatch:
    """Trials that are trained at once; with a folder, also a file that describes them and the file of their stack.

    trials: number, learning rate, noise. place, pid: of the process that trains them. results: once they are trained.
    """

    study: str
    worker: str
    trials: list[tuple[int, float, float]]
    stack: str
    place: str = field(default_factory=machine_name)
    pid: int = field(default_factory=os.getpid)
    results: list[Tried] | None = None
    seconds: float = 0.0
    folder: Path | None = None

    @classmethod
    def begin(cls, study: str, worker: str, cells: Mapping[int, Cell], folder: Path | None) -> TrialBatch:
        """A batch of these trials; without a folder, nothing of it is kept."""
        trials = [(number, *cell) for number, cell in cells.items()]
        return cls(study, worker, trials, f"{study}.{worker}.stack.safetensors", folder=folder)

    @classmethod
    def read(cls, path: Path) -> TrialBatch | None:
        """A batch that an earlier worker left; None if the file cannot be read."""
        try:
            batch = parse_record(cls, read_json(path), path)
        except (OSError, MupscaleError):
            return None
        batch.folder, batch.stack = path.parent, Path(batch.stack).name
        return batch

    @property
    def cells(self) -> dict[int, Cell]:
        return {number: Cell(lr, noise) for number, lr, noise in self.trials}

    @property
    def path(self) -> Path | None:
        return self.folder and self.folder / f"{self.study}.{self.worker}.batch.json"

    @property
    def stack_path(self) -> Path | None:
        return self.folder and self.folder / self.stack

    @property
    def has_stack(self) -> bool:
        return self.stack_path is not None and self.stack_path.exists()

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, {name: value for name, value in asdict(self).items() if name != "folder"})

    def remove_files(self) -> None:
        """Remove the files: the storage has the results, or the trials are free again."""
        for path in (self.path, self.stack_path):
            if path is not None:
                remove(path)


# ------------------------------------------------------------------------------------------------ who is at work


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life, as the storage keeps it. state: works, paused or left."""

    beat: int
    time: float
    place: str
    pid: int
    state: str


class Worker:
    """This worker: sends signs of life in the background, and watches those of others.

    Optuna's own heartbeats (and RetryHeartbeatStaleTrialCallback) are for databases alone, and are one of every trial;
    a journal has none, and a worker trains hundreds of trials as one program, of which one sign is enough.
    Clocks of machines differ, so a worker is dead when its sign has not changed for the grace period by our clock; on
    the same machine a process that is gone is dead at once.
    """

    def __init__(self, trials: SweepTrials, grace: float = GRACE) -> None:
        self.trials, self.grace = trials, grace
        self.id = f"{platform.node() or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"
        self.state = "works"
        self._seen: dict[str, tuple[Heartbeat | None, float]] = {}  # with the time by our clock when it was new
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_in_touch, name="sweep-heartbeat", daemon=True)

    def __enter__(self) -> Worker:
        self.trials.storage.use(self.send_heartbeat)
        self.read_heartbeats()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self.state == "works":
            self.state = "left"
        with suppress(Exception):  # a storage that is gone cannot be told
            self.send_heartbeat()

    def _keep_in_touch(self) -> None:
        while not self._stopped.wait(min(5.0, self.grace / 6)):
            with suppress(Exception):  # the main thread meets the same trouble, and says so
                self.send_heartbeat()

    def send_heartbeat(self) -> None:
        self._beats += 1
        state = self.state if self._stopped.is_set() else "works"  # whoever still sends, works
        sign = Heartbeat(self._beats, time.time(), machine_name(), os.getpid(), state)
        self.trials.storage.optuna.set_study_user_attr(self.trials.id, _PREFIX + self.id, asdict(sign))

    def read_heartbeats(self) -> None:
        storage = self.trials.storage
        for name, values in storage.use(lambda: storage.optuna.get_study_user_attrs(self.trials.id)).items():
            if name.startswith(_PREFIX):
                who = name.removeprefix(_PREFIX)
                sign = parse_record(Heartbeat, values, f"the sign of the worker {who} in the study")
                if who not in self._seen or self._seen[who][0] != sign:
                    self._seen[who] = sign, time.monotonic()

    def is_working(self, who: str) -> bool:
        """Whether a worker's last sign says that it works; true of one without a sign."""
        sign, _ = self._last_seen(who)
        return sign is None or sign.state == "works"

    def count_others(self) -> int:
        """How many other workers are alive, as far as their signs tell."""
        return sum(
            sign is not None and sign.state == "works" and not self._is_dead(who)
            for who, (sign, _) in self._seen.items()
            if who != self.id
        )

    def end_abandoned_trials(self) -> int:
        """End the trials of workers that died, and of those that were interrupted and did not come back."""
        self.read_heartbeats()
        self.trials.refresh()
        count = 0
        for number in sorted(self.trials.running):
            # one that died before it could sign is known by the trial alone
            who = self.trials.known[number].user_attrs.get("worker", f"trial {number}")
            if who != self.id and self._is_dead(who):
                sign, _ = self._last_seen(who)
                is_paused = sign is not None and sign.state == "paused"
                count += self.trials.drop(number, **({"void": "given back"} if is_paused else {}))
        return count

    def _last_seen(self, who: str) -> tuple[Heartbeat | None, float]:
        return self._seen.setdefault(who, (None, time.monotonic()))

    def _is_dead(self, who: str) -> bool:
        sign, since = self._last_seen(who)
        if sign is not None and sign.state == "left":
            return True
        if sign is not None and sign.state == "works" and sign.place == machine_name():
            return not is_process_alive(sign.pid) or time.monotonic() - since > self.grace
        return time.monotonic() - since > self.grace
