"""A sweep's study: which cells are to be trained, which worker has them, and their results; all in the storage.

A cell may have several trials of optuna's: one that was given back, one whose worker died, one that two workers asked
for at the same moment. Exactly one of them counts, the first that is neither void nor failed, and nothing but the
storage's own atomic change of a trial's state decides about it: so that any number of workers agree without a master.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mupscale.sweep.pruning import RULES, PruningRule, is_behind, make_pruner
from mupscale.sweep.space import Cell, Space, Trial
from mupscale.sweep.storage import PATIENCE, Storage, load_optuna
from mupscale.system import MupscaleError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

T = TypeVar("T")
TrialState = Literal["waiting", "running", "finished", "diverged", "pruned", "void", "died"]
COUNTING = ("waiting", "running", "finished", "diverged", "pruned")
"""States of trials that count: a cell with one of them needs no other."""
_REPORTED_POINTS = 8  # points of a finished trial's curve that optuna's own tools see
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
    ) -> None:
        optuna = load_optuna()
        self.name, self.space, self.steps, self.sampler = name, space, steps, sampler
        self.rule: PruningRule | None = RULES[pruner]
        self.description = json.loads(
            json.dumps({"lrs": space.lrs, "noises": space.noises, "steps": steps, **description})
        )
        self.fixed_cells = _fixed_cells(space, sampler, trials)
        self.sampled = sampler != "grid" and len(space.cells) > 1
        self.wanted = max(trials or 0, len(self.fixed_cells)) if self.sampled else len(self.fixed_cells)
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

    def enqueue(self, workers_died: Callable[[Cell], None]) -> None:
        """Queue every cell that is wanted and that nobody has: new ones, those given back, and the dead once more.

        It may be cut anywhere and be done by two workers at once: what is missing is queued by the next, and of
        two trials of a cell the later one is void when it is taken (see `take`).
        """
        by_cell: dict[Cell, list[FrozenTrial]] = {cell: [] for cell in self.fixed_cells}
        trials = self.optuna_trials()
        live = {cell_of(trial) for trial in trials if trial_state(trial) in COUNTING}
        for trial in trials:
            cell = cell_of(trial)
            if cell is not None and (cell in by_cell or trial_state(trial) == "died" or _is_given_back(trial)):
                by_cell.setdefault(cell, []).append(trial)
        for cell, attempts in by_cell.items():
            if cell in live:
                continue
            died = [trial.number for trial in attempts if trial_state(trial) == "died"]
            if len(died) > 1:
                workers_died(cell)
                continue
            more = {"retry_of": died[0]} if died else {}
            attrs = {"cell": [cell.lr, cell.noise], **more}
            self.storage.use(partial(self.study.enqueue_trial, cell._asdict(), user_attrs=attrs))

    def count_open(self) -> int:
        """How many trials are still to be taken."""
        states = [trial_state(trial) for trial in self.optuna_trials()]
        to_draw = self.wanted - sum(one in COUNTING for one in states) if self.sampled else 0
        return states.count("waiting") + max(0, to_draw)

    def take(self, count: int, worker: str) -> list[TakenTrial]:
        """Take so many trials at most; what another worker has already, or is too much, is made void."""
        numbers = []
        for _ in range(count):
            trial = self.storage.use(lambda: self.study.ask(self.ranges))
            self._set(trial.number, "worker", worker)
            numbers.append(trial.number)
        taken = []
        trials = self.optuna_trials()
        for number in numbers:
            mine = next(trial for trial in trials if trial.number == number)
            cell = cell_of(mine)
            before = [trial for trial in trials if trial.number < number and trial_state(trial) in COUNTING]
            if cell is None or any(cell_of(trial) == cell for trial in before):
                self.make_void(number, "duplicate")
            elif "cell" not in mine.user_attrs and (not self.sampled or len(before) >= self.wanted):
                self.make_void(number, "surplus")
            else:
                taken.append(TakenTrial(number, cell))
        return taken

    def take_over(self, trials: Sequence[TakenTrial], worker: str) -> set[int]:
        """The numbers of those of an earlier worker's trials that are still open; they are this worker's now."""
        running = {trial.number for trial in self.optuna_trials() if trial_state(trial) == "running"}
        return {one.number for one in trials if one.number in running and self._set(one.number, "worker", worker)}

    def make_void(self, number: int, why: str) -> bool:
        """End a trial that does not count: a duplicate, a surplus, or one that was given back."""
        return self._set(number, "void", why) and self._end(number, "FAIL")

    def mark_dead(self, number: int) -> bool:
        """End a trial whose worker died; False if somebody else has ended it already."""
        return self._end(number, "FAIL")

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
        all_trials, numbers, levels = self.optuna_trials(), set(numbers), self.space.noises
        trials = [t for t in all_trials if step in t.intermediate_values and trial_state(t) not in ("void", "died")]
        return {
            trial.number
            for trial in trials
            if trial.number in numbers and is_behind(self.rule, trial, trials, step, self.steps, levels)
        }

    def finish(self, number: int, result: Trial, seconds: float) -> bool:
        """Store the result of a trial; False if somebody else has ended it in the meantime."""
        last = {"status": result.status, "by_seed": [x for x in result.by_seed if math.isfinite(x)]}
        curve = [(step, loss) for step, loss in result.curve if math.isfinite(loss)]
        attrs = {**last, "curve": curve, "steps": result.steps, "flops": result.flops, "seconds": seconds}
        if not all(self._set(number, name, value) for name, value in attrs.items()):
            return False
        for step, loss in curve[:: max(1, len(curve) // _REPORTED_POINTS)]:  # all of it is in `curve`: writes are slow
            self.report({number: loss}, step)
        if result.status == "finished":
            return self._end(number, "COMPLETE", result.loss)
        if result.status == "diverged":  # for samplers and dashboards: no number, and so nothing to choose
            self.report({number: math.nan}, result.steps)
        return self._end(number, "PRUNED")

    def results(self) -> list[Trial]:
        """Every trial that came to an end, by noise and learning rate, from the storage alone."""
        ended = [t for t in self.optuna_trials() if trial_state(t) in ("finished", "diverged", "pruned")]
        return sorted(map(_result, ended), key=lambda trial: (trial.noise, trial.lr))

    def seconds(self) -> float:
        """Of training, over all workers."""
        return math.fsum(trial.user_attrs.get("seconds", 0.0) for trial in self.optuna_trials())

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


# ------------------------------------------------------------------------------------------------ a trial of optuna's


def trial_state(trial: FrozenTrial) -> TrialState:
    """Its state as a sweep sees it; 'died' where its worker did, 'void' where it does not count."""
    state = trial.state.name
    if state == "FAIL":
        return "void" if "void" in trial.user_attrs else "died"
    if state == "PRUNED":
        return "diverged" if trial.user_attrs.get("status") == "diverged" else "pruned"
    return {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "finished"}[state]  # type: ignore[return-value]


def cell_of(trial: FrozenTrial) -> Cell | None:
    """Its hyperparameters, as far as they are known yet."""
    if "cell" in trial.user_attrs:
        return Cell(*trial.user_attrs["cell"])
    return Cell(trial.params["lr"], trial.params["noise"]) if {"lr", "noise"} <= trial.params.keys() else None


def _is_given_back(trial: FrozenTrial) -> bool:
    return trial_state(trial) == "void" and trial.user_attrs["void"] == "given back"


def _result(trial: FrozenTrial) -> Trial:
    cell, attributes = cell_of(trial), trial.user_attrs
    assert cell is not None
    status: Any = trial_state(trial)
    return Trial(
        cell.lr,
        cell.noise,
        status,
        trial.value if status == "finished" else None,
        list(attributes.get("by_seed", [])),
        [(int(step), float(loss)) for step, loss in attributes.get("curve", [])],
        int(attributes.get("steps", 0)),
        float(attributes.get("flops", 0.0)),
    )


# ------------------------------------------------------------------------------------------------ what is searched


def _fixed_cells(space: Space, sampler: str, trials: int | None) -> list[Cell]:
    """Cells that are always trained: the whole grid; or, where cells are drawn, some of the zero-noise row."""
    if sampler == "grid":
        return space.cells
    count = min(len(space.lrs), max(1, (trials or 1) // 3))
    spread = [round((i + 0.5) * len(space.lrs) / count - 0.5) for i in range(count)]
    return [Cell(space.lrs[i], 0.0) for i in spread]


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
