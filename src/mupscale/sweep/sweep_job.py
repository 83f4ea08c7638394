"""What a sweep is to search, and which recipes stand for a cell of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mupscale.data import Data
from mupscale.sweep.space import Cell, Space
from mupscale.train import MAY_CHANGE, Recipe


@dataclass(frozen=True)
class SweepJob:
    """What is swept: a space, and the recipes (one for each of the sweep's seeds) that a cell of it stands for.

    name: the sweep's. width: at which trials train. start: the width they are upscaled from, None from scratch.
    measure: whose loss is minimised. trials: how many random and tpe take. data: the recipes' own, where it is loaded
    already. key: what tells its study from others of the same name in a storage.
    """

    name: str
    width: Any
    start: Any
    space: Space
    recipes: Callable[[Cell], list[Recipe]]
    steps: int
    measure: Literal["train", "held-out"] = "train"
    sampler: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median", "halving"] = "none"
    engine: Literal["auto", "vectorised", "serial"] = "auto"
    seed: int = 0
    data: Data | None = None
    key: str = ""

    @property
    def study_name(self) -> str:
        """What the storage calls it."""
        return f"{self.name}-{self.key}" if self.key else self.name

    def description(self) -> dict[str, Any]:
        """What a study of this name must agree in, beside its space and steps; folders may lie elsewhere."""
        recipes = self.recipes(self.space.cells[-1])
        free = {*MAY_CHANGE, "from", "noise", "seeds", "grow", "steps"}
        recipe = {name: value for name, value in recipes[0].to_json().items() if name not in free}
        recipe["optimizer"]["init_args"].pop("lr", None)
        seeds = [asdict(one.seeds) for one in recipes]
        return {"width": self.width, "start": self.start, "measure": self.measure, "recipe": recipe, "seeds": seeds}
