"""What a comparison says, in words: its sentences, the three numbers of it, tables, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mupscale.plots import words
from mupscale.study.budgets import CostRatio
from mupscale.study.contenders import contender_named
from mupscale.study.forecast import COST_ROWS, LOSS_ROW
from mupscale.study.results import Card, PageTable, StageSpent, StudySummary, SystemRuns
from mupscale.study.verdict import describe_ratio
from mupscale.study.wording import format_cost, format_widths, list_contenders

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
    "wsd": "Within a budget the learning rate is constant, then falls to zero over the last quarter.",
    "cosine": "Within a budget the learning rate falls as a cosine.",
    "recipe": "The learning rate follows the recipe's own schedule.",
}
_TUNING = {
    "base-rates": "Tuning: the base model's learning rate",
    "rates": "Tuning: learning rates and noise of the contenders",
    "close": "Tuning: more seeds where candidates were close",
}
_STAGES = {**_TUNING, "base": "The base models, full size", "contenders": "The contenders, full size"}
_FORECAST = "forecast-"


def write_pay_words(summary: StudySummary) -> StudySummary:
    """The summary with its sentences, cards and tables."""
    alone = "The large models are not trained: this is the forecast alone."
    if summary.large is None:
        size = summary.forecast.get("size", {}).get("sentence")
        sentences = [str(summary.forecast["sentence"]), *([size] if size else []), alone]
        cards = list(_forecast_cards(summary.forecast))
    else:
        sentences = [str(summary.answer["sentence"]), *_break_evens(summary.answer, summary.large)]
        cards = list(_answer_cards(summary, summary.large))
    return replace(
        summary,
        sentences=sentences,
        cards=cards,
        measured=[*_measuring(summary), *_tuning(summary), *_shares(summary.stages)],
        tables=list(_tables(summary)),
        stages=[replace(stage, label=name_stage(stage.name)) for stage in summary.stages],
    )


# ------------------------------------------------------------------------------------------------ the three numbers


def _answer_cards(summary: StudySummary, large: SystemRuns) -> Iterator[Card]:
    answer, forecast, grown = summary.answer, summary.forecast, summary.answer["grown"]
    phrase = "every grown model diverged" if grown is None else contender_named(grown).phrase
    for what, way in ((COST, "charged"), (COST_THERE, "there")):
        ratio, expected = answer[f"cost_{way}"], forecast["cost"].get(grown, {}).get(way)
        if ratio is not None:
            number = f"{describe_ratio(CostRatio(**ratio))}×"
            yield Card(what, number, _more(what, phrase, expected, words.format_times))
        else:
            yield Card(what, "unknown", phrase if grown is None else _why_no_ratio(large, way))
    above = answer["above_continued"]
    if above is not None:
        more = _more(LOSS, phrase, forecast["above_continued"].get(grown), words.format_change)
        yield Card(LOSS, _higher_or_lower(above), more)
    else:
        why = phrase if grown is None else "continuing the base model diverged, or took no part"
        yield Card(LOSS, "unknown", why)


def _more(what: str, phrase: str, expected: Mapping[str, Any] | None, shown: Callable[[Any], str]) -> str:
    forecast = f"; forecast {words.format_range(expected, shown)}" if expected else ""
    return f"{_MORE[what]}; {phrase}{forecast}"


def _why_no_ratio(large: SystemRuns, way: str) -> str:
    if way == "charged" and large.base_cost is None:
        return "the base model's steps are not known"
    return "starting over diverged, or took no part"


def _higher_or_lower(above: float) -> str:
    size = words.format_percent(abs(above))
    return "the same" if not above else f"{size} {'higher' if above > 0 else 'lower'}"


def _forecast_cards(forecast: Mapping[str, Any]) -> Iterator[Card]:
    grown = _lowest_grown(forecast["above_continued"])
    if grown is None:
        return
    phrase, costs = contender_named(grown).phrase, forecast["cost"].get(grown, {})
    for what, one, shown in (
        (COST, costs.get("charged"), words.format_times),
        (COST_THERE, costs.get("there"), words.format_times),
        (LOSS, forecast["above_continued"][grown], words.format_change),
    ):
        if not one:
            yield Card(what, "unknown", f"{phrase}; starting over takes no part")
        elif "no_rule" in one:
            yield Card(what, "no rule", f"{phrase}; {one['no_rule']}")
        else:
            number = _higher_or_lower(one["value"]) if what == LOSS else shown(one["value"])
            yield Card(what, number, f"{_MORE[what]}; {phrase}; {shown(one['low'])} to {shown(one['high'])}")


def _lowest_grown(above: Mapping[str, Any]) -> str | None:
    """The grown model that the forecast sees lowest; the first where no rule fits any."""
    grown = [name for name in above if contender_named(name).is_grown]
    return min(grown, key=lambda name: above[name].get("value", float("inf")), default=None)


# --------------------------------------------------------------------------------------------------- sentences


def _break_evens(answer: Mapping[str, Any], large: SystemRuns) -> Iterator[str]:
    """A sentence per rival: from which cost on the grown model is lower."""
    for rival, ways in answer["break_even"].items():
        even = ways.get("charged") or ways.get("there")
        if even is None:
            continue
        grown, what = contender_named(answer["grown"]).phrase.capitalize(), contender_named(rival).brief_phrase
        if even["kind"] == "unknown":
            yield f"{grown} and {what} have no cost in common, so neither is lower."
            continue
        charged = ", the base model's cost included" if "charged" in ways else ""
        where = {"always": "at every budget", "never": "at none of these budgets"}.get(
            even["kind"], f"from {format_cost(large, even['cost'] or 0.0)} on{charged}"
        )
        yield f"{grown} is lower than {what} {where}."


def _measuring(summary: StudySummary) -> Iterator[str]:
    """What was tuned, with how many seeds, and what the loss is."""
    base, runs = summary.base, summary.large or summary.small[-1]
    noise = any(len({cell.noise for cell in one.trials}) > 1 for one in summary.tuned)
    yield (
        f"Tuned at width {format_widths(summary.small[0])}: every contender's own learning rate"
        f"{', and the noise of copies' if noise else ''}."
    )
    if runs.seeds > 1:
        yield f"Seeds: {runs.seeds}{_lost_seeds(summary, runs)}. A line is their mean, its band their range."
    else:
        yield "Seeds: one, so nothing is known about chance."
    if summary.settings.get("measure") == "train":
        yield "Loss: the training loss at the end of a budget; nothing was held out."
    else:
        yield "Loss: the mean over the whole held-out set, at the end of a budget."
    yield _SCHEDULES[summary.settings["schedule"]]
    steps = "an unknown number of" if base["steps"] is None else words.format_count(base["steps"])
    if base["from"] is not None:
        yield f"The base model is {base['from']}, trained for {steps} steps."
    else:
        yield f"The base model trained for {steps} steps at learning rate {words.format_setting(base['lr'])}."


def _lost_seeds(summary: StudySummary, runs: SystemRuns) -> str:
    asked = summary.settings["seeds" if summary.large is not None else "small_seeds"]
    return f" of {asked}, as base models of the others diverged" if asked > runs.seeds else ""


def _tuning(summary: StudySummary) -> Iterator[str]:
    """How the candidates of the small width were tried."""
    yield "Every setting was tried with one seed at the small width, and those within 1 % of the best with more."
    stopped = [cell for one in summary.tuned for cell in one.trials if cell.status == "stopped"]
    if stopped:
        yield f"Settings far behind after {stopped[0].budget:g} of the budget were stopped there."


def _shares(stages: Sequence[StageSpent]) -> Iterator[str]:
    """What tuning and the forecast took of all cost."""
    total = sum(stage.cost or 0.0 for stage in stages)
    if total:
        tuning = sum(stage.cost or 0.0 for stage in stages if stage.name in _TUNING) / total
        forecast = sum(stage.cost or 0.0 for stage in stages if stage.name.startswith(_FORECAST)) / total
        yield f"Tuning took {100 * tuning:.0f} % of all cost, the forecast {100 * forecast:.0f} %."


def name_stage(name: str) -> str:
    """A stage in words.

    >>> name_stage("forecast-64"), name_stage("base")
    ('The contenders small, base width 64: the forecast', 'The base models, full size')
    """
    if name.startswith(_FORECAST):
        return f"The contenders small, base width {name.removeprefix(_FORECAST)}: the forecast"
    return _STAGES.get(name, name)


# ----------------------------------------------------------------------------------------------------- tables


def _tables(summary: StudySummary) -> Iterator[PageTable]:
    """Forecast and outcome, then the contenders; or the forecast, and the small contenders."""
    if summary.large is None:
        yield PageTable("The forecast", ["what", "forecast"], list(_forecast_rows(summary.forecast)))
        for runs in summary.small:
            title = f"The small contenders at the full budget, width {format_widths(runs)}"
            yield list_contenders(title, runs, summary.measure)
        return
    held = summary.forecast["held"]
    judged = [row["held"] for row in held if row["held"] is not None]
    about = [
        str(summary.forecast["sentence"]),
        *([f"Of {len(judged)} forecasts {sum(judged)} held."] if judged else []),
    ]
    head = ["what", "forecast", "measured", "held"]
    yield PageTable("Forecast and outcome", head, [_held_row(row) for row in held], about)
    yield list_contenders("The contenders, at the full budget", summary.large, summary.measure)


def _held_row(row: Mapping[str, Any]) -> list[str]:
    held = {True: "yes", False: "no"}.get(row["held"], words.UNKNOWN)
    expected, measured = row["forecast"], row["measured"]
    if isinstance(measured, str):
        forecast = "too close to call" if expected is None else contender_named(expected).label
        return [row["what"], forecast, contender_named(measured).label, held]
    shown = words.format_change if row["what"].endswith(LOSS_ROW) else words.format_times
    return [row["what"], words.format_range(expected, shown), shown(measured), held]


def _forecast_rows(forecast: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, one in forecast["above_continued"].items():
        label = contender_named(name).label
        yield [f"{label}{LOSS_ROW}", words.format_range(one, words.format_change)]
    for name, ways in forecast["cost"].items():
        for way, row in COST_ROWS.items():
            if way in ways:
                yield [f"{contender_named(name).label}{row}", words.format_range(ways[way], words.format_times)]
