"""Colours that can be read: how far two lie apart, and one moved until it is far enough from the page."""

from __future__ import annotations

_BLACK, _WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_STEPS = 50
Rgb = tuple[float, float, float]


def find_contrast(color: str, paper: str) -> float:
    """How far two colours lie apart in brightness: 1 for the same, 21 for black and white (as WCAG counts it).

    >>> find_contrast("#000000", "#ffffff"), round(find_contrast("#c98a1b", "#ffffff"), 1)
    (21.0, 2.9)
    """
    return _contrast(_rgb(color), _rgb(paper))


def with_contrast(color: str, paper: str, least: float = 4.5) -> str:
    """The same colour, as much darker or lighter as letters on this paper need; unchanged where it is legible as it is.

    >>> with_contrast("#c98a1b", "#ffffff"), with_contrast("#4c566a", "#ffffff"), with_contrast("#4c566a", "#171c23")
    ('#9d6c15', '#4c566a', '#7e8594')
    """
    own, ground = _rgb(color), _rgb(paper)
    if _contrast(own, ground) >= least:
        return color
    end = _BLACK if _brightness(ground) > 0.5 else _WHITE
    for step in range(1, _STEPS + 1):
        mixed = _rgb(_hex(_mix(own, end, step / _STEPS)))
        if _contrast(mixed, ground) >= least:
            return _hex(mixed)
    return _hex(end)


def _contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((_brightness(one), _brightness(other)))
    return (high + 0.05) / (low + 0.05)


def _brightness(rgb: Rgb) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    red, green, blue = (a + (b - a) * share for a, b in zip(one, other, strict=True))
    return red, green, blue


def _rgb(color: str) -> Rgb:
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _hex(rgb: Rgb) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
