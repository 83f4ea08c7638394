"""Numbers as people read them: 0.412, 1.3×, 598 TFLOPs, 2 min 3 s."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

UNKNOWN = "–"
"""What stands where a number is missing."""
_UNITS = ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1.0, "FLOPs"))


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether it is a number one can show: what comes from a file may be missing, not finite, or no number at all.

    >>> [is_finite_number(value) for value in (3, 0.5, float("nan"), None, "3", True)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def format_loss(value: Any) -> str:
    """A loss or an accuracy: three digits after the point, more for small ones."""
    if not is_finite_number(value):
        return _other(value)
    if value and abs(value) < 0.1:
        return _exponent(f"{value:.3g}")
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def format_setting(value: Any) -> str:
    """A hyperparameter: at most three significant digits."""
    return (
        _exponent(f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}")
        if is_finite_number(value)
        else _other(value)
    )


def format_factor(value: Any) -> str:
    if not is_finite_number(value):
        return _other(value)
    if abs(value) < 10:
        return f"{_exponent(f'{value:.2g}')}×"
    return f"{value:,.1f}×" if abs(value) < 100 else f"{value:,.0f}×"


def format_times(value: Any) -> str:
    """A ratio of costs, with two digits after the point where it is near 1.

    >>> format_times(0.8), format_times(1.284), format_times(23.4), format_times(0.0123)
    ('0.80×', '1.28×', '23.4×', '0.012×')
    """
    is_usual = is_finite_number(value) and 0.1 <= value < 10
    return f"{value:.2f}×" if is_usual else format_factor(value)


def format_digits(value: float, digits: int = 2) -> str:
    """So many significant digits, and as many before the point as there are.

    >>> format_digits(381.2), format_digits(99.7), format_digits(9.12), format_digits(-1234.0, 3)
    ('381', '100', '9.1', '-1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else _exponent(f"{value:.{digits}g}")


def format_share(value: float) -> str:
    """A share in a sentence.

    >>> format_share(0.0912), format_share(0.03), format_share(3.812)
    ('9.1 %', '3 %', '381 %')
    """
    return f"{format_digits(100 * value)} %"


def format_percent(value: float) -> str:
    """A share in a table, always with two digits, and a space at which no line breaks.

    >>> [format_percent(value).split() for value in (0.0912, 0.03, 1.503, -3.8)]
    [['9.1', '%'], ['3.0', '%'], ['150', '%'], ['-380', '%']]
    """
    share = 100 * value
    shown = format_digits(share) if abs(share) >= 9.95 or not share else _exponent(f"{share:#.2g}")
    return f"{shown.rstrip('.')}\N{NO-BREAK SPACE}%"


def format_change(value: Any) -> str:
    """A change in per cent, with its sign.

    >>> [format_change(value).split() for value in (0.0912, -0.013, 0.0)]
    [['+9.1', '%'], ['−1.3', '%'], ['±0', '%']]
    """
    if not is_finite_number(value):
        return UNKNOWN
    return f"{'±' if not value else '+' if value > 0 else '−'}{format_percent(abs(value))}"


def format_range(one: Mapping[str, Any] | None, shown: Callable[[Any], str]) -> str:
    """A forecast: the value and its range; or that there is none.

    >>> format_range({"low": 0.5, "value": 0.75, "high": 1.25}, format_times)
    '0.75× (0.50× to 1.25×)'
    """
    if not one or "no_rule" in one:
        return "no forecast"
    return f"{shown(one['value'])} ({shown(one['low'])} to {shown(one['high'])})"


def choose_flops_unit(largest: float) -> tuple[float, str]:
    """The unit for numbers up to this one; TFLOPs, the paper's, as long as that leaves something to read.

    >>> choose_flops_unit(3e11)
    (1000000000000.0, 'TFLOPs')
    """
    return next(((size, name) for size, name in _UNITS if largest >= 0.1 * size), (1.0, "FLOPs"))


def format_flops(value: Any) -> str:
    if not is_finite_number(value):
        return _other(value)
    size, name = choose_flops_unit(abs(value))
    scaled = value / size
    return f"{scaled:,.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"


def format_count(value: Any) -> str:
    """A whole number, with separators.

    >>> format_count(12000)
    '12,000'
    """
    return f"{value:,.0f}" if is_finite_number(value) else _other(value)


def format_duration(seconds: Any) -> str:
    if not is_finite_number(seconds):
        return _other(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _in_two_units(whole, 60, "min", 1, "s")
    if whole < 86400:
        return _in_two_units(round(seconds / 60) * 60, 3600, "h", 60, "min")
    return _in_two_units(round(seconds / 3600) * 3600, 86400, "d", 3600, "h")


def format_spread(values: Iterable[float]) -> str:
    """Mean and range over seeds."""
    finite = [value for value in values if is_finite_number(value)]
    if not finite:
        return UNKNOWN
    mean = format_loss(math.fsum(finite) / len(finite))
    return mean if len(finite) == 1 else f"{mean} ({format_loss(min(finite))} to {format_loss(max(finite))})"


def safe_file_name(text: str) -> str:
    """A safe name for a file: what is no letter, digit, dot or dash becomes a dash, and no dots lead."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "unnamed"


def _in_two_units(whole: int, large: int, name: str, small: int, smaller: str) -> str:
    first, rest = divmod(whole, large)
    return f"{first} {name} {rest // small} {smaller}" if rest // small else f"{first} {name}"


def _exponent(text: str) -> str:
    return re.sub(r"e([+-])0*(\d+)$", lambda m: f"e{'-' if m[1] == '-' else ''}{m[2]}", text)


def _other(value: Any) -> str:
    """What is no finite number."""
    if isinstance(value, float):
        return UNKNOWN if math.isnan(value) else ("∞" if value > 0 else "-∞")
    return UNKNOWN if value is None else str(value)
