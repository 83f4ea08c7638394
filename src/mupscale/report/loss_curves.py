"""Losses during training: mean and min–max band over seeds, against steps and against total cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import median
from typing import Any, Literal

import numpy as np

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
from mupscale.report.looks import Look, dark_colors, find_looks
from mupscale.study import ContenderRuns, Curve, SystemRuns

Against = Literal["step", "flops"]
What = Literal["training", "held-out", "accuracy"]
Points = list[Point]
_MOST = 300
"""Points a line is drawn with."""
AXES: dict[What, str] = {"training": "training loss", "held-out": "held-out loss", "accuracy": "held-out accuracy"}


@dataclass(frozen=True)
class CurveLine:
    """A model's curve: x, mean, low and high over the seeds that finished, and the others as far as they came.

    lowest, highest: of the single measurements, where a point is the mean of many; else the same as low and high.
    """

    runs: ContenderRuns
    look: Look
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
        return escape_text(self.look.short) + (f" ({lost} of {len(self.runs.curves)} diverged)" if lost else "")


def draw_loss_curves(system: SystemRuns, gallery: Gallery, answer: Mapping[str, Any]) -> Iterator[Picture]:
    """Training loss against steps and cost, whole and zoomed, then what was measured on held-out data.

    answer: may tell a loss for reference.
    """
    axes: dict[Against, str] = {"step": "steps", "flops": "total FLOPs"}
    for against, axis in axes.items():
        drawn = collect_lines(system, "training", against)
        for zoom in (False, True) if any(line.xs for line in drawn) else (False,) if drawn else ():
            end = "-zoom" if zoom else ""
            alt = f"Training loss against {axis}. {_finals(drawn)}{' Zoom.' if zoom else ''}"
            caption = _caption(against, zoom, any(line.has_extremes for line in drawn))
            yield _draw(gallery, f"training-{against}{end}", alt, caption, drawn, "training", against, zoom, answer)
    measured: tuple[What, ...] = ("held-out", "accuracy")
    for what in measured:
        drawn, charged = collect_lines(system, what, "step"), collect_lines(system, what, "flops")
        against, axis = "step", "steps"
        if len(charged) == len(drawn):  # all costs are known
            drawn, against, axis = charged, "flops", "total cost"
        if drawn:
            caption = f"{AXES[what].capitalize()} against {axis}"
            yield _draw(gallery, what, f"{caption}. {_finals(drawn)}", caption, drawn, what, against, True, answer)


def _draw(
    gallery: Gallery,
    name: str,
    alt: str,
    caption: str,
    drawn: Sequence[CurveLine],
    what: What,
    against: Against,
    zoom: bool,
    answer: Mapping[str, Any],
) -> Picture:
    def sketch(ax: Any) -> None:
        _sketch(ax, drawn, what, against, zoom)
        reference = answer.get("reference")
        if reference and zoom and what == "training":
            label = escape_text(reference["label"])
            ax.axhline(reference["loss"], color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=1, label=label)
        add_legend_below(ax, _columns(drawn))

    size = 4.8, 3.2 + 0.19 * -(-(len(drawn) + 1) // _columns(drawn))
    return gallery.draw(name, alt, caption, sketch, size=size, dark=dark_colors(line.look for line in drawn))


# ------------------------------------------------------------------------------------------------- lines


def collect_lines(system: SystemRuns, what: What, against: Against) -> list[CurveLine]:
    """Every model that has such a curve. Against FLOPs those whose cost is known.

    A model that starts from the base model starts where its cost ended.
    """
    looks, lines = find_looks(system.contenders), []
    for runs in system.contenders:
        line = _line(runs, looks[runs.name], what)
        if not line.xs and not line.diverged:
            continue
        if against == "step":
            lines.append(line)
        elif runs.cost_per_step is not None and not (line.look.contender.from_base and system.base_cost is None):
            lines.append(line.moved(system.charge(runs), runs.cost_per_step))
    return lines


def _line(runs: ContenderRuns, look: Look, what: What) -> CurveLine:
    tables = [(curve.status == "diverged", _table(curve, what)) for curve in runs.curves]
    steps, values = _shared_points([table for is_lost, table in tables if not is_lost and table.size])
    means, lowest, highest = values[:, 0], values[:, 1].min(0, initial=math.inf), values[:, 2].max(0, initial=-math.inf)
    kept = keep_extremes(lowest, highest, _MOST)
    return CurveLine(
        runs,
        look,
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


# ------------------------------------------------------------------------------------------------ pictures


def _sketch(ax: Any, drawn: Sequence[CurveLine], what: What, against: Against, zoom: bool) -> None:
    largest = max(max([*line.xs, *(x for points in line.diverged for x, _ in points)]) for line in drawn)
    size, unit = words.choose_flops_unit(largest) if against == "flops" else (1.0, "")
    for line in drawn:
        _add_line(ax, line, size)
    if zoom and (limits := _zoom(drawn, what)):
        log = what == "held-out" and set_log_axis_if_wide(ax, limits)
        ax.set_ylim(*_with_room(*limits, log=log, most=1.0 if what == "accuracy" and limits[1] <= 1 else math.inf))
    elif what != "accuracy":
        lost = [value for line in drawn for points in line.diverged for _, value in points]
        set_log_axis_if_wide(ax, [*lost, *(v for line in drawn for v in [*line.lowest, *line.highest])])
    ax.set_xlabel(f"training cost, {unit}" if against == "flops" else "steps of its own training")
    ax.set_ylabel(AXES[what] + (", zoomed" if zoom and what == "training" else ""))
    set_count_axis(ax)


def _add_line(ax: Any, line: CurveLine, size: float) -> None:
    """size: of the unit along x."""
    strong, color = line.look.contender.kind == "grown", line.look.contender.color
    xs = [x / size for x in line.xs]
    dots = {"marker": "o", "ms": 2.5} if 0 < len(xs) <= 25 else {}
    weight = {"lw": 2.0, "zorder": 4} if strong else {"lw": 1.6, "zorder": 3}
    ax.plot(xs, line.mean, label=line.label, **weight, **line.look.line, **dots)
    if len([curve for curve in line.runs.curves if curve.status != "diverged"]) > 1:
        ax.fill_between(xs, line.low, line.high, color=color, alpha=0.18, lw=0, zorder=2)
    if line.has_extremes:  # a peak is as thin as its edge
        ax.fill_between(
            xs, line.lowest, line.highest, facecolor=(color, 0.09), edgecolor=(color, 0.5), lw=0.5, zorder=1
        )
    for points in line.diverged:
        ax.plot([x / size for x, _ in points], [y for _, y in points], lw=0.7, color=color, alpha=0.7)
        ax.plot(points[-1][0] / size, points[-1][1], "x", ms=6, color=color)


def _zoom(drawn: Sequence[CurveLine], what: What) -> tuple[float, float] | None:
    """From the best value to the worst that a compared model had after its first quarter, or ends at.

    That is where the comparison is decided; a single jump, or a model that is there to be worse, does not count.
    """
    shown = [line for line in drawn if line.xs]
    compared = [line for line in shown if line.look.contender.sets_zoom] or shown
    if not compared:
        return None
    if what == "accuracy":
        top = max(max(line.high) for line in compared)
        bottom = min(value for line in compared for value in _typical(line))
    else:
        bottom = min(min(line.low) for line in compared)
        top = max(value for line in compared for value in _typical(line))
    return (bottom, top) if top > bottom else None


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


def _columns(drawn: Sequence[CurveLine]) -> int:
    """As many columns of names as fit below a picture."""
    return 2 if max(len(line.label) for line in drawn) <= 31 else 1


def _caption(against: Against, zoom: bool, has_extremes: bool) -> str:
    if zoom:
        return "The same, zoomed to where the comparison is decided"
    if against == "flops":
        return "Training loss against total cost; models that start from the base model start where its training ended"
    start = "Training loss against steps; every model from its own first step, mean and min–max over seeds"
    return f"{start}; fainter, the extremes of what each point is the mean of" if has_extremes else start


def _finals(drawn: Sequence[CurveLine]) -> str:
    ends = [f"{line.look.short} {words.format_loss(line.mean[-1]) if line.mean else 'diverged'}" for line in drawn]
    return f"At the end: {', '.join(ends)}."
