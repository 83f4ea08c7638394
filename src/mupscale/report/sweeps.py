"""What the sweeps found: heatmaps, losses against learning rates, scatters of random searches, curves by noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mupscale.method import Summary
from mupscale.plots import (
    BAD,
    COLORS,
    INK,
    MUTED,
    STAR,
    Gallery,
    HeatMap,
    Picture,
    add_color_bar,
    add_legend_below,
    draw_heat_map,
    drop_partial_point,
    level_colors,
    number_colors,
    set_count_axis,
    set_log_axis_if_wide,
    words,
)
from mupscale.report.facts import format_width
from mupscale.sweep import Sweep, Trial
from mupscale.system import MupscaleError


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
            caption = f"{_title(sweep)}: loss by noise level {where}, {words.format_setting(sweep.best.lr)}"
            yield gallery.draw(f"{sweep.name}-by-noise", caption, caption, curves)


def find_best(sweep: Sweep) -> Trial | None:
    """The optimum, if any trial finished."""
    try:
        return sweep.best
    except MupscaleError:
        return None


def _title(sweep: Sweep) -> str:
    if sweep.start is None:
        return f"Sweep at width {format_width(sweep.width)}"
    return f"Sweep of upscaling, width {format_width(sweep.start)} → {format_width(sweep.width)}"


def _measure(sweep: Sweep) -> str:
    return f"{'held-out' if sweep.measure == 'held-out' else 'training'} loss by learning rate and noise"


def _alt(sweep: Sweep) -> str:
    best = find_best(sweep)
    counts = {status: sum(trial.status == status for trial in sweep.trials) for status in ("diverged", "pruned")}
    more = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    end = f" Of {len(sweep.trials)} trials {more}." if more else ""
    if best is None:
        return f"{_title(sweep)}. All {len(sweep.trials)} trials diverged."
    at = f"learning rate {words.format_setting(best.lr)}" + (
        f" and noise {words.format_setting(best.noise)}" if best.noise else ""
    )
    return f"{_title(sweep)}. The lowest loss, {words.format_loss(best.loss)}, is at {at}.{end}"


# ---------------------------------------------------------------------------------------------- grids


def heatmap(ax: Any, sweep: Sweep, base_lr: float) -> None:
    """Losses by learning rate and noise, with the optimum; base_lr: the rate before the upscaling."""
    best = find_best(sweep)
    trials = [trial for cell in sweep.space.cells if (trial := sweep.at(cell)) is not None]
    finished = [trial for trial in trials if trial.status == "finished"]
    numbers: dict[tuple[float, float], float] = {t.cell: t.loss for t in finished if words.is_finite_number(t.loss)}
    pruned = {trial.cell for trial in trials if trial.status == "pruned"}
    draw_heat_map(
        ax,
        HeatMap(
            columns=sweep.space.lrs,
            rows=sweep.space.noises,
            numbers=numbers,
            crossed={trial.cell for trial in trials} - numbers.keys() - pruned,
            hatched=pruned,
            best=None if best is None else best.cell,
            reference=base_lr,
            column_label="learning rate",
            reference_label="learning rate, and as a multiple of the base model's",
            row_label="noise",
            crossed_label="diverged" if any(trial.status == "diverged" for trial in trials) else "",
            hatched_label="stopped early (pruned)" if pruned else "",
        ),
    )


# --------------------------------------------------------------------------------- random searches


def _scatter(ax: Any, sweep: Sweep) -> None:
    best = find_best(sweep)
    finished = [trial for trial in sweep.trials if trial.status == "finished" and words.is_finite_number(trial.loss)]
    color = number_colors([trial.loss for trial in finished])
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
        ax.plot(best.lr, best.noise, ms=14, ls="", zorder=5, label="optimum", **STAR)
    _log_axis(ax, sweep)
    _noise_axis(ax, [trial.noise for trial in sweep.trials])
    ax.set_xlabel("learning rate")
    ax.set_ylabel("noise")
    add_legend_below(ax, 3)
    add_color_bar(ax, color)


def _log_axis(ax: Any, sweep: Sweep) -> None:
    """A logarithmic axis of learning rates, in plain numbers."""
    lrs = sorted({trial.lr for trial in sweep.trials})
    ax.set_xscale("log")
    shown = _ticks(lrs, sweep.sampler == "grid")
    ax.set_xticks(shown, [words.format_setting(value) for value in shown])
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
    ax.set_yticks(ticks, [words.format_setting(tick) for tick in ticks])
    ax.yaxis.set_minor_locator(_none())
    ax.set_ylim(-0.3 * least, most * 1.3)


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


# --------------------------------------------------------------------------- learning rates, and noise levels


def _learning_rates(sweep: Sweep, gallery: Gallery) -> Picture:
    def sketch(ax: Any) -> None:
        done = sorted(
            (t for t in sweep.trials if t.status == "finished" and words.is_finite_number(t.loss)), key=lambda t: t.lr
        )
        losses = [trial.loss for trial in done if trial.loss is not None]
        lrs = [trial.lr for trial in done]
        label = "mean over seeds" if done and sweep.seeds > 1 else None
        ax.plot(lrs, losses, "o-", ms=4, lw=1.5, color=COLORS[1], label=label)
        if any(trial.spread > 0 for trial in done):
            low, high = [min(t.by_seed) for t in done], [max(t.by_seed) for t in done]
            ax.fill_between(lrs, low, high, color=COLORS[1], alpha=0.18, lw=0, label="min–max")
        best = find_best(sweep)
        if best is not None:
            ax.plot(best.lr, best.loss, ms=14, ls="", zorder=5, label="optimum", **STAR)
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
        add_legend_below(ax, 4)

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
    cmap = level_colors()
    color = ScalarMappable(scale, cmap)
    tops, bottoms = [], []
    for trial in trials:
        points = drop_partial_point(
            [(step, value) for step, value in trial.curve if words.is_finite_number(value)], trial.status
        )
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
        if set_log_axis_if_wide(ax, [*bottoms, *tops]):
            ax.set_ylim(0.9 * min(bottoms), 1.1 * max(tops))
        else:
            room = 0.06 * (max(tops) - min(bottoms))
            ax.set_ylim(min(bottoms) - room, max(tops) + room)
    ax.set_xlabel("steps after upscaling" if sweep.start is not None else "steps")
    ax.set_ylabel("training loss")
    set_count_axis(ax)
    add_color_bar(ax, color, "noise")
    bar = ax.figure.axes[-1]
    if high > low:
        shown = _ticks(positive, sweep.sampler == "grid")
        bar.set_yticks(shown, [words.format_setting(noise) for noise in shown])
        bar.yaxis.set_minor_locator(_none())
    if any(trial.noise == 0 for trial in trials):
        ax.legend(loc="upper right")
