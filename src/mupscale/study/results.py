"""What a study gave, as plain data: summary.json, which is all that its page needs, whatever the preset."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from mupscale.checks import CoordCheck
from mupscale.study.contenders import Contender, contender_or_stranger
from mupscale.study.space import BySeed, Sweep
from mupscale.system import NOT_EMPTY, Finite, MupscaleError, Positive, parse_record, read_json, text_table, write_json

Losses = Annotated[list[Finite | None], NOT_EMPTY]
"""Of every seed; None: diverged."""
Points = Sequence[tuple[float, float]]
"""Costs, rising, and the losses there."""
Tuning = dict[str, Sweep]
"""What the smallest width told: of the base model and of every contender, what was tried, by name."""


# ---------------------------------------------------------------------------------------------- what was trained


@dataclass(frozen=True)
class BudgetPoint(BySeed):
    """A contender after a part of its budget: its own steps and cost, and every seed's final loss (None: diverged)."""

    budget: Positive
    steps: int
    cost: Positive
    losses: Losses


@dataclass(frozen=True)
class Curve:
    """One seed's run: training loss (means between two points) and held-out scores, against steps.

    status: finished or diverged. Points lie at the same steps for all seeds of a run, as far as
    each came; held-out points have their own. accuracy is empty where targets are no classes.
    lowest, highest: the extremes of what each point is the mean of; empty where that is one measurement.
    """

    seed: int
    status: str
    steps: list[int]
    losses: list[float]
    held_out_steps: list[int] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {"losses": self.losses, "lowest": self.lowest, "highest": self.highest}
        for name, values in lengths.items():
            if len(values) != len(self.steps) and (values or name == "losses"):
                raise MupscaleError(f"a curve has {len(self.steps)} steps, but {len(values)} values in '{name}'")

    def final(self) -> float | None:
        """Mean training loss over the last tenth of the steps; None if it diverged."""
        if self.status == "diverged" or not self.steps:
            return None
        start = bisect_right(self.steps, 0.9 * self.steps[-1])
        return fmean(self.losses[min(start, len(self.losses) - 1) :])

    def final_held_out(self) -> float | None:
        """The last held-out loss; None if it diverged or none was taken."""
        return None if self.status == "diverged" or not self.held_out_losses else self.held_out_losses[-1]


@dataclass(frozen=True)
class ContenderRuns:
    """A contender with the values that it was trained with, at every budget, and as curves where they are kept.

    cost_per_step: None where it cannot be counted. change: the step at which the learning rate changes, and to what.
    label: what it is called here, where that is not what the table of contenders says. like: the contender of that
    table that it is a kind of, where its own name is not there. noise: one number, or constants by parameter.
    """

    name: str
    width: Any
    lr: Positive
    noise: Finite | dict[str, Finite]
    points: Annotated[list[BudgetPoint], NOT_EMPTY]
    label: str = ""
    cost_per_step: Positive | None = None
    change: tuple[int, Positive] | None = None
    curves: list[Curve] = field(default_factory=list)
    like: str = ""

    @property
    def contender(self) -> Contender:
        return contender_or_stranger(self.like or self.name)

    @property
    def final(self) -> float | None:
        """The mean final loss at the full budget; None if a seed diverged."""
        return self.points[-1].mean

    @property
    def finals(self) -> list[float]:
        """The final loss at the full budget of every seed that did not diverge."""
        return self.points[-1].finite

    @property
    def steps(self) -> int:
        return self.points[-1].steps

    @property
    def shown(self) -> str:
        return self.label or self.contender.label


@dataclass(frozen=True)
class SystemRuns:
    """All contenders of one base model and one wide width.

    base_cost: of training the base model; None where its steps are not known, 0 where each cost is all that was spent.
    unit: of all costs, FLOPs, or steps where
    those of a model cannot be counted.
    """

    narrow: Any
    wide: Any
    base_cost: Finite | None
    unit: str
    contenders: Annotated[list[ContenderRuns], NOT_EMPTY]

    def __post_init__(self) -> None:
        names = [one.name for one in self.contenders]
        for one in self.contenders:
            if any(later.cost <= earlier.cost for earlier, later in pairwise(one.points)):
                raise MupscaleError(f"the costs of the contender {one.name} do not rise")
            if names.count(one.name) > 1:
                raise MupscaleError(f"the contender {one.name} is there twice")

    def get(self, name: str) -> ContenderRuns | None:
        return next((runs for runs in self.contenders if runs.name == name), None)

    def curve(self, name: str, *, charged: bool = True, seed: int | None = None) -> Points:
        """Cost and mean loss at every budget, or those of one seed; charged: with the base model's cost."""
        runs = self.get(name)
        if runs is None:
            return []
        before = self.charge(runs) if charged else 0.0
        losses = [(point.cost, point.mean if seed is None else point.losses[seed]) for point in runs.points]
        return [(before + cost, loss) for cost, loss in losses if loss is not None]

    def charge(self, runs: ContenderRuns) -> float:
        """What a contender has cost before its own first step."""
        return (self.base_cost or 0.0) if runs.contender.from_base else 0.0

    @property
    def seeds(self) -> int:
        return min((len(point.losses) for runs in self.contenders for point in runs.points), default=0)


# ---------------------------------------------------------------------------------------------- what it comes to


@dataclass(frozen=True)
class StageSpent:
    """A stage, its cost in the summary's unit (None: not known), its seconds, and what a person calls it."""

    name: str
    cost: Finite | None
    seconds: Finite
    label: str = ""


@dataclass(frozen=True)
class Card:
    """A number to stand at the top of a page: what it is, the number, and what else to say of it."""

    what: str
    number: str
    more: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows of words under a title. about: sentences above it; note: one below it. folded: to be opened by a click."""

    title: str
    head: list[str]
    rows: list[list[str]]
    about: list[str] = field(default_factory=list)
    note: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise MupscaleError(f"the table '{self.title}' has {len(self.head)} columns, but a row of {len(row)}")


@dataclass(frozen=True)
class BreakEven:
    """From which cost on one contender is lower than another.

    kind: always (at the lowest cost that both have, too), from (from `cost` on), early (at lower costs, and not at the
    highest), never, or unknown (they have no costs in common).
    """

    kind: Literal["always", "from", "early", "never", "unknown"]
    cost: Positive | None = None


class _Reference(TypedDict):
    loss: Finite
    label: str


class _Answer(TypedDict):
    """What a page reads of a preset's own numbers; there may be more."""

    grown: NotRequired[str | None]
    break_even: NotRequired[dict[str, dict[Literal["charged", "there"], BreakEven]]]
    gain: NotRequired[dict[str, float | None]]
    reference: NotRequired[_Reference]


class _Answered(TypedDict):
    answer: _Answer


@dataclass(frozen=True)
class StudySummary:
    """What a study gave; a page can be drawn of it without knowing the preset.

    sentences: the answer first. cards, tables: words about it, made by the preset. measured: how the losses came about.
    large: the user's own sizes; None where only a forecast was asked for. small: the systems that it was forecast from.
    diverged: whether every model that the answer would be about did, so that there is none.
    base, forecast, answer: the preset's own numbers. coords: a coordinate check. notes: sentences to keep in mind.
    """

    name: str
    command: str
    preset: str
    recipe: dict[str, Any]
    settings: dict[str, Any]
    sentences: list[str] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    tuned: list[Sweep] = field(default_factory=list)
    small: list[SystemRuns] = field(default_factory=list)
    large: SystemRuns | None = None
    base: dict[str, Any] = field(default_factory=dict)
    forecast: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    stages: list[StageSpent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    coords: CoordCheck | None = None
    diverged: bool = False
    format: Literal[3] = 3

    def __post_init__(self) -> None:
        answer = parse_record(_Answered, {"answer": self.answer})["answer"]
        grown = answer.get("grown")
        if grown is not None and (self.large is None or self.large.get(grown) is None):
            raise MupscaleError(f"answer.grown is {grown!r}, which is not among large.contenders")
        for rival, ways in answer.get("break_even", {}).items():
            for way, one in ways.items():
                if one.kind == "from" and (one.cost is None or grown is None):
                    raise MupscaleError(f"answer.break_even.{rival}.{way} has no cost")

    @property
    def measure(self) -> str:
        """What the loss is called."""
        return "training loss" if self.settings.get("measure") == "train" else "held-out loss"

    def __str__(self) -> str:
        """The answer and its tables, as the page has them."""
        shown = [table for table in self.tables if not table.folded]
        cells = [[[cell.replace("\n", " ") for cell in row] for row in table.rows] for table in shown]
        tables = [f"\n{one.title}\n{text_table(one.head, rows)}" for one, rows in zip(shown, cells, strict=True)]
        return "\n".join([*self.sentences, *tables, *(f"Note: {note}" for note in self.notes)])

    def save(self, folder: Path) -> Path:
        """Write summary.json, whole or not at all."""
        return write_json(folder / "summary.json", asdict(self))


_OTHERS = {
    "study.db": "It has a sweep, which prints what it finds: call the same mupscale sweep again",
    "transfer-check.json": "It has a transfer check, whose picture is transfer-check.png",
    "rules-check.json": "It has a comparison of rule sets, whose numbers are in rules-check.json",
}
"""What other commands leave in a folder, and where to look."""


def load_summary(folder: str | Path) -> StudySummary:
    """What a study wrote into its folder; what is damaged is named by file and field."""
    path = Path(folder) / "summary.json"
    try:
        values = read_json(path)
    except OSError as error:
        above = (one for one in Path(folder).absolute().parents[:2] if (one / "summary.json").is_file())
        told = "".join(f". It is a part of the study in {os.path.relpath(one)}" for one in above)
        if not told and (Path(folder) / "metrics.jsonl").is_file():
            told = f". It is a single run: mupscale curves {folder}"
        for file, what in _OTHERS.items():
            told = told or (f". {what}" if (Path(folder) / file).is_file() else "")
        raise MupscaleError(f"{folder} holds no study: cannot read its summary.json ({error.strerror}){told}") from None
    try:
        return parse_record(StudySummary, values)
    except MupscaleError as error:
        raise MupscaleError(f"{path} is not the summary of a study ({error}): run the study again") from None
