"""What is asked of the engine, what is done of it, and the file that keeps it when somebody pulls the plug."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mupscale import checkpoint
from mupscale.data import Data
from mupscale.engine.outcomes import Outcome
from mupscale.system import MupscaleError
from mupscale.train import Recipe

Decide = Callable[[int, Mapping[int, float]], Collection[int]]
"""From a step and the loss of each run since the last point, by its number, to those that need not go on."""
Tell = Callable[[int, Mapping[int, float]], None]
"""Told at every point: the step and the loss of each run since the last one, by its number."""


@dataclass
class Work:
    """Recipes to train, where they may be stopped, who listens; and the outcomes so far, by number."""

    recipes: list[Recipe]
    points: int = 40
    rungs: Sequence[int] = ()
    decide: Decide | None = None
    evaluate: bool = False
    save: Path | None = None
    tell: Tell | None = None
    note: Callable[[str], None] = print
    memory: int | None = None
    data: Data | None = None  # that of all recipes, if somebody has it loaded
    resume: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    saved: checkpoint.Checkpoint | None = None  # a stack that waits to be taken up

    @property
    def left(self) -> list[int]:
        """The runs that are still to be trained."""
        return [number for number in range(len(self.recipes)) if number not in self.outcomes]

    def in_order(self) -> list[Outcome]:
        """All outcomes."""
        return [self.outcomes[number] for number in range(len(self.recipes))]

    def spacing(self, recipe: Recipe) -> int:
        """Steps between two points of a curve."""
        return recipe.log_every if recipe.out is not None else max(1, recipe.steps // self.points)

    def scored(self, recipe: Recipe) -> bool:
        """Whether somebody will look at held-out scores."""
        return self.evaluate or recipe.out is not None

    def told(self, step: int, values: Mapping[int, float]) -> None:
        """Tell whoever listens."""
        if self.tell is not None:
            self.tell(step, values)

    def stopped(self, recipe: Recipe, step: int, values: Mapping[int, float]) -> set[int]:
        """Those that need not go on after this point."""
        if self.decide is None or not values or step not in self._rungs_of(recipe):
            return set()
        return set(self.decide(step, values)) & set(values)

    def _rungs_of(self, recipe: Recipe) -> set[int]:
        """Rungs at the nearest points before the end."""
        spacing = self.spacing(recipe)
        near = {max(1, round(rung / spacing)) * spacing for rung in self.rungs}
        return {rung for rung in near if rung < recipe.steps}

    # ------------------------------------------------------------------------------------------- on disk

    def header(self) -> dict[str, Any]:
        """What a saved file tells: of which work it is, and what is done of it."""
        done = {str(number): outcome.to_json() for number, outcome in self.outcomes.items()}
        return {"fingerprint": self._fingerprint(), "outcomes": done, "numbers": []}

    def keep(self) -> None:
        """Write down what is done, where there is a place for it and more to do."""
        if self.save is not None and self.left:
            checkpoint.save_states(self.save, {}, None, None, {"stack": self.header()})

    def take_up(self) -> bool:
        """Find what an interrupted call has left; anything else in its place is of no use and ignored."""
        if self.save is None or not self.save.exists():
            return False
        try:
            saved = checkpoint.load(self.save)
        except (MupscaleError, ValueError, KeyError):
            return False
        header = saved.extra.get("stack", {})
        if header.get("fingerprint") != self._fingerprint():
            return False
        for number, values in header["outcomes"].items():
            self.outcomes[int(number)] = Outcome.from_json(self.recipes[int(number)], values)
        self.saved = saved if header["numbers"] else None
        return True

    def _fingerprint(self) -> str:
        asked = [[recipe.to_json() for recipe in self.recipes], self.points, list(self.rungs), self.evaluate]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
