"""The paper's figure 'Hyperparameter transfer for the upscaled model': loss against one hyperparameter, by width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NotRequired, TypedDict

from mupscale.method import read_width_line
from mupscale.plots import MUTED, Gallery, Picture, escape_text, figure, level_colors, save_figure, styled, words
from mupscale.report.facts import format_width
from mupscale.system import Finite, MupscaleError, Positive, parse_record, read_json

Varied = Literal["lr", "noise"]
FILE = "transfer-check.json"
_NAMES = {"lr": "learning rate", "noise": "noise"}


class _Point(TypedDict):
    x: Finite
    losses: list[Any]


class _Line(TypedDict):
    width: dict[str, Positive] | Positive
    points: list[_Point]


class _Check(TypedDict):
    lr: list[_Line]
    noise: list[_Line]
    fixed: dict[str, Any]
    verdict: NotRequired[list[str]]


def save_transfer_picture(values: Mapping[str, Any], out: Path) -> Path:
    """Write both panels as one picture: to `out` if it ends in .png or .svg, else to transfer-check.png and .svg in it.

    >>> from tempfile import TemporaryDirectory
    >>> def line(width: int) -> dict[str, Any]:
    ...     return {"width": width, "points": [{"x": x, "losses": [1 / x]} for x in (0.5, 1.0)]}
    >>> values = {"lr": [line(64), line(128)], "noise": [], "fixed": {"lr": 0.1, "noise": 1.0}}
    >>> with TemporaryDirectory() as folder:
    ...     save_transfer_picture(values, Path(folder) / "transfer.svg").name
    'transfer.svg'
    """
    single = out.suffix in (".png", ".svg")
    paths = [out] if single else [out / "transfer-check.png", out / "transfer-check.svg"]
    with styled("transfer"):
        fig, axes = figure(9.2, 3.8, columns=2)
        for ax, varied in zip(axes, ("lr", "noise"), strict=True):
            _panel(ax, values, varied)  # type: ignore[arg-type]
        _legend(fig)
        for path in paths:
            save_figure(fig, path)
    return paths[0]


def draw_transfer(values: Mapping[str, Any], gallery: Gallery) -> Iterator[Picture]:
    """A picture a panel, for the page."""
    for varied, other in (("lr", "noise"), ("noise", "lr")):
        if any(line["points"] for line in values[varied]):
            fixed = words.format_setting(values["fixed"].get(other))
            caption = f"Loss against {_NAMES[varied]} at {_NAMES[other]} {fixed}, by width after upscaling"

            def sketch(ax: Any, varied: str = varied) -> None:
                _panel(ax, values, varied)  # type: ignore[arg-type]
                _legend(ax.figure)

            alt = f"{caption}. {_optima(values[varied])} {_lost(values[varied])}"
            yield gallery.draw(f"transfer-{varied}", alt.strip(), caption, sketch)


def load_transfer_check(folder: Path) -> dict[str, Any] | None:
    """What the transfer check wrote into a run's folder, if it did."""
    path = folder / FILE
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


def _panel(ax: Any, values: Mapping[str, Any], varied: Varied) -> None:
    lines = values[varied]
    cmap = level_colors()
    colors = [cmap(number / max(1, len(lines) - 1)) for number in range(len(lines))]
    for line, color in zip(lines, colors, strict=True):
        points = _points(line)
        means = [fmean(losses) for _, losses in points]
        xs = [x for x, _ in points]
        ax.plot(xs, means, "o-", ms=3.5, lw=1.4, color=color, label=escape_text(format_width(line["width"])), zorder=3)
        if any(len(losses) > 1 for _, losses in points):
            low, high = [min(losses) for _, losses in points], [max(losses) for _, losses in points]
            ax.fill_between(xs, low, high, color=color, alpha=0.16, lw=0, zorder=2)
        if (best := _best(line)) is not None:
            ax.plot(*best, "*", ms=13, color=color, mec="#14181d", mew=0.7, zorder=4)
    _axis(ax, sorted({float(point["x"]) for line in lines for point in line["points"]}))
    _crosses(ax, [_diverged(line) for line in lines], colors)
    if not any(_points(line) for line in lines):
        ax.set_yticks([])
    other: Varied = "noise" if varied == "lr" else "lr"
    ax.set_xlabel(f"{_NAMES[varied]} ({_NAMES[other]} {words.format_setting(values['fixed'].get(other))})")
    ax.set_ylabel("training loss")


def _crosses(ax: Any, lost: Sequence[Sequence[float]], colors: Sequence[Any]) -> None:
    """A × at the top, in its width's colour, for every value that diverged, those of several widths below each other.

    A value that a picture leaves out looks like one that was never tried.
    """
    columns: dict[float, list[Any]] = {}
    for xs, color in zip(lost, colors, strict=True):
        for x in xs:
            columns.setdefault(x, []).append(color)
    if not columns:
        return
    rows = max(map(len, columns.values()))
    apart = min(0.05, 0.35 / rows)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, bottom + (top - bottom) / (1 - apart * rows))
    for x, column in columns.items():
        for row, color in enumerate(column):
            ax.plot(x, 1 - apart * (row + 0.5), "x", ms=5, mew=1.4, color=color, transform=ax.get_xaxis_transform())
    ax.plot([], [], "x", ms=5, mew=1.4, color=MUTED, label="diverged")


def _axis(ax: Any, xs: list[float]) -> None:
    """Logarithmic, with a short linear stretch to zero where zero is one of the values."""
    from matplotlib.ticker import NullLocator

    positive = [x for x in xs if x > 0]
    if not positive:
        return
    if len(positive) < len(xs):
        ax.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    else:
        ax.set_xscale("log")
    shown = _with_room(ax, xs)
    ax.set_xticks(xs, [words.format_setting(x) if x in shown else "" for x in xs])
    ax.xaxis.set_minor_locator(NullLocator())


def _with_room(ax: Any, xs: list[float]) -> set[float]:
    """Those values whose labels fit beside each other: the ends, and of the others as many as there is room for."""
    inches: float = 0.8 * ax.figure.get_figwidth() / len(ax.figure.axes)
    scaled: list[float] = ax.xaxis.get_transform().transform(xs).tolist()
    unit = inches / ((scaled[-1] - scaled[0]) or 1.0)
    at = {x: unit * place for x, place in zip(xs, scaled, strict=True)}
    wide = {x: 0.075 * (len(words.format_setting(x)) + 0.5) for x in xs}  # inches a letter, and half a one between two

    def fits(x: float, other: float) -> bool:
        return abs(at[x] - at[other]) > (wide[x] + wide[other]) / 2

    labelled = {xs[0], xs[-1]}
    for x in xs[1:-1]:
        if all(fits(x, other) for other in labelled):
            labelled.add(x)
    return labelled


def _legend(fig: Any) -> None:
    """Under all panels, each label once, and what diverged last."""
    handles = {label: handle for ax in fig.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles, key=lambda label: label == "diverged")
    if handles:
        at: dict[str, Any] = {"loc": "outside lower center", "ncols": min(6, len(labels))}
        fig.legend([handles[label] for label in labels], labels, title="width after upscaling", **at)


def _points(line: Mapping[str, Any]) -> list[tuple[float, list[float]]]:
    """Values of the hyperparameter with the losses of the seeds that did not diverge."""
    points = [(float(p["x"]), [float(v) for v in p["losses"] if words.is_finite_number(v)]) for p in line["points"]]
    return sorted((x, losses) for x, losses in points if losses)


def _diverged(line: Mapping[str, Any]) -> list[float]:
    """Values at which a seed diverged, which for the check is as if all had."""
    sound = read_width_line(line).losses
    return sorted(x for point in line["points"] if (x := float(point["x"])) not in sound)


def _best(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The value with the lowest mean loss, as the check sees it, and that loss."""
    sound = read_width_line(line)
    return (sound.best, sound.loss(sound.best)) if sound.losses else None


def _optima(lines: list[Mapping[str, Any]]) -> str:
    bests = [(line, best) for line in lines if (best := _best(line)) is not None]
    places = [f"{words.format_setting(best[0])} at width {format_width(line['width'])}" for line, best in bests]
    return f"Best: {', '.join(places)}." if places else ""


def _lost(lines: list[Mapping[str, Any]]) -> str:
    lost = [(line, xs) for line in lines if (xs := _diverged(line))]
    places = [
        f"{' and '.join(map(words.format_setting, xs))} at width {format_width(line['width'])}" for line, xs in lost
    ]
    return f"Diverged: {', '.join(places)}." if places else ""
