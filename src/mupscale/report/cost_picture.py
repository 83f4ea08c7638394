"""Final loss against cost, a line for every contender: its name where the line ends, and break-even marked."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from mupscale.plots import (
    INK,
    MUTED,
    PAPER,
    EndLabel,
    Gallery,
    Picture,
    add_crosses,
    add_end_labels,
    escape_text,
    round_numbers,
    set_log_axis_if_wide,
)
from mupscale.report.looks import add_line, dark_colors, find_looks
from mupscale.study import SystemRuns, contender_or_stranger, find_cost_unit, format_widths, loss_at
from mupscale.system import words

_CUT, _MARGIN = 6.0, 0.05
"""How many times the distance from the lowest loss to the median a picture shows, and the room beyond what it shows."""


@dataclass(frozen=True)
class Shape:
    """A picture's size in inches, how many letters a label's line has, and how many numbers fit along the axis."""

    size: tuple[float, float]
    letters: int
    ticks: int


WIDE, HALF, NARROW = Shape((8.8, 4.5), 30, 7), Shape((4.8, 3.7), 17, 4), Shape((3.75, 3.9), 16, 4)


@dataclass(frozen=True)
class Mark:
    """A break-even: from this cost on the grown model is lower than a rival, and the loss that both have there."""

    rival: str
    cost: float
    loss: float

    def words(self, unit: tuple[float, str]) -> str:
        """Whom it is with, and where."""
        return f"{self.rival}: {words.format_setting(self.cost / unit[0])} {unit[1]}"


def draw_system(
    runs: SystemRuns, gallery: Gallery, name: str, measure: str, answer: Mapping[str, Any], shape: Shape = HALF
) -> tuple[Picture, Picture]:
    """The picture of one base model and one wide width, and the same for a narrow page.

    measure: what the loss is called. answer: tells the break-evens.
    """
    marks, unit = find_marks(runs, answer), find_cost_unit(runs)
    over = f"mean and range over {runs.seeds} seeds" if runs.seeds > 1 else "one seed"
    caption = f"{measure.capitalize()} at the end of each budget, against cost; width {format_widths(runs)}; {over}"
    if (top := find_top(runs)) < math.inf:
        caption += f". Losses above {words.format_loss(top)} are not shown."
    finals = {one.shown: "diverged" if one.final is None else words.format_loss(one.final) for one in runs.contenders}
    ends = ", ".join(f"{shown} {final}" for shown, final in finals.items())
    alt = f"Final {measure} against cost. At the full budget: {ends}."
    alt += "".join(f" Break-even with {mark.words(unit)}." for mark in marks)
    dark = dark_colors(find_looks(runs.contenders).values())

    def draw(shape: Shape, end: str) -> Picture:
        sketch = partial(sketch_system, runs=runs, measure=measure, shape=shape, marks=marks)
        return gallery.draw(f"{name}{end}", alt, caption, sketch, size=shape.size, dark=dark)

    return draw(shape, ""), draw(NARROW, "-narrow")


def find_marks(runs: SystemRuns, answer: Mapping[str, Any]) -> list[Mark]:
    """Break-evens within the measured costs, with the base model charged if its cost is known."""
    marks = []
    for rival, ways in answer.get("break_even", {}).items():
        even = ways.get("charged") or ways.get("there")
        if even is None or even["kind"] != "from":
            continue
        loss = loss_at(runs.curve(answer["grown"]), even["cost"])
        if loss is not None:
            marks.append(Mark(contender_or_stranger(rival).brief_phrase, even["cost"], loss))
    return sorted(marks, key=lambda mark: mark.cost)


def sketch_system(ax: Any, runs: SystemRuns, measure: str, shape: Shape, marks: Sequence[Mark]) -> None:
    """Lines of means with their range over seeds, axes, crosses for what diverged, break-evens, names at the ends."""
    (size, name), looks = find_cost_unit(runs), find_looks(runs.contenders)
    unit = size, escape_text(name)
    costs: list[float] = []
    labels: list[EndLabel] = []
    lost: dict[str, list[float]] = {}
    for one in runs.contenders:
        look, spent = looks[one.name], [runs.charge(one) + point.cost for point in one.points]
        costs += spent
        usual = look.contender.is_usual
        strong = {"lw": 2.2, "ms": 4.5, "zorder": 4} if usual else {"lw": 1.1, "ms": 3.0, "zorder": 3}
        alive = [(cost, point.finite) for cost, point in zip(spent, one.points, strict=True) if point.mean is not None]
        if alive:
            add_line(ax, [cost for cost, _ in alive], [some for _, some in alive], look.color, marker="o", **strong)
        if len(alive) < len(spent):
            lost[one.name] = [cost for cost, point in zip(spent, one.points, strict=True) if point.mean is None]
        if one.final is not None:
            text = _wrap(f"{words.format_loss(one.final)} {one.shown}", shape)
            labels.append(EndLabel(text, look.color, (spent[-1], one.final), usual))
    low, high = min(costs), max(costs)
    room = (high / low) ** 0.03 if high > low else 1.1
    ax.set_xscale("log")
    ax.set_xlim(low / room, high * room)
    ticks = round_numbers(low / room / unit[0], high * room / unit[0], shape.ticks)
    ax.set_xticks([tick * unit[0] for tick in ticks], [f"{tick:,.10g}" for tick in ticks])
    ax.xaxis.minorticks_off()
    base = "base model included" if runs.base_cost is not None else "base model not included"
    if runs.base_cost == 0:  # each cost is all that was spent
        ax.set_xlabel(f"cost, {unit[1]}")
    else:
        ax.set_xlabel(f"cost, {base}, {unit[1]}" if shape is not NARROW else f"cost, {unit[1]},\n{base}")
    ax.set_ylabel(f"final {measure}")
    losses = [loss for one in runs.contenders for point in one.points for loss in point.finite]
    top = find_top(runs)
    set_log_axis_if_wide(ax, [loss for loss in losses if loss <= top])
    if losses and max(losses) > top:
        ax.set_ylim(min(losses) - _MARGIN * (top - min(losses)), top)
    if not losses:
        ax.set_yticks([])
    rows = 2 if shape is NARROW else 1
    heights = [(8.5 * 1.3 * rows + 7) / (0.75 * 72 * shape.size[1]) for _ in marks]
    crosses = add_crosses(ax, [(at, looks[name].color) for name, at in lost.items()], sum(heights))
    for one, height in zip(filter(None, map(runs.get, lost)), crosses, strict=True):
        if one.final is None:
            look = looks[one.name]
            labels.append(EndLabel(_wrap(f"diverged: {one.shown}", shape), look.color, height, look.contender.is_usual))
    add_end_labels(ax, labels, 8.5 if shape is not NARROW else 8.0)
    _add_marks(ax, marks, heights, unit, rows)


def find_top(runs: SystemRuns) -> float:
    """The highest loss that is shown: where one far above the others would leave these no room, the picture is cut."""
    means = [loss for one in runs.contenders for _, loss in runs.curve(one.name)]
    if not means:
        return math.inf
    low, high = min(means), max(means)
    usual = _CUT * (median(means) - low)
    if high - low <= 1.3 * usual:
        return math.inf
    finals = [one.final for one in runs.contenders if one.final is not None]
    top = max(loss for loss in means if loss <= low + usual or loss in finals)
    return top + _MARGIN * (top - low) if high > top else math.inf


def _wrap(text: str, shape: Shape) -> str:
    return "\n".join(textwrap.wrap(escape_text(text), shape.letters, break_long_words=False))


def _add_marks(ax: Any, marks: Sequence[Mark], heights: Sequence[float], unit: tuple[float, str], rows: int) -> None:
    """A tick where two lines cross, and words for it below all lines."""
    box = ax.get_window_extent()
    bottom = 0.0
    for mark, height in zip(marks, heights, strict=True):
        x, y = (ax.transScale + ax.transLimits).transform((mark.cost, mark.loss))
        place = {"transform": ax.transAxes, "color": INK, "solid_capstyle": "butt"}
        ax.plot([x, x], [y - 0.035, y + 0.035], lw=1.8, zorder=6, **place)
        ax.plot([x, x], [bottom + height, y - 0.035], lw=0.9, ls=(0, (1, 2)), zorder=1, **{**place, "color": MUTED})
        text = f"break-even with{chr(10) if rows > 1 else ' '}{mark.words(unit)}"
        style: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": 8.5, "color": INK, "zorder": 6}
        style["bbox"] = {"fc": PAPER, "ec": "none", "pad": 1.0}
        said = ax.text(0, bottom + height / 2, text, transform=ax.transAxes, linespacing=1.1, **style)
        width = said.get_window_extent().width / box.width
        said.set_x(min(max(x - width / 2, 0.03), max(0.03, 0.99 - width)))
        bottom += height
