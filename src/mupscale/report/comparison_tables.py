"""What a comparison says, as rows: forecast and outcome, contenders, tuning, costs by stage."""

from __future__ import annotations

from collections.abc import Iterator

from mupscale.plots import words
from mupscale.report.comparison_facts import WAYS, format_change, format_range, format_times, name_measure
from mupscale.report.comparison_picture import charge, format_system_cost
from mupscale.report.facts import format_width
from mupscale.study import ContenderRuns, StudySummary, SystemRuns, TunedContender, contender_named

TUNING = {
    "base-rates": "Tuning: the base model's learning rate",
    "rates": "Tuning: learning rates and noise of the contenders",
    "close": "Tuning: more seeds where candidates were close",
}
_STAGES = {**TUNING, "base": "The base models, full size", "contenders": "The contenders, full size"}
_FORECAST = "forecast-"


HELD_HEAD = ("what", "forecast", "measured", "held")


def list_held(summary: StudySummary) -> Iterator[list[str]]:
    """Forecast beside what happened."""
    for row in summary.forecast.get("held", []):
        held = {True: "yes", False: "no"}.get(row["held"], words.UNKNOWN)
        expected, measured = row["forecast"], row["measured"]
        if isinstance(measured, str):
            forecast = "too close to call" if expected is None else contender_named(expected).label
            yield [row["what"], forecast, contender_named(measured).label, held]
            continue
        shown = format_change if row["what"].endswith("above continuing") else format_times
        yield [row["what"], format_range(expected, shown), shown(measured), held]


def count_held(summary: StudySummary) -> str:
    """How many of the forecasts came true."""
    judged = [row["held"] for row in summary.forecast.get("held", []) if row["held"] is not None]
    return f"Of {len(judged)} forecasts {sum(judged)} held." if judged else ""


FORECAST_HEAD = ("what", "forecast")


def list_forecast(summary: StudySummary) -> Iterator[list[str]]:
    """What is expected of the large models."""
    for name, one in summary.forecast["above_continued"].items():
        label = contender_named(name).label
        yield [f"{label}, loss above continuing", format_range(one, format_change)]
    for name, ways in summary.forecast["cost"].items():
        for way, text in WAYS:
            if way in ways:
                label = contender_named(name).label
                yield [f"{label}, cost over starting over, {text}", format_range(ways[way], format_times)]


def head_of_contenders(summary: StudySummary, runs: SystemRuns) -> tuple[str, ...]:
    """Names of the columns of list_contenders."""
    about = "contender"
    if summary.large is None:
        about = f"contender, {format_width(runs.narrow)} → {format_width(runs.wide)}"
    return (about, "width", "learning rate", "noise", "steps", "cost", f"{name_measure(summary)} (range)")


def list_contenders(runs: SystemRuns) -> Iterator[list[str]]:
    """A row per contender at the full budget, lowest loss first, those that diverged last."""
    for one in sorted(runs.contenders, key=lambda one: float("inf") if one.final is None else one.final):
        last = one.points[-1]
        yield [
            contender_named(one.name).label,
            format_width(one.width),
            words.format_setting(one.lr),
            words.format_setting(one.noise) if one.noise else "none",
            words.format_count(last.steps),
            format_system_cost(runs, charge(runs, one) + last.cost),
            _final(one),
        ]


def _final(one: ContenderRuns) -> str:
    losses = one.points[-1].losses
    lost = sum(loss is None for loss in losses)
    if lost:
        return "diverged" if lost == len(losses) else f"diverged ({lost} of {len(losses)} seeds)"
    return words.format_spread([loss for loss in losses if loss is not None])


TUNED_HEAD = ("contender", "learning rate", "noise", "its loss", "tried", "stopped early", "diverged")


def list_tuned(summary: StudySummary) -> Iterator[list[str]]:
    """What every contender takes to the large width."""
    for one in summary.tuned:
        chosen = next((cell for cell in one.tried if (cell.lr, cell.noise) == (one.lr, one.noise)), None)
        yield [
            label_tuned(one),
            words.format_setting(one.lr),
            words.format_setting(one.noise) if one.noise else "none",
            words.UNKNOWN if chosen is None else words.format_loss(chosen.mean),
            words.format_count(len(one.tried)),
            words.format_count(sum(cell.is_stopped for cell in one.tried)),
            words.format_count(sum(cell.mean is None for cell in one.tried)),
        ]


def label_tuned(one: TunedContender) -> str:
    """Its label; the base model is no contender and is called what it is."""
    return one.name if is_base(one) else contender_named(one.name).label


def is_base(one: TunedContender) -> bool:
    """Whether it is the base model, which was tuned first."""
    return one.name == "the base model"


STAGE_HEAD = ("stage", "cost", "share", "time")


def list_costs_by_stage(summary: StudySummary) -> Iterator[list[str]]:
    """A row per stage, and the total."""
    runs, total = summary.large or summary.small[0], sum(stage.cost for stage in summary.stages)
    for stage in summary.stages:
        yield [
            name_stage(stage.name),
            _stage_cost(runs, stage.cost),
            f"{100 * stage.cost / total:.0f} %" if total else words.UNKNOWN,
            words.format_duration(stage.seconds),
        ]
    if len(summary.stages) > 1:
        seconds = sum(stage.seconds for stage in summary.stages)
        yield ["Together", _stage_cost(runs, total), "100 %", words.format_duration(seconds)]


def _stage_cost(runs: SystemRuns, cost: float) -> str:
    return words.format_flops(cost) if runs.unit == "FLOPs" else f"{words.format_count(cost)} {runs.unit}"


def name_stage(name: str) -> str:
    """A stage in words.

    >>> name_stage("forecast-64"), name_stage("base")
    ('The contenders small, base width 64: the forecast', 'The base models, full size')
    """
    if name.startswith(_FORECAST):
        return f"The contenders small, base width {name.removeprefix(_FORECAST)}: the forecast"
    return _STAGES.get(name, name)


def describe_shares(summary: StudySummary) -> str:
    """What tuning and the forecast took of all cost."""
    total = sum(stage.cost for stage in summary.stages)
    if not total:
        return ""
    tuning = sum(stage.cost for stage in summary.stages if stage.name in TUNING)
    forecast = sum(stage.cost for stage in summary.stages if stage.name.startswith(_FORECAST))
    return f"Tuning took {100 * tuning / total:.0f} % of all cost, the forecast {100 * forecast / total:.0f} %."
