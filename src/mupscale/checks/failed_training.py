"""Training that fails at a width: its loss rises, or something in the model is no longer finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

_RISE = 1.0  # of the loss at the start: so much more, and a rate is called too large


class Measured(Protocol):
    """What is asked of a measurement: where it was made, how large an output was, and the loss if that is known."""

    @property
    def width(self) -> float:
        """Of the model."""

    @property
    def step(self) -> int:
        """How many steps it had trained."""

    @property
    def size(self) -> float:
        """Root mean square of a module's output."""

    @property
    def loss(self) -> float | None:
        """The model's."""


def failure_at(width: float, rows: Sequence[Measured]) -> str | None:
    """How training fails at this width, in words: None where it does not, or where it was not sound at the start.

    Means over seeds count. A loss that is twice that of the start at any step has failed, even if it falls later.

    >>> from mupscale.checks import Measurement
    >>> rows = [Measurement(64, 0, step, "h", 1.0, 1.0, loss) for step, loss in enumerate([0.5, 7.0, 30.0])]
    >>> failure_at(64, rows), failure_at(64, rows[:1])
    ('the loss goes from 0.5 to 30 within 2 steps', None)
    """
    here = [row for row in rows if row.width == width]
    last = max((row.step for row in here), default=0)
    steps = f"{last} step{'s' * (last != 1)}"
    losses = [fmean(known) for step in range(last + 1) if (known := _losses(here, step))]
    if len(losses) > 1 and math.isfinite(losses[0]):
        start, *later = losses
        highest = next((loss for loss in later if not math.isfinite(loss)), max(later))
        if not highest - start <= _RISE * abs(start):  # true of NaN, too
            return f"the loss goes from {start:.3g} to {highest:.3g} within {steps}"
    lost = {row.step for row in here if not math.isfinite(row.size)}
    return f"activations are not finite after {steps}" if lost and min(lost) > 0 and _has_start(here) else None


def _losses(rows: Sequence[Measured], step: int) -> list[float]:
    """By seed, as often as there are layers, which leaves their mean as it is."""
    return [row.loss for row in rows if row.step == step and row.loss is not None]


def _has_start(rows: Sequence[Measured]) -> bool:
    return any(row.step == 0 for row in rows)
