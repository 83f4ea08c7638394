"""Axes for numbers that lie far apart, labelled where there is room, and room above and below the lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mupscale.plots import words

_ROW = 0.045
"""Of the axes' height, for a row of crosses."""


def set_value_axis(ax: Any, values: Sequence[float], part: float = 0.8) -> None:
    """Make x logarithmic, labelled at these values as far as there is room; to zero, where that is one, it is linear.

    part: of the figure's width, which all axes have together.

    >>> from mupscale.plots import figure
    >>> _, ax = figure()
    >>> set_value_axis(ax, [0.0, 0.1, 0.2])
    >>> ax.get_xscale(), [label.get_text() for label in ax.get_xticklabels()]
    ('symlog', ['0', '0.1', '0.2'])
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
    shown = _with_room(ax, xs, part)
    ax.set_xticks(xs, [words.format_setting(x) if x in shown else "" for x in xs])
    ax.xaxis.minorticks_off()


def _with_room(ax: Any, xs: Sequence[float], part: float) -> set[float]:
    """Those values whose labels fit beside each other: the ends, and of the others as many as there is room for."""
    inches: float = part * ax.figure.get_figwidth() / len(ax.figure.axes)
    scaled: list[float] = ax.xaxis.get_transform().transform(xs).tolist()
    unit = inches / ((scaled[-1] - scaled[0]) or 1.0)
    at = {x: unit * place for x, place in zip(xs, scaled, strict=True)}
    wide = {x: 0.075 * (len(words.format_setting(x)) + 0.5) for x in xs}  # inches a letter, and half a one between two
    labelled = {xs[0], xs[-1]}
    for x in xs[1:-1]:
        if all(abs(at[x] - at[other]) > (wide[x] + wide[other]) / 2 for other in labelled):
            labelled.add(x)
    return labelled


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Round numbers between these for a logarithmic axis: as many as there is room for.

    >>> round_numbers(190, 1050, 4), round_numbers(3, 70000, 5)
    ([200.0, 500.0, 1000.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for heads in ((1,), (1, 2, 5), (1, 2, 3, 5, 7), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        numbers = [float(f"{head * 10.0**power:.3g}") for power in powers for head in heads]
        numbers = [number for number in numbers if low <= number <= high]
        if (found and len(numbers) > most) or (len(heads) > 5 and len(found) > 2):
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
