"""Pictures of the limit, in the report's style: losses, errors against n, copies of a unit, preactivations, sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale.plots import COLORS, INK, MUTED, Gallery, HeatMap, Picture, add_legend_below, draw_heat_map, level_colors
from mupscale.system import MupscaleError, make_folder, require, words
from mupscale.theory.limit_study import LimitComparison, WayToGrow, WorkedExample, best_way

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
    """Loss against steps in the limit and at finite widths, and below how far from the limit networks are."""

    def sketch(ax: Any) -> None:
        fig = ax.figure  # pairs of axes, one above the other, take the place of one
        fig.clear()
        axes = fig.subplots(2, len(comparisons), sharex=True, sharey="row", height_ratios=[3, 2], squeeze=False)
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(alpha=0.25, linewidth=0.6)
        panels = list(zip(*axes, strict=True))
        for (above, below), (title, comparison) in zip(panels, comparisons.items(), strict=True):
            draw(above, below, comparison)
            above.set_title(title, fontsize="medium")
        panels[0][0].set_ylabel("training loss")
        panels[0][1].set_ylabel("network − limit")
        add_legend_below(panels[-1][0], 3)

    def draw(above: Any, below: Any, comparison: LimitComparison) -> None:
        limit, (first, last) = comparison.limit.losses, _WIDTH_COLORS
        for i, networks in enumerate(comparison.finite):
            color = level_colors()(first + (last - first) * i / max(1, len(comparison.finite) - 1))
            above.plot(networks.losses.mean, color=color, lw=1.1, label=f"n = {words.format_count(networks.width)}")
            off = networks.losses.mean - limit.mean
            below.plot(off, color=color, lw=1.1)
            _band(below, off, networks.losses.spread, color, 0.22)
        above.plot(limit.mean, color=INK, lw=1.8, zorder=4, label="limit n → ∞")
        for panel, level in ((above, limit.mean), (below, 0 * limit.mean)):
            _band(panel, level, 2 * limit.standard_error, INK, 0.5, zorder=4)
            _mark_upscalings(panel, comparison)
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
        for number, networks in enumerate(example.comparison.finite):
            outputs = networks.outputs.values.flatten(1)
            label = f"networks, n = {words.format_count(networks.width)}"
            _band(ax, outputs.mean(0), outputs.std(0), COLORS[1], 0.55 - 0.4 / (1 + number), label=label)
        ax.plot(example.never, "--", color=MUTED, lw=1.3, label="never upscaled")
        ax.plot(example.closed, color=INK, lw=1.6, zorder=4, label="closed form")
        limit = example.comparison.limit.outputs.mean.flatten()
        ax.plot(limit, "o", ms=4.5, mfc="none", color=COLORS[2], zorder=5, label="limit backend")
        _mark_upscalings(ax, example.comparison)
        _label(ax, "steps", "output", 3)

    caption = f"Example {example.number}: closed form, limit, and networks (one standard deviation over draws)"
    return gallery.draw(f"example-{example.number}", caption, caption, sketch, size=(5.4, 3.9))


def draw_errors(comparisons: Mapping[str, LimitComparison], gallery: Gallery, name: str = "error") -> Picture | None:
    """How far networks are from the limit, against n, with the Master theorem's slope −1/2; None if none is off."""
    comparisons = {label: one for label, one in comparisons.items() if one.finite and min(one.errors) > 0}
    if not comparisons:
        return None

    def sketch(ax: Any) -> None:
        from matplotlib.ticker import LogLocator

        widths = sorted({n for comparison in comparisons.values() for n in comparison.widths})
        ends = (widths[0] / 1.25, widths[-1] * 1.25)
        for (label, one), color in zip(comparisons.items(), COLORS[1:], strict=False):
            slope = "" if one.slope is None else f"slope {one.slope:.2f}".replace("-", "−")
            name = ", ".join(filter(None, (label, slope)))
            ax.plot(one.widths, one.errors, "o-", ms=5, lw=1.3, color=color, label=name or "one network")
            root = [math.log(e * math.sqrt(n)) for n, e in zip(one.widths, one.errors, strict=True)]
            level = math.exp(math.fsum(root) / len(root))
            shown = None if "slope −1/2" in ax.get_legend_handles_labels()[1] else "slope −1/2"
            line = [level / math.sqrt(n) for n in ends]
            ax.plot(ends, line, "--", lw=1, color=MUTED, zorder=1, label=shown)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [words.format_count(n) for n in widths])
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        ax.minorticks_off()
        _label(ax, "n", "distance from the limit (rms)", 2 if max(map(len, comparisons)) < _LONG else 1)

    caption = "Distance of one network's outputs from the limit, against n"
    return gallery.draw(name, caption, caption, sketch, size=_SIZE)


def draw_copies(comparison: LimitComparison, gallery: Gallery) -> Picture:
    """The copy kernel ⟨h|h⟩ over time: a copy with itself, and with another copy of the same unit.

    After several upscalings, with a copy that the first of them separated from it: others are equal for longer.
    """
    which = "two copies that part first" if len(comparison.upscaled) > 1 else "two copies"
    kinds = [("same", COLORS[1], "a copy with itself, ⟨h|h⟩ᵢᵢ")]
    kinds += [("other", COLORS[2], f"{which}, ⟨h|h⟩ᵢⱼ")] if comparison.times > 1 else []

    def sketch(ax: Any) -> None:
        for kind, color, label in kinds:
            limit = getattr(comparison.limit, kind)
            ax.plot(limit.mean, color=color, lw=1.8, zorder=4, label=label)
            _band(ax, limit.mean, 2 * limit.standard_error, color, 0.3)
        for widest in comparison.finite[-1:]:
            shown: str | None = f"networks, n = {words.format_count(widest.width)}"
            for kind, color, _ in kinds:
                ax.plot(getattr(widest, kind).mean, "o", ms=4, mfc="none", color=color, label=shown)
                shown = None
        _mark_upscalings(ax, comparison)
        ax.set_ylim(bottom=0)
        _label(ax, "steps", "second moment of preactivations", 2)

    caption = f"The copy kernel of the last hidden layer, mean over inputs; lines: the limit, k = {comparison.times}"
    return gallery.draw("copies", caption, caption, sketch, size=_SIZE)


def draw_preactivations(comparison: LimitComparison, gallery: Gallery) -> Picture:
    """The distribution of the last hidden layer's preactivations at the end, beside a Gaussian of the same spread."""

    def sketch(ax: Any) -> None:
        edges, density = comparison.edges, comparison.limit.density
        middle = (edges[1:] + edges[:-1]) / 2
        for widest in comparison.finite[-1:]:
            label = f"networks, n = {words.format_count(widest.width)}"
            ax.stairs(widest.density, edges, fill=True, color=COLORS[1], alpha=0.3, label=label)
        ax.plot(middle, density, color=INK, lw=1.6, label="limit n → ∞")
        weight = density * (edges[1] - edges[0])
        mean = (weight * middle).sum()
        std = (weight * (middle - mean).square()).sum().sqrt()
        gaussian = torch.exp(-((middle - mean) / std).square() / 2) / (std * math.sqrt(2 * math.pi))
        ax.plot(middle, gaussian, "--", lw=1.2, color=COLORS[2], label="Gaussian of that spread")
        ax.set_ylim(bottom=0)
        _label(ax, "preactivation at the end, first input", "density", 3)

    caption = "Preactivations of the last hidden layer after training, all copies of all units"
    return gallery.draw("preactivations", caption, caption, sketch, size=_SIZE)


def draw_sweep(cells: Sequence[WayToGrow], gallery: Gallery, base_lr: float, name: str, sizes: str) -> Picture:
    """Losses by learning rate and noise; base_lr: the learning rate before the upscaling."""
    losses = {_place(cell): cell.loss for cell in cells}
    best, numbers = best_way(cells), {place: loss for place, loss in losses.items() if loss is not None}
    heat_map = HeatMap(
        columns=sorted({lr for lr, _ in losses}),
        rows=sorted({noise for _, noise in losses}),
        numbers=numbers,
        crossed=losses.keys() - numbers,
        best=None if best is None else _place(best),
        reference=base_lr,
        column_label="learning rate",
        reference_label="learning rate, and as a multiple of the base model's",
        row_label="noise",
        crossed_label="diverged" if len(numbers) < len(losses) else "",
    )
    caption = f"Loss at infinite width by learning rate and noise, {sizes}"
    size = (max(4.8, 1.5 + 0.6 * len(heat_map.columns)), 1.7 + 0.36 * len(heat_map.rows))
    return gallery.draw(name, caption, caption, lambda ax: draw_heat_map(ax, heat_map), size=size)


def _place(cell: WayToGrow) -> tuple[float, float]:
    return cell.stage.lr, float(torch.as_tensor(cell.stage.noise))


def _band(ax: Any, middle: Tensor, half: Tensor, color: Any, alpha: float, **look: Any) -> None:
    ax.fill_between(range(len(middle)), middle - half, middle + half, color=color, alpha=alpha, lw=0, **look)


def _label(ax: Any, x: str, y: str, columns: int) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    add_legend_below(ax, columns)


def _mark_upscalings(ax: Any, comparison: LimitComparison) -> None:
    """Where the networks became wider: the first loss with the noise is that of this step."""
    word, last = "upscaled" if comparison.wider == comparison.times else "grown", len(comparison.upscaled) - 1
    for number, step in enumerate(comparison.upscaled):
        label = f"{word}, {_times(comparison)}" if number == last else None
        ax.axvline(step, color=MUTED, lw=1, ls=":", zorder=1, label=label)


def _times(comparison: LimitComparison) -> str:
    """By how much the networks grow: k by copies, r by fresh units as well."""
    return f"k = {comparison.times}" if comparison.wider == comparison.times else f"r = {comparison.wider:g}"
