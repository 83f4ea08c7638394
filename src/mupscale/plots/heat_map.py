"""A heat map: numbers over two lists of values, cells that have none, and the best cell; and the colours of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from mupscale.plots.gallery import BAD, INK, MUTED, PAPER
from mupscale.system import words

STAR = {"marker": "*", "color": "#ff4d2e", "markeredgecolor": "#14181d", "markeredgewidth": 0.8}
"""The look of an optimum."""
_COLUMNS_WITH_TEXT = 8
"""As many columns leave room for numbers."""

Place = tuple[float, float]
"""A cell: a value of the columns and one of the rows."""


@dataclass(frozen=True)
class HeatMap:
    """What a heat map shows; a cell that is in none of numbers, crossed and hatched stays empty.

    reference: columns are also labelled as multiples of it, where there is room. Labels that are empty are left out. A
    first row of 0 is called none, and a line sets it apart.
    """

    columns: Sequence[float]
    rows: Sequence[float]
    numbers: Mapping[Place, float]
    crossed: AbstractSet[Place] = frozenset()
    hatched: AbstractSet[Place] = frozenset()
    best: Place | None = None
    reference: float = 0.0
    column_label: str = ""
    reference_label: str = ""
    row_label: str = ""
    crossed_label: str = ""
    hatched_label: str = ""

    @property
    def with_text(self) -> bool:
        """Whether cells have room for their numbers."""
        return len(self.columns) <= _COLUMNS_WITH_TEXT


def draw_heat_map(ax: Any, heat_map: HeatMap) -> None:
    """Draw cells, the best one's star, a legend, both axes and a colour bar.

    >>> from mupscale.plots import figure
    >>> _, ax = figure()
    >>> draw_heat_map(ax, HeatMap([0.1, 0.2], [0.0, 1.0], {(0.1, 0.0): 3.0, (0.2, 1.0): 2.0}, best=(0.2, 1.0)))
    >>> [text.get_text() for text in ax.texts], [label.get_text() for label in ax.get_yticklabels()]
    (['3.000', '2.000'], ['0 (none)', '1'])
    """
    from matplotlib.patches import Patch, Rectangle

    color = number_colors(list(heat_map.numbers.values()))
    columns, rows, reference = heat_map.columns, heat_map.rows, heat_map.reference
    for place in product(columns, rows):
        column, row = columns.index(place[0]), rows.index(place[1])
        corner = column - 0.5, row - 0.5
        if place in heat_map.crossed:
            ax.plot(column, row, "x", ms=5, color=BAD, mew=1)
        elif place in heat_map.hatched:
            ax.add_patch(Rectangle(corner, 1, 1, fc="none", ec=MUTED, hatch="////", lw=0))
        elif place in heat_map.numbers:
            face = color.to_rgba(heat_map.numbers[place])
            ax.add_patch(Rectangle(corner, 1, 1, fc=face, ec=PAPER, lw=1))
            if heat_map.with_text:
                dark_face = 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
                at, ink = row - (0.2 if place == heat_map.best else 0), "#fdfdfd" if dark_face else "#101418"
                ax.text(column, at, words.format_loss(heat_map.numbers[place]), color=ink, **style)
    if heat_map.best is not None:
        column, row = columns.index(heat_map.best[0]), rows.index(heat_map.best[1])
        up, size = (0.22, 10) if heat_map.with_text else (0, 12)
        ax.plot(column, row + up, ms=size, ls="", zorder=5, label="optimum", **STAR)
    if heat_map.crossed_label:
        ax.plot([], [], "x", ms=5, color=BAD, label=heat_map.crossed_label)
    handles, labels = ax.get_legend_handles_labels()
    if heat_map.hatched_label:
        handles.append(Patch(fc="none", ec=MUTED, hatch="////", lw=0.5))
        labels.append(heat_map.hatched_label)
    if handles:
        ax.figure.legend(handles, labels, loc="outside lower center", ncols=3)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    ticks, label = [words.format_setting(value) for value in columns], heat_map.column_label
    if heat_map.with_text and words.is_finite_number(reference) and reference > 0:
        factors = [value / reference for value in columns]
        times = [f"÷{1 / factor:.2g}" if factor < 0.995 else f"×{factor:.2g}" for factor in factors]
        ticks, label = [f"{tick}\n{n}" for tick, n in zip(ticks, times, strict=True)], heat_map.reference_label
    ax.set_xlabel(label)
    ax.set_xticks(range(len(columns)), ticks, rotation=0 if heat_map.with_text else 45, fontsize=8)
    ax.set_yticks(range(len(rows)), ["0 (none)" if value == 0 else words.format_setting(value) for value in rows])
    ax.set_ylabel(heat_map.row_label)
    if rows[0] == 0 and len(rows) > 1:
        ax.axhline(0.5, color=INK, lw=1.2)
    add_color_bar(ax, color)


def number_colors(numbers: Sequence[float | None]) -> Any:
    """Colours of numbers, the lowest the brightest; None without any number.

    Far above the lowest all have one colour, so that differences near it can be seen.

    >>> [round(number, 2) for number in number_colors([1.0, 1.1, 1.2, 9.0]).get_clim()]
    [1.0, 1.45]
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    finite = [number for number in numbers if words.is_finite_number(number)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    high = min(high, low + 3 * (median(finite) - low)) if len(finite) > 2 and median(finite) > low else high
    cmap: Any = colormaps["viridis_r"].copy()
    cmap.colorbar_extend = "max" if high < max(finite) else "neither"
    return ScalarMappable(Normalize(low, high if high > low else low + 1e-12), cmap)


def add_color_bar(ax: Any, color: Any, label: str = "loss") -> None:
    """A bar beside the axes that says which colour is which number; none where there are no colours.

    >>> from mupscale.plots import figure
    >>> _, ax = figure()
    >>> add_color_bar(ax, number_colors([1.0, 2.0]), "error")
    >>> ax.figure.axes[-1].get_title(loc="left")
    'error'
    """
    from matplotlib.ticker import ScalarFormatter

    if color is None:
        return
    digits = ScalarFormatter(useOffset=False)  # as many as tell the ticks apart, the same for all
    digits.set_scientific(False)
    bar = ax.figure.colorbar(color, ax=ax, pad=0.02, aspect=24)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=8)
    bar.ax.yaxis.set_major_formatter(digits)
    low, high = color.get_clim()
    if high - low <= 1e-9 * abs(low):  # all numbers are the same
        bar.set_ticks([low], labels=[words.format_loss(low)])
    bar.ax.set_title(label, fontsize=8, loc="left", color=INK)
