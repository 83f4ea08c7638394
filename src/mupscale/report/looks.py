"""How contenders look, the same in all pictures: colours that can be read on light and dark pages, dashes, names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from mupscale.plots import COLORS, DARK_PAPER, PAPER, recolour_for_dark, with_contrast
from mupscale.study import CONTENDERS, Contender, ContenderRuns, Sweep, contender_or_stranger


@dataclass(frozen=True)
class Look:
    """A contender, and what it is called where there is little room."""

    contender: Contender
    short: str

    @property
    def color(self) -> str:
        """Dark enough for letters on a light page."""
        return with_contrast(self.contender.color, PAPER)

    @property
    def dark_color(self) -> str:
        """The same for a dark page: the house's own where it has one, which tells greys apart."""
        return with_contrast(recolour_for_dark(self.contender.color), DARK_PAPER, 6.0)

    @property
    def line(self) -> dict[str, Any]:
        """Colour and dashes of a line that no letters are beside."""
        return {"color": self.contender.color, "ls": self.contender.dashes}


def find_looks(shown: Sequence[ContenderRuns | Sweep]) -> dict[str, Look]:
    """By name; those that are strangers to the table of contenders get colours in turn."""
    looks: dict[str, Look] = {}
    strangers = 0
    for one in shown:
        contender = one.contender if isinstance(one, ContenderRuns) else contender_or_stranger(one.name)
        if contender not in CONTENDERS:
            contender = replace(contender, color=COLORS[(1 + strangers) % len(COLORS)])
            strangers += 1
        with_letter = contender.paper.letter and one.label.startswith(contender.paper.letter)
        looks[one.name] = Look(contender, contender.short if with_letter else one.label or contender.label)
    return looks


def add_line(ax: Any, xs: Sequence[float], losses: Sequence[Sequence[float]], color: Any, **style: Any) -> None:
    """A line of the means over seeds, and a band of their range where there are several."""
    ax.plot(xs, [fmean(some) for some in losses], color=color, **style)
    if any(len(some) > 1 for some in losses):
        low, high = [min(some) for some in losses], [max(some) for some in losses]
        ax.fill_between(xs, low, high, color=color, alpha=0.16, lw=0, zorder=2)


def dark_colors(looks: Iterable[Look]) -> dict[str, str]:
    """What becomes of their colours on a dark page."""
    return {color: look.dark_color for look in looks for color in (look.color, look.contender.color)}
