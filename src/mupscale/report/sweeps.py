"""What the sweeps found: heatmaps, losses against learning rates, scatters of random searches, curves by noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from mupscale.method import Summary
from mupscale.plots import (
    BAD,
    COLORS,
    INK,
    MUTED,
    PAPER,
    Gallery,
    Picture,
    count_along,
    legend_below,
    levels,
    log_if_wide,
    whole,
    words,
)
from mupscale.sweep import Cell, Sweep, Trial
from mupscale.system import MupscaleError

_STAR = {"marker": "*", "color": "#ff4d2e", "markeredgecolor": "#14181d", "markeredgewidth": 0.8}
_CELLS_WITH_TEXT = 8
"""As many columns leave room for numbers."""


def draw_sweeps(summary: Summary, gallery: Gallery) -> Iterator[Picture]:
    """One or two pictures a sweep."""
    for sweep in summary.sweeps:
        if not any(trial.noise > 0 for trial in sweep.trials):
            yield _learning_rates(sweep, gallery)
            continue
        grid = sweep.sampler == "grid"
        base_lr = summary.choice.base_lr
        shape = (4.8, 1.7 + 0.36 * len(sweep.space.noises)) if grid else (4.8, 3.6)

        def sketch(ax: Any, sweep: Sweep = sweep, grid: bool = grid, base_lr: float = base_lr) -> None:
            heatmap(ax, sweep, base_lr) if grid else _scatter(ax, sweep)

        yield gallery.draw(sweep.name, _alt(sweep), f"{_title(sweep)}: {_measure(sweep)}", sketch, size=shape)
        chosen = _by_noise(sweep)
        if len(chosen) > 1:

            def curves(ax: Any, chosen: list[Trial] = chosen, sweep: Sweep = sweep) -> None:
                _noise_curves(ax, chosen, sweep)

            where = "at the best learning rate" if grid else "at learning rates near the best"
            caption = f"{_title(sweep)}: loss by noise level {where}, {words.setting(sweep.best.lr)}"
            yield gallery.draw(f"{sweep.name}-by-noise", caption, caption, curves)


def find_best(sweep: Sweep) -> Trial | None:
    """The optimum, if any trial finished."""
    try:
        return sweep.best
    except MupscaleError:
        return None


def _title(sweep: Sweep) -> str:
    if sweep.start is None:
        return f"Sweep at width {words.width(sweep.width)}"
    return f"Sweep of upscaling, width {words.width(sweep.start)} → {words.width(sweep.width)}"


def _measure(sweep: Sweep) -> str:
    return f"{'held-out' if sweep.measure == 'held-out' else 'training'} loss by learning rate and noise"


def _alt(sweep: Sweep) -> str:
    best = find_best(sweep)
    counts = {status: sum(trial.status == status for trial in sweep.trials) for status in ("diverged", "pruned")}
    more = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    end = f" Of {len(sweep.trials)} trials {more}." if more else ""
    if best is None:
        return f"{_title(sweep)}. All {len(sweep.trials)} trials diverged."
    at = f"learning rate {words.setting(best.lr)}" + (f" and noise {words.setting(best.noise)}" if best.noise else "")
    return f"{_title(sweep)}. The lowest loss, {words.loss(best.loss)}, is at {at}.{end}"


# ---------------------------------------------------------------------------------------------- grids


def heatmap(ax: Any, sweep: Sweep, base_lr: float) -> None:
    """Losses by learning rate and noise, with the optimum; base_lr: the rate before the upscaling."""
    from matplotlib.patches import Patch, Rectangle

    lrs, noises = sweep.space.lrs, sweep.space.noises
    best = find_best(sweep)
    color = _colors([trial.loss for trial in sweep.trials if trial.status == "finished"])
    numbers = len(lrs) <= _CELLS_WITH_TEXT
    seen = set[str]()
    for column, lr in enumerate(lrs):
        for row, noise in enumerate(noises):
            trial = sweep.at(Cell(lr, noise))
            corner = (column - 0.5, row - 0.5)
            if trial is None:
                continue
            seen.add(trial.status)
            if trial.status == "diverged" or (trial.status == "finished" and not words.known(trial.loss)):
                ax.plot(column, row, "x", ms=5, color=BAD, mew=1)
            elif trial.status == "pruned":
                ax.add_patch(Rectangle(corner, 1, 1, fc="none", ec=MUTED, hatch="////", lw=0))
            elif color is not None and trial.loss is not None:
                face = color.to_rgba(trial.loss)
                ax.add_patch(Rectangle(corner, 1, 1, fc=face, ec=PAPER, lw=1))
                if numbers:
                    dark_face = 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
                    at = row - (0.2 if trial is best else 0)
                    shown = words.loss(trial.loss)
                    ink = "#fdfdfd" if dark_face else "#101418"
                    ax.text(column, at, shown, ha="center", va="center", fontsize=7.5, color=ink)
    if best is not None:
        column, row = lrs.index(best.lr), noises.index(best.noise)
        ax.plot(
            column, row + (0.22 if numbers else 0), ms=10 if numbers else 12, ls="", zorder=5, label="optimum", **_STAR
        )
    if "diverged" in seen:
        ax.plot([], [], "x", ms=5, color=BAD, label="diverged")
    handles, labels = ax.get_legend_handles_labels()
    if "pruned" in seen:
        handles, labels = (
            [*handles, Patch(fc="none", ec=MUTED, hatch="////", lw=0.5)],
            [*labels, "stopped early (pruned)"],
        )
    if handles:
        ax.figure.legend(handles, labels, loc="outside lower center", ncols=3)
    _grid_axes(ax, lrs, noises, base_lr)
    _color_bar(ax, color)


def _grid_axes(ax: Any, lrs: Sequence[float], noises: Sequence[float], base_lr: float) -> None:
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xlim(-0.5, len(lrs) - 0.5)
    ax.set_ylim(-0.5, len(noises) - 0.5)
    factors = [_factor(lr / base_lr) for lr in lrs] if words.known(base_lr) and base_lr > 0 else []
    shown = [words.setting(lr) for lr in lrs]
    if factors and len(lrs) <= _CELLS_WITH_TEXT:
        shown = [f"{lr}\n{factor}" for lr, factor in zip(shown, factors, strict=True)]
        ax.set_xlabel("learning rate, and as a multiple of the base model's")
    else:
        ax.set_xlabel("learning rate")
    ax.set_xticks(range(len(lrs)), shown, rotation=45 if len(lrs) > _CELLS_WITH_TEXT else 0, fontsize=8)
    ax.set_yticks(range(len(noises)), ["0 (none)" if noise == 0 else words.setting(noise) for noise in noises])
    ax.set_ylabel("noise")
    if noises[0] == 0 and len(noises) > 1:
        ax.axhline(0.5, color=INK, lw=1.2)


def _factor(value: float) -> str:
    return f"÷{1 / value:.2g}" if value < 0.995 else f"×{value:.2g}"


def _colors(values: Sequence[float | None]) -> Any:
    """Colours of losses; far above the best everything looks alike, so that the differences near it can be seen."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    known = [value for value in values if words.known(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    high = min(high, low + 3 * (median(known) - low)) if len(known) > 2 and median(known) > low else high
    cmap: Any = colormaps["viridis_r"].copy()
    cmap.colorbar_extend = "max" if high < max(known) else "neither"
    return ScalarMappable(Normalize(low, high if high > low else low + 1e-12), cmap)


def _color_bar(ax: Any, color: Any, label: str = "loss") -> None:
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
    if high - low <= 1e-9 * abs(low):  # all losses are the same
        bar.set_ticks([low], labels=[words.loss(low)])
    bar.ax.set_title(label, fontsize=8, loc="left", color=INK)


# --------------------------------------------------------------------------------- random searches


def _scatter(ax: Any, sweep: Sweep) -> None:
    best = find_best(sweep)
    finished = [trial for trial in sweep.trials if trial.status == "finished" and words.known(trial.loss)]
    color = _colors([trial.loss for trial in finished])
    for status, style, label in (
        ("diverged", {"marker": "x", "color": BAD, "ms": 5}, "diverged"),
        ("pruned", {"marker": "o", "mfc": "none", "color": MUTED, "ms": 5}, "stopped early (pruned)"),
    ):
        those = [trial for trial in sweep.trials if trial.status == status]
        if those:
            ax.plot([t.lr for t in those], [t.noise for t in those], ls="", label=label, **style)
    if color is not None:
        faces = [color.to_rgba(trial.loss) for trial in finished]
        ax.scatter([t.lr for t in finished], [t.noise for t in finished], c=faces, s=34, ec=MUTED, lw=0.4, zorder=3)
    if best is not None:
        ax.plot(best.lr, best.noise, ms=14, ls="", zorder=5, label="optimum", **_STAR)
    _log_axis(ax, sweep)
    _noise_axis(ax, [trial.noise for trial in sweep.trials])
    ax.set_xlabel("learning rate")
    ax.set_ylabel("noise")
    legend_below(ax, 3)
    _color_bar(ax, color)


def _log_axis(ax: Any, sweep: Sweep) -> None:
    """A logarithmic axis of learning rates, in plain numbers."""
    lrs = sorted({trial.lr for trial in sweep.trials})
    ax.set_xscale("log")
    shown = _ticks(lrs, sweep.sampler == "grid")
    ax.set_xticks(shown, [words.setting(value) for value in shown])
    ax.xaxis.set_minor_locator(_none())
    if len(lrs) == 1:
        ax.set_xlim(lrs[0] / 2, lrs[0] * 2)


def _ticks(values: Sequence[float], grid: bool) -> list[float]:
    """Of a grid's positive values all, or some if there are many; round numbers where they lie anyhow."""
    distinct = sorted({value for value in values if value > 0})
    if grid:
        many = len(distinct) > 7
        return [distinct[round(i * (len(distinct) - 1) / 5)] for i in range(6)] if many else distinct
    first, last = math.floor(math.log10(distinct[0])), math.ceil(math.log10(distinct[-1]))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    rounded = [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]
    inside = [value for value in rounded if distinct[0] <= value <= distinct[-1]]
    return inside if len(inside) > 1 else sorted({distinct[0], distinct[-1]})


def _noise_axis(ax: Any, noises: Sequence[float]) -> None:
    """Zero, a linear stretch to the smallest noise, and logarithmic above."""
    positive = [noise for noise in noises if noise > 0]
    if not positive:
        return
    least, most = min(positive), max(positive)
    ax.set_yscale("symlog", linthresh=least, linscale=0.5)
    ticks = [0.0, *_ticks(positive, grid=False)]
    ax.set_yticks(ticks, [words.setting(tick) for tick in ticks])
    ax.yaxis.set_minor_locator(_none())
    ax.set_ylim(-0.3 * least, most * 1.3)


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


# --------------------------------------------------------------------------- learning rates, and noise levels


def _learning_rates(sweep: Sweep, gallery: Gallery) -> Picture:
    def sketch(ax: Any) -> None:
        done = sorted((t for t in sweep.trials if t.status == "finished" and words.known(t.loss)), key=lambda t: t.lr)
        losses = [trial.loss for trial in done if trial.loss is not None]
        lrs = [trial.lr for trial in done]
        label = "mean over seeds" if done and sweep.seeds > 1 else None
        ax.plot(lrs, losses, "o-", ms=4, lw=1.5, color=COLORS[1], label=label)
        if any(trial.spread > 0 for trial in done):
            low, high = [min(t.by_seed) for t in done], [max(t.by_seed) for t in done]
            ax.fill_between(lrs, low, high, color=COLORS[1], alpha=0.18, lw=0, label="min–max")
        best = find_best(sweep)
        if best is not None:
            ax.plot(best.lr, best.loss, ms=14, ls="", zorder=5, label="optimum", **_STAR)
        for status, mark, color in (("diverged", "x", BAD), ("pruned", "o", MUTED)):
            those = [trial.lr for trial in sweep.trials if trial.status == status]
            if those:
                top = {"transform": ax.get_xaxis_transform(), "clip_on": False, "mfc": "none"}
                label = "diverged" if status == "diverged" else "stopped early (pruned)"
                ax.plot(those, [0.97] * len(those), mark, ms=6, color=color, label=label, **top)
        _log_axis(ax, sweep)
        ax.set_xlabel("learning rate")
        ax.set_ylabel("held-out loss" if sweep.measure == "held-out" else "training loss")
        if not done:
            ax.set_yticks([])
        legend_below(ax, 4)

    caption = f"{_title(sweep)}: loss against learning rate"
    return gallery.draw(sweep.name, _alt(sweep), caption, sketch, size=(4.8, 3.2))


def _by_noise(sweep: Sweep) -> list[Trial]:
    """Trials with curves at the best learning rate; in a random search, at those near it."""
    best = find_best(sweep)
    if best is None:
        return []
    near = 1.001 if sweep.sampler == "grid" else 1.5
    those = [t for t in sweep.trials if t.curve and abs(math.log(t.lr / best.lr)) <= math.log(near)]
    return sorted((t for t in those if t.status != "pruned"), key=lambda trial: trial.noise)


def _noise_curves(ax: Any, trials: list[Trial], sweep: Sweep) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    positive = [trial.noise for trial in trials if trial.noise > 0]
    low, high = min(positive), max(positive)
    scale = LogNorm(low, high) if high > low else Normalize(0.5 * low, 1.5 * low)
    cmap = levels()
    color = ScalarMappable(scale, cmap)
    tops, bottoms = [], []
    for trial in trials:
        points = whole([(step, value) for step, value in trial.curve if words.known(value)], trial.status)
        if not points:
            continue
        look: dict[str, Any] = {"color": cmap(scale(trial.noise))} if trial.noise else {"color": INK, "ls": "--"}
        ax.plot(*zip(*points, strict=True), lw=1.4, label=None if trial.noise else "no noise", **look)
        if trial.status == "diverged":
            ax.plot(*points[-1], "x", ms=6, color=look["color"])
        else:
            bottoms.append(min(value for _, value in points))
            tops.append(points[len(points) // 8][1])
    if bottoms and max(tops) > min(bottoms):
        if log_if_wide(ax, [*bottoms, *tops]):
            ax.set_ylim(0.9 * min(bottoms), 1.1 * max(tops))
        else:
            room = 0.06 * (max(tops) - min(bottoms))
            ax.set_ylim(min(bottoms) - room, max(tops) + room)
    ax.set_xlabel("steps after upscaling" if sweep.start is not None else "steps")
    ax.set_ylabel("training loss")
    count_along(ax)
    _color_bar(ax, color, "noise")
    bar = ax.figure.axes[-1]
    if high > low:
        shown = _ticks(positive, sweep.sampler == "grid")
        bar.set_yticks(shown, [words.setting(noise) for noise in shown])
        bar.yaxis.set_minor_locator(_none())
    if any(trial.noise == 0 for trial in trials):
        ax.legend(loc="upper right")
