"""The paper's figure 'Hyperparameter transfer for the upscaled model': loss against one hyperparameter, by width."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from mupscale.errors import MupscaleError
from mupscale.figures import figure
from mupscale.report import words
from mupscale.report.drawing import Gallery, Picture, levels, plain, styled

Varied = Literal["lr", "noise"]
FILE = "transfer-check.json"
_NAMES = {"lr": "learning rate", "noise": "noise"}


def transfer_picture(values: Mapping[str, Any], out: Path) -> Path:
    """Both panels in one picture: `out` itself if it ends in .png or .svg, else transfer-check.png and .svg in it."""
    single = out.suffix in (".png", ".svg")
    paths = [out] if single else [out / "transfer-check.png", out / "transfer-check.svg"]
    with styled("transfer"):
        fig, axes = figure(9.2, 3.8, columns=2)
        for ax, varied in zip(axes, ("lr", "noise"), strict=True):
            _panel(ax, values, varied)  # type: ignore[arg-type]
        _legend(fig, axes[0])
        try:
            paths[0].parent.mkdir(parents=True, exist_ok=True)
            for path in paths:
                fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise MupscaleError(f"{error.filename or paths[0]} cannot be written ({error.strerror})") from None
    return paths[0]


def pictures(values: Mapping[str, Any], gallery: Gallery) -> Iterator[Picture]:
    """A picture a panel, for the page."""
    for varied, other in (("lr", "noise"), ("noise", "lr")):
        if any(_points(line) for line in values[varied]):
            fixed = words.setting(values["fixed"].get(other))
            caption = f"Loss against {_NAMES[varied]} at {_NAMES[other]} {fixed}, by width after upscaling"

            def sketch(ax: Any, varied: str = varied) -> None:
                _panel(ax, values, varied)  # type: ignore[arg-type]
                _legend(ax.figure, ax)

            yield gallery.draw(f"transfer-{varied}", f"{caption}. {_optima(values[varied])}", caption, sketch)


def load(folder: Path) -> dict[str, Any] | None:
    """What the transfer check wrote into a run's folder, if it did."""
    path = folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for varied in ("lr", "noise"):
            for line in values[varied]:
                words.width(line["width"]), _points(line)
        values["fixed"].get("lr"), [str(sentence) for sentence in values.get("verdict", [])]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MupscaleError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MupscaleError(f"{path} is damaged ({error}): run mupscale transfer-check again, or remove it") from None
    return dict(values)


def _panel(ax: Any, values: Mapping[str, Any], varied: Varied) -> None:
    lines = values[varied]
    cmap, zero = levels(), False
    for number, line in enumerate(lines):
        points = _points(line)
        color = cmap(number / max(1, len(lines) - 1))
        means = [fmean(losses) for _, losses in points]
        xs = [x for x, _ in points]
        zero = zero or 0 in xs
        ax.plot(xs, means, "o-", ms=3.5, lw=1.4, color=color, label=plain(words.width(line["width"])), zorder=3)
        if any(len(losses) > 1 for _, losses in points):
            low, high = [min(losses) for _, losses in points], [max(losses) for _, losses in points]
            ax.fill_between(xs, low, high, color=color, alpha=0.16, lw=0, zorder=2)
        if points:
            best = min(range(len(xs)), key=means.__getitem__)
            ax.plot(xs[best], means[best], "*", ms=13, color=color, mec="#14181d", mew=0.7, zorder=4)
    _axis(ax, sorted({x for line in lines for x, _ in _points(line)}))
    other: Varied = "noise" if varied == "lr" else "lr"
    ax.set_xlabel(f"{_NAMES[varied]} ({_NAMES[other]} {words.setting(values['fixed'].get(other))})")
    ax.set_ylabel("training loss")


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
    shown = xs if len(xs) <= 7 else [xs[round(i * (len(xs) - 1) / 5)] for i in range(6)]
    ax.set_xticks(shown, [words.setting(x) for x in shown])
    ax.xaxis.set_minor_locator(NullLocator())


def _legend(fig: Any, ax: Any) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        fig.legend(
            handles, labels, loc="outside lower center", ncols=min(6, len(labels)), title="width after upscaling"
        )


def _points(line: Mapping[str, Any]) -> list[tuple[float, list[float]]]:
    """Values of the hyperparameter with the losses of the seeds that did not diverge."""
    points = [(float(p["x"]), [float(v) for v in p["losses"] if words.known(v)]) for p in line["points"]]
    return sorted((x, losses) for x, losses in points if losses)


def _optima(lines: list[Mapping[str, Any]]) -> str:
    best = []
    for line in lines:
        points = _points(line)
        if points:
            x = min(points, key=lambda point: fmean(point[1]))[0]
            best.append(f"{words.setting(x)} at width {words.width(line['width'])}")
    return f"Best: {', '.join(best)}."
