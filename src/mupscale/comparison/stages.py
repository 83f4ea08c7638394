"""How a comparison trains: stage by stage, each as few programs as possible, kept so that a kill loses nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mupscale.comparison.results import StageSpent
from mupscale.comparison.system import Costs
from mupscale.core import Width
from mupscale.engine import Outcome, lowest_loss_bar, read_outcome, train_many
from mupscale.system import MupscaleError, read_json, write_json
from mupscale.train import Recipe

Note = Callable[[str], None]


@dataclass
class StageTrainer:
    """Trains runs in the comparison's folder, and counts what they take. stages: how many there will be."""

    folder: Path
    costs: Costs
    engine: Literal["auto", "vectorised", "serial"]
    measure: str
    note: Note
    stages: int
    spent: dict[str, StageSpent] = field(default_factory=dict)
    number: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for name, (cost, seconds) in self._stored().items():
            self.spent[name] = StageSpent(name, cost, seconds)

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        """Everything trained within belongs to this stage."""
        self.number, self.name = self.number + 1, name
        self.note(f"{self.number}/{self.stages} {about}")
        self.spent.setdefault(name, StageSpent(name, 0.0, 0.0))
        yield

    def train(self, recipes: Sequence[Recipe]) -> list[float | None]:
        """Train all of these, those of one width, length and rules as one program; their final losses, None: diverged.

        What is finished already is read.
        """
        groups: dict[tuple[str, int], list[int]] = {}
        for number, recipe in enumerate(recipes):
            label = Width.of(recipe.width).label
            if recipe.base != self.costs.recipe.base:
                label += f"-base-{Width.of(recipe.base).label}"
            groups.setdefault((label, recipe.steps), []).append(number)
        losses: list[float | None] = [None] * len(recipes)
        for (label, steps), members in groups.items():
            outcomes = self._train_group(f"{label}-{steps}", [recipes[number] for number in members])
            for number, outcome in zip(members, outcomes, strict=True):
                losses[number] = self._loss(outcome)
        return losses

    def _train_group(self, name: str, recipes: list[Recipe]) -> list[Outcome]:
        if None not in (stored := [read_outcome(recipe) for recipe in recipes]):
            return [outcome for outcome in stored if outcome is not None]
        began = time.monotonic()
        with lowest_loss_bar(recipes[0].steps, stored.count(None)) as tell:
            outcomes = train_many(
                recipes,
                engine=self.engine,
                evaluate=True,
                save=self.folder / "stacks" / f"{self.name}-{name}.safetensors",
                on_point=tell,
                resume=True,
                note=self.note,
                data=self.costs.data,
            )
        new = [one for one, before in zip(outcomes, stored, strict=True) if before is None]
        cost = math.fsum(min(one.step, one.recipe.steps) * self.costs.of(one.recipe.width) for one in new)
        self._spend(cost, time.monotonic() - began)
        return outcomes

    def _loss(self, outcome: Outcome) -> float | None:
        if outcome.status != "finished":
            return None
        loss = outcome.scores.get("loss") if self.measure == "held-out" else outcome.loss
        return loss if loss is not None and math.isfinite(loss) else None

    # ------------------------------------------------------------------------------------------- what it took

    def _spend(self, cost: float, seconds: float) -> None:
        before = self.spent[self.name]
        self.spent[self.name] = StageSpent(self.name, before.cost + cost, before.seconds + seconds)
        values = {name: (one.cost, one.seconds) for name, one in self.spent.items()}
        write_json(self.folder / "stages.json", values)

    def _stored(self) -> dict[str, tuple[float, float]]:
        try:
            values = read_json(self.folder / "stages.json")
            return {str(name): (float(cost), float(seconds)) for name, (cost, seconds) in values.items()}
        except (OSError, ValueError, TypeError, AttributeError, MupscaleError):
            return {}
