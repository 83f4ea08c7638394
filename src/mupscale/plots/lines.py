"""Lines and their axes: numbers that lie far apart, words at the ends of lines, a million points drawn as hundreds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from mupscale.system import words

_ROW = 0.045
"""Of the axes' height, for a row of crosses."""


def set_value_axis(ax: Any, values: Sequence[float], part: float = 0.8) -> None:
    """Make x logarithmic, labelled at these values as far as there is room; to zero, where that is one, it is linear.

    part: of the figure's width, which all axes have together.
    """
    xs = sorted(set(values))
    positive = [x for x in xs if x > 0]
    if not positive:
        return
    if len(positive) < len(xs):
        ax.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    else:
        room = (xs[-1] / xs[0]) ** 0.04 if len(xs) > 1 else 2.0
        ax.set_xscale("log")
        ax.set_xlim(xs[0] / room, xs[-1] * room)
    # those values whose labels fit beside each other: the ends, and of the others as many as there is room for
    inches: float = part * ax.figure.get_figwidth() / len(ax.figure.axes)
    scaled: list[float] = ax.xaxis.get_transform().transform(xs).tolist()
    unit = inches / ((scaled[-1] - scaled[0]) or 1.0)
    at = {x: unit * place for x, place in zip(xs, scaled, strict=True)}
    wide = {x: 0.075 * (len(words.format_setting(x)) + 0.5) for x in xs}  # inches a letter, and half a one between two
    shown = {xs[0], xs[-1]}
    for x in xs[1:-1]:
        if all(abs(at[x] - at[other]) > (wide[x] + wide[other]) / 2 for other in shown):
            shown.add(x)
    ax.set_xticks(xs, [words.format_setting(x) if x in shown else "" for x in xs])
    ax.xaxis.minorticks_off()


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Round numbers between these for a logarithmic axis: as many as there is room for.

    >>> round_numbers(190, 1050, 4), round_numbers(3, 70000, 5)
    ([200.0, 500.0, 1000.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for heads in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        numbers = [float(f"{head * 10.0**power:.3g}") for power in powers for head in heads]
        numbers = [number for number in numbers if low <= number <= high]
        if (found and len(numbers) > most) or (len(heads) > 6 and len(found) > 2):
            break
        found = numbers
    return found[:: max(1, -(-len(found) // most))]


def add_crosses(ax: Any, rows: Sequence[tuple[Sequence[float], Any]], below: float = 0.0) -> list[float]:
    """A × above all lines for everything that has no loss: a row of places and a colour for each line that has some.

    Gives the rows' heights, as parts of the axes'. below: the part that is to stay free below the lines.

    >>> from mupscale.plots import figure
    >>> _, ax = figure()
    >>> ax.set_ylim(0.0, 0.9) and add_crosses(ax, [([1.0, 2.0], "#2a7fb8"), ([2.0], "#c44e52")], below=0.01)
    [0.9775, 0.9325]
    >>> [round(float(limit), 3) for limit in ax.get_ylim()]
    [-0.01, 0.99]
    """
    apart = min(_ROW, 0.35 / max(1, len(rows)))
    is_log, inside = ax.get_yscale() == "log", 1 - below - apart * len(rows)
    low, high = (math.log(limit) if is_log else limit for limit in ax.get_ylim())
    whole = (high - low) / inside
    limits = (low - below * whole, high + apart * len(rows) * whole)
    ax.set_ylim(*(math.exp(limit) if is_log else limit for limit in limits))
    heights = [1 - apart * (row + 0.5) for row in range(len(rows))]
    for at, (xs, color) in zip(heights, rows, strict=True):
        ax.plot(xs, [at] * len(xs), "x", ms=5.5, mew=1.6, color=color, transform=ax.get_xaxis_transform(), zorder=5)
    return heights


def keep_extremes(low: Sequence[float], high: Sequence[float], most: int) -> list[int]:
    """Which points to draw: of every stretch the lowest and the highest, and the first and the last of all.

    >>> from mupscale.plots import keep_extremes
    >>> values = [1.0] * 50 + [9.0] + [1.0] * 49
    >>> [values[i] for i in keep_extremes(values, values, 6)]
    [1.0, 9.0, 1.0, 1.0]
    """
    count = len(low)
    if count <= most:
        return list(range(count))
    lows, highs = np.nan_to_num(np.asarray(low), nan=np.inf), np.nan_to_num(np.asarray(high), nan=-np.inf)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int).tolist()
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(lows[start:end].argmin()), start + int(highs[start:end].argmax())}
    return sorted(kept)


_LEADER = 13.0
"""Points between the axes and the words, crossed by a thin line from a curve's end."""
_APART = 3.0
"""Points between two labels at least."""


@dataclass(frozen=True)
class EndLabel:
    """Words for a line. end: where it ends, as x and y of the data; y alone is a part of the axes' height."""

    text: str
    color: str
    end: tuple[float, float] | float
    is_strong: bool = True


def add_end_labels(ax: Any, labels: Sequence[EndLabel], size: float = 8.5) -> list[Any]:
    """Write them, each as near to its line's end as the others leave room; the limits of the axes are final by now.

    >>> from mupscale.plots import figure
    >>> fig, ax = figure()
    >>> _ = ax.plot([1, 2], [1.0, 1.0]), ax.plot([1, 2], [1.2, 1.01])
    >>> ends = [EndLabel("first", "#2a7fb8", (2, 1.0)), EndLabel("second", "#c44e52", (2, 1.01))]
    >>> low, high = (text.get_window_extent() for text in add_end_labels(ax, ends))
    >>> bool(low.y1 < high.y0), bool(ax.get_ylim()[0] > 0.9)
    (True, True)
    """
    from matplotlib.lines import Line2D

    fig = ax.figure
    texts = [
        ax.annotate(
            label.text,
            (1.0, 0.5),
            xycoords="axes fraction",
            xytext=(_LEADER + 3, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            linespacing=1.05,
            color=label.color,
            fontsize=size,
            fontweight="bold" if label.is_strong else "normal",
            annotation_clip=False,
        )
        for label in labels
    ]
    if not texts:
        return texts
    fig.draw_without_rendering()  # from here on the axes have the size that the words leave them
    box, point = ax.get_window_extent(), fig.dpi / 72
    places = ax.transScale + ax.transLimits  # from data to parts of the axes
    ends = [label.end for label in labels]
    wanted = [float(places.transform(end)[1]) if isinstance(end, tuple) else end for end in ends]
    heights = [(text.get_window_extent().height + _APART * point) / box.height for text in texts]
    for text, label, at in zip(texts, labels, spread_apart(wanted, heights), strict=True):
        text.xy = (1.0, at)
        if isinstance(label.end, tuple):  # a thin line from the curve's end to its words
            look: dict[str, Any] = {"lw": 0.7, "color": label.color, "alpha": 0.8, "clip_on": False}
            (x, y), end = places.transform(label.end), 1.0 + _LEADER * point / box.width
            line = Line2D([x, 1.0, end], [y, y, at], transform=ax.transAxes, **look)
            line.set_in_layout(False)
            ax.add_artist(line)  # which leaves the limits of the axes as they are
    return texts


def spread_apart(wanted: Sequence[float], sizes: Sequence[float], low: float = 0.0, high: float = 1.0) -> list[float]:
    """Centres of pieces of these sizes as near to the wanted ones as they can be without overlapping, in their order.

    Between low and high as long as there is room for all; then beyond high.

    >>> spread_apart([0.5, 0.5, 0.9], [0.2, 0.2, 0.2])
    [0.4, 0.6, 0.9]
    >>> spread_apart([0.0], [0.2])
    [0.1]
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    before, offsets = 0.0, []
    for number in order:
        offsets.append(before + sizes[number] / 2)
        before += sizes[number]
    groups: list[list[float]] = []  # the nearest levels that never fall: those that do are replaced by their mean
    for number, offset in zip(order, offsets, strict=True):
        groups.append([wanted[number] - offset])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    levels = [fmean(group) for group in groups for _ in group]
    most = max(low, high - before)
    placed = [min(max(level, low), most) + offset for level, offset in zip(levels, offsets, strict=True)]
    by_number = dict(zip(order, placed, strict=True))
    return [round(by_number[number], 12) for number in range(len(wanted))]
