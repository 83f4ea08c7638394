"""Pictures of the limit, in the report's style: losses, errors against n, copies of a unit, preactivations, sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mupscale.plots import (
    COLORS,
    INK,
    MUTED,
    Gallery,
    HeatMap,
    Picture,
    add_legend_below,
    draw_heat_map,
    level_colors,
    words,
)
from mupscale.sweep import Sweep
from mupscale.system import MupscaleError, make_folder, require
from mupscale.theory.estimates import Estimate
from mupscale.theory.limit_study import LimitComparison, WorkedExample

_SIZE = (5.4, 3.7)
_LONG = 20  # letters of a name of which two do not fit side by side below a picture
_WIDTH_COLORS = (0.0, 0.92)  # the part of level_colors() that widths take


def open_gallery(folder: Path) -> Gallery:
    """Make the folder for pictures. That it cannot be made, or matplotlib is missing, is said here."""
    require("matplotlib", reason="pictures need matplotlib")
    try:
        make_folder(folder)
    except OSError as error:
        raise MupscaleError(f"the folder {folder} cannot be made: {error.strerror}; choose another") from None
    return Gallery(folder)


def draw_losses(comparisons: Mapping[str, LimitComparison], gallery: Gallery, name: str = "loss") -> Picture:
    """Loss against steps in the limit and at finite widths, and below how far from the limit networks are.

    Several comparisons stand side by side, under their names.
    """

    def sketch(ax: Any) -> None:
        panels = _panels(ax, len(comparisons))
        for (above, below), (title, comparison) in zip(panels, comparisons.items(), strict=True):
            draw(above, below, comparison)
            above.set_title(title, fontsize="medium")
        panels[0][0].set_ylabel("training loss")
        panels[0][1].set_ylabel("network − limit")
        add_legend_below(panels[-1][0], 3)

    def draw(above: Any, below: Any, comparison: LimitComparison) -> None:
        limit, steps = comparison.limit.losses, range(len(comparison.limit.losses.mean))
        for each, color in zip(comparison.finite, _colors(len(comparison.finite)), strict=True):
            above.plot(steps, each.losses.mean, color=color, lw=1.1, label=f"n = {words.format_count(each.width)}")
            off = each.losses.mean - limit.mean
            below.plot(steps, off, color=color, lw=1.1)
            low, high = off - each.losses.spread, off + each.losses.spread
            below.fill_between(steps, low, high, color=color, alpha=0.22, lw=0)
        above.plot(steps, limit.mean, color=INK, lw=1.8, zorder=4, label="limit n → ∞")
        error = 2 * limit.standard_error
        for panel, level in ((above, limit.mean), (below, 0 * limit.mean)):
            panel.fill_between(steps, level - error, level + error, color=INK, alpha=0.5, lw=0, zorder=4)
            _upscaled(panel, comparison)
        below.axhline(0, color=INK, lw=0.8)
        below.set_xlabel("steps")

    first = next(iter(comparisons.values()))
    caption = (
        f"Loss in the limit (band: two standard errors) and at {len(first.finite)} widths, {_times(first)}; below, "
        f"networks minus the limit, mean and one standard deviation over draws"
    )
    caption = f"{', and '.join(comparisons)}. {caption}" if len(comparisons) > 1 else caption
    return gallery.draw(name, caption, caption, sketch, size=(5.4 if len(comparisons) == 1 else 8.6, 5.0))


def draw_outputs(example: WorkedExample, gallery: Gallery) -> Picture:
    """A worked example's output over time: the closed form, the limit backend on it, and finite networks around."""

    def sketch(ax: Any) -> None:
        comparison, steps = example.comparison, range(len(example.closed))
        for networks in comparison.finite:
            values = networks.outputs.values.flatten(1)
            low, high = values.mean(0) - values.std(0), values.mean(0) + values.std(0)
            label = f"networks, n = {words.format_count(networks.width)}"
            look = {"color": COLORS[1], "alpha": 0.55 - 0.4 / (1 + comparison.finite.index(networks)), "lw": 0}
            ax.fill_between(steps, low, high, label=label, **look)
        ax.plot(steps, example.never, "--", color=MUTED, lw=1.3, label="never upscaled")
        ax.plot(steps, example.closed, color=INK, lw=1.6, zorder=4, label="closed form")
        limit = comparison.limit.outputs.mean.flatten()
        ax.plot(steps, limit, "o", ms=4.5, mfc="none", color=COLORS[2], zorder=5, label="limit backend")
        _upscaled(ax, comparison)
        ax.set_xlabel("steps")
        ax.set_ylabel("output")
        add_legend_below(ax, 3)

    caption = f"Example {example.number}: closed form, limit, and networks (one standard deviation over draws)"
    return gallery.draw(f"example-{example.number}", caption, caption, sketch, size=(5.4, 3.9))


def draw_errors(comparisons: Mapping[str, LimitComparison], gallery: Gallery, name: str = "error") -> Picture | None:
    """How far networks are from the limit, against n, with the Master theorem's slope −1/2; None if none is off."""
    comparisons = {
        label: comparison
        for label, comparison in comparisons.items()
        if comparison.finite and min(comparison.errors) > 0
    }
    if not comparisons:
        return None

    def sketch(ax: Any) -> None:
        widths = sorted({n for comparison in comparisons.values() for n in comparison.widths})
        for (label, comparison), color in zip(comparisons.items(), COLORS[1:], strict=False):
            slope = "" if comparison.slope is None else f"slope {_signed(comparison.slope)}"
            name = ", ".join(filter(None, (label, slope)))
            ax.plot(comparison.widths, comparison.errors, "o-", ms=5, lw=1.3, color=color, label=name or "one network")
            root = [math.log(e * math.sqrt(n)) for n, e in zip(comparison.widths, comparison.errors, strict=True)]
            level, ends = math.exp(math.fsum(root) / len(root)), (widths[0] / 1.25, widths[-1] * 1.25)
            line = [level / math.sqrt(n) for n in ends]
            shown = None if "slope −1/2" in ax.get_legend_handles_labels()[1] else "slope −1/2"
            ax.plot(ends, line, "--", lw=1, color=MUTED, zorder=1, label=shown)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [words.format_count(n) for n in widths])
        _plain_log_axis(ax.yaxis)
        ax.minorticks_off()
        ax.set_xlabel("n")
        ax.set_ylabel("distance from the limit (rms)")
        add_legend_below(ax, 2 if max(map(len, comparisons)) < _LONG else 1)

    caption = "Distance of one network's outputs from the limit, against n"
    return gallery.draw(name, caption, caption, sketch, size=_SIZE)


def draw_copies(comparison: LimitComparison, gallery: Gallery, name: str = "copies") -> Picture:
    """The copy kernel ⟨h|h⟩ over time: a copy with itself, and with another copy of the same unit.

    After several upscalings, with a copy that the first of them separated from it: others are equal for longer.
    """

    def sketch(ax: Any) -> None:
        _line(ax, comparison.limit.same, COLORS[1], "a copy with itself, ⟨h|h⟩ᵢᵢ")
        if comparison.times > 1:
            which = "two copies that part first" if len(comparison.upscaled) > 1 else "two copies"
            _line(ax, comparison.limit.other, COLORS[2], f"{which}, ⟨h|h⟩ᵢⱼ")
        if comparison.finite:
            widest = comparison.finite[-1]
            steps = range(len(widest.same.mean))
            pairs = ((widest.same, COLORS[1]), (widest.other, COLORS[2]))
            for estimate, color in pairs[: 2 if comparison.times > 1 else 1]:
                shown = f"networks, n = {words.format_count(widest.width)}" if color == COLORS[1] else None
                ax.plot(steps, estimate.mean, "o", ms=4, mfc="none", color=color, label=shown)
        _upscaled(ax, comparison)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("steps")
        ax.set_ylabel("second moment of preactivations")
        add_legend_below(ax, 2)

    caption = f"The copy kernel of the last hidden layer, mean over inputs; lines: the limit, k = {comparison.times}"
    return gallery.draw(name, caption, caption, sketch, size=_SIZE)


def draw_preactivations(comparison: LimitComparison, gallery: Gallery, name: str = "preactivations") -> Picture:
    """The distribution of the last hidden layer's preactivations at the end, beside a Gaussian of the same spread."""

    def sketch(ax: Any) -> None:
        edges = comparison.edges
        middle = (edges[1:] + edges[:-1]) / 2
        if comparison.finite:
            widest = comparison.finite[-1]
            label = f"networks, n = {words.format_count(widest.width)}"
            ax.stairs(widest.density, edges, fill=True, color=COLORS[1], alpha=0.3, label=label)
        ax.plot(middle, comparison.limit.density, color=INK, lw=1.6, label="limit n → ∞")
        weight = comparison.limit.density * (edges[1] - edges[0])
        mean = float((weight * middle).sum())
        std = float((weight * (middle - mean).square()).sum().sqrt())
        gaussian = torch.exp(-((middle - mean) / std).square() / 2) / (std * math.sqrt(2 * math.pi))
        ax.plot(middle, gaussian, "--", lw=1.2, color=COLORS[2], label="Gaussian of that spread")
        ax.set_ylim(bottom=0)
        ax.set_xlabel("preactivation at the end, first input")
        ax.set_ylabel("density")
        add_legend_below(ax, 3)

    caption = "Preactivations of the last hidden layer after training, all copies of all units"
    return gallery.draw(name, caption, caption, sketch, size=_SIZE)


def draw_sweep(sweep: Sweep, gallery: Gallery, base_lr: float) -> Picture:
    """Losses by learning rate and noise; base_lr: the learning rate before the upscaling."""
    numbers: dict[tuple[float, float], float] = {t.cell: t.loss for t in sweep.trials if t.loss is not None}
    diverged = {trial.cell for trial in sweep.trials} - numbers.keys()
    heat_map = HeatMap(
        columns=sweep.grid.lrs,
        rows=sweep.grid.noises,
        numbers=numbers,
        crossed=diverged,
        best=sweep.best.cell if numbers else None,
        reference=base_lr,
        column_label="learning rate",
        reference_label="learning rate, and as a multiple of the base model's",
        row_label="noise",
        crossed_label="diverged" if diverged else "",
    )
    caption = f"Loss at infinite width by learning rate and noise, {sweep.start} → {sweep.width}"
    size = (max(4.8, 1.5 + 0.6 * len(heat_map.columns)), 1.7 + 0.36 * len(heat_map.rows))
    return gallery.draw(sweep.name, caption, caption, lambda ax: draw_heat_map(ax, heat_map), size=size)


def _line(ax: Any, estimate: Estimate, color: Any, label: str) -> None:
    """With a band of two standard errors."""
    steps, mean, error = range(len(estimate.mean)), estimate.mean, 2 * estimate.standard_error
    ax.plot(steps, mean, color=color, lw=1.8, zorder=4, label=label)
    ax.fill_between(steps, mean - error, mean + error, color=color, alpha=0.3, lw=0)


def _panels(ax: Any, columns: int) -> list[tuple[Any, Any]]:
    """Pairs of axes, one above the other, in the place of one."""
    fig = ax.figure
    fig.clear()
    panels = fig.subplots(2, columns, sharex=True, sharey="row", height_ratios=[3, 2], squeeze=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return list(zip(*panels, strict=True))


def _upscaled(ax: Any, comparison: LimitComparison) -> None:
    """Where the networks became wider: the first loss with the noise is that of this step."""
    for number, step in enumerate(comparison.upscaled):
        word = "upscaled" if comparison.wider == comparison.times else "grown"
        label = f"{word}, {_times(comparison)}" if number == len(comparison.upscaled) - 1 else None
        ax.axvline(step, color=MUTED, lw=1, ls=":", zorder=1, label=label)


def _times(comparison: LimitComparison) -> str:
    """By how much the networks grow: k by copies, r by fresh units as well."""
    return f"k = {comparison.times}" if comparison.wider == comparison.times else f"r = {comparison.wider:g}"


def _colors(count: int) -> list[Any]:
    first, last = _WIDTH_COLORS
    return [level_colors()(first + (last - first) * (i / (count - 1) if count > 1 else 0)) for i in range(count)]


def _plain_log_axis(axis: Any) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")
