"""Pictures of the limit, in the report's style: losses, errors against n, copies of a unit, preactivations, sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mupscale.plots import COLORS, INK, MUTED, Gallery, Picture, legend_below, levels, words
from mupscale.sweep import Sweep
from mupscale.system import MupscaleError
from mupscale.theory.estimate import Estimate
from mupscale.theory.study import Meeting, Worked

_SIZE = (5.4, 3.7)
_WIDTH_COLORS = (0.0, 0.92)  # of the colours of levels, those that widths have


def gallery(folder: Path) -> Gallery:
    """A folder for pictures."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MupscaleError(f"the folder {folder} cannot be made: {error.strerror}; choose another") from None
    return Gallery(folder)


def losses(found: Meeting, pictures: Gallery, name: str = "loss") -> Picture:
    """Loss against steps in the limit and at finite widths, and below how far from the limit networks are."""

    def sketch(ax: Any) -> None:
        above, below = _panels(ax)
        limit, steps = found.limit.losses, range(len(found.limit.losses.mean))
        for each, color in zip(found.finite, _colors(len(found.finite)), strict=True):
            above.plot(steps, each.losses.mean, color=color, lw=1.1, label=f"n = {words.count(each.width)}")
            off = each.losses.mean - limit.mean
            below.plot(steps, off, color=color, lw=1.1)
            low, high = off - each.losses.spread, off + each.losses.spread
            below.fill_between(steps, low, high, color=color, alpha=0.22, lw=0)
        above.plot(steps, limit.mean, color=INK, lw=1.8, zorder=4, label="limit n → ∞")
        error = 2 * limit.standard_error
        for panel, level in ((above, limit.mean), (below, 0 * limit.mean)):
            panel.fill_between(steps, level - error, level + error, color=INK, alpha=0.5, lw=0, zorder=4)
            _upscaled(panel, found)
        below.axhline(0, color=INK, lw=0.8)
        below.set_xlabel("steps")
        above.set_ylabel("training loss")
        below.set_ylabel("network − limit")
        legend_below(above, 3)

    caption = (
        f"Loss in the limit (band: two standard errors) and at {len(found.finite)} widths, k = {found.times}; below, "
        f"networks minus the limit, mean and one standard deviation over draws"
    )
    return pictures.draw(name, caption, caption, sketch, size=(5.4, 5.0))


def outputs(worked: Worked, pictures: Gallery) -> Picture:
    """A worked example's output over time: the closed form, the limit backend on it, and finite networks around."""

    def sketch(ax: Any) -> None:
        found, steps = worked.meeting, range(len(worked.closed))
        for each in found.finite:
            values = each.outputs.values.flatten(1)
            low, high = values.mean(0) - values.std(0), values.mean(0) + values.std(0)
            label = f"networks, n = {words.count(each.width)}"
            look = {"color": COLORS[1], "alpha": 0.55 - 0.4 / (1 + found.finite.index(each)), "lw": 0}
            ax.fill_between(steps, low, high, label=label, **look)
        ax.plot(steps, worked.never, "--", color=MUTED, lw=1.3, label="never upscaled")
        ax.plot(steps, worked.closed, color=INK, lw=1.6, zorder=4, label="closed form")
        limit = found.limit.outputs.mean.flatten()
        ax.plot(steps, limit, "o", ms=4.5, mfc="none", color=COLORS[2], zorder=5, label="limit backend")
        _upscaled(ax, found)
        ax.set_xlabel("steps")
        ax.set_ylabel("output")
        legend_below(ax, 3)

    caption = f"Example {worked.number}: closed form, limit, and networks (one standard deviation over draws)"
    return pictures.draw(f"example-{worked.number}", caption, caption, sketch, size=(5.4, 3.9))


def errors(meetings: Mapping[str, Meeting], pictures: Gallery, name: str = "error") -> Picture | None:
    """How far networks are from the limit, against n, with the Master theorem's slope −1/2; None if none is off."""
    meetings = {label: found for label, found in meetings.items() if found.finite and min(found.errors) > 0}
    if not meetings:
        return None

    def sketch(ax: Any) -> None:
        widths = sorted({n for found in meetings.values() for n in found.widths})
        for (label, found), color in zip(meetings.items(), COLORS[1:], strict=False):
            slope = "" if found.slope is None else f"slope {_signed(found.slope)}"
            said = ", ".join(filter(None, (label, slope)))
            ax.plot(found.widths, found.errors, "o-", ms=5, lw=1.3, color=color, label=said or "one network")
            root = [math.log(e * math.sqrt(n)) for n, e in zip(found.widths, found.errors, strict=True)]
            level, ends = math.exp(math.fsum(root) / len(root)), (widths[0] / 1.25, widths[-1] * 1.25)
            line = [level / math.sqrt(n) for n in ends]
            shown = None if "slope −1/2" in ax.get_legend_handles_labels()[1] else "slope −1/2"
            ax.plot(ends, line, "--", lw=1, color=MUTED, zorder=1, label=shown)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(widths, [words.count(n) for n in widths])
        _plain_log_axis(ax.yaxis)
        ax.minorticks_off()
        ax.set_xlabel("n")
        ax.set_ylabel("distance from the limit (rms)")
        legend_below(ax, 2)

    caption = "Distance of one network's outputs from the limit, against n"
    return pictures.draw(name, caption, caption, sketch, size=_SIZE)


def copies(found: Meeting, pictures: Gallery, name: str = "copies") -> Picture:
    """The copy kernel ⟨h|h⟩ over time: a copy with itself, and with another copy of the same unit.

    After several upscalings, with one that the first of them parted from it: copies that part later are one until then.
    """

    def sketch(ax: Any) -> None:
        _line(ax, found.limit.same, COLORS[1], "a copy with itself, ⟨h|h⟩ᵢᵢ")
        if found.times > 1:
            which = "two copies that part first" if len(found.upscaled) > 1 else "two copies"
            _line(ax, found.limit.other, COLORS[2], f"{which}, ⟨h|h⟩ᵢⱼ")
        if found.finite:
            widest = found.finite[-1]
            steps = range(len(widest.same.mean))
            pairs = ((widest.same, COLORS[1]), (widest.other, COLORS[2]))
            for estimate, color in pairs[: 2 if found.times > 1 else 1]:
                shown = f"networks, n = {words.count(widest.width)}" if color == COLORS[1] else None
                ax.plot(steps, estimate.mean, "o", ms=4, mfc="none", color=color, label=shown)
        _upscaled(ax, found)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("steps")
        ax.set_ylabel("second moment of preactivations")
        legend_below(ax, 2)

    caption = f"The copy kernel of the last hidden layer, mean over inputs; lines: the limit, k = {found.times}"
    return pictures.draw(name, caption, caption, sketch, size=_SIZE)


def preactivations(found: Meeting, pictures: Gallery, name: str = "preactivations") -> Picture:
    """The distribution of the last hidden layer's preactivations at the end, beside a Gaussian of the same spread."""

    def sketch(ax: Any) -> None:
        edges = found.edges
        middle = (edges[1:] + edges[:-1]) / 2
        if found.finite:
            widest = found.finite[-1]
            label = f"networks, n = {words.count(widest.width)}"
            ax.stairs(widest.density, edges, fill=True, color=COLORS[1], alpha=0.3, label=label)
        ax.plot(middle, found.limit.density, color=INK, lw=1.6, label="limit n → ∞")
        weight = found.limit.density * (edges[1] - edges[0])
        mean = float((weight * middle).sum())
        std = float((weight * (middle - mean).square()).sum().sqrt())
        gaussian = torch.exp(-((middle - mean) / std).square() / 2) / (std * math.sqrt(2 * math.pi))
        ax.plot(middle, gaussian, "--", lw=1.2, color=COLORS[2], label="Gaussian of that spread")
        ax.set_ylim(bottom=0)
        ax.set_xlabel("preactivation at the end, first input")
        ax.set_ylabel("density")
        legend_below(ax, 3)

    caption = "Preactivations of the last hidden layer after training, all copies of all units"
    return pictures.draw(name, caption, caption, sketch, size=_SIZE)


def heat(found: Sweep, pictures: Gallery, base_lr: float) -> Picture:
    """A sweep as the report draws it."""
    from mupscale.report import heatmap

    caption = f"Loss at infinite width by learning rate and noise, {found.start} → {found.width}"
    size = (max(4.8, 1.5 + 0.6 * len(found.space.lrs)), 1.7 + 0.36 * len(found.space.noises))
    return pictures.draw(found.name, caption, caption, lambda ax: heatmap(ax, found, base_lr), size=size)


def _line(ax: Any, estimate: Estimate, color: Any, label: str) -> None:
    """With a band of two standard errors."""
    steps, mean, error = range(len(estimate.mean)), estimate.mean, 2 * estimate.standard_error
    ax.plot(steps, mean, color=color, lw=1.8, zorder=4, label=label)
    ax.fill_between(steps, mean - error, mean + error, color=color, alpha=0.3, lw=0)


def _panels(ax: Any) -> tuple[Any, Any]:
    """Two pairs of axes, one above the other, in the place of one."""
    fig = ax.figure
    fig.clear()
    panels = fig.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return panels[0], panels[1]


def _upscaled(ax: Any, found: Meeting) -> None:
    """Where the networks became wider: the first loss with the noise is that of this step."""
    for number, step in enumerate(found.upscaled):
        label = f"upscaled, k = {found.times}" if number == len(found.upscaled) - 1 else None
        ax.axvline(step, color=MUTED, lw=1, ls=":", zorder=1, label=label)


def _colors(count: int) -> list[Any]:
    first, last = _WIDTH_COLORS
    return [levels()(first + (last - first) * (i / (count - 1) if count > 1 else 0)) for i in range(count)]


def _plain_log_axis(axis: Any) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")
