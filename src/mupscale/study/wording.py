"""What studies say in words: widths and costs as people read them, cards, tables, and how the losses came about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mupscale.core import Width
from mupscale.study.contenders import COPIES, COPIES_OWN, FROM_SCRATCH, contender_named
from mupscale.study.forecast import COST_ROWS, LOSS_ROW
from mupscale.study.loss_gaps import format_gap_in_table, signed_gaps, stored_gap_kind
from mupscale.study.results import BudgetPoint, Card, ContenderRuns, Curve, PageTable, StudySummary, SystemRuns
from mupscale.study.verdict import CostRatio, is_clear
from mupscale.system import MupscaleError, words


def format_width(width: Any) -> str:
    """A width as a summary holds it; what is none, in a damaged one, is shown as it is."""
    try:
        return Width.of(width).shown(words.format_count)
    except MupscaleError:
        return words.format_count(width)


def format_widths(runs: SystemRuns) -> str:
    """Both widths of a system."""
    return f"{format_width(runs.narrow)} → {format_width(runs.wide)}"


def find_cost_unit(runs: SystemRuns) -> tuple[float, str]:
    """The unit for all costs of a system, and its size: the largest of which its lowest cost is one or more."""
    if runs.unit != "FLOPs":
        return 1.0, runs.unit
    lowest = min(runs.charge(one) + point.cost for one in runs.contenders for point in one.points)
    return words.choose_flops_unit(lowest / 10)


def format_cost(runs: SystemRuns, cost: float) -> str:
    """A cost in the system's unit."""
    size, name = find_cost_unit(runs)
    return f"{words.format_setting(cost / size)} {name}"


def count_of(count: int, what: str) -> str:
    """A number of things: 1 run, 1,200 steps."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# ----------------------------------------------------------------------------------------- the table of contenders


def list_contenders(title: str, runs: SystemRuns, measure: str) -> PageTable:
    """A row per contender at the full budget, lowest loss first, those that diverged last."""

    def noise(one: ContenderRuns) -> str:
        if isinstance(one.noise, dict):
            return "per parameter"
        return words.format_setting(one.noise) if one.noise else "none"

    ranked = _ranked(runs)
    rates = [(one.lr, *([] if one.change is None else [one.change[1]])) for one in ranked]
    columns = {
        "contender": [one.shown for one in ranked],
        "width": [format_width(one.width) for one in ranked],
        "learning rate": [" → ".join(map(words.format_setting, some)) for some in rates],
        "noise": [noise(one) for one in ranked],
        "steps": [words.format_count(one.steps) for one in ranked],
        "cost": [format_cost(runs, runs.charge(one) + one.points[-1].cost) for one in ranked],
        f"final {measure}": [_loss_after(one.points[-1]) for one in ranked],
    }
    # what else was measured at the end, by those of whom curves are kept
    last: dict[str, Callable[[Curve], list[float]]] = {
        "held-out loss": lambda curve: curve.held_out_losses[-1:],
        "accuracy": lambda curve: curve.accuracy[-1:],
    }
    for name, read in last.items():
        found = [[v for c in one.curves if c.status != "diverged" for v in read(c)] for one in ranked]
        if any(found) and name != measure:
            columns[name] = [_in_two_lines(values) for values in found]
    note = (
        "If a contender starts from the base model, its cost includes the base model's, and its steps do not. Losses "
        "are the mean over the seeds, with their range."
    )
    return PageTable(title, list(columns), [list(row) for row in zip(*columns.values(), strict=True)], note=note)


def list_budgets(runs: SystemRuns, measure: str) -> PageTable:
    """The same contenders with their losses at every budget, and what each has cost there."""
    parts = [point.budget for point in runs.contenders[0].points]
    head = ["contender", *("full budget" if part == 1 else f"{part:g} of the budget" for part in parts)]
    rows = [
        [one.shown, *(f"{_loss_after(p)}\nat {format_cost(runs, runs.charge(one) + p.cost)}" for p in one.points)]
        for one in _ranked(runs)
    ]
    note = "A cost includes the base model's, if the contender starts from it."
    return PageTable(f"{measure.capitalize()} at each budget", head, rows, note=note)


def _ranked(runs: SystemRuns) -> list[ContenderRuns]:
    return sorted(runs.contenders, key=lambda one: float("inf") if one.final is None else one.final)


def _loss_after(point: BudgetPoint) -> str:
    """The mean over the seeds with their range, and how many diverged."""
    count, lost = len(point.losses), len(point.losses) - len(point.finite)
    more = f"\n{lost} of {count} seeds diverged" if lost else ""
    return "diverged" if lost == count else _in_two_lines(point.finite) + more


def _in_two_lines(values: Sequence[float]) -> str:
    return words.format_spread(values).replace(" (", "\n(")


# ---------------------------------------------------------------------------------------------- does growing pay?

COST, COST_THERE, LOSS = (
    "Cost of growing, compared with training from scratch to the same loss",
    "Cost of growing if you already have the base model",
    "Final loss of growing, compared with continuing the base model",
)
_MORE = {
    COST: "base model's cost included",
    COST_THERE: "compared with training from scratch to the same loss",
    LOSS: "at the same cost",
}
_SCHEDULES = {
    "wsd": "In each budget the learning rate is constant, then falls to zero over the last quarter.",
    "cosine": "In each budget the learning rate follows a cosine.",
    "recipe": "The learning rate follows the recipe's own schedule.",
}
_TUNING = {
    "base-rates": "Tuning: the base model's learning rate",
    "rates": "Tuning: the contenders' learning rates and noise",
    "close": "Tuning: more seeds where candidates were close",
}
_STAGES = {**_TUNING, "base": "Full-size base models", "contenders": "Full-size contenders"}
_FORECAST = "forecast-"
FORECAST_RANGE = (
    "A cost below 1× means that growing costs less; a loss with − that it ends lower. A range covers the seeds of the "
    "small models and the trend over their widths. It is not a confidence interval: in the four comparisons that come "
    "with mupscale, 24 of 28 measured values lay in their range."
)
_ONE_SEED = "Seeds: one, so the variation between seeds is unknown."


def write_pay_words(summary: StudySummary) -> StudySummary:
    """The summary of the preset `pay` with its sentences, cards and tables."""
    if summary.large is None:
        size = summary.forecast.get("size", {}).get("sentence")
        alone = "This is only a forecast: the large models were not trained."
        sentences = [str(summary.forecast["sentence"]), *([size] if size else []), alone]
    else:
        sentences = [str(summary.answer["sentence"]), *break_evens(summary.answer, summary.large)]
    # learning rates of the large model: grown, first in the way that the cards are about, and from scratch
    grown, found = _judged_grown(summary), {one.name: words.format_setting(one.best.lr) for one in summary.tuned}
    others = [name for name in found if name != grown and contender_named(name).is_grown]
    rates = [f"{found[n]} {contender_named(n).label}" for n in (grown, *others, FROM_SCRATCH.name) if n in found]
    if rates:
        sentences.append(f"Learning rate found for the large model, at the base width: {'; '.join(rates)}.")
    forecasts = "Forecast: small contenders, base width "
    labels = {one.name: one.name.replace(_FORECAST, forecasts) for one in summary.stages} | _STAGES
    return replace(
        summary,
        sentences=sentences,
        cards=list(_pay_cards(summary)),
        measured=list(_pay_measuring(summary)),
        tables=list(_pay_tables(summary)),
        stages=[replace(one, label=labels[one.name]) for one in summary.stages],
    )


def _judged_grown(summary: StudySummary) -> str | None:
    """The grown model that it is about: the lowest, or that which the forecast sees lowest; None where there is none.

    Where the forecast has no number for any, it is the first.
    """
    if summary.large is not None:
        name = summary.answer["grown"]
        return None if name is None else str(name)
    above = {name: one for name, one in summary.forecast["above_continued"].items() if contender_named(name).is_grown}
    return min(above, key=lambda name: above[name].get("value", float("inf")), default=None)


def _pay_cards(summary: StudySummary) -> Iterator[Card]:
    """What growing costs and where it ends: as measured, beside the forecast; or the forecast's range alone."""
    grown, forecast, large = _judged_grown(summary), summary.forecast, summary.large
    if grown is None:
        yield from (Card(what, "unknown", "every grown model diverged") for what in _MORE if large is not None)
        return
    phrase, costs = contender_named(grown).phrase, forecast["cost"].get(grown, {})
    for what, way in {COST: "charged", COST_THERE: "there", LOSS: ""}.items():
        shown = words.format_times if way else signed_gaps(stored_gap_kind(forecast))
        expected = costs.get(way) if way else forecast["above_continued"].get(grown)
        if large is None and not expected:
            yield Card(what, "unknown", f"{phrase}; training from scratch was left out")
            continue
        if large is None and "no_rule" in expected:
            yield Card(what, "no forecast", f"{phrase}; {expected['no_rule']}")
            continue
        if large is None:  # the range is the forecast: its middle alone would stand beside "too close to call"
            number = f"{shown(expected['low'])} to {shown(expected['high'])}"
            middle = f"in the middle {shown(expected['value'])}"
            direction = say_which_costs_less(expected["low"], expected["high"]) if way else _LOWER_ENDS_LOWER
            yield Card(what, number, f"{direction}; {_MORE[what]}; {phrase}; {middle}")
            continue
        measured = summary.answer[f"cost_{way}" if way else "above_continued"]
        if measured is None:
            why = f"{'training from scratch' if way else 'continuing the base model'} diverged, or was left out"
            if way == "charged" and large.base_cost is None:
                why = "the base model's steps are unknown"
            yield Card(what, "unknown", why)
            continue
        range_ = f"; forecast {words.format_range(expected, shown)}" if expected else ""
        number = f"{CostRatio(**measured)}×" if way else "the same"
        direction = f"{say_which_costs_less(measured['value'], measured['value'])}; " if way else ""
        if measured and not way:
            size = format_gap_in_table(measured, stored_gap_kind(summary.answer))
            number = f"{size} {'higher' if measured > 0 else 'lower'}"
        yield Card(what, number, f"{direction}{_MORE[what]}; {phrase}{range_}")


def say_which_costs_less(low: float, high: float) -> str:
    """What a ratio of costs means: which way it points, for somebody who has not counted in it.

    >>> say_which_costs_less(1.06, 48.1), say_which_costs_less(0.4, 0.7)
    ('above 1×, so growing costs more', 'below 1×, so growing costs less')
    >>> say_which_costs_less(0.8, 1.2)
    'below 1× growing costs less, above 1× it costs more'
    """
    if low > 1:
        return "above 1×, so growing costs more"
    if high < 1:
        return "below 1×, so growing costs less"
    return "equal cost" if low == high else "below 1× growing costs less, above 1× it costs more"


_LOWER_ENDS_LOWER = "− means that growing ends at a lower loss"


def break_evens(answer: Mapping[str, Any], large: SystemRuns) -> Iterator[str]:
    """A sentence per rival: from which cost on the grown model has the lower loss."""
    if all(len(one.points) < 2 for one in large.contenders):
        yield "One budget does not show from which cost on growing pays: give two or more (budgets in the settings)."
        return
    for rival, ways in answer["break_even"].items():
        even = ways.get("charged") or ways.get("there")
        if even is None:
            continue
        grown, what = contender_named(answer["grown"]).phrase, contender_named(rival).brief_phrase
        if even["kind"] == "unknown":
            yield f"{grown.capitalize()} and {what} were not measured at a common cost, so they cannot be compared."
            continue
        if even["kind"] in ("never", "early"):
            where = (
                "at smaller budgets, and not at the full one" if even["kind"] == "early" else "at none of these budgets"
            )
            yield f"{grown.capitalize()} ends lower than {what} {where}."
            continue
        pair = large.get(answer["grown"]), large.get(rival)
        mean = ""
        if large.seeds > 1 and pair[0] and pair[1] and pair[0].points and pair[1].points:
            first = -min(len(pair[0].points), len(pair[1].points)) if even["kind"] == "always" else -1
            hazy = [at for at in range(first, 0) if not is_clear(pair[0], pair[1], at)]
            where = "at the full budget" if -1 in hazy else "at smaller budgets"
            mean = f" on the mean, though seeds do not tell them apart {where}" if hazy else ""
        charged = " (base model's cost included)" if "charged" in ways else ""
        start = f"From {format_cost(large, even['cost'] or 0.0)} on{charged}"
        yield f"{'At every budget' if even['kind'] == 'always' else start}, {grown} ends lower than {what}{mean}."


def _pay_measuring(summary: StudySummary) -> Iterator[str]:
    base, runs, settings = summary.base, summary.large or summary.small[-1], summary.settings
    tuned = "every contender's own learning rate"
    if any(len({cell.noise for cell in one.trials}) > 1 for one in summary.tuned):
        unit = next((one.get("noise_unit", "init") for one in summary.recipe.get("grow") or ()), "init")
        tuned += ", and the noise of copies" + (f" ({_UNITS[unit]})" if unit != "init" else "")
    is_repeated = settings.get("small_seeds", 1) > 1
    order = " Their losses there come from one seed" + ", or from all where values were close" * is_repeated
    order += ", and from batches in another order than those of the small contenders: they may lie outside these "
    order += "contenders' range."
    yield f"Tuned at width {format_widths(summary.small[0])}: {tuned}.{order}"
    if runs.seeds > 1:
        asked = settings["seeds" if summary.large is not None else "small_seeds"]
        lost = f" of {asked}; the base models of the others diverged" if asked > runs.seeds else ""
        whose = "" if summary.large is not None else " of small models"
        yield f"Seeds{whose}: {runs.seeds}{lost}. A line is their mean, its band their range."
    else:
        yield _ONE_SEED
    if settings.get("measure") == "train":
        yield "Loss: the training loss at the end of a budget; nothing was held out."
    else:
        yield "Loss: the mean over the whole held-out set, at the end of a budget."
    yield _SCHEDULES[settings["schedule"]]
    steps = "an unknown number of" if base["steps"] is None else words.format_count(base["steps"])
    if base["from"] is not None:
        yield f"The base model is {base['from']}, trained for {steps} steps."
    else:
        yield f"The base model trained for {steps} steps at learning rate {words.format_setting(base['lr'])}."
    close = "Those within 1 % of the best were repeated." if is_repeated else "Close ones were not repeated."
    yield f"At the small width, every setting was tried with one seed. {close}"
    stopped = [cell for one in summary.tuned for cell in one.trials if cell.status == "stopped"]
    if stopped:
        yield f"Settings that were far behind after {stopped[0].budget:g} of the budget were stopped."
    spent = {stage.name: stage.cost or 0.0 for stage in summary.stages}
    if total := sum(spent.values()):
        tuning = sum(cost for name, cost in spent.items() if name in _TUNING) / total
        forecast = sum(cost for name, cost in spent.items() if name.startswith(_FORECAST)) / total
        # a small model does few FLOPs a second, so a share of the FLOPs alone would make tuning look cheaper than it is
        seconds = {stage.name: stage.seconds for stage in summary.stages}
        time = sum(seconds.values())
        of_time = ["", ""]
        if time:
            tuning_time = sum(each for name, each in seconds.items() if name in _TUNING) / time
            forecast_time = sum(each for name, each in seconds.items() if name.startswith(_FORECAST)) / time
            of_time = [f" and {100 * tuning_time:.0f} % of the time", f" and {100 * forecast_time:.0f} %"]
        yield (
            f"Tuning took {100 * tuning:.0f} % of the total cost{of_time[0]}, the forecast {100 * forecast:.0f} %"
            f"{of_time[1]}."
        )


def _pay_tables(summary: StudySummary) -> Iterator[PageTable]:
    """Forecast and outcome, then the contenders; or the forecast, and the small contenders."""
    forecast, rows = summary.forecast, list[list[str]]()
    if summary.large is None:
        show_gap = signed_gaps(stored_gap_kind(forecast))
        for name, one in forecast["above_continued"].items():
            rows.append([f"{contender_named(name).label}{LOSS_ROW}", words.format_range(one, show_gap)])
        for name, ways in forecast["cost"].items():
            label = contender_named(name).label
            rows += [
                [f"{label}{COST_ROWS[way]}", words.format_range(one, words.format_times)] for way, one in ways.items()
            ]
        yield PageTable("The forecast", ["what", "forecast"], rows, note=FORECAST_RANGE)
        for runs in summary.small:
            title = f"Small contenders at the full budget, width {format_widths(runs)}"
            yield list_contenders(title, runs, summary.measure)
        return
    for row in forecast["held"]:
        what, expected, measured = row["what"], row["forecast"], row["measured"]
        if isinstance(measured, str):
            foretold = "too close to call" if expected is None else contender_named(expected).label
            ended = contender_named(measured).label
        else:
            shown = signed_gaps(stored_gap_kind(row)) if what.endswith(LOSS_ROW) else words.format_times
            foretold, ended = words.format_range(expected, shown), shown(measured)
        rows.append([what, foretold, ended, {True: "yes", False: "no"}.get(row["held"], words.UNKNOWN)])
    judged = [row["held"] for row in forecast["held"] if row["held"] is not None]
    about = [str(forecast["sentence"]), str(forecast.get("size", {}).get("sentence") or "")]
    about.append(f"{sum(judged)} of {len(judged)} forecasts were right." if judged else "")
    head = ["what", "forecast", "measured", "right?"]
    yield PageTable("Forecast and outcome", head, rows, [one for one in about if one], note=FORECAST_RANGE)
    table = list_contenders("The contenders (ways to train) at the full budget", summary.large, summary.measure)
    if losses := [loss for loss in summary.base.get("losses", ()) if loss is not None]:
        before = f"Before growth, the base model's {summary.measure} is {words.format_spread(losses)}"
        decays = "" if summary.settings["schedule"] == "recipe" else ", at a learning rate that has not fallen yet"
        table = replace(table, about=[f"{before}{decays}."])
    yield table
    if any(len(one.points) > 1 for one in summary.large.contenders):
        yield list_budgets(summary.large, summary.measure)


# ---------------------------------------------------------------------------------------------- the paper's comparison

_COSTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "base": ("The base model, one run", words.format_flops),
    "tuning": ("Tuning: all sweeps and their small base models", words.format_flops),
    "scratch_total": ("The wide model from scratch, for as many steps as the upscaled one", words.format_flops),
    "scratch_min_loss": ("Its lowest training loss in these steps", words.format_loss),
    "upscaled_to_scratch_loss": ("The upscaled model, until it reaches that loss", words.format_flops),
    "speedup_sunk": ("Speed-up if you already have the base model", words.format_factor),
    "speedup_base_charged": ("Speed-up with the base model's cost included", words.format_factor),
    "speedup_all_charged": ("Speed-up with the cost of the base model and of tuning included", words.format_factor),
    "tuning_speedup": ("Small tuning runs for the cost of one at full width", words.format_factor),
}
_REACHED = {"upscaled_to_scratch_loss", "speedup_sunk", "speedup_base_charged", "speedup_all_charged"}
_UNITS = {
    "init": "1 is the size of a fresh initialisation",
    "theory": "in the paper's constants",
    "signal": "relative to the spectral norm of each weight",
}


def write_paper_words(summary: StudySummary) -> StudySummary:
    """The summary of the preset `paper` with its cards and tables; its sentences are the verdict's.

    answer holds costs and choice. It gets reference: the loss that speed-ups are about, as a line for the pictures.
    """
    answer, large, settings = summary.answer, summary.large, summary.settings
    assert large is not None
    lowest = answer["costs"].get("scratch_min_loss")
    reference = {"loss": lowest, "label": "(a)'s lowest in (e)'s steps"}
    small = " and ".join(format_width(width) for width in settings["widths"])
    over = "held-out" if settings.get("measure") == "held-out" else "training"
    trial = "one seed" if settings["small_seeds"] == 1 else f"{settings['small_seeds']} seeds"
    count = max(len(one.points[-1].losses) for one in large.contenders)
    mean = "A line is the mean over those that finished, its band their range."
    return replace(
        summary,
        cards=list(_paper_cards(answer["costs"], large, answer["choice"])),
        measured=[
            f"Tuned at width {small}, by the {over} loss, with {trial} a trial.",
            f"Seeds: {count}. {mean}" if count > 1 else _ONE_SEED,
            "Final loss: the mean of the training loss over the last tenth of the steps.",
        ],
        tables=list(_paper_tables(answer, large)),
        answer={**answer, "reference": reference} if words.is_finite_number(lowest) else answer,
    )


def _paper_cards(costs: Mapping[str, Any], large: SystemRuns, choice: Mapping[str, Any]) -> Iterator[Card]:
    if "speedup_base_charged" in costs:
        number, sunk, everything = (_cost(costs, f"speedup_{how}") for how in ("base_charged", "sunk", "all_charged"))
        more = f"base model's cost included; {sunk} if you already have it, {everything} with tuning included as well"
        known = number not in ("not reached", "unknown")
        yield Card("Speed-up to the from-scratch model's lowest loss", number, more if known else "")
    baselines = [one for one in large.contenders if one.contender.kind == "baseline" and one.finals]
    best = min(baselines, key=lambda one: fmean(one.finals), default=None)
    shown: dict[str, ContenderRuns | None] = {"from scratch": large.get(FROM_SCRATCH.name)}
    if best is not None and best.name != FROM_SCRATCH.name:
        shown[f"best alternative: {best.contender.label}"] = best
    shown |= {"upscaled": large.get(COPIES.name), "upscaled, learning rate changed halfway": large.get(COPIES_OWN.name)}
    for what, runs in shown.items():
        if runs is not None:
            mean, _, spread = words.format_spread(runs.finals).partition(" (")
            seeds = len(runs.finals)
            over = f"{spread.rstrip(')')} over {seeds} seeds" if spread else "one seed" if seeds == 1 else ""
            yield Card(f"Final loss, {what}", mean if seeds else "diverged", over)
    # noise and learning rate after the growth, and what one small width alone would transfer
    noise, rate = [f"; plain transfer: {words.format_setting(each)}" for each in choice["plain"] or ()] or ("", "")
    unit = _UNITS.get(choice["unit"], f"unit {choice['unit']}")
    yield Card("Chosen noise", words.format_setting(choice["noise"]), f"{unit}{noise}")
    before = words.format_setting(choice["base_lr"])
    yield Card("Chosen learning rate", words.format_setting(choice["lr"]), f"after upscaling; {before} before{rate}")


def _cost(costs: Mapping[str, Any], key: str) -> str:
    """One of them; without a number it says whether the loss was not reached or the cost is not known."""
    if words.is_finite_number(value := costs.get(key)):
        return _COSTS[key][1](value)
    reachable = words.is_finite_number(costs.get("scratch_total"))
    return "not reached" if key in _REACHED and reachable else "unknown"


def _paper_tables(answer: Mapping[str, Any], large: SystemRuns) -> Iterator[PageTable]:
    yield list_contenders("The models", large, "training loss")
    costs = answer["costs"]
    rows = [[what, _cost(costs, key)] for key, (what, _) in _COSTS.items() if key in costs]
    if rows:
        yield PageTable("Costs and speed-ups", ["what", "how much"], rows)
    constants = answer["choice"].get("constants") or {}
    if constants:
        values = [[str(name), words.format_setting(value)] for name, value in constants.items()]
        yield PageTable("Noise per parameter, as transferred", ["parameter", "noise"], values, folded=True)
