"""What small systems say about the large one, before it is trained, and whether it came true.

For every quantity each small system gives a mean and a spread over its seeds. With one small width nobody knows the
trend, so the range goes from no difference to twice that width's. With several, a straight line over the logarithm of
the width is followed. Its range is the largest spread, and as much again as the line leads away from the widest small
system. Where small widths contradict each other by more than their spreads, there is no rule, and the forecast says so
instead of a number.

The paper's comparison follows the same line to extrapolate the best noise and learning rate. Transfer as in the paper
takes them as they are; with two small widths tuned, what is left of a drift can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import CONTINUED, FROM_SCRATCH, contender_named
from mupscale.study.loss_gaps import GapKind, choose_gap_kind, gap_above, stored_gap_kind
from mupscale.study.results import SystemRuns
from mupscale.study.space import Cell, Sweep
from mupscale.study.verdict import compare_costs
from mupscale.system import recipe_entry, words

Quantity = Callable[[SystemRuns, int], float | None]
"""A number of one seed of a system; None where a contender diverged."""
LOSS_ROW = ", loss compared with continuing"
COST_ROWS = {
    "charged": ", cost compared with starting over, base model included",
    "there": ", cost compared with starting over, if you already have the base model",
}
"""What is forecast of a contender, behind its label."""


class Line(NamedTuple):
    """A straight line."""

    slope: float
    intercept: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line of least squares; through points of one x a level one."""
    if len({x for x, _ in points}) < 2:
        return Line(0.0, fmean(y for _, y in points))
    return Line(*linear_regression(*zip(*points, strict=True)))


# ---------------------------------------------------------------------------------------------- does growing pay?


def make_forecast(small: Sequence[SystemRuns], narrow: WholeWidth) -> dict[str, Any]:
    """The forecast for a base model of this width, as plain values.

    above_continued: for every other contender, by how much it ends above the base model continued at the full budget:
    {low, value, high}, or {no_rule: why}. gap: whether that is a share of the loss, or a difference. cost: for every
    grown one, what it costs over starting over to the same loss, with the base model charged and with it already there.
    winner: None where that is too close to call.
    """
    names = [runs.name for runs in small[0].contenders]
    gap = choose_gap_kind(loss for runs in small for one in runs.contenders for loss in one.finals)
    back: Callable[[float], float] = math.expm1 if gap == "share" else float
    above = {name: _extend(small, narrow, _loss_quantity(name, gap), back) for name in names if name != CONTINUED.name}
    cost = {
        name: {way: _extend(small, narrow, _cost_quantity(name, way == "charged"), math.exp) for way in COST_ROWS}
        for name in names
        if FROM_SCRATCH.name in names and contender_named(name).is_grown
    }
    values = {
        "widths": [runs.narrow for runs in small],
        "seeds": min(runs.seeds for runs in small),
        "above_continued": above,
        "gap": gap,
        "cost": cost,
        **_pick_winner(above),
    }
    return {**values, "sentence": _write_forecast(values)}


def _loss_quantity(name: str, gap: GapKind) -> Quantity:
    """How far a contender ends above the base model continued: the logarithm of a ratio, or a difference."""

    def quantity(runs: SystemRuns, seed: int) -> float | None:
        both = [one.points[-1].losses[seed] for each in (name, CONTINUED.name) if (one := runs.get(each)) is not None]
        ours, theirs = both if len(both) == 2 else (None, None)
        if ours is None or theirs is None:
            return None
        return math.log(ours / theirs) if gap == "share" else ours - theirs

    return quantity


def _cost_quantity(name: str, charged: bool) -> Quantity:

    def quantity(runs: SystemRuns, seed: int) -> float | None:
        ratio = compare_costs(*(runs.curve(one, charged=charged, seed=seed) for one in (name, FROM_SCRATCH.name)))
        return None if ratio is None else math.log(ratio.value)

    return quantity


def _extend(
    small: Sequence[SystemRuns], narrow: WholeWidth, quantity: Quantity, back: Callable[[float], float]
) -> dict[str, Any]:
    """A quantity at the large width: {low, value, high}, or {no_rule: why}. back: what it stands for."""
    if any(runs.seeds < 2 for runs in small):
        return {"no_rule": "one seed says nothing about the range"}
    points: list[tuple[float, float]] = []
    spread = 0.0
    for runs in small:
        values = [value for seed in range(runs.seeds) if (value := quantity(runs, seed)) is not None]
        if not values:
            return {"no_rule": f"it diverged at {Width.of(runs.narrow).phrase}"}
        points.append((math.log(Width.of(runs.narrow).size), fmean(values)))
        spread = max(spread, (max(values) - min(values)) / 2)
    first, last = points[0][1], points[-1][1]
    if min(abs(first), abs(last)) > spread and first * last < 0:
        ends = zip((first, last), (small[0], small[-1]), strict=True)
        shown = " and ".join(f"{back(value):.3g} at {Width.of(runs.narrow).phrase}" for value, runs in ends)
        return {"no_rule": f"small widths contradict each other: {shown}"}
    value = fit_line(points).at(math.log(Width.of(narrow).size))
    reach = spread + (abs(value) if len(points) == 1 else abs(value - last))
    return {"low": back(value - reach), "value": back(value), "high": back(value + reach)}


def _pick_winner(above: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Growing, by the way that is expected to end lowest, against its rivals; the base model continued is at 0.

    winner: whichever lies below the others with its whole range; None where none does, or one has no rule. likeliest:
    the two that come first; without a winner, all whose ranges reach the first one's, every way of growing included.
    """
    judged = {name: one for name, one in above.items() if not contender_named(name).full_steps}
    unsure = [name for name, one in judged.items() if "no_rule" in one]
    ranges = {CONTINUED.name: (0.0, 0.0, 0.0)}
    ranges |= {name: (one["low"], one["value"], one["high"]) for name, one in judged.items() if name not in unsure}
    grown = [name for name in ranges if contender_named(name).is_grown]
    best = min(grown, key=lambda name: ranges[name][1], default=None)
    order = sorted((name for name in ranges if name not in grown or name == best), key=lambda name: ranges[name][1])
    clear = not unsure and all(ranges[order[0]][2] < ranges[name][0] for name in order[1:])
    near = [name for name, (low, _, _) in ranges.items() if low <= ranges[order[0]][2]]
    likeliest = order[:2] if clear else sorted(near, key=lambda name: ranges[name][1])
    return {"winner": order[0] if clear else None, "likeliest": likeliest, "without_rule": unsure}


def _write_forecast(values: Mapping[str, Any]) -> str:
    smallest, *others = map(Width.of, values["widths"])
    about = f"Forecast from {' and '.join([smallest.phrase, *map(str, others)])}"
    if values["without_rule"]:
        *names, last = (contender_named(name).phrase for name in values["without_rule"])
        why = values["above_continued"][values["without_rule"][0]]["no_rule"]
        return f"{about}: none for {' and '.join([', '.join(names), last] if names else [last])}, because {why}."
    likeliest = [contender_named(name) for name in values["likeliest"]]
    if values["winner"] is None:
        *phrases, last = (one.phrase for one in likeliest)
        return f"{about}: too close to call between {', '.join(phrases)} and {last}."
    first, second = likeliest
    shown, what = (second, f"{second.label} ") if first is CONTINUED else (first, "")
    one = values["above_continued"][shown.name]
    parts = one["value"], one["low"], one["high"]
    if stored_gap_kind(values) == "difference":
        value, low, high = (f"{part:+.2g}" for part in parts)
        return f"{about}: {first.phrase} ends lowest, {what}{value} in loss ({low} to {high}) against continuing."
    value, low, high = (f"{100 * part:+.{0 if abs(part) >= 0.1 else 1}f}" for part in parts)
    return f"{about}: {first.phrase} ends lowest, {what}{value} % ({low} to {high}) against continuing."


def check_forecast(forecast: Mapping[str, Any], runs: SystemRuns, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Forecast against outcome: a row for every quantity with both, and whether the outcome lies in the range."""
    rows: list[dict[str, Any]] = []

    def add(name: str, what: str, expected: Mapping[str, Any], measured: float, **more: Any) -> None:
        held = None if "no_rule" in expected else expected["low"] <= measured <= expected["high"]
        about = f"{contender_named(name).label}{what}"
        rows.append({"what": about, "forecast": dict(expected), "measured": measured, "held": held, **more})

    continued = runs.get(CONTINUED.name)
    for name, expected in forecast["above_continued"].items():
        one = runs.get(name)
        if one is not None and one.final is not None and continued is not None and continued.final is not None:
            gap = stored_gap_kind(forecast)
            if gap == "share" and choose_gap_kind([one.final, continued.final]) == "difference":
                gap, expected = "difference", {"no_rule": "only the large models' losses are negative"}
            add(name, LOSS_ROW, expected, gap_above(one.final, continued.final, gap), gap=gap)
    # With one budget a ratio of costs would be that of what was spent, whatever the losses are.
    has_curves = any(len(one.points) > 1 for one in runs.contenders)
    for name, ways in forecast["cost"].items() if has_curves else ():
        for way, expected in ways.items():
            charged = way == "charged"
            ratio = compare_costs(runs.curve(name, charged=charged), runs.curve(FROM_SCRATCH.name, charged=charged))
            if ratio is not None and (runs.base_cost is not None or not charged):
                add(name, COST_ROWS[way], expected, ratio.value)
    rivals = [name for name in answer["ranking"] if name == answer["grown"] or not contender_named(name).is_grown]
    winner = forecast["winner"]
    held = None if winner is None else winner == rivals[0]
    return [*rows, {"what": "lowest loss", "forecast": winner, "measured": rivals[0], "held": held}]


# ---------------------------------------------------------------------------------------------- which size is better?

_FAR = math.log(1e6)  # times the budget: nobody knows how lines go on there
CAVEAT = (
    "Growing does not beat the best size, trained from the start. It saves the compute already spent on the base model."
)


def forecast_size(
    small: Sequence[SystemRuns],
    narrow: WholeWidth,
    wide: WholeWidth,
    budget: float,
    cost: Callable[[WholeWidth], float],
) -> dict[str, Any]:
    """The better size at a budget, None where it is too close to call, and the cost from which the wide one is.

    In a small system the base model that goes on and the wide one from scratch are two sizes, each trained at several
    budgets. Straight lines through their losses, in logarithms, meet at a cost: the crossing. From size to size it
    grows with the square of what a step costs, if a size needs data in proportion to it; and along a line through the
    crossings of several small systems. The range goes over both rules, and over the seeds; one seed has none.
    cost: of a step at a width. overtakes: {low, value, high}; empty where lines do not meet. {} where it is not told.
    """
    if any(runs.unit != "FLOPs" or runs.get(FROM_SCRATCH.name) is None for runs in small):
        return {}
    seeds, here = min(runs.seeds for runs in small), math.log(cost(narrow))
    steps = [math.log(cost(runs.narrow)) for runs in small]
    sizes = {"narrow": narrow, "wide": wide, "budget": budget, "best": narrow}
    told: dict[str, Any] = {**sizes, "overtakes": {}, "seeds": seeds}
    crossings = [[_crossing(runs, seed) for runs in small] for seed in range(seeds)]
    logs: list[float] = []  # what each rule makes of each seed's crossings
    for known in crossings if all(None not in some for some in crossings) else ():
        at = [one for one in known if one is not None]
        logs.append(at[-1] + 2 * (here - steps[-1]))
        if len(set(steps)) > 1:
            logs.append(fit_line(list(zip(steps, at, strict=True))).at(here))
    if logs and max(logs) - math.log(budget) < _FAR:
        low, value, high = (math.exp(at) for at in (min(logs), math.fsum(logs) / len(logs), max(logs)))
        if seeds < 2:  # the two rules alone would give a range that is far too narrow
            low = high = value
        told["overtakes"] = {"low": low, "value": value, "high": high}
        told["best"] = None if low <= budget <= high else narrow if low > budget else wide
    return {**told, "sentence": write_size(told)}


def _crossing(runs: SystemRuns, seed: int) -> float | None:
    """The logarithm of the cost at which the wide model from scratch meets the base model that goes on."""
    lines = []
    for name in (CONTINUED.name, FROM_SCRATCH.name):
        points = [(math.log(spent), math.log(loss)) for spent, loss in runs.curve(name, seed=seed) if loss > 0]
        if len({at for at, _ in points}) < 2:
            return None
        lines.append(fit_line(points))
    ours, theirs = lines
    return None if theirs.slope >= ours.slope else (theirs.intercept - ours.intercept) / (ours.slope - theirs.slope)


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


# ---------------------------------------------------------------------------------------------- what the sweeps found

LIMIT = 4.0
"""The largest factor between an extrapolated value and that of the largest small width, either way."""

_AXES = {"noise": "noise", "lr": "learning rate"}


def extrapolate(sweeps: Sequence[tuple[float, Sweep]], width: float) -> tuple[Cell, list[str]]:
    """The optimum of Sweep 2 at each small width, continued to `width` along a power of it; and sentences about that.

    From one small width it is transferred as it is (plain transfer).
    """
    ordered = sorted(sweeps, key=lambda pair: pair[0])
    widths = [small for small, _ in ordered]
    last = ordered[-1][1]
    plain = last.best.cell
    if len(widths) == 1:
        return plain, []
    zeros = [small for small, sweep in ordered if sweep.best.noise == 0]
    value, sentences = dict(plain._asdict()), list[str]()
    if zeros:
        where = " and ".join(f"{small:g}" for small in zeros)
        stays = f"so it is not extrapolated: noise {plain.noise:.3g} is transferred"
        sentences.append(f"at width {where} the best noise is 0, {stays}")
    axes = list(_AXES) if not zeros else ["lr"]
    if zeros and len(zeros) < len(widths):  # with and without noise are two different optima
        axes = []
    for axis in axes:
        optima = [_between(sweep, axis) for _, sweep in ordered]
        power = fit_line([(math.log2(n), math.log2(best)) for n, best in zip(widths, optima, strict=True)]).slope
        value[axis], limited = _limited(optima[-1], power * math.log2(width / widths[-1]), last, axis)
        sentences.append(
            f"from width {widths[0]:g} to {widths[-1]:g} the best {_AXES[axis]} goes from {optima[0]:.3g} to "
            f"{optima[-1]:.3g} (×{2**power:.2f} for each doubling); at width {width:g} that makes {value[axis]:.3g}"
            f"{limited}, where plain transfer has {getattr(plain, axis):.3g}"
        )
    return Cell(**value), [*sentences, *_gains(ordered, width)]


def _gains(sweeps: Sequence[tuple[float, Sweep]], width: float) -> list[str]:
    """What noise gains at each small width, and where that leads; it may fall, since wide models lack less capacity."""
    pairs = [(small, sweep.best.loss, sweep.best_without_noise) for small, sweep in sweeps]
    losses = {n: (best, zero.loss) for n, best, zero in pairs if best and zero is not None and zero.loss}
    gains = {n: 1 - best / zero for n, (best, zero) in losses.items() if best > 0 and zero > 0}
    if len(gains) < 2 or not any(gains.values()):
        return []
    line = fit_line([(math.log2(n), gain) for n, gain in gains.items()])
    there = line.at(math.log2(width))
    at_each = " and ".join(f"{gain:.1%} at width {n:g}" for n, gain in gains.items())
    end = "that does not fall with the width"
    if line.slope < 0:
        leads = f"{there:.0%} at width {width:g}" if there > 0 else f"nothing at width {width:g}"
        end = f"along the logarithm of the width that would make {leads}"
    return [f"noise lowers the best loss by {at_each}; {end}{'' if there > 0 else ', so widening may not pay there'}"]


def _between(sweep: Sweep, axis: str) -> float:
    """The optimum between grid values: of the parabola through the best trial and its neighbours, in the logarithm.

    The grid's own value at an edge, beside zero, and beside a trial that did not come to its end.
    """
    best = sweep.best.cell
    here, values = float(getattr(best, axis)), getattr(sweep.grid, f"{axis}s")
    if here not in values or not 0 < values.index(here) < len(values) - 1:
        return here
    around = values[values.index(here) - 1 : values.index(here) + 2]
    trials = [sweep.at(best._replace(**{axis: value})) for value in around]
    losses = [trial.loss for trial in trials if trial is not None and trial.status == "finished"]
    if around[0] <= 0 or len(losses) < 3:
        return here
    return math.exp(vertex({math.log(value): loss or 0.0 for value, loss in zip(around, losses, strict=True)}))


def vertex(curve: Mapping[float, float]) -> float:
    """Where a curve is least: by a parabola through its lowest point and that one's neighbours, else that point.

    >>> vertex({0.0: 4.0, 1.0: 1.0, 2.0: 4.0, 3.0: 9.0}), round(vertex({x: (x - 1.3) ** 2 for x in (0.0, 1.0, 3.0)}), 9)
    (1.0, 1.3)
    """
    xs = sorted(curve)
    place = min(range(len(xs)), key=lambda i: curve[xs[i]])
    near = xs[max(0, place - 1) : place + 2]
    if len(near) < 3 or not all(math.isfinite(curve[x]) for x in near):
        return xs[place]
    (a, b, c), (fa, fb, fc) = near, (curve[x] for x in near)
    left, right = (b - a) * (fb - fc), (b - c) * (fb - fa)
    return b - ((b - a) * left - (b - c) * right) / (2 * (left - right)) if left != right else b


def _limited(last: float, doublings: float, sweep: Sweep, axis: str) -> tuple[float, str]:
    """The last width's value times a power of two, kept within LIMIT and below what diverged there; and a remark."""
    wanted = last * 2.0 ** max(-64.0, min(64.0, doublings))
    value, remark = min(max(wanted, last / LIMIT), last * LIMIT), ""
    if value != wanted:
        remark = f" (limited to a factor of {LIMIT:g}: the line alone would lead to {wanted:.3g})"
    best = sweep.best.cell
    above = [v for v in getattr(sweep.grid, f"{axis}s") if v > getattr(best, axis)]
    trials = {v: sweep.at(best._replace(**{axis: v})) for v in above}
    diverged = next((v for v, trial in trials.items() if trial is not None and trial.status == "diverged"), None)
    safe = (
        value if diverged is None else max((v for v in getattr(sweep.grid, f"{axis}s") if v < diverged), default=value)
    )
    if value > safe:
        value, remark = safe, f" (limited: {diverged:.3g} diverged)"
    return value, remark
