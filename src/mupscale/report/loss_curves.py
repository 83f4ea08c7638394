"""Losses of the compared models: mean and min–max band over seeds, against steps and against total FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import median
from typing import Any, Literal

import numpy as np

from mupscale.method import UPSCALED, Curve, Runs, Summary, find_contender
from mupscale.plots import (
    MUTED,
    Gallery,
    Picture,
    Point,
    add_legend_below,
    drop_partial_point,
    escape_text,
    keep_extremes,
    set_count_axis,
    set_log_axis_if_wide,
    words,
)

Against = Literal["step", "flops"]
What = Literal["training", "held-out", "accuracy"]
Points = list[Point]
_MOST = 300
"""Points a line is drawn with."""
_AXIS = {"training": "training loss", "held-out": "held-out loss", "accuracy": "held-out accuracy"}


@dataclass(frozen=True)
class CurveLine:
    """A model's curve: x, mean, low and high over the seeds that finished, and the others as far as they came.

    lowest, highest: of the single measurements, where a point is the mean of many; else the same as low and high.
    """

    runs: Runs
    xs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    lowest: list[float]
    highest: list[float]
    diverged: list[Points]

    @property
    def has_extremes(self) -> bool:
        """Whether single measurements lie beyond the points."""
        return self.lowest != self.low or self.highest != self.high

    def moved(self, start: float, scale: float) -> CurveLine:
        """The same line on another scale of x."""
        diverged = [[(start + scale * x, value) for x, value in points] for points in self.diverged]
        return replace(self, xs=[start + scale * x for x in self.xs], diverged=diverged)

    @property
    def label(self) -> str:
        """Its name, and what became of it."""
        lost = sum(curve.status == "diverged" for curve in self.runs.curves)
        end = f" ({lost} of {len(self.runs.curves)} diverged)" if lost else ""
        contender = find_contender(self.runs.name)
        return (escape_text(self.runs.label or self.runs.name) if contender is None else contender.short) + end

    @property
    def look(self) -> dict[str, Any]:
        """Colour and dashes, the same in all pictures."""
        contender = find_contender(self.runs.name)
        return {"color": MUTED, "ls": "-"} if contender is None else {"color": contender.color, "ls": contender.dashes}


def draw_loss_curves(summary: Summary, gallery: Gallery) -> Iterator[Picture]:
    """Training loss against steps and FLOPs, whole and zoomed, then what was measured on held-out data."""
    trained = collect_lines(summary, "training", "step")
    for against, axis, drawn in (
        ("step", "steps", trained),
        ("flops", "total FLOPs", _against_flops(summary, trained)),
    ):
        if not drawn:
            continue
        alt = f"Training loss against {axis}. {_finals(drawn)}"
        for zoom in (False, True) if any(line.xs for line in drawn) else (False,):
            name = f"training-{against}{'-zoom' if zoom else ''}"
            caption = _caption(against, zoom, any(line.has_extremes for line in drawn))

            def sketch(ax: Any, drawn: list[CurveLine] = drawn, zoom: bool = zoom, against: str = against) -> None:
                _plot(ax, summary, drawn, "training", against, zoom)

            yield gallery.draw(name, f"{alt} {'Zoom.' if zoom else ''}".strip(), caption, sketch, size=_size(drawn))
    measured: tuple[What, ...] = ("held-out", "accuracy")
    for what in measured:
        drawn = collect_lines(summary, what, "step")
        charged = _against_flops(summary, drawn)
        against, axis = "step", "steps"
        if len(charged) == len(drawn):  # all costs are known
            drawn, against, axis = charged, "flops", "total cost"
        if drawn:

            def held_out(ax: Any, drawn: list[CurveLine] = drawn, what: str = what, against: str = against) -> None:
                _plot(ax, summary, drawn, what, against, zoom=True)

            caption = f"{_AXIS[what].capitalize()} against {axis}"
            yield gallery.draw(what, f"{caption}. {_finals(drawn)}", caption, held_out, size=_size(drawn))


def collect_lines(summary: Summary, what: What, against: Against) -> list[CurveLine]:
    """Every model that has such a curve, against steps or FLOPs."""
    lines = [line for runs in summary.runs if (line := _line(runs, what)).xs or line.diverged]
    return lines if against == "step" else _against_flops(summary, lines)


def _against_flops(summary: Summary, lines: Sequence[CurveLine]) -> list[CurveLine]:
    """Those whose cost is known. A model that starts from the base model starts where its cost ended."""
    base = summary.get("base")
    spent = summary.costs.get("base")
    if not words.is_finite_number(spent):
        spent = base.steps * base.flops_per_step if base and words.is_finite_number(base.flops_per_step) else None
    charged = []
    for line in lines:
        runs = line.runs
        if words.is_finite_number(runs.flops_per_step) and not (runs.after_base and spent is None):
            charged.append(line.moved((spent or 0.0) if runs.after_base else 0.0, runs.flops_per_step))
    return charged


def _line(runs: Runs, what: What) -> CurveLine:
    tables = [(curve.status == "diverged", _table(curve, what)) for curve in runs.curves]
    steps, values = _shared_points([table for is_lost, table in tables if not is_lost and table.size])
    means, lowest, highest = values[:, 0], values[:, 1].min(0, initial=math.inf), values[:, 2].max(0, initial=-math.inf)
    kept = keep_extremes(lowest, highest, _MOST)
    return CurveLine(
        runs,
        steps[kept].tolist(),
        (means[:, kept].mean(0) if kept else steps).tolist(),
        means[:, kept].min(0, initial=math.inf).tolist(),
        means[:, kept].max(0, initial=-math.inf).tolist(),
        lowest[kept].tolist(),
        highest[kept].tolist(),
        [_thinned(_with_extremes(table)) for is_lost, table in tables if is_lost and table.size],
    )


def _shared_points(tables: Sequence[Any]) -> tuple[Any, Any]:
    """The steps that all seeds have, and their values: seeds × (mean, lowest, highest) × steps."""
    if not tables:
        return np.empty(0), np.empty((0, 3, 0))
    if any(not np.array_equal(table[0], tables[0][0]) for table in tables):
        common = reduce(np.intersect1d, [table[0] for table in tables])
        tables = [table[:, np.searchsorted(table[0], common)] for table in tables]
    return tables[0][0], np.stack([table[1:] for table in tables])


def _table(curve: Curve, what: What) -> Any:
    """Steps that rise, and at each the value and the lowest and highest that it stands for; four rows of numbers."""
    extremes: tuple[list[float], list[float]] = ([], [])
    if what == "training":
        steps, values, extremes = curve.steps, curve.losses, (curve.lowest, curve.highest)
    else:
        steps, values = curve.held_out_steps, curve.accuracy if what == "accuracy" else curve.held_out_losses
    row = np.array(values, dtype=float)[: len(steps)]
    columns = [row, *(np.array(one, dtype=float) if one else row for one in extremes)]
    table = np.stack([np.array(steps[: len(row)], dtype=float), *columns])
    table = table[:, np.isfinite(table).all(0)]
    if not (np.diff(table[0]) > 0).all():
        table = table[:, np.unique(table[0], return_index=True)[1]]
    return _without_partial_point(table) if what == "training" and curve.status != "diverged" else table


def _without_partial_point(table: Any) -> Any:
    """Without a last point of far fewer steps, see `drop_partial_point`; its extremes go to the point before it."""
    ends = [(step, 0.0) for step in table[0, [0, 1, -2, -1]].tolist()] if table.shape[1] > 2 else []
    if len(drop_partial_point(ends, "")) == len(ends):
        return table
    table[2, -2], table[3, -2] = table[2, -2:].min(), table[3, -2:].max()
    return table[:, :-1]


def _with_extremes(table: Any) -> list[tuple[float, float]]:
    """The points of one run, with the lowest and the highest that any of them stands for in the place of its mean."""
    steps, values, lowest, highest = table
    values = values.copy()
    values[highest.argmax()], values[lowest.argmin()] = highest.max(), lowest.min()
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def _thinned(points: Sequence[Any]) -> list[Any]:
    """Some of them, the first, the last and the extremes among them."""
    values = [value for _, value in points]
    return [points[i] for i in keep_extremes(values, values, _MOST)]


def _plot(ax: Any, summary: Summary, drawn: list[CurveLine], what: str, against: str, zoom: bool) -> None:
    largest = max(max([*line.xs, *(x for points in line.diverged for x, _ in points)]) for line in drawn)
    size, unit = words.choose_flops_unit(largest) if against == "flops" else (1.0, "")
    for line in drawn:
        strong = line.runs.name == UPSCALED.name
        xs = [x / size for x in line.xs]
        dots = {"marker": "o", "ms": 2.5} if 0 < len(xs) <= 25 else {}
        ax.plot(
            xs, line.mean, lw=2.0 if strong else 1.6, label=line.label, zorder=4 if strong else 3, **line.look, **dots
        )
        if len([c for c in line.runs.curves if c.status != "diverged"]) > 1:
            ax.fill_between(xs, line.low, line.high, color=line.look["color"], alpha=0.18, lw=0, zorder=2)
        if line.has_extremes:
            shade, edge = ((line.look["color"], strength) for strength in (0.09, 0.5))  # a peak is as thin as its edge
            ax.fill_between(xs, line.lowest, line.highest, facecolor=shade, edgecolor=edge, lw=0.5, zorder=1)
        for points in line.diverged:
            ax.plot([x / size for x, _ in points], [y for _, y in points], lw=0.7, color=line.look["color"], alpha=0.7)
            ax.plot(points[-1][0] / size, points[-1][1], "x", ms=6, color=line.look["color"])
    if zoom and (limits := _zoom(drawn, what)):
        log = what == "held-out" and set_log_axis_if_wide(ax, limits)
        ax.set_ylim(*_with_room(*limits, log=log, most=1.0 if what == "accuracy" and limits[1] <= 1 else math.inf))
    elif what != "accuracy":
        set_log_axis_if_wide(
            ax, [v for line in drawn for v in [*line.lowest, *line.highest, *(y for p in line.diverged for _, y in p)]]
        )
    lowest = summary.costs.get("scratch_min_loss")
    if zoom and what == "training" and words.is_finite_number(lowest):
        ax.axhline(lowest, color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1, label="(a)'s lowest in (e)'s steps")
    ax.set_xlabel(f"training cost, {unit}" if against == "flops" else "steps of its own training")
    ax.set_ylabel(_AXIS[what] + (", zoomed" if zoom and what == "training" else ""))
    set_count_axis(ax)
    add_legend_below(ax, _columns(drawn))


def _zoom(drawn: list[CurveLine], what: str) -> tuple[float, float] | None:
    """From the best value to the worst that a compared model had after its first quarter, or ends at.

    That is where the comparison is decided; a single jump, or a model that is there to be worse, does not count.
    """
    compared = [line for line in drawn if line.xs and _sets_zoom(line)]
    compared = compared or [line for line in drawn if line.xs]
    if not compared:
        return None
    if what == "accuracy":
        top = max(max(line.high) for line in compared)
        bottom = min(value for line in compared for value in _typical(line))
    else:
        bottom = min(min(line.low) for line in compared)
        top = max(value for line in compared for value in _typical(line))
    return (bottom, top) if top > bottom else None


def _sets_zoom(line: CurveLine) -> bool:
    contender = find_contender(line.runs.name)
    return contender is None or contender.sets_zoom


def _typical(line: CurveLine) -> tuple[float, float]:
    """What it had after the first quarter, and what it ends at."""
    return line.mean[len(line.mean) // 4], median(line.mean[-max(1, len(line.mean) // 10) :])


def _with_room(bottom: float, top: float, *, log: bool, most: float) -> tuple[float, float]:
    """Limits of an axis for values between these: a little further, but not to where none can be."""
    if log:
        room = (top / bottom) ** 0.08
        return bottom / room, top * room
    room = 0.08 * (top - bottom)
    return max(0.0, bottom - room) if bottom >= 0 else bottom - room, min(most, top + room)


def _size(drawn: list[CurveLine]) -> tuple[float, float]:
    return 4.8, 3.2 + 0.19 * -(-(len(drawn) + 1) // _columns(drawn))


def _columns(drawn: list[CurveLine]) -> int:
    """As many columns of names as fit below a picture."""
    return 2 if max(len(line.label) for line in drawn) <= 28 else 1


def _caption(against: str, zoom: bool, has_extremes: bool) -> str:
    if zoom:
        return "The same, zoomed to where the comparison is decided"
    if against == "flops":
        return "Training loss against total cost; models that start from the base model start where its training ended"
    start = "Training loss against steps; every model from its own first step, mean and min–max over seeds"
    return f"{start}; fainter, the extremes of what each point is the mean of" if has_extremes else start


def _finals(drawn: list[CurveLine]) -> str:
    return (
        "At the end: "
        + ", ".join(
            f"{_short(line.runs)} {words.format_loss(line.mean[-1]) if line.mean else 'diverged'}" for line in drawn
        )
        + "."
    )


def _short(runs: Runs) -> str:
    contender = find_contender(runs.name)
    return runs.label if contender is None else contender.short
