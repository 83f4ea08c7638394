"""What small systems say about the large one, before it is trained, and whether it came true.

For every quantity each small system gives a mean and a spread over its seeds. With one small width nobody knows the
trend, so the range goes from no difference to twice that width's. With several, a straight line over the logarithm of
the width is followed. Its range is the largest spread, and as much again as the line leads away from the widest small
system. Where small widths contradict each other by more than their spreads, there is no rule, and the forecast says so
instead of a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from mupscale.core import WholeWidth, Width
from mupscale.study.budgets import compare_costs
from mupscale.study.contenders import CONTINUED, FROM_SCRATCH, contender_named
from mupscale.study.results import SystemRuns

Quantity = Callable[[SystemRuns, int], float | None]
"""A number of one seed of a system; None where a contender diverged."""
LOSS_ROW = ", loss compared with continuing"
COST_ROWS = {
    "charged": ", cost compared with starting over, base model included",
    "there": ", cost compared with starting over, base model already there",
}
"""What is forecast of a contender, behind its label."""


def make_forecast(small: Sequence[SystemRuns], narrow: WholeWidth) -> dict[str, Any]:
    """The forecast for a base model of this width, as plain values.

    above_continued: for every other contender, by how much of its loss it ends above the base model continued at the
    full budget: {low, value, high}, or {no_rule: why}. cost: for every grown one, what it costs over starting over to
    the same loss, with the base model charged and with it already there. winner: None where that is too close to call.

    >>> from mupscale.study import BudgetPoint, ContenderRuns
    >>> ends = {"continued": 1.0, "fresh": 0.9}
    >>> points = {name: [BudgetPoint(1.0, 10, 100.0, [end, end + 0.01])] for name, end in ends.items()}
    >>> small = SystemRuns(8, 16, 50.0, "FLOPs", [ContenderRuns(n, 16, 0.01, 0.0, each) for n, each in points.items()])
    >>> make_forecast([small], 64)["sentence"]
    'Forecast from width 8: too close to call between growing with fresh units and continuing the base model.'
    """
    names = [runs.name for runs in small[0].contenders]
    above = {
        name: _extrapolate(small, narrow, _loss_quantity(name), math.expm1) for name in names if name != CONTINUED.name
    }
    grown = [name for name in names if contender_named(name).is_grown]
    cost = {
        name: {
            way: _extrapolate(small, narrow, _cost_quantity(name, flag), math.exp)
            for way, flag in (("charged", True), ("there", False))
        }
        for name in grown
        if FROM_SCRATCH.name in names
    }
    values = {
        "widths": [runs.narrow for runs in small],
        "seeds": min(runs.seeds for runs in small),
        "above_continued": above,
        "cost": cost,
        **_pick_winner(above),
    }
    return {**values, "sentence": write_forecast(values)}


def _loss_quantity(name: str) -> Quantity:
    """The logarithm of a contender's final loss over that of the base model continued."""

    def quantity(runs: SystemRuns, seed: int) -> float | None:
        ours, theirs = (_final(runs, one, seed) for one in (name, CONTINUED.name))
        return None if ours is None or theirs is None else math.log(ours / theirs)

    return quantity


def _final(runs: SystemRuns, name: str, seed: int) -> float | None:
    one = runs.get(name)
    return None if one is None else one.points[-1].losses[seed]


def _cost_quantity(name: str, charged: bool) -> Quantity:
    """The logarithm of what a contender costs over starting over, to the same loss."""

    def quantity(runs: SystemRuns, seed: int) -> float | None:
        ours, theirs = (runs.curve(one, charged=charged, seed=seed) for one in (name, FROM_SCRATCH.name))
        ratio = compare_costs(ours, theirs)
        return None if ratio is None else math.log(ratio.value)

    return quantity


def _extrapolate(
    small: Sequence[SystemRuns], narrow: WholeWidth, quantity: Quantity, back: Callable[[float], float]
) -> dict[str, Any]:
    """A quantity at the large width: {low, value, high}, or {no_rule: why}. back: from its logarithm."""
    if any(runs.seeds < 2 for runs in small):
        return {"no_rule": "one seed says nothing about the range"}
    points: list[tuple[float, float, float]] = []
    for runs in small:
        values = [value for seed in range(runs.seeds) if (value := quantity(runs, seed)) is not None]
        if not values:
            return {"no_rule": f"it diverged at width {Width.of(runs.narrow)}"}
        points.append((math.log(Width.of(runs.narrow).size), fmean(values), (max(values) - min(values)) / 2))
    spread = max(each for _, _, each in points)
    ends = [points[0], points[-1]]
    if len(points) > 1 and all(abs(value) > spread for _, value, _ in ends) and ends[0][1] * ends[1][1] < 0:
        shown = " and ".join(f"{back(value):.3g} at width {Width.of(runs.narrow)}" for (_, value, _), runs in zip(
            ends, (small[0], small[-1]), strict=True))  # fmt: skip
        return {"no_rule": f"small widths contradict each other: {shown}"}
    value = _line_at(points, math.log(Width.of(narrow).size))
    reach = spread + (abs(value) if len(points) == 1 else abs(value - points[-1][1]))
    return {"low": back(value - reach), "value": back(value), "high": back(value + reach)}


def _line_at(points: Sequence[tuple[float, float, float]], x: float) -> float:
    """The straight line of least squares; the one value where there is one point."""
    if len(points) == 1:
        return points[0][1]
    middle, level = fmean(each[0] for each in points), fmean(each[1] for each in points)
    across = math.fsum((at - middle) ** 2 for at, _, _ in points)
    slope = math.fsum((at - middle) * (value - level) for at, value, _ in points) / across
    return level + slope * (x - middle)


def _pick_winner(above: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Growing, by the way that is expected to end lowest, against its rivals; the base model continued is at 0.

    winner: whichever lies below the others with its whole range; None where none does, or one has no rule. likeliest:
    the two that come first.
    """
    unsure = [name for name, one in above.items() if "no_rule" in one and not contender_named(name).full_steps]
    ranges = {CONTINUED.name: (0.0, 0.0, 0.0)}
    ranges |= {
        name: (one["low"], one["value"], one["high"])
        for name, one in above.items()
        if name not in unsure and not contender_named(name).full_steps
    }
    grown = [name for name in ranges if contender_named(name).is_grown]
    best = min(grown, key=lambda name: ranges[name][1], default=None)
    order = sorted((name for name in ranges if name not in grown or name == best), key=lambda name: ranges[name][1])
    clear = not unsure and all(ranges[order[0]][2] < ranges[name][0] for name in order[1:])
    return {"winner": order[0] if clear else None, "likeliest": order[:2], "without_rule": unsure}


def write_forecast(values: Mapping[str, Any]) -> str:
    """The forecast in words."""
    about = f"Forecast from width {' and '.join(str(Width.of(width)) for width in values['widths'])}"
    if values["without_rule"]:
        names = ", ".join(contender_named(name).label for name in values["without_rule"])
        why = values["above_continued"][values["without_rule"][0]]["no_rule"]
        return f"{about}: no rule fits ({names}: {why})."
    first, second = (contender_named(name) for name in values["likeliest"])
    if values["winner"] is None:
        return f"{about}: too close to call between {first.phrase} and {second.phrase}."
    shown = second.name if first.name == CONTINUED.name else first.name
    what = f"{second.label} " if first.name == CONTINUED.name else ""
    return f"{about}: {first.phrase} ends lowest, {what}{_range(values, shown)} against continuing."


def _range(values: Mapping[str, Any], name: str) -> str:
    one = values["above_continued"][name]
    return f"{_percent(one['value'])} % ({_percent(one['low'])} to {_percent(one['high'])})"


def _percent(part: float) -> str:
    return f"{100 * part:+.{0 if abs(part) >= 0.1 else 1}f}"


def check_forecast(forecast: Mapping[str, Any], runs: SystemRuns, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Forecast against outcome: a row for every quantity with both, and whether the outcome lies in the range.

    >>> from mupscale.study import BudgetPoint, ContenderRuns
    >>> ends = {"continued": 1.0, "fresh": 0.9}
    >>> points = {name: [BudgetPoint(1.0, 10, 100.0, [end])] for name, end in ends.items()}
    >>> runs = SystemRuns(8, 16, 50.0, "FLOPs", [ContenderRuns(n, 16, 0.01, 0.0, each) for n, each in points.items()])
    >>> forecast = {"above_continued": {"fresh": {"low": -0.2, "value": -0.1, "high": 0.0}}, "cost": {}, "winner": None}
    >>> [row["held"] for row in check_forecast(forecast, runs, {"ranking": ["fresh", "continued"], "grown": "fresh"})]
    [True, None]
    """
    rows: list[dict[str, Any]] = []
    continued = runs.get(CONTINUED.name)
    for name, expected in forecast["above_continued"].items():
        one = runs.get(name)
        if one is None or one.final is None or continued is None or continued.final is None:
            continue
        rows.append(_row(f"{contender_named(name).label}{LOSS_ROW}", expected, one.final / continued.final - 1))
    for name, ways in forecast["cost"].items():
        for way, expected in ways.items():
            charged = way == "charged"
            ratio = compare_costs(runs.curve(name, charged=charged), runs.curve(FROM_SCRATCH.name, charged=charged))
            if ratio is not None and (runs.base_cost is not None or not charged):
                rows.append(_row(f"{contender_named(name).label}{COST_ROWS[way]}", expected, ratio.value))
    grown, rivals = answer["grown"], [name for name in answer["ranking"] if not contender_named(name).is_grown]
    lowest = next(name for name in answer["ranking"] if name == grown or name in rivals)
    rows.append({"what": "lowest loss", "forecast": forecast["winner"], "measured": lowest,
                 "held": None if forecast["winner"] is None else forecast["winner"] == lowest})  # fmt: skip
    return rows


def _row(what: str, expected: Mapping[str, Any], measured: float) -> dict[str, Any]:
    held = None if "no_rule" in expected else expected["low"] <= measured <= expected["high"]
    return {"what": what, "forecast": dict(expected), "measured": measured, "held": held}
