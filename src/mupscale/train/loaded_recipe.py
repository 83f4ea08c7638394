"""A recipe with its data, loaded once for all runs that vary it, and what a step costs at every width."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mupscale.core import WholeWidth, Width
from mupscale.data import Data
from mupscale.train.model_checks import cost_per_example
from mupscale.train.recipe import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    """The recipe that many runs vary: its data and the cost of its steps are the same for all of them.

    >>> from mupscale.train import Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3}),
    ...     width=64,
    ...     base=64,
    ...     steps=1,
    ...     batch=10,
    ... )
    >>> LoadedRecipe(recipe).flops_per_step(64)
    725760.0
    """

    recipe: Recipe

    @cached_property
    def data(self) -> Data:
        """The data of all runs."""
        return self.recipe.make_data()

    @cached_property
    def _flops_by_width(self) -> dict[str, float | None]:
        return {}

    def flops_per_step(self, width: WholeWidth) -> float | None:
        """Training FLOPs of a step at a width; None where the model's cost cannot be counted."""
        costs = self._flops_by_width
        if (name := Width.of(width).label) not in costs:
            each = cost_per_example(self.recipe.family(), width, self.data, self.recipe)
            costs[name] = None if each is None else each * self.recipe.batch
        return costs[name]
