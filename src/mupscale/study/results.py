"""What a comparison gave, as plain data: summary.json, which is all that its page needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mupscale.study.budgets import Points
from mupscale.study.contenders import Contender, contender_named
from mupscale.system import MupscaleError, parse_record, write_json

FORMAT = 2


def _mean_unless_diverged(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None


@dataclass(frozen=True)
class BudgetPoint:
    """A contender after a part of its budget: its own steps and cost, and the final loss of each seed (None: diverged).

    >>> BudgetPoint(0.5, steps=100, cost=4e9, losses=[0.25, 0.75]).mean
    0.5
    """

    budget: float
    steps: int
    cost: float
    losses: list[float | None]

    @property
    def mean(self) -> float | None:
        """Over the seeds; None if one of them diverged."""
        return _mean_unless_diverged(self.losses)


@dataclass(frozen=True)
class ContenderRuns:
    """A contender with the values that it was trained with, at every budget."""

    name: str
    width: Any
    lr: float
    noise: float
    points: list[BudgetPoint]

    @property
    def final(self) -> float | None:
        """The mean final loss at the full budget; None if a seed diverged."""
        return self.points[-1].mean if self.points else None

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged at the full budget."""
        return self.final is None


@dataclass(frozen=True)
class SystemRuns:
    """All contenders of one base model and one wide width.

    base_cost: of training the base model; None where its steps are not known. unit: of all costs, FLOPs, or steps where
    those of a model cannot be counted.
    """

    narrow: Any
    wide: Any
    base_cost: float | None
    unit: str
    contenders: list[ContenderRuns]

    def get(self, name: str) -> ContenderRuns | None:
        """The runs of a contender."""
        return next((runs for runs in self.contenders if runs.name == name), None)

    def curve(self, name: str, *, charged: bool = True, seed: int | None = None) -> Points:
        """Cost and mean loss at every budget, or those of one seed; charged: with the base model's cost."""
        runs = self.get(name)
        if runs is None:
            return []
        before = (self.base_cost or 0.0) if charged and contender_named(name).from_base else 0.0
        losses = [(point.cost, point.mean if seed is None else point.losses[seed]) for point in runs.points]
        return [(before + cost, loss) for cost, loss in losses if loss is not None]

    @property
    def seeds(self) -> int:
        """How many seeds every contender has."""
        return min((len(point.losses) for runs in self.contenders for point in runs.points), default=0)


@dataclass(frozen=True)
class Tried:
    """A learning rate and noise that a contender tried at the small width, with the loss of each seed.

    budget: the part of the full budget after which these losses are; below 1 it was stopped there, far behind.

    >>> Tried(0.1, 0.0, [3.0], budget=0.25).is_stopped
    True
    """

    lr: float
    noise: float
    losses: list[float | None]
    budget: float = 1.0

    @property
    def mean(self) -> float | None:
        """Over the seeds; None if one of them diverged."""
        return _mean_unless_diverged(self.losses)

    @property
    def is_stopped(self) -> bool:
        """Whether it went no further than the first budget, without diverging."""
        return self.budget < 1 and self.mean is not None

    @property
    def final(self) -> float | None:
        """The mean at the full budget; None where it diverged or was stopped."""
        return self.mean if self.budget == 1 else None


@dataclass(frozen=True)
class TunedContender:
    """The values that a contender takes to the large width, and all that it tried. remarks: sentences about them."""

    name: str
    lr: float
    noise: float
    tried: list[Tried]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tuning:
    """What the small width told: the base model's learning rate, and the values of every contender."""

    base: TunedContender
    contenders: list[TunedContender]

    def of(self, contender: Contender) -> TunedContender:
        """The values of a contender, or of the one that it is tuned as."""
        wanted = contender.tuned_as or contender.name
        return next(one for one in self.contenders if one.name == wanted)


@dataclass(frozen=True)
class StageSpent:
    """A stage, its cost in the summary's unit, and its seconds."""

    name: str
    cost: float
    seconds: float


@dataclass(frozen=True)
class StudySummary:
    """What a run gave.

    base: where the base model is from, its steps and learning rate. tuned: what each contender takes to the large
    width. small: the systems that the forecast was made from. large: None where only a forecast was asked for.
    forecast, answer: see forecast.py and answer.py. notes: sentences to keep in mind.
    """

    name: str
    command: str
    recipe: dict[str, Any]
    settings: dict[str, Any]
    base: dict[str, Any]
    tuned: list[TunedContender]
    small: list[SystemRuns]
    forecast: dict[str, Any]
    large: SystemRuns | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    stages: list[StageSpent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the same."""
        return {"format": FORMAT, "kind": "comparison", **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StudySummary:
        """What to_json gave."""
        try:
            return parse_record(cls, {name: value for name, value in values.items() if name not in ("format", "kind")})
        except MupscaleError as error:
            raise MupscaleError(f"this is no summary of a comparison ({error}): run it again") from None

    def save(self, folder: Path) -> Path:
        """Write summary.json, whole or not at all."""
        return write_json(folder / "summary.json", self.to_json())
