"""Numbers as people read them: 0.412, 1.3×, 598 TFLOPs, 2 min 3 s."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeGuard

UNKNOWN = "–"
_UNITS = ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1.0, "FLOPs"))


def known(value: object) -> TypeGuard[float]:
    """Whether it is a number one can show: what comes from a file may be missing, not finite, or no number at all."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def loss(value: Any) -> str:
    """A loss or an accuracy: three digits after the point, more for small ones."""
    if not known(value):
        return _other(value)
    if value and abs(value) < 0.1:
        return _exponent(f"{value:.3g}")
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


def setting(value: Any) -> str:
    """A hyperparameter: at most three significant digits."""
    return _exponent(f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}") if known(value) else _other(value)


def times(value: Any) -> str:
    """A factor: 1.3×, 23.6×, 1,250×."""
    if not known(value):
        return _other(value)
    if abs(value) < 10:
        return f"{_exponent(f'{value:.2g}')}×"
    return f"{value:,.1f}×" if abs(value) < 100 else f"{value:,.0f}×"


def flops_unit(largest: float) -> tuple[float, str]:
    """The unit for numbers up to this one; TFLOPs, the paper's, as long as that leaves something to read."""
    return next(((size, name) for size, name in _UNITS if largest >= 0.1 * size), (1.0, "FLOPs"))


def flops(value: Any) -> str:
    """A cost: 598 TFLOPs, 37,929,809 TFLOPs."""
    if not known(value):
        return _other(value)
    size, name = flops_unit(abs(value))
    scaled = value / size
    return f"{scaled:,.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"


def count(value: Any) -> str:
    """A whole number, with separators."""
    return f"{value:,.0f}" if known(value) else _other(value)


def duration(seconds: Any) -> str:
    """A time: 0.8 s, 2 min 3 s, 1 h 4 min, 3 d 2 h."""
    if not known(seconds):
        return _other(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two(whole, 60, "min", 1, "s")
    if whole < 86400:
        return _two(round(seconds / 60) * 60, 3600, "h", 60, "min")
    return _two(round(seconds / 3600) * 3600, 86400, "d", 3600, "h")


def width(value: Any) -> str:
    """A width: 128, or head_dim 32, heads 4."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count(size)}" for name, size in value.items())
    return count(value)


def spread(values: Iterable[float]) -> str:
    """Mean and range over seeds: 0.412 (0.405 to 0.420)."""
    given = [value for value in values if known(value)]
    if not given:
        return UNKNOWN
    mean = loss(math.fsum(given) / len(given))
    return mean if len(given) == 1 else f"{mean} ({loss(min(given))} to {loss(max(given))})"


def file_name(text: str) -> str:
    """A safe name for a file: what is no letter, digit, dot or dash becomes a dash, and no dots lead."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "unnamed"


def _two(whole: int, large: int, name: str, small: int, smaller: str) -> str:
    first, rest = divmod(whole, large)
    return f"{first} {name} {rest // small} {smaller}" if rest // small else f"{first} {name}"


def _exponent(text: str) -> str:
    return re.sub(r"e([+-])0*(\d+)$", lambda m: f"e{'-' if m[1] == '-' else ''}{m[2]}", text)


def _other(value: Any) -> str:
    """What is no finite number."""
    if isinstance(value, float):
        return UNKNOWN if math.isnan(value) else ("∞" if value > 0 else "-∞")
    return UNKNOWN if value is None else str(value)
