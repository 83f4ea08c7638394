"""A sweep's study: which cells are to be trained, which worker has them, and their results; all in the storage.

A worker takes a cell by beginning a trial of it. Of two that begin one at the same moment the one whose trial has the
lower number keeps it; nothing but the storage decides about that, so any number of workers agree without a master.
Trials are not queued in the storage: what is open follows from what was begun (see `attempts`), so that what a trial
costs does not grow with their number.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mupscale.sweep.attempts import Attempts, cell_of, stored_result, trial_result, trial_state
from mupscale.sweep.pruning import RULES, PruningRule, make_pruner, trials_behind
from mupscale.sweep.space import Cell, Space, Trial
from mupscale.sweep.storage import PATIENCE, Storage, load_optuna
from mupscale.system import MupscaleError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

T = TypeVar("T")
_REPORTED_POINTS = 2  # points of a finished trial's curve that optuna's own tools see
_DESCRIPTION = "sweep"  # the study's attribute with what it searches


@dataclass(frozen=True)
class TakenTrial:
    """A trial that this worker has taken."""

    number: int
    cell: Cell


class Study:
    """The study of a name in a storage, created or joined."""

    def __init__(
        self,
        place: str,
        name: str,
        space: Space,
        description: Mapping[str, Any],
        *,
        steps: int,
        sampler: str = "grid",
        trials: int | None = None,
        pruner: str = "none",
        seed: int = 0,
        patience: float = PATIENCE,
        retries: int | None = None,
    ) -> None:
        optuna = load_optuna()
        self.name, self.space, self.steps, self.sampler = name, space, steps, sampler
        self.rule: PruningRule | None = RULES[pruner]
        self.description = json.loads(
            json.dumps({"lrs": space.lrs, "noises": space.noises, "steps": steps, **description})
        )
        planned = _planned_cells(space, sampler, trials, seed)
        self.drawn = sampler == "tpe" and len(space.cells) > 1
        self.wanted = max(trials or 0, len(planned)) if self.drawn else len(planned)
        self.attempts = Attempts(planned, retries)
        self.storage = Storage(place, patience)
        self.study = self.storage.use(
            lambda: optuna.create_study(
                study_name=name,
                storage=self.storage.optuna,
                load_if_exists=True,
                direction="minimize",
                sampler=_sampler(optuna, sampler, seed, trials),
                pruner=make_pruner(pruner, steps, space.noises),
            )
        )
        self.id = self.storage.use(lambda: self.storage.optuna.get_study_id_from_name(name))
        rates, most = space.lrs, space.noises[-1]
        self.ranges = {
            "lr": optuna.distributions.FloatDistribution(rates[0], rates[-1], log=True),
            "noise": optuna.distributions.FloatDistribution(0.0, most),
        }
        self.check_description()
        self.refresh()

    # ------------------------------------------------------------------------------------------- what it searches

    def check_description(self) -> None:
        """Refuse a study of this name that searches something else."""
        theirs = self.attributes().get(_DESCRIPTION)
        if theirs is None:
            self.set_attribute(_DESCRIPTION, self.description)
            return
        if isinstance(theirs, dict) and theirs != self.description:
            raise MupscaleError(
                f"the study {self.name} in {self.storage.shown} is another one: "
                f"{_first_difference(theirs, self.description)}; choose another name or storage, or put it back"
            )

    def attributes(self) -> dict[str, Any]:
        """The study's own attributes."""
        return self.storage.use(lambda: self.storage.optuna.get_study_user_attrs(self.id))

    def set_attribute(self, name: str, value: Any) -> None:
        """Set one of them."""
        self.storage.use(lambda: self.storage.optuna.set_study_user_attr(self.id, name, value))

    def optuna_trials(self) -> list[FrozenTrial]:
        """Every trial of optuna's, in the order of their numbers."""
        return self.storage.use(lambda: self.storage.optuna.get_all_trials(self.id, deepcopy=False))

    # ------------------------------------------------------------------------------------------- taking trials

    def refresh(self) -> None:
        """Take notice of what other workers have begun and ended."""
        self.attempts.update(self.storage.use(lambda: self.storage.trials(self.id)))

    def count_open(self) -> int:
        """How many trials are still to be taken."""
        self.refresh()
        return self.count_untaken()

    def count_untaken(self) -> int:
        """The same, as of the last look."""
        attempts = self.attempts
        room = max(0, self.wanted - len(attempts.live) - len(attempts.given_up))
        untaken = (
            len(attempts.to_do) if self.sampler == "grid" else room if self.drawn else min(room, len(attempts.to_do))
        )
        return len(attempts.numbers("waiting")) + untaken

    def count_running(self) -> int:
        """How many trials workers had at the last look."""
        return len(self.attempts.numbers("running"))

    def take(self, count: int, worker: str, offset: int = 0) -> list[TakenTrial]:
        """Take so many trials at most; what another worker has already, or is too much, is made void.

        offset: which of the open cells to begin with; workers that differ in it seldom begin the same.
        """
        queued = min(count, len(self.attempts.numbers("waiting")))  # by earlier versions, or somebody's own program
        numbers = [self._ask(worker) for _ in range(queued)]
        cells = self.attempts.choose(count - queued, offset)
        numbers += [self._begin(cell, worker, queued + len(cells)) for cell in cells]
        if self.drawn and not cells:
            numbers += [self._ask(worker) for _ in range(count - queued)]
        self.refresh()
        return [TakenTrial(number, cell) for number in numbers if (cell := self._own_cell(number)) is not None]

    def _ask(self, worker: str) -> int:
        number: int = self.storage.use(lambda: self.study.ask(self.ranges)).number
        self._set(number, "worker", worker)
        return number

    def _begin(self, cell: Cell, worker: str, company: int) -> int:
        """Begin a trial of a cell; company: how many are trained at once."""
        from optuna.trial import TrialState, create_trial

        died = self.attempts.deaths.get(cell, [])
        more = {"retry_of": died[0]} if died else {}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=cell._asdict(),
            distributions=self.ranges,
            user_attrs={"cell": list(cell), "worker": worker, "company": company, **more},
        )
        new = self.storage.use(lambda: self.storage.optuna.create_new_trial(self.id, trial))
        return int(self.storage.use(lambda: self.storage.optuna.get_trial_number_from_id(new)))

    def _own_cell(self, number: int) -> Cell | None:
        """The cell of a trial that was just begun; None where it is another's already, or too much: it is void then."""
        trial, attempts = self.attempts.trials[number], self.attempts
        cell = cell_of(trial)
        if cell is None or attempts.has_earlier(cell, number):
            self.make_void(number, "duplicate")
            return None
        if len(attempts.live) > self.wanted and "cell" not in trial.user_attrs:
            before = sum(min(numbers) < number for numbers in attempts.live.values())
            if before >= self.wanted:
                self.make_void(number, "surplus")
                return None
        return cell

    def take_over(self, trials: Sequence[TakenTrial], worker: str) -> set[int]:
        """The numbers of those of an earlier worker's trials that are still open; they are this worker's now."""
        self.refresh()
        running = set(self.attempts.numbers("running"))
        return {one.number for one in trials if one.number in running and self._set(one.number, "worker", worker)}

    def make_void(self, number: int, why: str) -> bool:
        """End a trial that does not count: a duplicate, a surplus, one given back or that failed in company."""
        return self._set(number, "void", why) and self._end(number, "FAIL")

    def mark_dead(self, number: int) -> bool:
        """End a trial whose worker died; False if somebody else has ended it already."""
        return self._end(number, "FAIL")

    def mark_failed(self, number: int, error: str) -> bool:
        """End a trial that failed by itself, with its error."""
        return self._set(number, "error", error) and self._end(number, "FAIL")

    # ------------------------------------------------------------------------------------------- their results

    def report(self, values: Mapping[int, float], step: int) -> None:
        """Store the losses of trials at a step, by number; those that somebody else has ended are left alone."""
        put = self.storage.optuna.set_trial_intermediate_value
        for number, value in values.items():
            self._change(number, partial(put, step=step, intermediate_value=value))

    def trials_to_prune(self, numbers: Iterable[int], step: int) -> set[int]:
        """Which of these trials the pruner stops at this step."""
        if self.rule is None:
            return set()
        lost = ("void", "died", "failed")
        trials = [t for t in self.optuna_trials() if step in t.intermediate_values and trial_state(t) not in lost]
        return set(numbers) & trials_behind(self.rule, trials, step, self.steps, self.space.noises)

    def finish(self, number: int, result: Trial, seconds: float) -> bool:
        """Store the result of a trial; False if somebody else has ended it in the meantime."""
        curve = [(step, loss) for step, loss in result.curve if math.isfinite(loss)]
        by_seed = [x for x in result.by_seed if math.isfinite(x)]
        cost = {"steps": result.steps, "flops": result.flops, "seconds": seconds}
        if not self._set(number, "result", {"status": result.status, "by_seed": by_seed, "curve": curve, **cost}):
            return False
        for step, loss in _spread(curve, _REPORTED_POINTS):  # all of it is in `curve`: writes are slow
            self.report({number: loss}, step)
        if result.status == "finished":
            return self._end(number, "COMPLETE", result.loss)
        if result.status == "diverged":  # for samplers and dashboards: no number, and so nothing to choose
            self.report({number: math.nan}, result.steps)
        return self._end(number, "PRUNED")

    def results(self) -> list[Trial]:
        """Every trial that came to an end, by noise and learning rate, from the storage alone."""
        ended = [t for t in self.optuna_trials() if trial_state(t) in ("finished", "diverged", "pruned")]
        return sorted(map(trial_result, ended), key=lambda trial: (trial.noise, trial.lr))

    def seconds(self) -> float:
        """Of training, over all workers."""
        return math.fsum(stored_result(trial).seconds for trial in self.optuna_trials())

    # ------------------------------------------------------------------------------------------- in the storage

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


# ------------------------------------------------------------------------------------------------ what is searched


def _planned_cells(space: Space, sampler: str, trials: int | None, seed: int) -> list[Cell]:
    """Cells that are known beforehand: the whole grid; or some of the zero-noise row, and for random the draws, too."""
    if sampler == "grid" or len(space.cells) == 1:
        return space.cells
    count = min(len(space.lrs), max(1, (trials or 1) // 3))
    spread = [round((i + 0.5) * len(space.lrs) / count - 0.5) for i in range(count)]
    fixed = [Cell(space.lrs[i], 0.0) for i in spread]
    if sampler == "tpe":
        return fixed
    draw, rates = random.Random(seed), (math.log(space.lrs[0]), math.log(space.lrs[-1]))
    drawn = dict.fromkeys(fixed)
    while len(drawn) < (trials or 0):
        lr = min(max(math.exp(draw.uniform(*rates)), space.lrs[0]), space.lrs[-1])
        drawn[Cell(lr, draw.uniform(0.0, space.noises[-1]))] = None
    return list(drawn)


def _spread(values: Sequence[T], count: int) -> list[T]:
    """So many of the values at most, evenly, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _sampler(optuna: Any, name: str, seed: int, trials: int | None) -> Any:
    if name == "tpe":  # trials are asked for in batches: those under way count as bad, so that others differ from them
        at_random = min(10, max(2, (trials or 10) // 4))
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=at_random)
    return optuna.samplers.RandomSampler(seed=seed)


def _first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> str:
    """The first thing in which two descriptions differ."""
    for name in sorted({*theirs, *ours}, key=lambda n: (n not in ("lrs", "noises"), n)):
        there, here = theirs.get(name), ours.get(name)
        if there == here:
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            return _first_difference(there, here, f"{prefix}{name}.")
        return f"{prefix}{name} is {json.dumps(there)} there and {json.dumps(here)} here"
    return "it differs"
