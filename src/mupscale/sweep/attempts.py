"""What became of every attempt at a cell, kept up to date at a cost that does not grow with their number.

A cell may have several trials of optuna's: one that was given back, one whose worker died, one that two workers began
at the same moment. Exactly one of them counts, the first that is neither void nor failed. What has ended stays as it
is, so only trials that are open, and new ones, are looked at again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from mupscale.sweep.space import Cell, Trial
from mupscale.system import MupscaleError, parse_record, show_short

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TrialState = Literal["waiting", "running", "finished", "diverged", "pruned", "void", "died", "failed"]
COUNTING = ("waiting", "running", "finished", "diverged", "pruned")
"""States of trials that count: a cell with one of them needs no other."""
_AGAIN = ("given back", "in company")  # void trials whose cell is to be trained all the same


class Attempts:
    """All trials of a study by cell, and the cells that nobody has.

    planned: the cells to train, as far as they are known beforehand. retries: how often a cell whose worker died is
    trained again; None: without limit. to_do: cells that nobody has, in the order of their turn. given_up: cells that
    are not tried any more, and why.
    """

    def __init__(self, planned: Iterable[Cell], retries: int | None = None) -> None:
        self.retries = retries
        self.planned = dict.fromkeys(planned)
        self.to_do = dict(self.planned)
        self.given_up: dict[Cell, str] = {}
        self.trials: list[FrozenTrial] = []
        self.open: dict[int, TrialState] = {}  # numbers of those that may still change
        self.live: dict[Cell, set[int]] = {}  # numbers of those that count
        self.deaths: dict[Cell, list[int]] = {}
        self._companies: dict[Cell, int] = {}  # the largest batch in which a cell may be tried
        self._first: int | None = None  # the first number that was not there when this process came

    def update(self, trials: Sequence[FrozenTrial] | Mapping[int, FrozenTrial]) -> None:
        """Take notice of what has changed since the last time; of all trials, by number, only those are looked at."""
        count = len(trials)
        self._first = count if self._first is None else self._first
        changed = [*self.open, *range(len(self.trials), count)]
        for number in changed:
            try:
                trial = trials[number]
            except KeyError:
                raise MupscaleError(
                    f"the study is damaged: it has {count} trials, but none of number {number}"
                ) from None
            self.trials[number : number + 1] = [trial]
            self._look_at(trial)

    def _look_at(self, trial: FrozenTrial) -> None:
        state, cell, number = trial_state(trial), cell_of(trial), trial.number
        if state in ("waiting", "running"):
            self.open[number] = state
        else:
            self.open.pop(number, None)
        if cell is None:
            return
        if state in COUNTING:
            self.live.setdefault(cell, set()).add(number)
            self.to_do.pop(cell, None)
            self.given_up.pop(cell, None)
            return
        self._note_end(trial, state, cell)
        counting = self.live.get(cell, set())
        counting.discard(number)
        if counting or cell in self.given_up:
            return
        self.live.pop(cell, None)
        if cell in self.planned or state != "void" or trial.user_attrs["void"] in _AGAIN:
            self.to_do[cell] = None

    def _note_end(self, trial: FrozenTrial, state: TrialState, cell: Cell) -> None:
        """Count a death or a failure, and give the cell up where that was the last attempt."""
        company = trial.user_attrs.get("company", 1)
        company = company if type(company) is int else 1
        if state == "died":
            deaths = self.deaths.setdefault(cell, [])
            deaths.append(trial.number)
            if len(deaths) > 1:  # the first time it is likelier that the machine was taken away
                self._companies[cell] = min(self._companies.get(cell, company), max(1, company // 2))
            if self.retries is not None and len(deaths) > self.retries:
                self._give_up(cell, f"its worker died {_times(len(deaths))}")
        elif state == "void" and trial.user_attrs["void"] == "in company":
            self._companies[cell] = max(1, company // 2)
        elif state == "failed" and self._first is not None and trial.number >= self._first:
            self._give_up(cell, str(trial.user_attrs.get("error", "it failed")))

    def _give_up(self, cell: Cell, why: str) -> None:
        self.given_up[cell] = why
        self.to_do.pop(cell, None)

    # ------------------------------------------------------------------------------------------- what follows

    def choose(self, count: int, offset: int = 0) -> list[Cell]:
        """So many cells at most that may be trained together; offset: where to begin, so that workers differ.

        A cell at which workers die, or training fails, in company is tried in ever smaller company, at last alone.
        """
        start = offset % len(self.to_do) if self.to_do else 0
        chosen: list[Cell] = []
        for cell in chain(islice(self.to_do, start, None), islice(self.to_do, start)):
            if len(chosen) >= count:
                break
            limit = self._companies.get(cell, count)
            if limit > len(chosen):
                chosen.append(cell)
                count = min(count, limit)
        return chosen

    def has_earlier(self, cell: Cell, number: int) -> bool:
        """Whether an earlier trial of the cell counts."""
        return min(self.live.get(cell, {number})) < number

    def numbers(self, state: TrialState) -> list[int]:
        """The trials that wait or run."""
        return [number for number, open_state in self.open.items() if open_state == state]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# ------------------------------------------------------------------------------------------------ a trial of optuna's


def trial_state(trial: FrozenTrial) -> TrialState:
    """Its state as a sweep sees it: 'died' where its worker did, 'failed' by itself, 'void' where it does not count."""
    state = trial.state.name
    if state == "FAIL":
        return "void" if "void" in trial.user_attrs else "failed" if "error" in trial.user_attrs else "died"
    if state == "PRUNED":
        return "diverged" if stored_result(trial).status == "diverged" else "pruned"
    return {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "finished"}[state]  # type: ignore[return-value]


@dataclass(frozen=True)
class StoredResult:
    """What a storage keeps of a trial that came to an end, beside its loss."""

    status: str = ""
    by_seed: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    flops: float = 0.0
    seconds: float = 0.0


def stored_result(trial: FrozenTrial) -> StoredResult:
    """What was stored with its end: in one attribute; studies of earlier versions have one for each value."""
    values = trial.user_attrs.get("result", trial.user_attrs)
    if isinstance(values, dict):
        values = {name: values[name] for name in _RESULT if name in values}
    return parse_record(StoredResult, values, f"trial {trial.number} of the study")


_RESULT = tuple(each.name for each in fields(StoredResult))


def cell_of(trial: FrozenTrial) -> Cell | None:
    """Its hyperparameters, as far as they are known yet."""
    if "cell" in trial.user_attrs:
        cell = trial.user_attrs["cell"]
        if not isinstance(cell, list | tuple) or len(cell) != 2 or not all(type(x) in (int, float) for x in cell):
            raise MupscaleError(f"trial {trial.number} of the study: its cell is {show_short(cell)}, not two numbers")
        return Cell(*cell)
    return Cell(trial.params["lr"], trial.params["noise"]) if {"lr", "noise"} <= trial.params.keys() else None


def trial_result(trial: FrozenTrial) -> Trial:
    """The result of a trial that came to an end."""
    cell, values = cell_of(trial), stored_result(trial)
    if cell is None:
        raise MupscaleError(f"trial {trial.number} of the study came to an end without a learning rate and a noise")
    status: Any = trial_state(trial)
    loss = trial.value if status == "finished" else None
    return Trial(*cell, status, loss, values.by_seed, values.curve, values.steps, values.flops)
