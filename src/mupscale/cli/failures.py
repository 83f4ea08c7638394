"""What ends a command, as one line: errors that a person can mend, a machine that gives no more, and mistakes."""

from __future__ import annotations

import errno
import os
import sys

from mupscale.cli.arguments import UsageError
from mupscale.system import Diverged, Interrupted, MupscaleError, is_out_of_memory, printable, show, show_foreign_errors

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 600


def failure_sentence(error: BaseException, command: str, again: str) -> tuple[str, int]:
    """The line that tells what went wrong, and the exit status. again: what to add where a command can go on."""
    of_command = f"mupscale {command}"
    if isinstance(error, KeyboardInterrupt):
        return f"{of_command}: interrupted{again}", 130
    if isinstance(error, Interrupted):
        return f"{of_command}: {error}{again}", 130
    if isinstance(error, UsageError):
        return f"{of_command}: {error}", 2
    if isinstance(error, MupscaleError):
        return f"{of_command}: {error}", 3 if isinstance(error, Diverged) else 1
    if isinstance(error, OSError):
        named, reason = error.filename, error.strerror or _first_words(error)
        if error.errno in _DISK_FULL:
            named, reason = named and f"{named} cannot be written", f"{reason}; free some space"
        return f"{of_command}: {f'{named}: ' if named else ''}{reason}{again}", 1
    if is_out_of_memory(error):
        return f"{of_command}: there is not enough memory ({_first_words(error)}); use smaller sizes{again}", 1
    if isinstance(error, RecursionError):
        return f"{of_command}: the input is nested too deeply", 1
    if isinstance(error, ValueError) and "null byte" in str(error):
        return f"{of_command}: a path contains a NUL character, which no system accepts", 1
    return f"{of_command}: {_first_words(error)}; -v shows where it comes from", 1


def _first_words(error: BaseException) -> str:
    """The kind of an error and what it says, on one line."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # of a class of the user's, perhaps
        said = ""
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def print_failure(line: str, status: int) -> int:
    """Print an error on one line, from one process of many; return the exit status."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_another = rank.isdecimal() and int(rank) > 0 and not (world.isdecimal() and int(rank) >= int(world))
    if not is_another:  # nor one whose rank is none
        show(printable(line), stream="stderr")
    return status


def prepare_streams() -> None:
    """Let every text be printed: into nothing where a stream is closed, written out where it is ASCII alone.

    Warnings and errors with their origin are shown as all that is printed.
    """
    show_foreign_errors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def give_up_stdout() -> None:
    """Whoever read the output is gone, or its disk is full: what is left of it goes nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # it has no descriptor of its own
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
