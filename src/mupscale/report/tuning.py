"""What was tuned: losses against learning rates, heat maps with noise, scatters of random searches, curves by noise.

And the paper's figure 'Hyperparameter transfer for the upscaled model': loss against one hyperparameter, by width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from mupscale import plots
from mupscale.plots import EndLabel, Gallery, Picture
from mupscale.report.pictures import Look, add_line, dark_colors, find_looks
from mupscale.study import (
    CONTENDERS,
    TRANSFER_FILE,
    Sweep,
    Tried,
    WidthLine,
    contender_or_stranger,
    format_width,
    read_width_line,
)
from mupscale.system import Finite, MupscaleError, Positive, parse_record, read_json, words

_NAMES = {one.name for one in CONTENDERS}


def draw_tuning(tuned: Sequence[Sweep], gallery: Gallery, base_lr: float | None) -> Iterator[Picture]:
    """One picture of the learning rates of all contenders, and one or two for every search that has noise, too.

    base_lr: the learning rate before the growth, which others are multiples of.
    """
    tuned = [one for one in tuned if len({(trial.lr, trial.noise) for trial in one.trials}) > 1]  # one is no picture
    contenders = [one for one in tuned if one.name in _NAMES]
    if contenders:
        yield _draw_rates("tuned-rates", contenders, gallery)
    for one in tuned:
        grid, noises = one.sampler == "grid", {trial.noise for trial in one.trials}
        if len(noises) > 1:
            sketch = partial(sketch_heat_map, one=one, base_lr=base_lr) if grid else partial(sketch_scatter, one=one)
            size = (4.8, 1.7 + 0.36 * len(noises) if grid else 3.6)
            caption = f"{_title(one)}: {_measure(one)} by learning rate and {one.second}; the star is what was chosen"
            yield gallery.draw(_file(one), _alt(one), caption, sketch, size=size)
            if len(chosen := list_by_noise(one)) > 1:
                where = "at the best learning rate" if grid else "at learning rates near the best"
                caption = f"{_title(one)}: loss by noise level {where}, {words.format_setting(one.best.lr)}"
                sketch = partial(sketch_by_noise, trials=chosen, one=one)
                yield gallery.draw(f"{_file(one)}-by-noise", caption, caption, sketch)
        elif one not in contenders:
            yield _draw_rates(_file(one), [one], gallery)


def list_tuned(tuned: Sequence[Sweep]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: what every search found, and of how many trials."""
    second = next(iter({one.second for one in tuned})) if len({one.second for one in tuned}) == 1 else "noise"
    head = ["for", "learning rate", second, "its loss", "tried", "stopped early", "diverged"]
    rows = [
        [
            _name(one),
            words.format_setting(one.best.lr),
            words.format_setting(one.best.noise) if one.best.noise else "none",
            words.format_loss(one.best.loss),
            words.format_count(len(one.trials)),
            *(words.format_count(sum(t.status == status for t in one.trials)) for status in ("stopped", "diverged")),
        ]
        for one in tuned
    ]
    return head, rows


# ------------------------------------------------------------------------------------------------ words


def _name(one: Sweep) -> str:
    return one.label or contender_or_stranger(one.name).label


def _file(one: Sweep) -> str:
    return f"tuned-{one.name}" if one.name in _NAMES else one.name


def _measure(one: Sweep) -> str:
    return "held-out loss" if one.measure == "held-out" else "training loss"


def _title(one: Sweep) -> str:
    if one.width is None:
        return _name(one).capitalize()
    if one.start is None:
        return f"Sweep at width {format_width(one.width)}"
    return f"Sweep of upscaling, width {format_width(one.start)} → {format_width(one.width)}"


def _alt(one: Sweep) -> str:
    counts = {status: sum(trial.status == status for trial in one.trials) for status in ("diverged", "stopped")}
    more = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    end = f" Of {len(one.trials)} trials {more}." if more else ""
    best, loss = one.best, words.format_loss(one.best.loss)
    noise = f" and {one.second} {words.format_setting(best.noise)}" if best.noise else ""
    return f"{_title(one)}. Chosen: learning rate {words.format_setting(best.lr)}{noise}, with loss {loss}.{end}"


# ------------------------------------------------------------------------------------------- learning rates


def _draw_rates(name: str, searches: Sequence[Sweep], gallery: Gallery) -> Picture:
    several = len(searches) > 1
    title = _measure(searches[0]).capitalize() if several else f"{_title(searches[0])}: {_measure(searches[0])}"
    caption = f"{title} against learning rate{', each at its chosen noise' if several else ''}"
    looks = find_looks(searches)
    sketch = partial(sketch_rates, searches=searches, looks=looks)
    alt = f"{caption}. {' '.join(_alt(one) for one in searches)}"
    size, dark = (4.8, 3.7 if several else 3.2), dark_colors(looks.values())
    return gallery.draw(name, alt, f"{caption}; the ring is what was chosen", sketch, size=size, dark=dark)


def sketch_rates(ax: Any, searches: Sequence[Sweep], looks: dict[str, Look]) -> None:
    """A line for every search, with a ring at what was chosen and a × above for what diverged."""
    labels, lost = [], []
    for one in searches:
        look = looks[one.name]
        trials = sorted((trial for trial in one.trials if trial.noise == one.best.noise), key=lambda trial: trial.lr)
        done = [(trial, trial.loss) for trial in trials if trial.loss is not None]
        style = "-" if look.contender.is_wide or len(searches) == 1 else "--"
        rates, losses = [trial.lr for trial, _ in done], [trial.finite for trial, _ in done]
        add_line(ax, rates, losses, look.color, ls=style, lw=1.6, marker="o", ms=3)
        ax.plot([one.best.lr], [one.best.loss], "o", ms=9, mfc="none", mew=1.4, color=look.color, zorder=5)
        if len(searches) > 1:
            text, end = plots.escape_text(_name(one)), (rates[-1], done[-1][1])
            text = text.replace(" ", "\n", 1) if len(_name(one)) > 14 else text
            labels.append(EndLabel(text, look.color, end, look.contender.kind != "base"))
        if any(trial.status == "diverged" for trial in trials):
            lost.append(([trial.lr for trial in trials if trial.status == "diverged"], look.color))
    finals = [trial.loss for one in searches for trial in one.trials if trial.loss is not None]
    plots.set_log_axis_if_wide(ax, finals)
    _set_rate_axis(ax, searches)
    plots.add_crosses(ax, lost)
    ax.set_ylabel(_measure(searches[0]))
    plots.add_end_labels(ax, labels)


def _set_rate_axis(ax: Any, searches: Sequence[Sweep]) -> None:
    """Logarithmic, in plain numbers: those of a grid, or round ones."""
    lrs = [trial.lr for one in searches for trial in one.trials]
    plots.set_value_axis(ax, lrs, 0.8 if len(searches) == 1 else 0.5)
    if searches[0].sampler != "grid" and (ticks := plots.round_numbers(min(lrs), max(lrs), 6)):
        ax.set_xticks(ticks, [words.format_setting(tick) for tick in ticks])
    ax.set_xlabel("learning rate")


# ------------------------------------------------------------------------------------ learning rates and noise


def sketch_heat_map(ax: Any, one: Sweep, base_lr: float | None) -> None:
    """Losses by learning rate and noise, with the optimum."""
    cells = {status: {(t.lr, t.noise) for t in one.trials if t.status == status} for status in ("diverged", "stopped")}
    plots.draw_heat_map(
        ax,
        plots.HeatMap(
            columns=sorted({trial.lr for trial in one.trials}),
            rows=sorted({trial.noise for trial in one.trials}),
            numbers={(trial.lr, trial.noise): trial.loss for trial in one.trials if trial.loss is not None},
            crossed=cells["diverged"],
            hatched=cells["stopped"],
            best=one.best.cell,
            reference=base_lr,
            column_label="learning rate",
            reference_label="learning rate, and as a multiple of the base model's",
            row_label=one.second,
            crossed_label="diverged" if cells["diverged"] else "",
            hatched_label="stopped early, far behind" if cells["stopped"] else "",
        ),
    )


def sketch_scatter(ax: Any, one: Sweep) -> None:
    """The same where values were drawn."""
    finished = [trial for trial in one.trials if trial.loss is not None]
    color = plots.number_colors([trial.loss for trial in finished])
    for status, style, label in (
        ("diverged", {"marker": "x", "color": plots.BAD, "ms": 5}, "diverged"),
        ("stopped", {"marker": "o", "mfc": "none", "color": plots.MUTED, "ms": 5}, "stopped early, far behind"),
    ):
        those = [trial for trial in one.trials if trial.status == status]
        if those:
            ax.plot([t.lr for t in those], [t.noise for t in those], ls="", label=label, **style)
    faces = [color.to_rgba(trial.loss) for trial in finished]
    ax.scatter([t.lr for t in finished], [t.noise for t in finished], c=faces, s=34, ec=plots.MUTED, lw=0.4, zorder=3)
    ax.plot(*one.best.cell, ms=14, ls="", zorder=5, label="optimum", **plots.STAR)
    _set_rate_axis(ax, [one])
    positive = [trial.noise for trial in one.trials if trial.noise > 0]
    least, most = min(positive), max(positive)
    ax.set_yscale("symlog", linthresh=least, linscale=0.5)  # zero, a linear stretch to the smallest noise, then log
    ticks = [0.0, *plots.round_numbers(least, most, 5)]
    ax.set_yticks(ticks, [words.format_setting(tick) for tick in ticks])
    ax.yaxis.minorticks_off()
    ax.set_ylim(-0.3 * least, most * 1.3)
    ax.set_ylabel("noise")
    plots.add_legend_below(ax, 3)
    plots.add_color_bar(ax, color)


# ------------------------------------------------------------------------------------------ curves by noise


def list_by_noise(one: Sweep) -> list[Tried]:
    """Trials with curves at the chosen learning rate; in a random search, at those near it."""
    near = math.log(1.001 if one.sampler == "grid" else 1.5)
    those = [t for t in one.trials if t.curve and t.status != "stopped" and abs(math.log(t.lr / one.best.lr)) <= near]
    return sorted(those, key=lambda trial: trial.noise) if any(trial.noise > 0 for trial in those) else []


def sketch_by_noise(ax: Any, trials: Sequence[Tried], one: Sweep) -> None:
    """Their losses against steps, coloured by noise."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    positive = [trial.noise for trial in trials if trial.noise > 0]
    low, high = min(positive), max(positive)
    scale = LogNorm(low, high) if high > low else Normalize(0.5 * low, 1.5 * low)
    cmap = plots.level_colors()
    tops, bottoms = [], []
    for trial in trials:
        finite = [(float(step), value) for step, value in trial.curve if words.is_finite_number(value)]
        points = plots.drop_partial_point(finite, trial.status)
        if not points:
            continue
        look: dict[str, Any] = {"color": cmap(scale(trial.noise))} if trial.noise else {"color": plots.INK, "ls": "--"}
        ax.plot(*zip(*points, strict=True), lw=1.4, label=None if trial.noise else "no noise", **look)
        if trial.status == "diverged":
            ax.plot(*points[-1], "x", ms=6, color=look["color"])
        else:
            bottoms.append(min(value for _, value in points))
            tops.append(points[len(points) // 8][1])
    if bottoms and max(tops) > min(bottoms):
        log, room = plots.set_log_axis_if_wide(ax, [*bottoms, *tops]), 0.06 * (max(tops) - min(bottoms))
        ax.set_ylim(0.9 * min(bottoms) if log else min(bottoms) - room, 1.1 * max(tops) if log else max(tops) + room)
    ax.set_xlabel("steps after upscaling" if one.start is not None else "steps")
    ax.set_ylabel("training loss")
    plots.set_count_axis(ax)
    plots.add_color_bar(ax, ScalarMappable(scale, cmap), "noise")
    if high > low:
        levels = sorted(set(positive))
        bar, shown = ax.figure.axes[-1], levels[:: -(-len(levels) // 6)]
        bar.set_yticks(shown, [words.format_setting(noise) for noise in shown])
        bar.yaxis.minorticks_off()
    if any(trial.noise == 0 for trial in trials):
        ax.legend(loc="upper right")


# ------------------------------------------------------------------------------------------------ transfer

Varied = Literal["lr", "noise"]
_AXES = {"lr": "learning rate", "noise": "noise"}
_OTHER: dict[Varied, Varied] = {"lr": "noise", "noise": "lr"}


class _Point(TypedDict):
    x: Finite
    losses: list[Finite | None]


class _Line(TypedDict):
    width: dict[str, Positive] | Positive
    points: list[_Point]


class _Check(TypedDict):
    lr: list[_Line]
    noise: list[_Line]
    fixed: dict[str, Any]
    growth: NotRequired[str]
    times: NotRequired[Positive]
    steps: NotRequired[Positive]
    verdict: NotRequired[list[str]]


def save_transfer_picture(values: Mapping[str, Any], out: Path) -> Path:
    """Write both panels as one picture: to `out` if it is a .png or .svg, else to transfer-check.png and .svg in it."""
    single = out.suffix in (".png", ".svg")
    paths = [out] if single else [out / "transfer-check.png", out / "transfer-check.svg"]
    with plots.styled("transfer"):
        panels: list[Varied] = ["lr", "noise"] if values["noise"] else ["lr"]
        fig, axes = plots.figure(4.6 * len(panels), 3.8, columns=len(panels))
        for ax, varied in zip(axes if len(panels) > 1 else [axes], panels, strict=True):
            _panel(ax, values, varied)
        _legend(fig)
        for path in paths:
            plots.save_figure(fig, path)
    return paths[0]


def draw_transfer(values: Mapping[str, Any], gallery: Gallery) -> Iterator[Picture]:
    """A picture a panel, for the page."""
    for varied, other in _OTHER.items():
        if any(line["points"] for line in values[varied]):
            fixed = f" at {_fixed(values, other)}" if values[other] else ""
            caption = f"Training loss against {_AXES[varied]}{fixed}, by width of the grown model"
            alt = f"{caption}. {_describe([read_width_line(entry) for entry in values[varied]])}".strip()
            yield gallery.draw(f"transfer-{varied}", alt, caption, partial(_alone, values=values, varied=varied))


def load_transfer_check(folder: Path) -> dict[str, Any] | None:
    """What the transfer check wrote into a run's folder, if it did."""
    path = folder / TRANSFER_FILE
    try:
        values = read_json(path)
        parse_record(_Check, values)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MupscaleError(f"{path} cannot be read ({error.strerror})") from None
    except MupscaleError as error:
        why = str(error).removeprefix(f"{path} is damaged: ")
        raise MupscaleError(f"{path} is damaged ({why}): run mupscale transfer-check again, or remove it") from None
    return dict(values)


def _fixed(values: Mapping[str, Any], other: Varied) -> str:
    return f"{_AXES[other]} {words.format_setting(values['fixed'].get(other))}"


def _alone(ax: Any, values: Mapping[str, Any], varied: Varied) -> None:
    _panel(ax, values, varied)
    _legend(ax.figure)


def _panel(ax: Any, values: Mapping[str, Any], varied: Varied) -> None:
    lines = [read_width_line(entry) for entry in values[varied]]
    cmap = plots.level_colors()
    colors = [cmap(number / max(1, len(lines) - 1)) for number in range(len(lines))]
    for line, color in zip(lines, colors, strict=True):
        points, label = {x: some for x, some in line.seeds.items() if some}, plots.escape_text(format_width(line.width))
        add_line(ax, list(points), list(points.values()), color, marker="o", ms=3.5, lw=1.4, label=label, zorder=3)
        if line.losses:
            ax.plot(line.best, line.loss(line.best), "*", ms=13, color=color, mec="#14181d", mew=0.7, zorder=4)
    plots.set_value_axis(ax, [x for line in lines for x in line.seeds])
    lost = [(line.diverged, color) for line, color in zip(lines, colors, strict=True) if line.diverged]
    plots.add_crosses(ax, lost)  # else a value that diverged looks like one that was never tried
    if lost:
        ax.plot([], [], "x", ms=5, mew=1.4, color=plots.MUTED, label="diverged")
    if not any(some for line in lines for some in line.seeds.values()):
        ax.set_yticks([])
    other = _OTHER[varied]
    ax.set_xlabel(_AXES[varied] + (f" ({_fixed(values, other)})" if values[other] else ""))
    ax.set_ylabel("training loss")


def _legend(fig: Any) -> None:
    """Under all panels, each label once, and what diverged last."""
    handles = {label: handle for ax in fig.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles, key=lambda label: label == "diverged")
    if handles:
        at: dict[str, Any] = {"loc": "outside lower center", "ncols": min(6, len(labels))}
        fig.legend([handles[label] for label in labels], labels, title="width of the grown model", **at)


def _describe(lines: Sequence[WidthLine]) -> str:
    """Where each width is best, and where it diverged."""
    best = {format_width(line.width): [line.best] for line in lines if line.losses}
    lost = {format_width(line.width): line.diverged for line in lines if line.diverged}
    sentences = []
    for what, by_width in (("Best", best), ("Diverged", lost)):
        places = [f"{' and '.join(map(words.format_setting, xs))} at width {width}" for width, xs in by_width.items()]
        sentences += [f"{what}: {', '.join(places)}."] if places else []
    return " ".join(sentences)
