"""The gain taken apart: from the from-scratch model's loss to the grown one's, effect by effect, and beyond."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mupscale.plots import BAD, GOOD, MUTED, PAPER, Gallery, Picture
from mupscale.report.looks import Look, dark_colors
from mupscale.study import CONTENDERS, Contender, contender_named
from mupscale.system import words

Gain = Mapping[str, float | None]
_EFFECTS = (("learning_rate", "learning\nrate"), ("head_start", "head\nstart"), ("noise", "noise"))
START, END = contender_named("from-scratch"), contender_named("copies")
_IN_WATERFALL = (START.name, "from-scratch-changed", END.name)


def draw_gain(gain: Gain, gallery: Gallery) -> Iterator[Picture]:
    """A waterfall, where both ends of it are known. gain: final losses by contender, and each effect's part."""
    start, end = gain.get(START.name), gain.get(END.name)
    if words.is_finite_number(start) and words.is_finite_number(end):
        alt = f"From scratch {words.format_loss(start)}, upscaled {words.format_loss(end)}. {describe_gain(gain)}"
        caption = "What lowers the final loss at equal cost, from training from scratch to the upscaled model"
        for one, value in _others(gain, "grown"):
            alt = f"{alt.strip()} {one.label.capitalize()}: {words.format_loss(value)}."
            caption += f", and to that {one.label}"
        for one, value in _alternative(gain):
            alt = f"{alt.strip()} {one.label.capitalize()}: {words.format_loss(value)}."
            caption += f"; the line: {one.label}"
        dark = dark_colors(Look(one, one.short) for one in CONTENDERS)
        yield gallery.draw("gain", alt.strip(), caption, lambda ax: _waterfall(ax, gain), size=(4.8, 3.3), dark=dark)


def describe_gain(gain: Gain) -> str:
    """How much each effect takes off the loss."""
    effects = [(name.replace("_", " "), gain.get(name)) for name, _ in _EFFECTS]
    changes = [f"{name} {_signed(value, gain)}" for name, value in effects if words.is_finite_number(value)]
    return f"Change in loss from each effect: {', '.join(changes)}." if changes else ""


def _signed(value: float, gain: Gain) -> str:
    """A gain lowers the loss; with three digits of the loss that is taken apart."""
    whole, digits = gain.get(START.name), 3
    if words.is_finite_number(whole) and whole > 0:
        digits = max(3, 2 - math.floor(math.log10(whole)))
    shown = f"{abs(value):.{digits}f}"
    return f"{'±' if not float(shown) else '−' if value > 0 else '+'}{shown}"


def _alternative(gain: Gain) -> list[tuple[Contender, float]]:
    """What growing competes with, and is not in the waterfall: the best baseline of these, if there is one."""
    return sorted(_others(gain, "baseline"), key=lambda pair: pair[1])[:1]


def _others(gain: Gain, kind: str) -> Iterator[tuple[Contender, float]]:
    """Contenders of a kind that are not in the waterfall itself, and their losses."""
    for one in CONTENDERS:
        if one.kind == kind and one.name not in _IN_WATERFALL and words.is_finite_number(value := gain.get(one.name)):
            yield one, value


def _waterfall(ax: Any, gain: Gain) -> None:
    start, end = gain[START.name], gain[END.name]
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
        _number(ax, at, max(level, level - value), _signed(value, gain))
        level -= value
        seen.append(level)
        names.append(name)
    ax.plot([len(names) - 1 + 0.31, len(names)], [level, end], color=MUTED, lw=0.8, zorder=2)
    ends = [(0, start, START), (len(names), end, END)]
    names.append("upscaled")
    for one, value in _others(gain, "grown"):
        ends.append((len(names), value, one))
        seen.append(value)
        names.append(f"upscaled\n{one.paper.letter}")
    for at, value, one in ends:
        ax.plot(at, value, "D", ms=8, color=Look(one, one.short).color, zorder=4)
        _number(ax, at, value, words.format_loss(value), 7)
    for one, value in _alternative(gain):
        seen.append(value)
        ax.axhline(value, lw=1.2, zorder=1, label=one.label, **Look(one, one.short).line)
        ax.legend(loc="upper right")
    room = max(seen) - min(seen) or abs(start) or 1.0
    lowest = min(seen) - 0.15 * room
    ax.set_ylim(max(0.0, lowest) if min(seen) >= 0 else lowest, max(seen) + 0.3 * room)
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_xticks(range(len(names)), names)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel("final loss")


def _number(ax: Any, x: float, y: float, text: str, above: float = 3) -> None:
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    ground = {"fc": PAPER, "ec": "none", "pad": 0.8}
    ax.annotate(text, (x, y), xytext=(0, above), fontsize=8.5, zorder=5, bbox=ground, **at)
