"""What a sweep searches, learning rates and noise levels with zero always among them, and its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mupscale.engine import Status
from mupscale.system import Diverged, MupscaleError


class Cell(NamedTuple):
    """One choice of hyperparameters."""

    lr: float
    noise: float


@dataclass(frozen=True)
class Space:
    """A grid of learning rates × noise levels, both in ascending order.

    Noise levels beside 0 are what Sweep 2 searches; 0 itself is always one of them, since it is training on without
    upscaling (the paper's 'Equivalence at zero noise'). A space with 0 alone is one of learning rates: Sweep 1.

    >>> from mupscale.sweep import Space
    >>> space = Space(lrs=(0.2, 0.1), noises=(1.0,))
    >>> space.noises
    (0.0, 1.0)
    >>> space.cells[0]
    Cell(lr=0.1, noise=0.0)
    """

    lrs: tuple[float, ...]
    noises: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        _check_numbers("learning rate", self.lrs)
        _check_numbers("noise level", self.noises)
        check_learning_rates(self.lrs)
        object.__setattr__(self, "lrs", _sorted(self.lrs))
        object.__setattr__(self, "noises", _sorted((0.0, *self.noises)))

    @property
    def cells(self) -> list[Cell]:
        """Every cell of the grid, noise by noise."""
        return [Cell(lr, noise) for noise in self.noises for lr in self.lrs]


@dataclass(frozen=True)
class Trial:
    """One cell, trained with every seed of the sweep.

    loss: the mean over seeds of what the sweep measures, None unless finished. by_seed: each seed's (pruned trials:
    where they stood). curve: steps and the mean loss there. steps: how far it came. flops: what it cost, all seeds.
    """

    lr: float
    noise: float
    status: Status
    loss: float | None
    by_seed: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    flops: float = 0.0

    @property
    def cell(self) -> Cell:
        """Its hyperparameters."""
        return Cell(self.lr, self.noise)

    @property
    def spread(self) -> float:
        """Largest minus smallest loss over seeds; 0 for one seed."""
        return max(self.by_seed) - min(self.by_seed) if self.by_seed else 0.0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trial:
        """The trial of these plain values, read back from a file."""
        return cls(**{**values, "curve": [(int(step), float(loss)) for step, loss in values["curve"]]})


@dataclass(frozen=True)
class Sweep:
    """A finished sweep.

    name: sweep-1-width-64, sweep-2-width-64 … width: at which trials train. start: the width they are upscaled from,
    None if they train from scratch. measure: whose loss was minimised, training or held-out.

    >>> from mupscale.sweep import Space, Sweep, Trial
    >>> losses = {0.1: 1.5, 0.2: 1.2}
    >>> trials = [Trial(lr, 0.0, "finished", loss) for lr, loss in losses.items()]
    >>> trials.append(Trial(0.4, 0.0, "diverged", None))
    >>> sweep = Sweep("sweep-1-width-64", 64, None, Space((0.1, 0.2, 0.4)), trials)
    >>> sweep.best.lr
    0.2
    """

    name: str
    width: Any
    start: Any
    space: Space
    trials: list[Trial]
    seeds: int = 1
    measure: str = "train"
    sampler: str = "grid"
    pruner: str = "none"
    seconds: float = 0.0

    @property
    def best(self) -> Trial:
        """The trial with the lowest loss; an error if none finished."""
        self.check_any_finished()
        return min(self.finished, key=lambda trial: (trial.loss, trial.noise, trial.lr))

    @property
    def finished(self) -> list[Trial]:
        """The trials that came to their end, and so have a loss."""
        return [trial for trial in self.trials if trial.status == "finished" and trial.loss is not None]

    def check_any_finished(self) -> None:
        """Refuse a sweep without a finished trial: there is no best one."""
        if self.finished:
            return
        if not self.trials:
            raise MupscaleError(f"{self.name}: no trial was trained, so there is nothing to choose: run it again")
        counts = Counter(trial.status for trial in self.trials)
        if counts["pruned"]:
            raise MupscaleError(
                f"{self.name}: no trial came to its end ({counts['diverged']} diverged, {counts['pruned']} were "
                f"pruned), so there is nothing to choose: try rates below {min(self.space.lrs):g}, or no pruner"
            )
        raise Diverged(
            f"{self.name}: all {len(self.trials)} trials diverged, so there is nothing to choose: try learning "
            f"rates below {min(self.space.lrs):g}"
        )

    @property
    def best_without_noise(self) -> Trial | None:
        """The trial with the lowest loss among those that go on without new capacity; None where none finished."""
        zeros = [trial for trial in self.finished if trial.noise == 0]
        return min(zeros, key=lambda trial: (trial.loss, trial.lr), default=None)

    @property
    def flops(self) -> float:
        """Training FLOPs of all trials."""
        return math.fsum(trial.flops for trial in self.trials)

    def at(self, cell: Cell) -> Trial | None:
        """The trial of a cell, if it was trained."""
        return next((trial for trial in self.trials if trial.cell == cell), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the same."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sweep:
        """The sweep that to_json was called on, read back from a file."""
        space = Space(tuple(values["space"]["lrs"]), tuple(values["space"]["noises"]))
        return cls(**{**values, "space": space, "trials": [Trial.from_json(trial) for trial in values["trials"]]})


def check_learning_rates(lrs: Sequence[float]) -> None:
    """Refuse learning rates that no sweep can try, before anything is trained.

    >>> from mupscale.sweep import check_learning_rates
    >>> check_learning_rates([0.1, 0.2])
    >>> check_learning_rates([0.1, float("inf")])
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: inf is no learning rate for a sweep: it must be a number, 0 or more and finite
    """
    _check_numbers("learning rate", lrs)
    if not lrs or 0 in lrs:
        raise MupscaleError("a sweep needs at least one learning rate, and all of them above 0")


def _check_numbers(what: str, values: Iterable[float]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise MupscaleError(f"{value!r} is no {what} for a sweep: it must be a number, 0 or more and finite")


def _sorted(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted({float(value) for value in values}))
