"""A line of a million points, drawn with some hundred: its extremes stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def keep_extremes(low: Sequence[float], high: Sequence[float], most: int) -> list[int]:
    """Which points to draw: of every stretch the lowest and the highest, and the first and the last of all.

    >>> from mupscale.plots import keep_extremes
    >>> values = [1.0] * 50 + [9.0] + [1.0] * 49
    >>> [values[i] for i in keep_extremes(values, values, 6)]
    [1.0, 9.0, 1.0, 1.0]
    """
    count = len(low)
    if count <= most:
        return list(range(count))
    lows, highs = np.nan_to_num(np.asarray(low), nan=np.inf), np.nan_to_num(np.asarray(high), nan=-np.inf)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int).tolist()
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(lows[start:end].argmin()), start + int(highs[start:end].argmax())}
    return sorted(kept)
