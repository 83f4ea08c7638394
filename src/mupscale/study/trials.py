"""The trials of a sweep in its storage: which cells are to be trained, which worker has them, and their results.

A worker takes a cell by beginning a trial of it. Of two that begin one at the same moment the one whose trial has the
lower number keeps it; nothing but the storage decides about that, so any number of workers agree without a master.
Trials are not queued in the storage: what is open follows from what was begun, so that what a trial costs hardly grows
with their number.

A cell may have several trials of Optuna's: one that was given back, one whose worker died, one that two workers began
at the same moment. Exactly one of them counts, the first that is neither void nor failed. What has ended stays as it
is, so only trials that are open, and new ones, are looked at again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import median
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mupscale.study.space import Cell, Space, Sweep, SweepJob, Tried
from mupscale.system import MupscaleError, check_links, open_file, parse_record, require

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

TrialState = Literal["running", "finished", "diverged", "stopped", "void", "died", "failed"]
_COUNTING = ("running", "finished", "diverged", "stopped")  # a cell with such a trial needs no other
ENDED = _COUNTING[1:]
_AGAIN = ("given back", "in company")  # void trials whose cell is to be trained all the same
_DESCRIPTION = "sweep"  # the study's attribute with what it searches


class SweepTrials:
    """All trials of a sweep's study, which is created or joined, as of the last look.

    retries: how often a cell whose worker died is trained again; None: without limit. wanted: how many trials the sweep
    is to have. known: Optuna's trials by number. running: numbers of those that workers have. to_do: cells that nobody
    has, in the order of their turn. given_up: cells that are not tried any more, and why.
    """

    def __init__(self, job: SweepJob, storage: Storage, retries: int | None = None) -> None:
        optuna = load_optuna()
        self.job, self.storage, self.retries = job, storage, retries
        self.rule = RULES[job.pruner]
        self.is_drawn = job.sampler == "tpe" and len(job.space.cells) > 1
        self._planned = dict.fromkeys(_planned_cells(job))
        self.wanted = max(job.trials or 0, len(self._planned)) if self.is_drawn else len(self._planned)
        self.to_do = dict(self._planned)
        self.given_up: dict[Cell, str] = {}
        self.known: list[FrozenTrial] = []
        self.running: set[int] = set()
        self._counting: dict[Cell, set[int]] = {}  # numbers of those that count
        self._deaths: dict[Cell, list[int]] = {}
        self._companies: dict[Cell, int] = {}  # the largest batch in which a cell may be tried
        self._first: int | None = None  # the first number that was not there when this process came
        sampler: Any = optuna.samplers.RandomSampler(seed=job.seed)
        if job.sampler == "tpe":  # asked for in batches: those under way count as bad, so that others differ from them
            at_random = min(10, max(2, (job.trials or 10) // 4))
            sampler = optuna.samplers.TPESampler(seed=job.seed, constant_liar=True, n_startup_trials=at_random)
        self.study = storage.use(
            lambda: optuna.create_study(
                study_name=job.study_name,
                storage=storage.optuna,
                load_if_exists=True,
                direction="minimize",
                sampler=sampler,
            )
        )
        self.id = storage.use(lambda: storage.optuna.get_study_id_from_name(job.study_name))
        rates, levels, log = job.space.lrs, job.space.noises, not job.space.has_noise
        self.ranges = {
            "lr": optuna.distributions.FloatDistribution(rates[0], rates[-1], log=True),
            job.space.second: optuna.distributions.FloatDistribution(levels[0], levels[-1], log=log),
        }
        self._description = json.loads(json.dumps(job.description()))
        self.check_description()
        self.refresh()

    def check_description(self) -> None:
        """Refuse a study of this name that searches something else."""
        theirs = self.storage.use(lambda: self.storage.optuna.get_study_user_attrs(self.id)).get(_DESCRIPTION)
        if theirs is None:
            put = self.storage.optuna.set_study_user_attr
            self.storage.use(lambda: put(self.id, _DESCRIPTION, self._description))
        elif isinstance(theirs, dict) and theirs != self._description:
            raise MupscaleError(
                f"the study {self.job.study_name} in {self.storage.shown} is another one: "
                f"{_first_difference(theirs, self._description)}; choose another name or storage, or put it back"
            )

    # ------------------------------------------------------------------------------------------- what became of them

    def refresh(self) -> None:
        """Take notice of what other workers have begun and ended."""
        trials = self.storage.use(lambda: self.storage.optuna.get_all_trials(self.id, deepcopy=False))
        if self._first is None:
            self._first = len(trials)
        for number in [*self.running, *range(len(self.known), len(trials))]:
            if number >= len(trials) or trials[number].number != number:
                raise MupscaleError(f"the study is damaged: it has {len(trials)} trials, but none of number {number}")
            self.known[number : number + 1] = [trials[number]]
            self._look_at(trials[number])

    def _look_at(self, trial: FrozenTrial) -> None:
        state, cell, number = trial_state(trial), _cell_of(trial), trial.number
        (self.running.add if state == "running" else self.running.discard)(number)
        if cell is None:
            return
        if state in _COUNTING:
            self._counting.setdefault(cell, set()).add(number)
            self.to_do.pop(cell, None)
            self.given_up.pop(cell, None)
            return
        self._note_loss(trial, state, cell)
        counting = self._counting.get(cell, set())
        counting.discard(number)
        if counting or cell in self.given_up:
            return
        self._counting.pop(cell, None)
        if cell in self._planned or state != "void" or trial.user_attrs["void"] in _AGAIN:
            self.to_do[cell] = None

    def _note_loss(self, trial: FrozenTrial, state: TrialState, cell: Cell) -> None:
        """Count a death or a failure, and give the cell up where that was the last attempt."""
        company = trial.user_attrs.get("company", 1)
        company = company if type(company) is int else 1
        why = ""
        if state == "died":
            deaths = self._deaths.setdefault(cell, [])
            deaths.append(trial.number)
            if len(deaths) > 1:  # the first time it is likelier that the machine was taken away
                self._companies[cell] = min(self._companies.get(cell, company), max(1, company // 2))
            if self.retries is not None and len(deaths) > self.retries:
                times = {1: "once", 2: "twice"}.get(len(deaths), f"{len(deaths)} times")
                why = f"its worker died {times}"
        elif state == "void" and trial.user_attrs["void"] == "in company":
            self._companies[cell] = max(1, company // 2)
        elif state == "failed" and self._first is not None and trial.number >= self._first:
            why = str(trial.user_attrs["error"])
        if why:
            self.given_up[cell] = why
            self.to_do.pop(cell, None)

    def count_open(self) -> int:
        """How many trials are still to be taken, as of the last look."""
        room = max(0, self.wanted - len(self._counting) - len(self.given_up))
        if self.is_drawn:
            return room
        return len(self.to_do) if self.job.sampler == "grid" else min(room, len(self.to_do))

    # ------------------------------------------------------------------------------------------- ask

    def take(self, count: int, worker: str, offset: int = 0) -> dict[int, Cell]:
        """Take so many trials at most, by number; what another worker has already, or is too much, is made void.

        offset: which of the open cells to begin with; workers that differ in it seldom begin the same.
        """
        cells = self._choose(count, offset)
        numbers = [self._begin(cell, worker, len(cells)) for cell in cells]
        for _ in range(count if self.is_drawn and not cells else 0):  # the sampler draws them
            numbers.append(int(self.storage.use(lambda: self.study.ask(self.ranges)).number))
            self._set(numbers[-1], "worker", worker)
        self.refresh()
        return {number: cell for number in numbers if (cell := self._keep(number)) is not None}

    def _choose(self, count: int, offset: int) -> list[Cell]:
        """So many cells at most that may be trained together.

        A cell at which workers die, or training fails, in company is tried in ever smaller company, at last alone.
        """
        start = offset % len(self.to_do) if self.to_do else 0
        chosen: list[Cell] = []
        for cell in chain(islice(self.to_do, start, None), islice(self.to_do, start)):
            if len(chosen) >= count:
                break
            if chosen and not self.job.space.has_noise and cell.noise != chosen[0].noise:
                continue  # one program has one set of rules
            limit = self._companies.get(cell, count)
            if limit > len(chosen):
                chosen.append(cell)
                count = min(count, limit)
        return chosen

    def _begin(self, cell: Cell, worker: str, company: int) -> int:
        from optuna.trial import TrialState, create_trial

        died = self._deaths.get(cell, [])
        more = {"retry_of": died[0]} if died else {}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(zip(self.ranges, cell, strict=True)),
            distributions=self.ranges,
            user_attrs={"cell": list(cell), "worker": worker, "company": company, **more},
        )
        new = self.storage.use(lambda: self.storage.optuna.create_new_trial(self.id, trial))
        return int(self.storage.use(lambda: self.storage.optuna.get_trial_number_from_id(new)))

    def _keep(self, number: int) -> Cell | None:
        """The cell of a trial that was just begun; None where it is another's already, or too much: it is void then."""
        cell, was_drawn = _cell_of(self.known[number]), "cell" not in self.known[number].user_attrs
        if cell is None or min(self._counting.get(cell, {number})) < number:
            self.drop(number, void="duplicate")
            return None
        if was_drawn and sum(min(numbers) < number for numbers in self._counting.values()) >= self.wanted:
            self.drop(number, void="surplus")
            return None
        return cell

    def take_over(self, numbers: Iterable[int], worker: str) -> set[int]:
        """Those of an earlier worker's trials that are still open; they are this worker's now."""
        self.refresh()
        return {number for number in numbers if number in self.running and self._set(number, "worker", worker)}

    # ------------------------------------------------------------------------------------------- tell

    def report(self, values: Mapping[int, float], step: int) -> None:
        """Store the losses of trials at a step, by number; those that somebody else has ended are left alone."""
        put = self.storage.optuna.set_trial_intermediate_value
        for number, value in values.items():
            self._change(number, partial(put, step=step, intermediate_value=value))

    def find_behind(self, step: int) -> set[int]:
        if self.rule is None:
            return set()
        trials = self.storage.use(lambda: self.storage.optuna.get_all_trials(self.id, deepcopy=False))
        compared = [trial for trial in trials if trial_state(trial) in _COUNTING]
        return self.rule.find_behind(compared, step, self.job.steps, self.job.space)

    def finish(self, number: int, found: Tried, seconds: float) -> bool:
        """Store the result of a trial; False if somebody else has ended it in the meantime."""
        curve = [(step, loss) for step, loss in found.curve if math.isfinite(loss)]
        cost = {"steps": found.steps, "flops": found.cost, "seconds": seconds}
        if not self._set(number, "result", {"status": found.status, "by_seed": found.finite, "curve": curve, **cost}):
            return False
        for step, loss in dict(curve[:1] + curve[-1:]).items():  # for Optuna's own tools; all of it would be slow
            self.report({number: loss}, step)
        if found.status == "finished":
            return self._end(number, "COMPLETE", found.loss)
        if found.status == "diverged":  # for samplers and dashboards: no number, and so nothing to choose
            self.report({number: math.nan}, found.steps)
        return self._end(number, "PRUNED")

    def drop(self, number: int, **why: str) -> bool:
        """End a trial that has no result; False if somebody else has ended it already.

        why: void, which does not count (a duplicate, a surplus, given back, failed in company); error, where it failed
        by itself; nothing where its worker died.
        """
        return all(self._set(number, name, value) for name, value in why.items()) and self._end(number, "FAIL")

    def _set(self, number: int, name: str, value: Any) -> bool:
        return self._change(number, lambda trial: self.storage.optuna.set_trial_user_attr(trial, name, value))

    def _end(self, number: int, state: str, value: float | None = None) -> bool:
        from optuna.trial import TrialState as OptunaState

        values = None if value is None else [value]
        return self._change(
            number, lambda trial: self.storage.optuna.set_trial_state_values(trial, OptunaState[state], values)
        )

    def _change(self, number: int, change: Callable[[int], object]) -> bool:
        """Change a trial; False if it has ended, since what has ended stays as it is."""
        from optuna.exceptions import UpdateFinishedTrialError

        def attempt() -> bool:
            trial = self.storage.optuna.get_trial_id_from_study_id_trial_number(self.id, number)
            try:
                change(trial)
            except UpdateFinishedTrialError:
                return False
            return True

        return self.storage.use(attempt)

    # ------------------------------------------------------------------------------------------- what was found

    def check_complete(self) -> None:
        """Refuse a sweep of which trials are missing: its best trial may be one of them."""
        if not self.given_up:
            return
        second = self.job.space.second
        shown = [f"lr {cell.lr:g} and {second} {cell.noise:g} ({why})" for cell, why in list(self.given_up.items())[:3]]
        more = f", and {len(self.given_up) - len(shown)} more" if len(self.given_up) > len(shown) else ""
        raise MupscaleError(
            f"{self.job.study_name} is not complete, and nothing is chosen from it: {len(self.given_up)} of "
            f"{self.wanted} trials are missing: {', '.join(shown)}{more}; the same command tries what failed again; "
            f"more attempts where workers die: --study.retries; less memory: --study.engine serial; or leave these "
            f"values out under another name"
        )

    def read_results(self) -> Sweep:
        """Every trial that came to an end, by noise and learning rate, from the storage alone."""
        self.refresh()
        job, seeds = self.job, len(self.job.recipes(self.job.space.cells[0]))
        ended = [trial for trial in self.known if trial_state(trial) in ENDED]
        found = [read_result(trial, job.steps, seeds) for trial in ended]
        return Sweep(
            job.name,
            sorted(found, key=lambda trial: (trial.noise, trial.lr)),
            job.width,
            job.start,
            job.space,
            measure=job.measure,
            sampler=job.sampler,
            seconds=math.fsum(_stored_result(trial).seconds for trial in ended),
            second=job.space.second,
        )


# ------------------------------------------------------------------------------------------------ what is searched


def _planned_cells(job: SweepJob) -> list[Cell]:
    """Cells that are known beforehand: the whole grid; or some of the zero-noise row, and for random the draws, too."""
    space = job.space
    if job.sampler == "grid" or len(space.cells) == 1:
        return space.cells
    count = min(len(space.lrs), max(1, (job.trials or 1) // 3))
    spread = [round((i + 0.5) * len(space.lrs) / count - 0.5) for i in range(count)]
    planned = dict.fromkeys(Cell(space.lrs[i], space.noises[0]) for i in spread)
    draw = random.Random(job.seed)

    def draw_log(values: Sequence[float]) -> float:
        drawn = math.exp(draw.uniform(math.log(values[0]), math.log(values[-1])))
        return min(max(drawn, values[0]), values[-1])

    while job.sampler == "random" and len(planned) < (job.trials or 0):
        lr = draw_log(space.lrs)
        planned[Cell(lr, draw.uniform(0.0, space.noises[-1]) if space.has_noise else draw_log(space.noises))] = None
    return list(planned)


def _first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> str:
    for name in sorted({*theirs, *ours}, key=lambda n: (n not in ("lrs", "noises"), n)):
        there, here = theirs.get(name), ours.get(name)
        if there == here:
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            return _first_difference(there, here, f"{prefix}{name}.")
        return f"{prefix}{name} is {json.dumps(there)} there and {json.dumps(here)} here"
    return "it differs"


# ------------------------------------------------------------------------------------------------ a trial of Optuna's


@dataclass(frozen=True)
class _StoredResult:
    status: str = ""
    by_seed: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    flops: float = 0.0
    seconds: float = 0.0


def _stored_result(trial: FrozenTrial) -> _StoredResult:
    return parse_record(_StoredResult, trial.user_attrs.get("result", {}), f"trial {trial.number} of the study")


def trial_state(trial: FrozenTrial) -> TrialState:
    """Its state as a sweep sees it: 'died' where its worker did, 'failed' by itself, 'void' where it does not count."""
    state = trial.state.name
    if state == "FAIL":
        return "void" if "void" in trial.user_attrs else "failed" if "error" in trial.user_attrs else "died"
    if state == "PRUNED":
        return "diverged" if _stored_result(trial).status == "diverged" else "stopped"
    return "finished" if state == "COMPLETE" else "running"  # or queued by somebody else, and not begun


def _cell_of(trial: FrozenTrial) -> Cell | None:
    if "cell" in trial.user_attrs:
        return parse_record(Cell, trial.user_attrs["cell"], f"trial {trial.number} of the study: its cell")
    second = next((name for name in ("noise", "embeddings") if name in trial.params), None)
    return Cell(trial.params["lr"], trial.params[second]) if second and "lr" in trial.params else None


def read_result(trial: FrozenTrial, steps: int, seeds: int) -> Tried:
    """The result of a trial that came to an end. steps, seeds: of a whole one."""
    cell, stored, state = _cell_of(trial), _stored_result(trial), trial_state(trial)
    if cell is None:
        raise MupscaleError(f"trial {trial.number} of the study ended without a learning rate and a noise")
    losses: list[float | None] = [None] * seeds if state == "diverged" else [*stored.by_seed] or [trial.value]
    budget = max(1, min(stored.steps, steps - 1)) / steps if state == "stopped" else 1.0
    return Tried(*cell, losses, budget, stored.curve, stored.steps, stored.flops)


# ------------------------------------------------------------------------------------------------ who falls behind


@dataclass(frozen=True)
class PruningRule:
    """Which of the trials at a rung are good enough to go on.

    Optuna's own rules compare with completed trials alone, or with whoever came first; here all trials of a sweep reach
    a rung at nearly the same time, and each is compared with every value that any trial of the study reported there.

    Noise makes a model worse before it makes it better, so a comparison of losses across noise levels would choose too
    little noise, the more so the earlier it comes. At the first rung learning rates are therefore compared at equal
    noise; later everything is compared with everything, but by where losses lead: the line through a trial's last two
    rungs over the logarithm of the step, continued to the end. The best zero-noise trial is never stopped: without it
    nobody could say whether noise pays.

    rungs: where they are compared, as fractions of the steps. reduction: successive halving keeps one of so many at
    each of them; None stops what is worse than the median.
    """

    rungs: tuple[float, ...]
    reduction: int | None = None

    def steps(self, steps: int) -> list[int]:
        """The rungs in steps, each once, none at the very beginning or the end."""
        return sorted({round(rung * steps) for rung in self.rungs} - {0, steps})

    def find_behind(self, trials: Iterable[FrozenTrial], step: int, steps: int, space: Space) -> set[int]:
        """The numbers of the trials to stop at this step; noise between two levels counts as the nearer one."""
        rung = min(range(len(self.rungs)), key=lambda i: abs(self.rungs[i] * steps - step))  # a curve's nearest point
        before = self.rungs[rung - 1] * steps if rung else None
        values = {
            trial.number: (
                _level(trial.params[space.second], space.noises),
                _expected_final_loss(trial, step, before, steps),
            )
            for trial in trials
            if step in trial.intermediate_values and space.second in trial.params
        }
        compared: dict[float, list[float]] = {}  # by noise at the first rung, all in one list later
        for level, loss in values.values():
            if math.isfinite(loss):
                compared.setdefault(0.0 if rung else level, []).append(loss)
        limits = {level: self._limit(sorted(losses)) for level, losses in compared.items()}
        best = min((loss for level, loss in values.values() if level == 0 and math.isfinite(loss)), default=-math.inf)
        return {
            number
            for number, (level, loss) in values.items()
            if not (math.isfinite(loss) and (loss <= limits[0.0 if rung else level] or (level == 0 and loss <= best)))
        }

    def _limit(self, losses: Sequence[float]) -> float:
        """The largest of these losses, in ascending order, that goes on."""
        return median(losses) if self.reduction is None else losses[max(1, round(len(losses) / self.reduction)) - 1]


MEDIAN = PruningRule(rungs=(0.15, 0.35, 0.6))
HALVING = PruningRule(rungs=(0.1, 0.3, 0.5), reduction=2)
RULES: Mapping[str, PruningRule | None] = {"none": None, "median": MEDIAN, "halving": HALVING}


def _expected_final_loss(trial: FrozenTrial, step: int, before: float | None, steps: int) -> float:
    """The loss itself at the first rung; later, the line over log step through this rung and the last, to the end."""
    values = trial.intermediate_values
    earlier = [other for other in values if 0 < other < step]
    if before is None or not earlier:
        return float(values[step])
    last = min(earlier, key=lambda other: abs(other - before))
    slope = (values[step] - values[last]) / math.log(step / last)
    return float(values[step] + slope * math.log(steps / step))


def _level(noise: float, levels: Sequence[float]) -> float:
    """The nearest level; zero is for zero alone."""
    return 0.0 if noise == 0 else min((level for level in levels if level), key=lambda level: abs(level - noise))


# ---------------------------------------------------------------------------------------------- where they are stored

T = TypeVar("T")
PATIENCE = 30.0  # seconds for which a storage may be locked or gone
_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Storage:
    """A storage of optuna's, by path, journal:PATH or URL; a call is tried again for a while before it fails."""

    def __init__(self, place: str | Path, patience: float = PATIENCE) -> None:
        self.place, self.patience = str(place), patience
        self.shown = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", self.place)  # without its password
        with self._explain("opened"):
            self.optuna: BaseStorage = _open(self.place, patience)

    def use(self, call: Callable[[], T]) -> T:
        """The result of the call, tried again for a while where the storage is out of reach; then a MupscaleError."""
        end = time.monotonic() + self.patience
        while True:
            try:
                return call()
            except Exception as error:
                if not _is_temporary(error) or time.monotonic() > end:
                    with self._explain("used"):
                        raise
            time.sleep(min(1.0, self.patience / 10))

    @contextmanager
    def _explain(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = _describe_cause(error, self.patience)
            if cause is None:
                raise
            after_use = "; all that it was told is kept, and the same command goes on from there"
            remedy = "" if verb == "opened" else after_use
            raise MupscaleError(f"the study's storage {self.shown} cannot be {verb}: {cause}{remedy}") from error


def _open(place: str, patience: float) -> BaseStorage:
    optuna = load_optuna()
    if place.startswith("journal:"):
        path = place.removeprefix("journal:").removeprefix("//")
        check_links(Path(path))
        return optuna.storages.JournalStorage(_journal(path))
    check_links(Path(place))
    url, options = place, dict[str, Any]()
    if "://" not in place:  # opened by itself, since ?, % and # of its path would mean something else in a URL
        import sqlite3

        url = "sqlite:///study.db"  # so that SQLAlchemy knows the kind; the path is given to SQLite itself
        options["creator"] = lambda: sqlite3.connect(place, timeout=patience, check_same_thread=False)
    elif place.startswith("sqlite"):
        options["connect_args"] = {"timeout": patience}
    else:
        waits = {"connect_timeout": max(2, int(patience / 3))} if place.startswith("postgresql") else {}
        options |= {"pool_pre_ping": True, "connect_args": waits}
    for attempt in range(5):  # two workers may create the tables at the same moment: the second then finds them there
        try:
            database = optuna.storages.RDBStorage(url, engine_kwargs=options)
            break
        except Exception as error:
            said = str(_driver_error(error)).lower()
            if attempt == 4 or not ("already exists" in said or "unique" in said):
                raise
            time.sleep(0.1 * (attempt + 1))
    weakref.finalize(database, database.engine.dispose)  # connections would warn that nobody closed them
    if database.engine.dialect.name == "sqlite":
        _serialize_transactions(database.engine)
    return optuna.storages.get_storage(database)


def load_optuna() -> Any:
    """Optuna, without its running commentary."""
    optuna = require("optuna", reason="sweeps need optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it warns of, it then raises
    return optuna


def _serialize_transactions(engine: Any) -> None:
    """One SQLite transaction at a time, from its first read on: or two workers could take the same trial."""
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def plain(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        connection.execute("PRAGMA synchronous=NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()
    raw = engine.raw_connection()
    try:
        if raw.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            raw.execute("PRAGMA journal_mode=WAL")
    except Exception as error:  # somebody else is at it, or the file system has no shared memory: it works without
        if _describe_cause(error, 0) is None:
            raise
    finally:
        raw.close()


def _journal(path: str) -> Any:
    """Optuna's journal in a file, in which half a line, of a full disk or a killed process, does no harm."""
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import get_lock_file

    class Journal(JournalFileBackend):  # type: ignore[misc]
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with get_lock_file(self._lock), open_file(Path(self._file_path), "r+b") as file:
                end = file.seek(0, os.SEEK_END)
                while end and (file.seek(end - 1), file.read(1))[1] != b"\n":
                    end -= 1
                file.truncate(end)
            super().append_logs(logs)

    return Journal(path)


# ------------------------------------------------------------------------------------------------ what goes wrong


def _driver_error(error: BaseException) -> BaseException:
    """The database driver's own error, under optuna's and SQLAlchemy's."""
    from optuna.exceptions import StorageInternalError

    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return getattr(error, "orig", None) or error


def _is_storage_error(error: BaseException) -> bool:
    import sqlite3

    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, StorageInternalError | SQLAlchemyError | sqlite3.Error | OSError)


def _is_temporary(error: BaseException) -> bool:
    """Whether waiting could help: a server that restarts, a network that comes back; not a full disk or a long lock.

    SQLite has no server: it has waited for locks already, and nothing else of it passes.
    """
    import sqlite3

    if not _is_storage_error(error) or isinstance(_driver_error(error), sqlite3.Error):
        return False
    text = str(_driver_error(error)).lower()
    hopeless = ("locked", "full", "disk i/o", "readonly", "read-only", "not a database", "malformed", "no such table")
    if any(word in text for word in hopeless):
        return False
    return not isinstance(error, OSError) or error.errno not in (*_FULL, errno.EACCES, errno.EROFS)


def _describe_cause(error: BaseException, patience: float) -> str | None:
    """What is wrong with the storage, in words; None for errors that are not the storage's."""
    text = (str(_driver_error(error)).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        return "its database driver is missing; for PostgreSQL, pip install 'mupscale[sweep]'"
    if isinstance(error, ValueError) and "null byte" in text:  # a mistake in the name
        return None
    if "database is locked" in text:
        return f"another process has kept it locked for more than {patience:g} s"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}"
    if _is_storage_error(error):
        return text
    if isinstance(error, KeyError) and "does not exist" in text:
        return "the study has been deleted from it"
    if isinstance(error, RuntimeError) and ("schema" in text or "possess lock" in text):
        return text
    readers = {Path(frame.f_code.co_filename).parent.name for frame, _ in walk_tb(error.__traceback__)}
    if isinstance(error, _DAMAGE) and readers & {"journal", "_rdb", "storages"}:  # packages of optuna's
        return f"it is not a {'journal' if 'journal' in readers else 'study'} of optuna's, or a damaged one"
    return None
