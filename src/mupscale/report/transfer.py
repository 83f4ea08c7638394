"""The paper's figure 'Hyperparameter transfer for the upscaled model': loss against one hyperparameter, by width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NotRequired, TypedDict

from mupscale.plots import (
    MUTED,
    Gallery,
    Picture,
    add_crosses,
    escape_text,
    figure,
    level_colors,
    save_figure,
    set_value_axis,
    styled,
    words,
)
from mupscale.report.looks import add_line
from mupscale.study import format_width
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
        xs, losses, label = [x for x, _ in points], [some for _, some in points], format_width(line["width"])
        add_line(ax, xs, losses, color, marker="o", ms=3.5, lw=1.4, label=escape_text(label), zorder=3)
        if (best := _best(line)) is not None:
            ax.plot(*best, "*", ms=13, color=color, mec="#14181d", mew=0.7, zorder=4)
    set_value_axis(ax, [float(point["x"]) for line in lines for point in line["points"]])
    lost = [(xs, color) for line, color in zip(lines, colors, strict=True) if (xs := _diverged(line))]
    add_crosses(ax, lost)  # else a value that diverged looks like one that was never tried
    if lost:
        ax.plot([], [], "x", ms=5, mew=1.4, color=MUTED, label="diverged")
    if not any(_points(line) for line in lines):
        ax.set_yticks([])
    other: Varied = "noise" if varied == "lr" else "lr"
    ax.set_xlabel(f"{_NAMES[varied]} ({_NAMES[other]} {words.format_setting(values['fixed'].get(other))})")
    ax.set_ylabel("training loss")


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


def _sound(line: Mapping[str, Any]) -> dict[float, float]:
    """The mean loss at every value where no seed diverged: for the check one that did is as if all had."""
    losses = {float(point["x"]): point["losses"] for point in line["points"]}
    return {x: fmean(some) for x, some in losses.items() if some and all(map(words.is_finite_number, some))}


def _diverged(line: Mapping[str, Any]) -> list[float]:
    """Values at which a seed diverged."""
    sound = _sound(line)
    return sorted(x for point in line["points"] if (x := float(point["x"])) not in sound)


def _best(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The value with the lowest mean loss, as the check sees it, and that loss."""
    return min(_sound(line).items(), key=lambda item: item[1], default=None)


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
