"""The gain taken apart: from the from-scratch model's loss to (e)'s, effect by effect, and on to (e′)'s."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mupscale.method import CONTENDERS, SCRATCH, UPSCALED, GainMark, PaperContender, Summary
from mupscale.plots import BAD, GOOD, MUTED, PAPER, Gallery, Picture, words

_EFFECTS = (("learning_rate", "learning\nrate"), ("head_start", "head\nstart"), ("noise", "noise"))
_BASELINES = [one for one in CONTENDERS if one.kind == "baseline" and one.gain_mark is not None]
_VARIANTS = [one for one in CONTENDERS if one.kind == "grown" and one.gain_mark is not None]


def draw_gain(summary: Summary, gallery: Gallery) -> Iterator[Picture]:
    """A waterfall, where both ends of it are known."""
    gain = summary.gain
    start, end = gain.get("scratch"), gain.get("upscaled")
    if words.is_finite_number(start) and words.is_finite_number(end):
        alt = f"From scratch {words.format_loss(start)}, upscaled {words.format_loss(end)}. {describe_gain(summary)}"
        caption = "Final training loss at equal total cost, from the from-scratch model's to the upscaled one's"
        for _, mark, value in _variants(gain):
            alt = f"{alt.strip()} {mark.words.capitalize()}: {words.format_loss(value)}."
            caption += f", and to that of {mark.caption}"
        if (other := _alternative(gain)) is not None:
            _, mark, value = other
            alt = f"{alt.strip()} {mark.words.capitalize()}: {words.format_loss(value)}."
            caption += f"; the line: {mark.words}"
        yield gallery.draw("gain", alt.strip(), caption, lambda ax: _waterfall(ax, gain), size=(4.8, 3.3))


def describe_gain(summary: Summary) -> str:
    """How much each effect takes off the loss."""
    effects = [(name.replace("_", " "), summary.gain.get(name)) for name, _ in _EFFECTS]
    digits = _digits(summary.gain)
    changes = [f"{name} {_signed(value, digits)}" for name, value in effects if words.is_finite_number(value)]
    return f"Change of the loss by effect: {', '.join(changes)}." if changes else ""


def _signed(value: float, digits: int) -> str:
    """A gain lowers the loss."""
    shown = f"{abs(value):.{digits}f}"
    return f"{'±' if not float(shown) else '−' if value > 0 else '+'}{shown}"


def _digits(gain: dict[str, float | None]) -> int:
    """After the point: three digits of the loss that is taken apart."""
    whole = gain.get("scratch")
    return max(3, 2 - math.floor(math.log10(whole))) if words.is_finite_number(whole) and whole > 0 else 3


def _variants(gain: dict[str, float | None]) -> list[tuple[PaperContender, GainMark, float]]:
    """Grown models beside (e), each with its mark and loss."""
    return [*_marked(_VARIANTS, gain)]


def _alternative(gain: dict[str, float | None]) -> tuple[PaperContender, GainMark, float] | None:
    """What widening competes with, and is not in the waterfall: the best baseline of these, its mark and loss."""
    return min(_marked(_BASELINES, gain), key=lambda item: item[2], default=None)


def _marked(
    contenders: Sequence[PaperContender], gain: dict[str, float | None]
) -> Iterator[tuple[PaperContender, GainMark, float]]:
    for one in contenders:
        if one.gain_mark is not None and words.is_finite_number(value := gain.get(one.key)):
            yield one, one.gain_mark, value


def _waterfall(ax: Any, gain: dict[str, float | None]) -> None:
    start, end = gain["scratch"], gain["upscaled"]
    assert start is not None
    assert end is not None
    names, level, seen = ["from\nscratch"], start, [start, end]
    for key, name in _EFFECTS:
        value = gain.get(key)
        if not words.is_finite_number(value):
            continue
        at = len(names)
        ax.bar(at, -value, bottom=level, width=0.62, color=GOOD if value >= 0 else BAD, zorder=3)
        ax.plot([at - 1 + (0.31 if at > 1 else 0.2), at + 0.31], [level, level], color=MUTED, lw=0.8, zorder=2)
        _number(ax, at, max(level, level - value), _signed(value, _digits(gain)))
        level -= value
        seen.append(level)
        names.append(name)
    ax.plot([len(names) - 1 + 0.31, len(names)], [level, end], color=MUTED, lw=0.8, zorder=2)
    ends = [(0, start, SCRATCH.color), (len(names), end, UPSCALED.color)]
    names.append("upscaled")
    for one, mark, value in _variants(gain):
        ends.append((len(names), value, one.color))
        seen.append(value)
        names.append(mark.tick)
    for at, value, color in ends:
        ax.plot(at, value, "D", ms=8, color=color, zorder=4)
        _number(ax, at, value, words.format_loss(value), 7)
    if (other := _alternative(gain)) is not None:
        baseline, mark, value = other
        seen.append(value)
        ax.axhline(value, color=baseline.color, lw=1.2, ls=baseline.dashes, zorder=1, label=mark.words)
        ax.legend(loc="upper right")
    room = max(seen) - min(seen) or abs(start) or 1.0
    lowest = min(seen) - 0.15 * room
    ax.set_ylim(max(0.0, lowest) if min(seen) >= 0 else lowest, max(seen) + 0.3 * room)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel("final training loss")


def _number(ax: Any, x: float, y: float, text: str, above: float = 3) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    ground = {"fc": PAPER, "ec": "none", "pad": 0.8}
    ax.annotate(text, (x, y), xytext=(0, above), fontsize=8.5, zorder=5, bbox=ground, **at)
