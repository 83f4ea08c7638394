"""How whoever asked says a thing: as an argument in Python, or as an option of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
