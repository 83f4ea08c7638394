"""Small groups of a recipe's settings: seeds, checkpoints, evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seeds:
    """Seeds kept apart, so that two runs can share one and differ in another.

    Args:
        init: initial weights
        data: order of the data and its augmentation
        noise: symmetry-breaking noise
        dropout: what modules draw while they train
    """

    init: int = 0
    data: int = 0
    noise: int = 0
    dropout: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are written, and how many are kept.

    Args:
        every: steps between two; 0 for none but the last
        minutes: and after so many minutes without one
        keep: how many of the last ones to keep
    """

    every: int = 1000
    minutes: float | None = None
    keep: int = 2


@dataclass(frozen=True)
class Evaluation:
    """When the model is evaluated on the held-out data.

    Args:
        every: steps between two; 0 for the end alone
        batch: examples at a time; the training batch if not given
    """

    every: int = 0
    batch: int | None = None
