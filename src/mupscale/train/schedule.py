"""How the learning rate goes over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over the run, as a multiple of the optimizer's lr.

    Args:
        kind: constant; cosine (falls to floor after the warm-up); or wsd (warm-up, stable, then linear decay)
        warmup: steps of linear warm-up
        decay: steps of the decay at the end (wsd only)
        floor: final learning rate, as a fraction of lr (cosine and wsd)
        before: where a run is a part of a longer one, steps that came before it; the schedule is that of the whole
        after: steps that come after it

    Example:
        >>> [Schedule("wsd", warmup=2, decay=3).at(step, 10) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
        >>> Schedule("cosine", before=3, after=2).at(1, 5) == Schedule("cosine").at(4, 10)
        True
    """

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0
    before: int = 0
    after: int = 0

    def at(self, step: int, steps: int) -> float:
        """The multiple for the step after `step` ones, of `steps`; a function of these alone, so without a state."""
        step, steps = self.before + step, self.before + steps + self.after
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / max(1, steps - self.warmup)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "wsd" and step >= steps - self.decay:
            return self.floor + (1 - self.floor) * max(0, steps - step) / (self.decay + 1)
        return 1.0
