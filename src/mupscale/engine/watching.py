"""A bar for many runs that train as one program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mupscale.engine.training_job import PointCallback
from mupscale.train import make_progress


@contextmanager
def lowest_loss_bar(steps: int) -> Iterator[PointCallback]:
    """For `train_many(on_point=…)`: a bar of the steps with the lowest loss among the runs, gone when they end.

    >>> with lowest_loss_bar(100) as tell:
    ...     tell(50, {0: 0.25, 1: float("nan")})
    """
    progress = make_progress(steps, "steps", visible=True, passing=True)

    def tell(step: int, values: Mapping[int, float]) -> None:
        finite = [value for value in values.values() if math.isfinite(value)]
        if finite:
            progress.update({"kind": "train", "step": step, "loss": min(finite)}, 0.0)

    try:
        yield tell
    finally:
        progress.close()
