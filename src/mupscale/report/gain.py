"""The gain taken apart: from the from-scratch model's loss to (e)'s, effect by effect, and on to (e′)'s."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mupscale.method import Summary
from mupscale.plots import BAD, COLORS, GOOD, MUTED, PAPER, RUN_COLORS, RUN_DASHES, Gallery, Picture, words

_EFFECTS = (("learning_rate", "learning\nrate"), ("head_start", "head\nstart"), ("noise", "noise"))
_ALTERNATIVES = (
    ("continued", "continued", "base model continued"),
    ("continued_own", "continued-own", "base model continued, own lr"),
    ("continued_late", "continued-late", "base model continued, own lr from halfway"),
    ("scratch_own", "scratch-own", "from scratch, own lr"),
)
"""Keys of the gain, names of the runs, and words."""


def pictures(summary: Summary, gallery: Gallery) -> Iterator[Picture]:
    """A waterfall, where both ends of it are known."""
    gain = summary.gain
    start, end = gain.get("scratch"), gain.get("upscaled")
    if words.known(start) and words.known(end):
        alt = f"From scratch {words.loss(start)}, upscaled {words.loss(end)}. {in_words(summary)}"
        caption = "Final training loss at equal total cost, from the from-scratch model's to the upscaled one's"
        if words.known(own := gain.get("upscaled_own")):
            alt = f"{alt.strip()} Upscaled, own lr from halfway on: {words.loss(own)}."
            caption += ", and to that of the same with its own lr from halfway on"
        if (other := _alternative(gain)) is not None:
            alt = f"{alt.strip()} {other[2].capitalize()}: {words.loss(other[0])}."
            caption += f"; the line: {other[2]}"
        yield gallery.draw("gain", alt.strip(), caption, lambda ax: _waterfall(ax, gain), size=(4.8, 3.3))


def in_words(summary: Summary) -> str:
    """How much each effect takes off the loss."""
    effects = [(name.replace("_", " "), summary.gain.get(name)) for name, _ in _EFFECTS]
    digits = _digits(summary.gain)
    said = [f"{name} {_signed(value, digits)}" for name, value in effects if words.known(value)]
    return f"Change of the loss by effect: {', '.join(said)}." if said else ""


def _signed(value: float, digits: int) -> str:
    """A gain lowers the loss."""
    shown = f"{abs(value):.{digits}f}"
    return f"{'±' if not float(shown) else '−' if value > 0 else '+'}{shown}"


def _digits(gain: dict[str, float | None]) -> int:
    """After the point: three digits of the loss that is taken apart."""
    whole = gain.get("scratch")
    return max(3, 2 - math.floor(math.log10(whole))) if words.known(whole) and whole > 0 else 3


def _alternative(gain: dict[str, float | None]) -> tuple[float, str, str] | None:
    """What widening competes with, and is not in the waterfall: loss, run and words of the best of them."""
    found = [(value, run, said) for key, run, said in _ALTERNATIVES if words.known(value := gain.get(key))]
    return min(found, key=lambda item: item[0], default=None)


def _waterfall(ax: Any, gain: dict[str, float | None]) -> None:
    start, end = gain["scratch"], gain["upscaled"]
    assert start is not None
    assert end is not None
    names, level, seen = ["from\nscratch"], start, [start, end]
    for key, name in _EFFECTS:
        value = gain.get(key)
        if not words.known(value):
            continue
        at = len(names)
        ax.bar(at, -value, bottom=level, width=0.62, color=GOOD if value >= 0 else BAD, zorder=3)
        ax.plot([at - 1 + (0.31 if at > 1 else 0.2), at + 0.31], [level, level], color=MUTED, lw=0.8, zorder=2)
        _number(ax, at, max(level, level - value), _signed(value, _digits(gain)))
        level -= value
        seen.append(level)
        names.append(name)
    ax.plot([len(names) - 1 + 0.31, len(names)], [level, end], color=MUTED, lw=0.8, zorder=2)
    ends = [(0, start, COLORS[0]), (len(names), end, RUN_COLORS["upscaled"])]
    names.append("upscaled")
    if words.known(own := gain.get("upscaled_own")):
        ends.append((len(names), own, RUN_COLORS["upscaled-own"]))
        seen.append(own)
        names.append("upscaled,\nown lr")
    for at, value, color in ends:
        ax.plot(at, value, "D", ms=8, color=color, zorder=4)
        _number(ax, at, value, words.loss(value), 7)
    if (other := _alternative(gain)) is not None:
        value, run, label = other
        seen.append(value)
        ax.axhline(value, color=RUN_COLORS[run], lw=1.2, ls=RUN_DASHES[run], zorder=1, label=label)
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
