"""What a person sees: results and lines as they come, and how far something is, as a bar, as lines, or not at all.

All that is printed is printed here, by `show` or by a bar: text may come from somebody's files, and what would move the
cursor, change a title or hide a line is written out. Bars and tables have their colours from rich.
"""

from __future__ import annotations

import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol

SECONDS_BETWEEN_LINES = 10.0
SECONDS_OF_PACE = 5.0  # over which is measured how fast something goes, before the time left is told
Stream = Literal["stdout", "stderr"]
Loudness = Literal["quiet", "normal", "verbose"]
_loudness: Loudness = "normal"


def set_loudness(loudness: Loudness) -> None:
    """How much is shown from now on of how far something is: nothing (quiet), a bar or some lines, all lines (verbose).

    >>> from mupscale.system import print_at_once, set_loudness
    >>> set_loudness("quiet")
    >>> print_at_once("2/7 base model")
    >>> set_loudness("normal")
    """
    global _loudness
    _loudness = loudness


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, lines: bool = False) -> str:
    """Text for a terminal, in which characters that would move its cursor or change its colours are written out.

    lines: line ends and tabulators stay as they are; else they are written out, too.

    >>> from mupscale.system import printable
    >>> printable("weight\\x1b[2J\\n")
    'weight\\\\x1b[2J\\\\n'
    """
    pattern = _CONTROL if lines else re.compile(_CONTROL.pattern[:-1] + "\n\t]")
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def show(*texts: str, stream: Stream = "stdout", end: str = "\n") -> None:
    """Print texts at once, each on lines of its own, with control characters written out.

    >>> from mupscale.system import show
    >>> show("a title\x1b]0;owned\x07", "and a line")
    a title\\x1b]0;owned\\x07
    and a line
    """
    print(*(printable(text, lines=True) for text in texts), sep="\n", end=end, file=getattr(sys, stream), flush=True)


def show_foreign_errors() -> None:
    """Let warnings, and errors that end the program, be shown as all that is printed: both may quote files.

    >>> from mupscale.system import show_foreign_errors
    >>> before = warnings.formatwarning, sys.excepthook
    >>> show_foreign_errors()
    >>> warnings.formatwarning("a name\x1b[2J", UserWarning, "models.py", 3, "")
    'models.py:3: UserWarning: a name\\\\x1b[2J\\n'
    >>> warnings.formatwarning, sys.excepthook = before
    """
    warnings.formatwarning = lambda *what, **more: printable(_format_warning(*what, **more), lines=True)
    sys.excepthook = lambda *error: show("".join(traceback.format_exception(*error)), stream="stderr", end="")


_format_warning = warnings.formatwarning


def show_table(table: Any, width: int) -> None:
    """Print a table of rich's, with its colours where there is a terminal.

    >>> from rich.table import Table
    >>> from mupscale.system import show_table
    >>> show_table(Table("step", box=None, padding=0), 4)
    step
    """
    from rich.console import Console

    Console(width=width).print(table)


class Display(Protocol):
    """Shows how far something is, until it is closed."""

    def update(
        self, done: float, line: str = "", *, total: float | None = None, last: bool = False, **fields: Any
    ) -> None:
        """So much is done.

        line: this state as a plain line. total: a new one. last: the end, which is always shown. fields: for columns.
        """

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def note(self, text: str, line: str | None = None) -> None:
        """Something that happens once, shown in any case. line: the same as a plain line, if it differs."""

    def close(self) -> None:
        """Stop showing."""


class SilentDisplay:
    """Shows nothing."""

    def update(
        self, done: float, line: str = "", *, total: float | None = None, last: bool = False, **fields: Any
    ) -> None:
        """Nothing."""

    def advance(self, amount: float = 1) -> None:
        """Nothing."""

    def note(self, text: str, line: str | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def rough_time(seconds: float) -> str:
    """Seconds for people, rounded up, as an estimate has them.

    >>> from mupscale.system import rough_time
    >>> rough_time(61), rough_time(7300)
    ('2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


class LineDisplay:
    """A line every few seconds, and one for whatever happens once. total: for lines that tell the time left, too."""

    def __init__(self, stream: Stream, *, total: float | None = None, first_at_once: bool = False) -> None:
        self.stream, self.total = stream, total
        self.printed = -math.inf if first_at_once else time.monotonic()
        self.measured: tuple[float, float] | None = None  # how much was done then, and when
        self.pace: float | None = None  # seconds for each unit, of late

    def update(
        self, done: float, line: str = "", *, total: float | None = None, last: bool = False, **fields: Any
    ) -> None:
        """A line, if the one before is some time ago."""
        now = time.monotonic()
        self._measure_pace(done, now)
        if self.total is not None and total is not None:
            self.total = total
        if last or now - self.printed >= SECONDS_BETWEEN_LINES or _loudness == "verbose":
            self.printed = now
            self.note(line + self._time_left(done))

    def _measure_pace(self, done: float, now: float) -> None:
        """How fast it goes since it was last measured: what was done before a run was resumed took no time here."""
        if self.measured is None or done < self.measured[0]:
            self.measured = done, now
        elif now - self.measured[1] >= SECONDS_OF_PACE and done > self.measured[0]:
            self.pace = (now - self.measured[1]) / (done - self.measured[0])
            self.measured = done, now

    def _time_left(self, done: float) -> str:
        if self.total is None or self.pace is None or done >= self.total:
            return ""
        return f", about {rough_time(self.pace * (self.total - done))} left"

    def advance(self, amount: float = 1) -> None:
        """Nothing: there is no line for it."""

    def note(self, text: str, line: str | None = None) -> None:
        """A line."""
        show(text if line is None else line, stream=self.stream)

    def close(self) -> None:
        """Nothing."""


class BarDisplay:
    """A bar of rich's on stderr. Columns are named as in `open_display`."""

    def __init__(
        self, columns: Sequence[str], total: float | None, *, transient: bool, started: bool, fields: dict[str, Any]
    ) -> None:
        from rich import progress
        from rich.console import Console

        columns_by_name = {
            "description": lambda: progress.TextColumn("[progress.description]{task.description}"),
            "bar": progress.BarColumn,
            "wide bar": lambda: progress.BarColumn(bar_width=None),
            "percentage": progress.TaskProgressColumn,
            "count": progress.MofNCompleteColumn,
            "bytes": progress.DownloadColumn,
            "bytes/s": progress.TransferSpeedColumn,
            "time": progress.TimeElapsedColumn,
            "time left": progress.TimeRemainingColumn,
        }
        shown = [columns_by_name.get(name, partial(progress.TextColumn, name, markup=False))() for name in columns]
        self.bar = progress.Progress(*shown, console=Console(stderr=True), transient=transient)
        self.task = self.bar.add_task("", total=total, **_printable_fields(fields))
        if started:
            self.bar.start()

    def update(
        self, done: float, line: str = "", *, total: float | None = None, last: bool = False, **fields: Any
    ) -> None:
        """The bar's new state."""
        self.bar.start()
        self.bar.update(self.task, completed=done, total=total, **_printable_fields(fields))

    def advance(self, amount: float = 1) -> None:
        """Move the bar."""
        self.bar.start()
        self.bar.advance(self.task, amount)

    def note(self, text: str, line: str | None = None) -> None:
        """A line above the bar."""
        self.bar.console.print(printable(text, lines=True), highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands, or remove it if it is transient."""
        self.bar.stop()


def _printable_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}


def open_display(
    columns: Sequence[str],
    total: float | None = None,
    *,
    visible: bool = True,
    transient: bool = False,
    started: bool = True,
    lines: Stream | None = None,
    first_line_at_once: bool = False,
    **fields: Any,
) -> Display:
    """A bar where stderr is a terminal and rich is installed; else lines on the stream that is named, or nothing.

    columns: description, bar, wide bar, percentage, count, bytes, bytes/s, time, time left; anything else is shown as
        it is, with {task.fields[NAME]} for a field. Lines tell the time left where it is among the columns.
    visible: False for nothing at all. transient: the bar is gone when it is closed. started: show it at once, and not
        only at the first update. fields: first values.

    >>> from mupscale.system import open_display
    >>> display = open_display(["bar", "count"], 3, lines="stdout", first_line_at_once=True)
    >>> display.update(1, "1 of 3 is done")
    1 of 3 is done
    >>> display.update(2, "2 of 3 are done")
    >>> display.update(3, "all are done", last=True)
    all are done
    >>> display.close()
    """
    visible = visible and _loudness != "quiet"
    if visible and sys.stderr.isatty() and _loudness != "verbose":
        try:
            return BarDisplay(columns, total, transient=transient, started=started, fields=fields)
        except ImportError:  # something has removed rich
            pass
    if visible and lines is not None:
        return LineDisplay(lines, total=total if "time left" in columns else None, first_at_once=first_line_at_once)
    return SilentDisplay()


def print_at_once(text: str, stream: Stream = "stdout") -> None:
    """Print a line without waiting for the next, for whoever looks on.

    >>> print_at_once("3/7 base models")
    3/7 base models
    """
    if _loudness != "quiet":
        show(text, stream=stream)
