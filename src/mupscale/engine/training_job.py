"""What `train_many` was asked for, how far it is, and the file from which the same call goes on after a kill."""

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
from mupscale.system import MupscaleError, show
from mupscale.train import Recipe, seen_from, stored_values

PruneCallback = Callable[[int, Mapping[int, float]], Collection[int]]
"""Given a step and the mean loss of each run since its last point, by number: the runs to stop."""
PointCallback = Callable[[int, Mapping[int, float]], None]
"""Called at every point of the curves with the step and the mean loss of each run since the last point, by number."""


@dataclass
class TrainingJob:
    """The arguments of `train_many`, and the outcomes so far, by the number of the recipe."""

    recipes: list[Recipe]
    points: int = 40
    rungs: Sequence[int] = ()
    prune: PruneCallback | None = None
    evaluate: bool = False
    save_path: Path | None = None
    on_point: PointCallback | None = None
    note: Callable[[str], None] = show
    memory: int | None = None
    data: Data | None = None  # of all recipes, if it is loaded already
    resume: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    saved: checkpoint.Checkpoint | None = None  # an interrupted stack that is to go on

    @property
    def remaining(self) -> list[int]:
        """The numbers of the runs that are still to be trained."""
        return [number for number in range(len(self.recipes)) if number not in self.outcomes]

    def ordered_outcomes(self) -> list[Outcome]:
        """All outcomes, in the order of the recipes."""
        return [self.outcomes[number] for number in range(len(self.recipes))]

    def point_spacing(self, recipe: Recipe) -> int:
        """Steps between two points of a curve."""
        return recipe.log_every if recipe.out is not None else max(1, recipe.steps // self.points)

    def needs_scores(self, recipe: Recipe) -> bool:
        """Whether held-out scores of a run are wanted."""
        return self.evaluate or recipe.out is not None

    def report_point(self, step: int, values: Mapping[int, float]) -> None:
        """Call `on_point`, if there is one."""
        if self.on_point is not None:
            self.on_point(step, values)

    def runs_to_prune(self, recipe: Recipe, step: int, values: Mapping[int, float]) -> set[int]:
        """The numbers of the runs that are stopped at this point."""
        if self.prune is None or not values or step not in self._rungs_of(recipe):
            return set()
        return set(self.prune(step, values)) & set(values)

    def _rungs_of(self, recipe: Recipe) -> set[int]:
        """The steps of the rungs, moved to the nearest point of the curve; none at the last step."""
        spacing = self.point_spacing(recipe)
        near = {max(1, round(rung / spacing)) * spacing for rung in self.rungs}
        return {rung for rung in near if rung < recipe.steps}

    # ------------------------------------------------------------------------------------------- on disk

    def header(self) -> dict[str, Any]:
        """The header of a saved file: the fingerprint of the job, and its outcomes so far."""
        done = {str(number): outcome.to_json() for number, outcome in self.outcomes.items()}
        return {"fingerprint": self._fingerprint(), "outcomes": done, "numbers": []}

    def save_outcomes(self, *, complete: bool = False) -> None:
        """Write the outcomes so far to `save_path`, if there is one and not all is done; complete: then, too."""
        if self.save_path is not None and (self.remaining or complete):
            checkpoint.save_states(self.save_path, {}, None, None, {"stack": self.header()})

    def load_saved(self) -> bool:
        """Read what an interrupted call of the same job has saved; whether there was any. Other files are ignored."""
        if self.save_path is None or not self.save_path.exists():
            return False
        try:
            saved = checkpoint.load(self.save_path)
            header = saved.extra.get("stack", {})
            if header.get("fingerprint") != self._fingerprint():
                return False
            done = {int(n): Outcome.from_json(self.recipes[int(n)], v) for n, v in header["outcomes"].items()}
            numbers = list(header["numbers"])
        except (MupscaleError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
        self.outcomes |= done
        self.saved = saved if numbers else None
        return True

    def _fingerprint(self) -> str:
        """Of all that is asked for; paths are seen from the saved file's folder, which may be moved with them."""
        assert self.save_path is not None
        here = self.save_path.parent
        recipes = [(stored_values(recipe, here), seen_from(here, recipe.out)) for recipe in self.recipes]
        arguments = [recipes, self.points, list(self.rungs), self.evaluate]
        return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
