"""What a comparison says, as words: its sentence, the three numbers of it, break-evens, how it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mupscale.plots import words
from mupscale.report.comparison_picture import RIVALS, format_system_cost
from mupscale.report.facts import format_width, name_parts
from mupscale.study import (
    CostRatio,
    StudySummary,
    SystemRuns,
    contender_named,
    describe_ratio,
)

_SPACE = "\N{NO-BREAK SPACE}"
_SCHEDULES = {
    "wsd": "Within a budget the learning rate is constant, then falls to zero over the last quarter.",
    "cosine": "Within a budget the learning rate falls as a cosine.",
    "recipe": "The learning rate follows the recipe's own schedule.",
}
WAYS = (("charged", "base model charged"), ("there", "base model already there"))


# ------------------------------------------------------------------------------------ numbers as words


def format_change(value: Any) -> str:
    """A change in per cent, with its sign.

    >>> [format_change(value).split() for value in (0.0912, -0.013, 0.0)]
    [['+9.1', '%'], ['−1.3', '%'], ['±0', '%']]
    """
    if not words.is_finite_number(value):
        return words.UNKNOWN
    size = format_percent(abs(value))
    return f"{'±' if not value else '+' if value > 0 else '−'}{size}"


def format_percent(value: float) -> str:
    """A share, with two digits, and a space at which no line breaks.

    >>> [format_percent(value).split() for value in (0.0912, 0.03, 1.503)]
    [['9.1', '%'], ['3.0', '%'], ['150', '%']]
    """
    share = 100 * value
    return (f"{share:.0f}" if share >= 9.95 or not share else f"{share:#.2g}").rstrip(".") + f"{_SPACE}%"


def format_times(value: Any) -> str:
    """A ratio of costs.

    >>> format_times(0.8), format_times(1.284), format_times(23.4), format_times(0.0123)
    ('0.80×', '1.28×', '23.4×', '0.012×')
    """
    is_usual = words.is_finite_number(value) and 0.1 <= value < 10
    return f"{value:.2f}×" if is_usual else words.format_factor(value)


def format_range(one: Mapping[str, Any] | None, shown: Any) -> str:
    """A forecast: the value and its range; or that there is no rule.

    >>> format_range({"low": 0.5, "value": 0.75, "high": 1.25}, format_times)
    '0.75× (0.50× to 1.25×)'
    """
    if not one or "no_rule" in one:
        return "no rule"
    return f"{shown(one['value'])} ({shown(one['low'])} to {shown(one['high'])})"


def name_measure(summary: StudySummary) -> str:
    """What the loss is called."""
    return "training loss" if summary.settings.get("measure") == "train" else "held-out loss"


# --------------------------------------------------------------------------------------- the headline


def write_headline(summary: StudySummary) -> str:
    """The one sentence: the answer, or the forecast where the large models are not trained."""
    return str(summary.forecast["sentence"] if summary.large is None else summary.answer["sentence"])


def list_cards(summary: StudySummary) -> list[tuple[str, str, str]]:
    """The three numbers that the sentence is made of: what, the number, and what else to say of it."""
    return _forecast_cards(summary) if summary.large is None else _answer_cards(summary, summary.large)


def _answer_cards(summary: StudySummary, large: SystemRuns) -> list[tuple[str, str, str]]:
    answer, forecast = summary.answer, summary.forecast
    grown = answer["grown"]
    phrase = "every grown model diverged" if grown is None else contender_named(grown).phrase
    cards = []
    for way, words_ in WAYS:
        ratio, expected = answer[f"cost_{way}"], forecast["cost"].get(grown, {}).get(way)
        number = "unknown" if ratio is None else f"{describe_ratio(CostRatio(**ratio))}×"
        more = phrase if ratio is None else _with_forecast(phrase, expected, format_times)
        if ratio is None and grown is not None:
            more = _why_no_ratio(large, way)
        cards.append((f"Cost over starting over, to the same loss, {words_}", number, more))
    above = answer["above_continued"]
    number = "unknown" if above is None else _higher_or_lower(above)
    more = _with_forecast(phrase, forecast["above_continued"].get(grown), format_change)
    if above is None and grown is not None:
        more = "continuing the base model diverged, or took no part"
    return [*cards, ("Loss against continuing the base model, at the same cost", number, more if grown else phrase)]


def _with_forecast(phrase: str, expected: Mapping[str, Any] | None, shown: Any) -> str:
    return f"{phrase}; forecast {format_range(expected, shown)}" if expected else phrase


def _why_no_ratio(large: SystemRuns, way: str) -> str:
    if way == "charged" and large.base_cost is None:
        return "the base model's steps are not known"
    return "starting over diverged, or took no part"


def _higher_or_lower(above: float) -> str:
    size = format_percent(abs(above))
    return "the same" if not above else f"{size} {'higher' if above > 0 else 'lower'}"


def _forecast_cards(summary: StudySummary) -> list[tuple[str, str, str]]:
    forecast = summary.forecast
    grown = pick_grown(forecast)
    if grown is None:
        return []
    phrase, cards = contender_named(grown).phrase, []
    costs = forecast["cost"].get(grown, {})
    for what, one, shown in [
        *((f"Cost over starting over, to the same loss, {text}", costs.get(way), format_times) for way, text in WAYS),
        (
            "Loss against continuing the base model, at the same cost",
            forecast["above_continued"][grown],
            format_change,
        ),
    ]:
        if not one:
            cards.append((what, "unknown", f"{phrase}; starting over takes no part"))
        elif "no_rule" in one:
            cards.append((what, "no rule", f"{phrase}; {one['no_rule']}"))
        else:
            number = _higher_or_lower(one["value"]) if shown is format_change else shown(one["value"])
            cards.append((what, number, f"{phrase}; {shown(one['low'])} to {shown(one['high'])}"))
    return cards


def pick_grown(forecast: Mapping[str, Any]) -> str | None:
    """The grown model that the forecast sees lowest; the first where no rule fits any."""
    above = forecast["above_continued"]
    grown = [name for name in above if contender_named(name).is_grown]
    return min(grown, key=lambda name: above[name].get("value", float("inf")), default=None)


def describe_break_even(summary: StudySummary) -> list[str]:
    """A sentence per rival: from which cost on the grown model is lower."""
    sentences, answer = [], summary.answer
    for rival, ways in answer.get("break_even", {}).items():
        even = ways.get("charged") or ways.get("there")
        if even is None or summary.large is None:
            continue
        grown = contender_named(answer["grown"]).phrase
        where = {"always": "at every budget", "never": "at none of these budgets"}.get(even["kind"], "")
        if even["kind"] == "from":
            charged = ", base model charged" if "charged" in ways else ""
            where = f"from {format_system_cost(summary.large, even['cost'])} on{charged}"
        what = RIVALS.get(rival, rival)
        sentences.append(
            f"{grown.capitalize()} is lower than {what} {where}."
            if where
            else f"{grown.capitalize()} and {what} have no cost in common, so neither is lower."
        )
    return sentences


def describe_tuning(summary: StudySummary) -> str:
    """How the candidates of the small width were tried."""
    stopped = [cell for one in summary.tuned for cell in one.tried if cell.is_stopped]
    tried = "Every setting was tried with one seed at the small width, and those within 1 % of the best with more."
    if not stopped:
        return tried
    return f"{tried} Settings far behind after {stopped[0].budget:g} of the budget were stopped there."


def describe_measuring(summary: StudySummary) -> list[str]:
    """What was tuned, with how many seeds, and what the loss is."""
    base, runs = summary.base, summary.large or summary.small[-1]
    small = summary.small[0]
    noise = any(len({cell.noise for cell in one.tried}) > 1 for one in summary.tuned)
    sentences = [
        f"Tuned at width {format_width(small.narrow)} → {format_width(small.wide)}: every contender's own learning "
        f"rate{', and the noise of copies' if noise else ''}.",
        f"Seeds: {runs.seeds}{_lost_seeds(summary)}. A line is their mean, its band their range."
        if runs.seeds > 1
        else "Seeds: one, so nothing is known about chance.",
    ]
    if name_measure(summary) == "held-out loss":
        sentences.append("Loss: the mean over the whole held-out set, at the end of a budget.")
    else:
        sentences.append("Loss: the training loss at the end of a budget; nothing was held out.")
    sentences.append(_SCHEDULES.get(str(summary.settings.get("schedule")), ""))
    steps = "an unknown number of" if base.get("steps") is None else words.format_count(base["steps"])
    if base.get("from") is not None:
        sentences.append(f"The base model is {base['from']}, trained for {steps} steps.")
    else:
        sentences.append(
            f"The base model trained for {steps} steps at learning rate {words.format_setting(base.get('lr'))}."
        )
    return [sentence for sentence in sentences if sentence]


def _lost_seeds(summary: StudySummary) -> str:
    asked = summary.settings.get("seeds" if summary.large is not None else "small_seeds")
    runs = summary.large or summary.small[-1]
    lost = asked - runs.seeds if isinstance(asked, int) else 0
    return f" of {asked}, as base models of the others diverged" if lost > 0 else ""


def describe_what(summary: StudySummary) -> str:
    """What was trained, in a line."""
    runs = summary.large
    narrow, wide = (summary.base["width"], _wide_width(summary.recipe)) if runs is None else (runs.narrow, runs.wide)
    widths = f"width {format_width(narrow)}" + (f" → {format_width(wide)}" if wide is not None else "")
    return " · ".join([*name_parts(summary.recipe), widths])


def _wide_width(recipe: Mapping[str, Any]) -> Any:
    """What the model would grow to, where the recipe tells."""
    growths = recipe.get("grow")
    if isinstance(growths, list) and growths and isinstance(growths[0], Mapping):
        return growths[0].get("width")
    return None
