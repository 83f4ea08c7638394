"""The paper's figure 'Hyperparameter transfer for the upscaled model': loss against one hyperparameter, by width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
from mupscale.study import Tried, format_width
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

            alt = f"{caption}. {_describe(values[varied])}".strip()
            yield gallery.draw(f"transfer-{varied}", alt, caption, sketch)


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
        points = [(x, tried.finite) for x, tried in _tried(line) if tried.finite]
        xs, losses, label = [x for x, _ in points], [some for _, some in points], format_width(line["width"])
        add_line(ax, xs, losses, color, marker="o", ms=3.5, lw=1.4, label=escape_text(label), zorder=3)
        if (best := _best(line)) is not None:
            ax.plot(*best, "*", ms=13, color=color, mec="#14181d", mew=0.7, zorder=4)
    set_value_axis(ax, [float(point["x"]) for line in lines for point in line["points"]])
    lost = [(xs, color) for line, color in zip(lines, colors, strict=True) if (xs := _diverged(line))]
    add_crosses(ax, lost)  # else a value that diverged looks like one that was never tried
    if lost:
        ax.plot([], [], "x", ms=5, mew=1.4, color=MUTED, label="diverged")
    if not any(tried.finite for line in lines for _, tried in _tried(line)):
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


def _tried(line: Mapping[str, Any]) -> list[tuple[float, Tried]]:
    """Values of the hyperparameter, each once, with the losses of all seeds there (None: diverged)."""
    by_value = {float(point["x"]): point["losses"] for point in line["points"]}
    finite = {x: [v if words.is_finite_number(v) else None for v in losses] for x, losses in by_value.items()}
    return sorted(((x, Tried(1.0, x, losses or [None])) for x, losses in finite.items()), key=lambda item: item[0])


def _diverged(line: Mapping[str, Any]) -> list[float]:
    """Values at which a seed diverged: for the check that is as if all had."""
    return [x for x, tried in _tried(line) if tried.loss is None]


def _best(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The value with the lowest mean loss, as the check sees it, and that loss."""
    ended = [(x, tried.loss) for x, tried in _tried(line) if tried.loss is not None]
    return min(ended, key=lambda item: item[1], default=None)


def _describe(lines: Sequence[Mapping[str, Any]]) -> str:
    """Where each width is best, and where it diverged."""
    best = {format_width(line["width"]): [found[0]] for line in lines if (found := _best(line)) is not None}
    lost = {format_width(line["width"]): xs for line in lines if (xs := _diverged(line))}
    sentences = []
    for what, by_width in (("Best", best), ("Diverged", lost)):
        places = [f"{' and '.join(map(words.format_setting, xs))} at width {width}" for width, xs in by_width.items()]
        sentences += [f"{what}: {', '.join(places)}."] if places else []
    return " ".join(sentences)
