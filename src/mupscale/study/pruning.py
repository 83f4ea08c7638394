"""When to stop a trial that falls behind, for trials that are trained at once.

Optuna's own rules compare with completed trials alone, or with whoever came first; here all trials of a sweep reach a
rung at nearly the same time, and each is compared with every value that any trial of the study reported there.

Noise makes a model worse before it makes it better, so a comparison of losses across noise levels would choose too
little noise, the more so the earlier it comes. At the first rung learning rates are therefore compared at equal noise;
later everything is compared with everything, but by where losses lead: the line through a trial's last two rungs over
the logarithm of the step, continued to the end. The best zero-noise trial is never stopped: without it nobody could
say whether noise pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mupscale.study.space import Space


@dataclass(frozen=True)
class PruningRule:
    """Which of the trials at a rung are good enough to go on.

    rungs: where they are compared, as fractions of the steps. reduction: successive halving keeps one of so many at
    each of them; None stops what is worse than the median.
    """

    rungs: tuple[float, ...]
    reduction: int | None = None

    def steps(self, steps: int) -> list[int]:
        """The rungs in steps, each once, none at the very beginning or the end."""
        return sorted({round(rung * steps) for rung in self.rungs} - {0, steps})

    def find_behind(self, trials: Iterable[FrozenTrial], step: int, steps: int, space: Space) -> set[int]:
        """The numbers of the trials to stop at this step; noise between two levels counts as the nearer one."""
        rung = min(range(len(self.rungs)), key=lambda i: abs(self.rungs[i] * steps - step))  # a curve's nearest point
        before = self.rungs[rung - 1] * steps if rung else None
        values = {
            trial.number: (
                _level(trial.params[space.second], space.noises),
                _expected_final_loss(trial, step, before, steps),
            )
            for trial in trials
            if step in trial.intermediate_values and space.second in trial.params
        }
        compared: dict[float, list[float]] = {}  # by noise at the first rung, all in one list later
        for level, loss in values.values():
            if math.isfinite(loss):
                compared.setdefault(0.0 if rung else level, []).append(loss)
        limits = {level: self._limit(sorted(losses)) for level, losses in compared.items()}
        best = min((loss for level, loss in values.values() if level == 0 and math.isfinite(loss)), default=-math.inf)
        return {
            number
            for number, (level, loss) in values.items()
            if not (math.isfinite(loss) and (loss <= limits[0.0 if rung else level] or (level == 0 and loss <= best)))
        }

    def _limit(self, losses: Sequence[float]) -> float:
        """The largest of these losses, in ascending order, that goes on."""
        return median(losses) if self.reduction is None else losses[max(1, round(len(losses) / self.reduction)) - 1]


MEDIAN = PruningRule(rungs=(0.15, 0.35, 0.6))
HALVING = PruningRule(rungs=(0.1, 0.3, 0.5), reduction=2)
RULES: Mapping[str, PruningRule | None] = {"none": None, "median": MEDIAN, "halving": HALVING}


def _expected_final_loss(trial: FrozenTrial, step: int, before: float | None, steps: int) -> float:
    """The loss itself at the first rung; later, the line over log step through this rung and the last, to the end."""
    values = trial.intermediate_values
    earlier = [other for other in values if 0 < other < step]
    if before is None or not earlier:
        return float(values[step])
    last = min(earlier, key=lambda other: abs(other - before))
    slope = (values[step] - values[last]) / math.log(step / last)
    return float(values[step] + slope * math.log(steps / step))


def _level(noise: float, levels: Sequence[float]) -> float:
    """The nearest level; zero is for zero alone."""
    return 0.0 if noise == 0 else min((level for level in levels if level), key=lambda level: abs(level - noise))
