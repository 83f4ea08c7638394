"""Small groups of a recipe's settings: seeds, checkpoints, evaluation, what hyperparameters were tuned for."""

from __future__ import annotations

from dataclasses import dataclass

from mupscale.system import MupscaleError


@dataclass(frozen=True)
class Seeds:
    """Seeds kept apart, so that two runs can share one and differ in another.

    Args:
        init: initial weights
        data: order of the data and its augmentation
        noise: noise that makes copies differ
        dropout: dropout, and other random numbers that modules draw in training
    """

    init: int = 0
    data: int = 0
    noise: int = 0
    dropout: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many are kept.

    Args:
        every: write one every N steps; 0 writes only the last
        minutes: also write one if this many minutes have passed since the last
        keep: how many of the latest to keep
    """

    every: int = 1000
    minutes: float | None = None
    keep: int = 2


@dataclass(frozen=True)
class Evaluation:
    """When the model is evaluated on the held-out data.

    Args:
        every: evaluate every N steps; 0 evaluates only at the end
        batch: batch size of the evaluation (default: the training batch)
    """

    every: int = 0
    batch: int | None = None


@dataclass(frozen=True)
class TunedAt:
    """The run that hyperparameters were tuned for, where this one has another batch or duration.

    Args:
        batch: its examples per step
        steps: its number of steps
    """

    batch: int
    steps: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 1:
            raise MupscaleError(f"tuned_at has batch {self.batch} and steps {self.steps}, but both must be at least 1")
