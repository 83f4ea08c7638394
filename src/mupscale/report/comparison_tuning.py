"""What was tuned at the small width: loss against learning rate by contender, and heat maps where noise was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mupscale.plots import (
    MUTED,
    EndLabel,
    Gallery,
    HeatMap,
    Picture,
    add_end_labels,
    draw_heat_map,
    escape_text,
    set_log_axis_if_wide,
    words,
)
from mupscale.report.comparison_facts import name_measure
from mupscale.report.comparison_picture import dark_colors, line_color
from mupscale.report.comparison_tables import is_base, label_tuned
from mupscale.study import StudySummary, Tried, TunedContender, contender_named

_ROW = 0.045
"""Of the axes' height, for the crosses of one contender."""


def draw_tuning(summary: StudySummary, gallery: Gallery) -> Iterator[Picture]:
    """One picture of all learning rates, and one of learning rate and noise for each that has both."""
    tuned, measure = [one for one in summary.tuned if one.tried], name_measure(summary)
    if not tuned:
        return
    ends = [f"{label_tuned(one)} {words.format_setting(one.lr)}" for one in tuned]
    caption = f"{measure.capitalize()} against learning rate, each at its chosen noise; the ring is what was chosen"
    dark = dark_colors([contender_named(one.name) for one in tuned if not is_base(one)])

    def sketch(ax: Any) -> None:
        _sketch_rates(ax, tuned, measure)

    alt = f"{caption}. Chosen: {', '.join(ends)}."
    yield gallery.draw("tuned-rates", alt, caption, sketch, size=(4.8, 3.7), dark=dark)
    for one in tuned:
        if len({cell.noise for cell in one.tried}) > 1:
            yield _draw_noise(one, gallery, measure)


def _sketch_rates(ax: Any, tuned: Sequence[TunedContender], measure: str) -> None:
    lrs = sorted({cell.lr for one in tuned for cell in one.tried})
    ax.set_xscale("log")
    room = (lrs[-1] / lrs[0]) ** 0.04 if len(lrs) > 1 else 1.2
    ax.set_xlim(lrs[0] / room, lrs[-1] * room)
    labels, lost = [], []
    for one in tuned:
        cells = sorted((cell for cell in one.tried if cell.noise == one.noise), key=lambda cell: cell.lr)
        done = [(cell.lr, cell.final) for cell in cells if cell.final is not None]
        color = _color(one)
        if done:
            ax.plot(*zip(*done, strict=True), "--" if is_base(one) else "-", lw=1.6, marker="o", ms=3, color=color)
            ax.plot(*_chosen(one, cells), "o", ms=9, mfc="none", mew=1.4, color=color, zorder=5)
            labels.append(EndLabel(_wrapped(label_tuned(one)), color, done[-1], not is_base(one)))
        if any(cell.mean is None for cell in cells):
            lost.append(([cell.lr for cell in cells if cell.mean is None], color))
    set_log_axis_if_wide(ax, [cell.final for one in tuned for cell in one.tried if cell.final is not None])
    _add_crosses(ax, lost)
    _set_rate_ticks(ax, lrs)
    ax.set_xlabel("learning rate")
    ax.set_ylabel(measure)
    add_end_labels(ax, labels)


def _color(one: TunedContender) -> str:
    return MUTED if is_base(one) else line_color(contender_named(one.name))


def _wrapped(text: str) -> str:
    first, _, rest = escape_text(text).partition(" ")
    return f"{first}\n{rest}" if len(text) > 14 else escape_text(text)


def _chosen(one: TunedContender, cells: Sequence[Tried]) -> tuple[list[float], list[float]]:
    losses = [cell.final for cell in cells if cell.lr == one.lr and cell.final is not None]
    return [one.lr] * len(losses), losses


def _add_crosses(ax: Any, lost: Sequence[tuple[Sequence[float], str]]) -> None:
    """Learning rates that diverged, at the top, a row for each contender; room for them was none before."""
    if not lost:
        return
    low, high = ax.get_ylim()
    share = 1 - _ROW * len(lost)
    ax.set_ylim(low, low * (high / low) ** (1 / share) if ax.get_yscale() == "log" else low + (high - low) / share)
    for row, (lrs, color) in enumerate(lost):
        at = 1 - _ROW * (row + 0.5)
        ax.plot(lrs, [at] * len(lrs), "x", ms=5, mew=1.5, color=color, transform=ax.get_xaxis_transform())


def _set_rate_ticks(ax: Any, lrs: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    every = -(-len(lrs) // 5)
    ax.set_xticks(lrs[::every], [words.format_setting(lr) for lr in lrs[::every]])
    ax.xaxis.set_minor_locator(NullLocator())


def _draw_noise(one: TunedContender, gallery: Gallery, measure: str) -> Picture:
    numbers = {(cell.lr, cell.noise): cell.final for cell in one.tried if cell.final is not None}
    stopped = {(cell.lr, cell.noise) for cell in one.tried if cell.is_stopped}
    lost = {(cell.lr, cell.noise) for cell in one.tried if cell.mean is None}
    rows = sorted({cell.noise for cell in one.tried})
    chosen = (one.lr, one.noise)
    heat_map = HeatMap(
        columns=sorted({cell.lr for cell in one.tried}),
        rows=rows,
        numbers=numbers,
        crossed=lost,
        hatched=stopped,
        best=chosen if chosen in numbers else None,
        column_label="learning rate",
        row_label="noise",
        crossed_label="diverged" if lost else "",
        hatched_label="stopped early, far behind" if stopped else "",
    )
    caption = f"{label_tuned(one).capitalize()}: {measure} by learning rate and noise; the star is what was chosen"
    alt = f"{caption}: {words.format_setting(one.lr)} and {words.format_setting(one.noise)}."

    def sketch(ax: Any) -> None:
        draw_heat_map(ax, heat_map)

    return gallery.draw(f"tuned-{one.name}", alt, caption, sketch, size=(4.8, 1.7 + 0.36 * len(rows)))
