"""Whoever asked: how they say a thing, as an argument in Python or as an option of a command, and on which line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OURS = {__name__.partition(".")[0], "torch"}  # torch's no_grad stands between a function and its caller
_BY_COMMAND: ContextVar[bool] = ContextVar("by_command", default=False)


@contextmanager
def asked_by_command() -> Iterator[None]:
    """While a command runs, messages name its options.

    >>> with asked_by_command():
    ...     setting("hidden", 48)
    '--hidden 48'
    """
    token = _BY_COMMAND.set(True)
    try:
        yield
    finally:
        _BY_COMMAND.reset(token)


def as_asked(argument: str, option: str) -> str:
    """The one of two ways to say a thing that the caller has.

    >>> as_asked("grow=mupscale.Fresh()", "--how fresh")
    'grow=mupscale.Fresh()'
    """
    return option if _BY_COMMAND.get() else argument


def setting(name: str, value: object = "") -> str:
    """A setting for a message, with its value if one is given.

    >>> setting("hidden", 48), setting("times", "ffn=2"), setting("kv")
    ('hidden=48', 'times="ffn=2"', 'kv=')
    """
    quoted = f'"{value}"' if isinstance(value, str) and value else value
    return as_asked(f"{name}={quoted}", f"--{name} {value}".rstrip())


def level_of_caller() -> int:
    """The stacklevel, for a warning in the function that asks, of the first line outside this package.

    >>> level_of_caller() > 0
    True
    """
    level = 1
    while str(sys._getframe(level).f_globals.get("__name__")).partition(".")[0] in _OURS:
        level += 1
    return level
