"""Training: a recipe, the loop with growth in the middle of it, exact resume, one process or many."""

from mupscale.train.loop import Result, train
from mupscale.train.loss import cross_entropy
from mupscale.train.recipe import Checkpoints, Evaluation, Growth, Recipe, Schedule, Seeds, Spec

__all__ = [
    "Checkpoints",
    "Evaluation",
    "Growth",
    "Recipe",
    "Result",
    "Schedule",
    "Seeds",
    "Spec",
    "cross_entropy",
    "train",
]
