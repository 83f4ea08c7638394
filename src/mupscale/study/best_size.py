"""Which of two sizes is the better one at a budget, and from which budget the larger one is: from small runs.

In a small system the base model that goes on and the wide one from scratch are two sizes, each trained at several
budgets. Straight lines through their losses, in logarithms, meet at a cost: the crossing. From size to size it grows
with the square of what a step costs, if a size needs data in proportion to it; and along a line through the crossings
of several small systems. The range goes over both rules, and over the seeds; one seed has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import linear_regression
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.plots import words
from mupscale.study.contenders import CONTINUED, FROM_SCRATCH
from mupscale.study.results import SystemRuns
from mupscale.study.systems import System
from mupscale.system import recipe_entry

_FAR = math.log(1e6)  # times the budget: nobody knows how lines go on there
CAVEAT = (
    "Growing does not beat the best size, trained from the start. It saves the compute already spent on the base model."
)


def forecast_size_of(system: System, small: Sequence[SystemRuns]) -> dict[str, Any]:
    """The better one of a system's two sizes, with all that its base model and the growth cost; {} where not told."""
    names = {one.name for one in small[0].contenders}
    if system.base_steps is None or not {CONTINUED.name, FROM_SCRATCH.name} <= names:
        return {}
    each = system.costs.cost_per_step
    budget = (system.base_steps + system.steps(CONTINUED)) * each(system.narrow)
    return forecast_size(small, system.narrow, system.wide, budget, each)


def forecast_size(
    small: Sequence[SystemRuns],
    narrow: WholeWidth,
    wide: WholeWidth,
    budget: float,
    cost: Callable[[WholeWidth], float],
) -> dict[str, Any]:
    """The better size at a budget, None where it is too close to call, and the cost from which the wide one is.

    cost: of a step at a width. overtakes: {low, value, high}; empty where lines do not meet.
    """
    if any(runs.unit != "FLOPs" for runs in small):
        return {}
    seeds = min(runs.seeds for runs in small)
    found = [
        at
        for seed in range(seeds)
        for at in _extrapolate([_crossing(runs, seed) for runs in small], small, narrow, cost)
    ]
    sizes = {"narrow": narrow, "wide": wide, "budget": budget, "best": narrow}
    told: dict[str, Any] = {**sizes, "overtakes": {}, "seeds": seeds}
    if found and None not in found:
        logs = sorted(at for at in found if at is not None)
        if logs[-1] - math.log(budget) < _FAR:
            low, value, high = (math.exp(at) for at in (logs[0], math.fsum(logs) / len(logs), logs[-1]))
            if seeds < 2:  # the two rules alone would give a range that is far too narrow
                low = high = value
            told["overtakes"] = {"low": low, "value": value, "high": high}
            told["best"] = narrow if low > budget else wide if high < budget else None
    return {**told, "sentence": write_size(told)}


def _crossing(runs: SystemRuns, seed: int) -> float | None:
    """The logarithm of the cost at which the wide model from scratch meets the base model that goes on."""
    lines = []
    for name in (CONTINUED.name, FROM_SCRATCH.name):
        points = [(math.log(spent), math.log(loss)) for spent, loss in runs.curve(name, seed=seed) if loss > 0]
        if len({at for at, _ in points}) < 2:
            return None
        lines.append(linear_regression(*zip(*points, strict=True)))
    ours, theirs = lines
    return None if theirs.slope >= ours.slope else (theirs.intercept - ours.intercept) / (ours.slope - theirs.slope)


def _extrapolate(
    crossings: Sequence[float | None],
    small: Sequence[SystemRuns],
    narrow: WholeWidth,
    cost: Callable[[WholeWidth], float],
) -> list[float | None]:
    """What each rule makes of one seed's crossings; None where they do not meet."""
    sizes, here = [math.log(cost(runs.narrow)) for runs in small], math.log(cost(narrow))
    known = [at for at in crossings if at is not None]
    if len(known) < len(crossings):
        return [None]
    rules: list[float | None] = [known[-1] + 2 * (here - sizes[-1])]
    if len(set(sizes)) > 1:
        line = linear_regression(sizes, known)
        rules.append(line.slope * here + line.intercept)
    return rules


def write_size(told: Mapping[str, Any]) -> str:
    """The better size in words."""
    narrow, wide, budget = Width.of(told["narrow"]), Width.of(told["wide"]), words.format_flops(told["budget"])
    at = told["overtakes"]
    when = f"The small runs show no budget at which {wide.phrase} is better"
    if at:
        when = f"{wide.phrase[0].upper()}{wide.phrase[1:]} is better from about {words.format_flops(at['value'])} on"
        if at["low"] < at["high"]:
            when += f" ({words.format_flops(at['low'])} to {words.format_flops(at['high'])})"
    if told["best"] is None:
        said = f"At {budget} in all, it is too close to call between {narrow.phrase} and {wide}"
    else:
        better, other = (narrow, wide) if Width.of(told["best"]) == narrow else (wide, narrow)
        said = f"At {budget} in all, {better.phrase} is a better size than {other}"
        if told.get("seeds", 2) < 2:
            said = f"At {budget} in all, {better.phrase} may be a better size than {other}"
            when += f". That is from one seed, which has no range: {recipe_entry('study.small_seeds')} 3 gives one"
    return f"{said}. {when}. {CAVEAT}"
