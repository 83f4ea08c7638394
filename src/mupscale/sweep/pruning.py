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

from mupscale.sweep.storage import load_optuna

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.study import Study
    from optuna.trial import FrozenTrial


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

    def rung(self, step: int, steps: int) -> int:
        """Which rung a step is; the engine may reach it at the nearest point of a curve."""
        return min(range(len(self.rungs)), key=lambda i: abs(self.rungs[i] * steps - step))

    def is_behind(
        self, noise: float, value: float, trials: Iterable[tuple[float, float]], at_equal_noise: bool
    ) -> bool:
        """Whether to stop a trial of this noise and loss, given every (noise, loss) at the rung, its own included."""
        if not math.isfinite(value):
            return True
        finite = [(level, loss) for level, loss in trials if math.isfinite(loss)]
        same_noise = sorted(loss for level, loss in finite if level == noise)
        if noise == 0 and value <= same_noise[0]:
            return False
        return value > self.limit(same_noise if at_equal_noise else sorted(loss for _, loss in finite))

    def limit(self, compared: Sequence[float]) -> float:
        """The largest of these losses, in ascending order, that goes on."""
        if self.reduction is None:
            return median(compared)
        return compared[max(1, round(len(compared) / self.reduction)) - 1]


MEDIAN = PruningRule(rungs=(0.15, 0.35, 0.6))
HALVING = PruningRule(rungs=(0.1, 0.3, 0.5), reduction=2)
RULES: Mapping[str, PruningRule | None] = {"none": None, "median": MEDIAN, "halving": HALVING}


def make_pruner(name: str, steps: int, levels: Sequence[float]) -> BasePruner:
    """The rule of this name as a pruner of optuna's, for any study whose trials have a parameter `noise`."""
    load_optuna()
    from optuna.pruners import BasePruner, NopPruner

    rule = RULES[name]
    if rule is None:
        return NopPruner()
    active, rungs = rule, frozenset(rule.steps(steps))

    class RungPruner(BasePruner):  # type: ignore[misc]
        """Stops a trial at a rung where it is behind, by what the study's storage holds."""

        def prune(self, study: Study, trial: FrozenTrial) -> bool:
            step = trial.last_step
            if step not in rungs:
                return False
            return is_behind(active, trial, study.get_trials(deepcopy=False), step, steps, levels)

    return RungPruner()


def is_behind(
    rule: PruningRule, trial: FrozenTrial, trials: Iterable[FrozenTrial], step: int, steps: int, levels: Sequence[float]
) -> bool:
    """Whether to stop this trial at this step, given all trials; noise between two levels counts as the nearer one."""
    rung = rule.rung(step, steps)
    before = rule.rungs[rung - 1] * steps if rung else None
    others = [
        (_level(other.params["noise"], levels), _expected_final_loss(other, step, before, steps))
        for other in trials
        if other.number != trial.number and step in other.intermediate_values and "noise" in other.params
    ]
    own = (_level(trial.params["noise"], levels), _expected_final_loss(trial, step, before, steps))
    return rule.is_behind(*own, [own, *others], at_equal_noise=rung == 0)


def trials_behind(
    rule: PruningRule, trials: Iterable[FrozenTrial], step: int, steps: int, levels: Sequence[float]
) -> set[int]:
    """The numbers of those of the trials that `is_behind` would stop at this step, all of them judged at once."""
    rung = rule.rung(step, steps)
    before = rule.rungs[rung - 1] * steps if rung else None
    values = {
        trial.number: (_level(trial.params["noise"], levels), _expected_final_loss(trial, step, before, steps))
        for trial in trials
        if step in trial.intermediate_values and "noise" in trial.params
    }
    by_level: dict[float, list[float]] = {}
    for level, loss in values.values():
        if math.isfinite(loss):
            by_level.setdefault(level if rung == 0 else 0.0, []).append(loss)
    limits = {level: rule.limit(sorted(losses)) for level, losses in by_level.items()}
    zeros = min((loss for level, loss in values.values() if level == 0 and math.isfinite(loss)), default=math.inf)

    def goes_on(level: float, loss: float) -> bool:
        if not math.isfinite(loss):
            return False
        return (level == 0 and loss <= zeros) or loss <= limits[level if rung == 0 else 0.0]

    return {number for number, (level, loss) in values.items() if not goes_on(level, loss)}


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
