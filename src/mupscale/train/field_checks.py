"""Checks of a recipe's fields that several of its parts share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from mupscale.system import MupscaleError, show_short


def check_choices(part: Any, where: str = "") -> None:
    """Fields that are one of a few words are: on the command line the parser checks that, in Python and JSON nobody."""
    kind: type = type(part)
    for name, (choices, others) in _fields_of_words(kind).items():
        value = getattr(part, name)
        if value not in choices and not isinstance(value, others):
            allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise MupscaleError(f"{where}{name} is {value!r}, but must be {allowed}")


def check_not_negative(what: str, value: float | dict[str, float] | None) -> None:
    for number in value.values() if isinstance(value, dict) else [value]:
        if number is not None and not 0 <= number < math.inf:
            raise MupscaleError(f"{what} is {number}, but must be 0 or more and finite")


def check_rate(arguments: Mapping[str, Any]) -> None:
    """An optimizer's learning rate: there, and a number that can be one."""
    if "lr" not in arguments:
        raise MupscaleError("the optimizer's init_args need lr, the learning rate at the base width")
    lr = arguments["lr"]
    if isinstance(lr, Tensor):
        return
    if isinstance(lr, bool) or not isinstance(lr, int | float):
        raise MupscaleError(f"the optimizer's lr is {show_short(lr)}, but must be a number")
    check_not_negative("the optimizer's lr", lr)


@cache
def _fields_of_words(part: type) -> dict[str, tuple[list[str], tuple[type, ...]]]:
    """A class's fields that are one of a few words: which, and whether they may be true or false, or None, instead."""
    hints = {name: hint for name, hint in get_type_hints(part).items() if _choices(hint)}
    others = {
        name: tuple(kind for kind in (bool, type(None)) if kind in get_args(hint)) for name, hint in hints.items()
    }
    return {name: (_choices(hint), others[name]) for name, hint in hints.items()}


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]
