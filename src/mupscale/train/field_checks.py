"""Checks of a recipe's fields that several of its parts share."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mupscale.system import MupscaleError


def check_choices(part: Any, where: str = "") -> None:
    """Fields that are one of a few words are: on the command line the parser checks that, in Python and JSON nobody."""
    for name, hint in get_type_hints(type(part)).items():
        value, choices = getattr(part, name), _choices(hint)
        if choices and value not in choices and not (isinstance(value, bool) and bool in get_args(hint)):
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise MupscaleError(f"{where}{name} is {value!r}, but must be {allowed}")


def check_not_negative(what: str, value: float | dict[str, float] | None) -> None:
    for number in value.values() if isinstance(value, dict) else [value]:
        if number is not None and not 0 <= number < math.inf:
            raise MupscaleError(f"{what} is {number}, but must be 0 or more and finite")


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]
