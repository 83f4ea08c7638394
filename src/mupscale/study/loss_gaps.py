"""By how much one loss ends above another: as a share of it, or as a difference where losses may be zero or negative.

The negative log-likelihood of a density, a reward or a margin may have either sign. A share of a negative loss has the
wrong sign, and a share of a loss close to zero says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from mupscale.system import words

GapKind = Literal["share", "difference"]


def choose_gap_kind(losses: Iterable[float | None]) -> GapKind:
    """How these losses are compared: by shares where all are above zero. None: diverged.

    >>> choose_gap_kind([2.3, None, 0.1]), choose_gap_kind([2.3, -0.1]), choose_gap_kind([2.3, 0.0])
    ('share', 'difference', 'difference')
    """
    return "share" if all(loss > 0 for loss in losses if loss is not None) else "difference"


def stored_gap_kind(values: Mapping[str, Any]) -> GapKind:
    """How the numbers of a summary compare losses; those of older versions are shares."""
    return "difference" if values.get("gap") == "difference" else "share"


def gap_above(loss: float, other: float, kind: GapKind) -> float:
    """By how much the first ends above the other; negative: below.

    >>> gap_above(1.5, 1.2, "share"), gap_above(-1.5, -1.0, "difference")
    (0.25, -0.5)
    """
    return loss / other - 1 if kind == "share" else loss - other


def format_gap(gap: float, kind: GapKind) -> str:
    """How large a gap is, in a sentence, whichever way it goes.

    >>> format_gap(-0.03, "share"), format_gap(-0.123, "difference")
    ('3 %', '0.12')
    """
    return words.format_share(abs(gap)) if kind == "share" else words.format_digits(abs(gap))


def format_gap_in_table(gap: float, kind: GapKind) -> str:
    """The same where numbers stand below each other."""
    return words.format_percent(abs(gap)) if kind == "share" else words.format_digits(abs(gap))


def signed_gaps(kind: GapKind) -> Callable[[Any], str]:
    """How gaps are written with their sign.

    >>> [signed_gaps("difference")(gap) for gap in (0.123, -0.5, 0.0)]
    ['+0.12', '−0.5', '±0']
    """
    return words.format_change if kind == "share" else _format_difference


def _format_difference(value: Any) -> str:
    if not words.is_finite_number(value):
        return words.UNKNOWN
    sign = "±" if not value else "+" if value > 0 else "−"
    return f"{sign}{words.format_digits(abs(value))}"
