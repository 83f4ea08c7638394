"""What a file of plain values must hold; the first that is missing or of another kind is named by where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mupscale.plots import words

Check = Callable[[Any, str], None]
"""Looks at a value; the text is where it lies, such as large.contenders[2].lr."""


class WrongShapeError(ValueError):
    """A value is not what it must be; the message says where, and what it is instead."""


def number(value: Any, at: str) -> None:
    """A finite number.

    >>> number(float("nan"), "base.lr")
    Traceback (most recent call last):
    mupscale.report.shapes.WrongShapeError: base.lr is nan, but must be a number
    """
    _require(words.is_finite_number(value), value, at, "a number")


def positive(value: Any, at: str) -> None:
    """A finite number above 0."""
    _require(words.is_finite_number(value) and value > 0, value, at, "a number above 0")


def any_text(value: Any, at: str) -> None:
    """A text."""
    _require(isinstance(value, str), value, at, "a text")


def truth(value: Any, at: str) -> None:
    """True or false."""
    _require(isinstance(value, bool), value, at, "true or false")


def mapping(value: Any, at: str) -> None:
    """Values by name, whatever they are."""
    _require(isinstance(value, Mapping), value, at, "values by name")


def anything(value: Any, at: str) -> None:
    """Whatever there is."""


def width(value: Any, at: str) -> None:
    """A width: a number above 0, or several by name."""
    either(by_name(positive), positive)(value, at)


def one_of(names: Mapping[str, Any] | tuple[str, ...] | frozenset[str]) -> Check:
    """One of these texts."""

    def check(value: Any, at: str) -> None:
        _require(isinstance(value, str) and value in names, value, at, f"one of {', '.join(sorted(names))}")

    return check


def either(*checks: Check) -> Check:
    """What one of these takes; the complaint is the last one's."""

    def check(value: Any, at: str) -> None:
        for one in checks[:-1]:
            try:
                return one(value, at)
            except WrongShapeError:
                continue
        return checks[-1](value, at)

    return check


def nothing(value: Any, at: str) -> None:
    """Nothing at all (null)."""
    _require(value is None, value, at, "nothing")


def list_of(inner: Check, least: int = 0) -> Check:
    """A list of at least so many."""

    def check(value: Any, at: str) -> None:
        _require(isinstance(value, list), value, at, "a list")
        _require(len(value) >= least, value, at, f"a list of {least} or more")
        for place, item in enumerate(value):
            inner(item, f"{at}[{place}]")

    return check


def by_name(inner: Check, names: Check = any_text) -> Check:
    """Values of one kind by name. names: which."""

    def check(value: Any, at: str) -> None:
        mapping(value, at)
        for name, item in value.items():
            names(name, f"a name in {at}")
            inner(item, f"{at}.{name}")

    return check


def fields(inner: Mapping[str, Check], *, optional: frozenset[str] = frozenset()) -> Check:
    """Values by name, each of its own kind; others may lie beside them."""

    def check(value: Any, at: str) -> None:
        mapping(value, at)
        for name, one in inner.items():
            place = f"{at}.{name}" if at else name
            if name not in value:
                if name in optional:
                    continue
                raise WrongShapeError(f"{place} is missing")
            one(value[name], place)

    return check


def _require(is_right: bool, value: Any, at: str, wanted: str) -> None:
    if not is_right:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:39]}…"
        raise WrongShapeError(f"{at or 'it'} is {shown}, but must be {wanted}")
