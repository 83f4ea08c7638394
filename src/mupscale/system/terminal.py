"""What a person sees: results, tables and lines as they come, and how far something is.

Progress is a bar, lines, or nothing, as the terminal is one; tables fit it and break between words alone.
"""

from __future__ import annotations

import html
import math
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

SECONDS_BETWEEN_LINES = 10.0
SECONDS_OF_PACE = 5.0  # over which is measured how fast something goes, before the time left is told
Stream = Literal["stdout", "stderr"]
Loudness = Literal["quiet", "normal", "verbose"]
_loudness: Loudness = "normal"


@contextmanager
def at_loudness(loudness: Loudness) -> Iterator[None]:
    """How much is shown meanwhile of how far something is: nothing (quiet), a bar or some lines, or all (verbose)."""
    global _loudness
    before, _loudness = _loudness, loudness
    try:
        yield
    finally:
        _loudness = before


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, *, lines: bool = False) -> str:
    """Text for a terminal, in which characters that would move its cursor or change its colours are written out.

    lines: line ends and tabulators stay as they are; else they are written out, too.
    """
    pattern = _CONTROL if lines else re.compile(_CONTROL.pattern[:-1] + "\n\t]")
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def show(*texts: str, stream: Stream = "stdout", end: str = "\n") -> None:
    """Print texts at once, each on lines of its own, with control characters written out."""
    print(*(printable(text, lines=True) for text in texts), sep="\n", end=end, file=getattr(sys, stream), flush=True)


def show_foreign_errors() -> None:
    """Let warnings, and errors that end the program, be shown as all that is printed: both may quote files."""
    warnings.formatwarning = lambda *what, **more: printable(_format_warning(*what, **more), lines=True)
    sys.excepthook = lambda *error: show("".join(traceback.format_exception(*error)), stream="stderr", end="")


_format_warning = warnings.formatwarning


def rough_time(seconds: float) -> str:
    """Seconds for people, rounded up, as an estimate has them."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


class Display:
    """How far something is, until it is closed: a bar where stderr is a terminal; else lines, or nothing.

    columns: description, bar, wide bar, percentage, count, bytes, bytes/s, time, time left; anything else is shown as
        it is, with {task.fields[NAME]} for a field. Lines tell the time left where it is among the columns.
    visible: False for nothing at all. transient: the bar is gone when it is closed. started: show it at once, and not
        only at the first update. lines: the stream for lines, if there are any. fields: first values.
    """

    def __init__(
        self,
        columns: Sequence[str],
        total: float | None = None,
        *,
        visible: bool = True,
        transient: bool = False,
        started: bool = True,
        lines: Stream | None = None,
        first_line_at_once: bool = False,
        **fields: Any,
    ) -> None:
        self.bar: Any = None
        self.stream, self.total = None, total if "time left" in columns else None
        self.printed = -math.inf if first_line_at_once else time.monotonic()
        self.measured: tuple[float, float] | None = None  # how much was done then, and when
        self.pace: float | None = None  # seconds for each unit, of late
        if not visible or _loudness == "quiet":
            return
        if not sys.stderr.isatty() or _loudness == "verbose":
            self.stream = lines
            return
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(
        self, done: float, line: str = "", *, total: float | None = None, last: bool = False, **fields: Any
    ) -> None:
        """So much is done.

        line: this state as a plain line. total: a new one. last: the end, which is always shown. fields: for columns.
        """
        if self.bar is not None:
            self.bar.start()
            self.bar.update(self.task, completed=done, total=total, **_printable_fields(fields))
            return
        now = time.monotonic()
        # the pace since it was last measured: what was done before a run was resumed took no time here
        if self.measured is None or done < self.measured[0]:
            self.measured = done, now
        elif now - self.measured[1] >= SECONDS_OF_PACE and done > self.measured[0]:
            self.pace = (now - self.measured[1]) / (done - self.measured[0])
            self.measured = done, now
        if self.total is not None and total is not None:
            self.total = total
        if last or now - self.printed >= SECONDS_BETWEEN_LINES or _loudness == "verbose":
            self.printed = now
            if self.total is not None and self.pace is not None and done < self.total:
                line += f", about {rough_time(self.pace * (self.total - done))} left"
            self.note(line)

    def advance(self, amount: float = 1) -> None:
        """So much more is done; a line does not tell it."""
        if self.bar is not None:
            self.bar.start()
            self.bar.advance(self.task, amount)

    def note(self, text: str, line: str | None = None) -> None:
        """Something that happens once, shown in any case. line: the same as a plain line, if it differs."""
        if self.bar is not None:
            self.bar.console.print(printable(text, lines=True), highlight=False, markup=False)
        elif self.stream is not None:
            show(text if line is None else line, stream=self.stream)

    def close(self) -> None:
        """Leave the bar as it stands, or remove it if it is transient."""
        if self.bar is not None:
            self.bar.stop()


def _printable_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}


def print_at_once(text: str, stream: Stream = "stdout") -> None:
    """Print a line without waiting for the next, for whoever looks on."""
    if _loudness != "quiet":
        show(text, stream=stream)


LEAST_NAME = 16
"""Characters that a shortened name keeps at least."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NUMBERS = re.compile(r"[\d–,]+|\*")


def terminal_width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where the output is a file or a pipe: then nothing is cut."""
    told = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (told.isdigit() and int(told) > 0):
        return shutil.get_terminal_size().columns
    return None


def wrap_text(text: str, width: int | None = None, hanging: str = "") -> str:
    """Sentences in lines of at most `width` characters (by default the terminal's), broken between words alone.

    hanging: what every line but the first of a paragraph begins with.
    """
    width = terminal_width() if width is None else width
    if width is None:
        return text
    pieces = (
        textwrap.fill(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
        for line in printable(text, lines=True).splitlines()
    )
    return "\n".join(pieces)


def shorten_middle(text: str, width: int) -> str:
    """The text with its middle left out where it is longer than `width`."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2 + (width - 1) % 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def shorten_name(name: str, width: int) -> str:
    """A dotted name of at most `width` characters that keeps its numbers and its end, if it can: block and module."""
    parts = name.split(".")
    numbers = {number for number, part in enumerate(parts) if _NUMBERS.fullmatch(part)}
    ends = {len(parts) - 2, len(parts) - 1}
    for kept in (ends | numbers | {max(0, number - 1) for number in numbers}, ends | numbers):
        if len(parts) > 2 and len(name) > width >= len(text := _joined(parts, kept)):
            return text
    return shorten_middle(name, width)


def _joined(parts: Sequence[str], kept: set[int]) -> str:
    text, before = "", -1
    for number in sorted(kept):
        text += ("" if number == 0 else "." if number == before + 1 else "…") + parts[number]
        before = number
    return text


def name_of_group(names: Sequence[str]) -> str:
    """One name for parameters that differ in numbers alone, such as layers 0 to 11."""
    columns = [
        sorted(set(column)) for column in zip(*([int(n) for n in _NUMBER.findall(name)] for name in names), strict=True)
    ]
    whole = 1
    for column in columns:
        whole *= len(column)
    shown = iter([_numbers(column) if whole == len(set(names)) else "*" for column in columns])
    return _NUMBER.sub(lambda _: next(shown), names[0])


def pattern_of_name(name: str) -> str:
    """A name with its numbers left open: what names of a group have in common."""
    return _NUMBER.sub("*", name)


def _numbers(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}–{values[-1]}"
    return ",".join(map(str, values)) if len(values) <= 4 else "*"


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Columns under their titles. Names, in the first column, are shortened where the table does not fit.

    left: how many columns are aligned to the left; the others hold numbers. width: by default the terminal's.
    """
    cells = [tuple(map(printable, row)) for row in (header, *rows)]
    width = terminal_width() if width is None else width
    sizes = [max(len(row[i]) for row in cells) for i in range(len(header))]
    over = 0 if width is None else sum(sizes) + 2 * (len(sizes) - 1) - width
    names = [row[0] for row in cells]
    if over > 0:  # a name alike others when it is short loses its middle instead
        most = max(sizes[0] - over, min(sizes[0], LEAST_NAME))
        short = [shorten_name(name, most) for name in names]
        odd = [short.count(each) > 1 and names.count(name) == 1 for name, each in zip(names, short, strict=True)]
        names = [shorten_middle(names[i], most) if odd[i] else short[i] for i in range(len(names))]
        sizes[0] = max(map(len, names))
    lines = []
    for first, row in zip(names, cells, strict=True):
        texts = [
            text.ljust(size) if number < left else text.rjust(size)
            for number, (text, size) in enumerate(zip((first, *row[1:]), sizes, strict=True))
        ]
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """The same for a notebook."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    said = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
