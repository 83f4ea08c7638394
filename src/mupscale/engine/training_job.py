"""What `train_many` was asked for, how far it is, and the file from which the same call goes on after a kill."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from mupscale import checkpoint
from mupscale.data import Data
from mupscale.system import MupscaleError, show
from mupscale.train import Recipe, RunFolder, StoredRecipe, seen_from, step_of, stored_values

Status = Literal["finished", "diverged", "pruned"]
_LAST = 0.1  # the part of a run at its end over which its training loss is measured
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """How one run of `train_many` ended.

    step: how far it came; if it diverged, the first step whose loss is not finite. curve: steps, and the mean training
    loss since the one before. scores: of the evaluation at its end. flops: of all its steps, None where the model's
    cost cannot be counted.
    """

    recipe: Recipe
    status: Status
    step: int
    curve: list[tuple[int, float]]
    scores: dict[str, float] = field(default_factory=dict)
    flops: float | None = None

    @property
    def loss(self) -> float | None:
        """The mean training loss over the last tenth of the steps; None unless it finished."""
        if self.status != "finished":
            return None
        return fmean(loss for step, loss in self.curve if step > (1 - _LAST) * self.curve[-1][0])

    def to_json(self) -> dict[str, Any]:
        """All but the recipe, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    @classmethod
    def from_json(cls, recipe: Recipe, values: Mapping[str, Any]) -> Outcome:
        return cls(recipe, **{**values, "curve": curve_from_json(values["curve"])})


def curve_from_json(points: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """A curve whose points are lists, as JSON has them."""
    return [(int(step), float(loss)) for step, loss in points]


def read_outcome(recipe: Recipe) -> Outcome | None:
    """The outcome of a run that is over, read from its folder; None if it is not, or of another recipe."""
    if recipe.out is None:
        return None
    folder = RunFolder(recipe.out)
    records = folder.records()
    if not records or records[-1]["kind"] != "end" or records[-1]["status"] not in ("finished", "diverged"):
        return None
    try:
        theirs = _recipe_in(folder)
    except MupscaleError:
        return None
    if theirs is None or theirs.describe_difference(recipe, recipe.steps) or theirs.steps != recipe.steps:
        return None
    end, last = records[-1], folder.last()
    if end["status"] == "finished" and (last is None or step_of(last) != recipe.steps):
        return None
    return Outcome(recipe, end["status"], int(end.get("at", end["step"])), *curve_and_scores(records), end.get("flops"))


def curve_and_scores(records: Records) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """A run's curve and its last scores, from its records of metrics."""
    curve = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and r["loss"] is not None]
    last: Mapping[str, Any] = next((r for r in reversed(records) if r["kind"] == "eval"), {})
    names = [name for name in ("loss", "accuracy") if name in last]
    return curve, {name: math.nan if last[name] is None else last[name] for name in names}


def check_folders(recipes: Sequence[Recipe], resume: bool) -> None:
    """Refuse two runs in one folder, a folder with a run that is not to be resumed, and one of another recipe."""
    seen: set[Path] = set()
    for recipe in recipes:
        if recipe.out is None:
            continue
        folder, path = RunFolder(recipe.out), Path(recipe.out).absolute()
        if path in seen:
            raise MupscaleError(f"two runs have the folder {recipe.out}: give each its own (out)")
        seen.add(path)
        last, theirs = folder.last(), _recipe_in(folder)
        if not resume and (last is not None or folder.records()):
            raise MupscaleError(f"{recipe.out} holds a run already: resume it, or choose another folder (out)")
        if theirs is not None and (why := theirs.describe_difference(recipe, recipe.steps)):
            raise MupscaleError(f"{recipe.out} holds a run of another recipe: {why}; choose another folder (out)")
        if last is not None and step_of(last) > recipe.steps:
            raise MupscaleError(
                f"the run in {recipe.out} stands at step {step_of(last)}, beyond the {recipe.steps} steps asked for: "
                f"give more steps, or another folder (out)"
            )


def _recipe_in(folder: RunFolder) -> StoredRecipe | None:
    path = folder.path / "recipe.json"
    try:
        return StoredRecipe.read(path)
    except FileNotFoundError:
        return None
    except (OSError, MupscaleError) as error:
        raise MupscaleError(f"{path} cannot be read as a recipe ({error}): choose another folder (out)") from None


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
        return [number for number in range(len(self.recipes)) if number not in self.outcomes]

    def point_spacing(self, recipe: Recipe) -> int:
        """Steps between two points of a curve."""
        return recipe.log_every if recipe.out is not None else max(1, recipe.steps // self.points)

    def needs_scores(self, recipe: Recipe) -> bool:
        return self.evaluate or recipe.out is not None

    def report_point(self, step: int, values: Mapping[int, float]) -> None:
        if self.on_point is not None:
            self.on_point(step, values)

    def runs_to_prune(self, recipe: Recipe, step: int, values: Mapping[int, float]) -> set[int]:
        """The numbers of the runs that are stopped at this point."""
        if self.prune is None or not values:
            return set()
        spacing = self.point_spacing(recipe)
        near = {max(1, round(rung / spacing)) * spacing for rung in self.rungs}  # the nearest points of the curve
        return set(self.prune(step, values)) & set(values) if step in near and step < recipe.steps else set()

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
