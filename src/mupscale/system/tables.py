"""Tables and sentences for people: as text that fits the terminal and breaks between words alone, and as HTML."""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from mupscale.system.terminal import printable

LEAST_NAME = 16
"""Characters that a shortened name keeps at least."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NUMBERS = re.compile(r"[\d–,]+|\*")


def terminal_width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where the output is a file or a pipe: then nothing is cut.

    >>> import os
    >>> from mupscale.system import terminal_width
    >>> os.environ["COLUMNS"] = "72"
    >>> terminal_width()
    72
    >>> del os.environ["COLUMNS"]
    """
    told = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (told.isdigit() and int(told) > 0):
        return shutil.get_terminal_size().columns
    return None


def wrap_text(text: str, width: int | None = None, hanging: str = "") -> str:
    """Sentences in lines of at most `width` characters (by default the terminal's), broken between words alone.

    hanging: what every line but the first of a paragraph begins with.

    >>> from mupscale.system import wrap_text
    >>> print(wrap_text("equivalent: largest relative difference 1.1e-15", 24))
    equivalent: largest
    relative difference
    1.1e-15
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
    """The text with its middle left out where it is longer than `width`.

    >>> from mupscale.system import shorten_middle
    >>> shorten_middle("model.layers.0–11.self_attn.q_proj.weight", 24)
    'model.layers…proj.weight'
    """
    if len(text) <= width:
        return text
    left = (width - 1) // 2 + (width - 1) % 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"


def shorten_name(name: str, width: int) -> str:
    """A dotted name of at most `width` characters that keeps its numbers and its end, if it can: block and module.

    >>> from mupscale.system import shorten_name
    >>> shorten_name("model.encoder.layers.0–11.self_attention.query.weight", 32)
    '…layers.0–11…query.weight'
    """
    parts = name.split(".")
    if len(name) <= width or len(parts) < 3:
        return shorten_middle(name, width)
    ends = {len(parts) - 2, len(parts) - 1}
    numbers = {number for number, part in enumerate(parts) if _NUMBERS.fullmatch(part)}
    kept = ends | numbers | {max(0, number - 1) for number in numbers}
    if len(_joined(parts, kept)) > width:  # without what is counted
        kept = ends | numbers
    order = [i for i in range(len(parts) - 1, -1, -1) if i not in kept]
    best = shorten_middle(name, width)
    for count in range(len(order) + 1):
        text = _joined(parts, kept | set(order[:count]))
        if len(text) <= width:
            best = text
    return best


def _joined(parts: Sequence[str], kept: set[int]) -> str:
    """The parts that are kept, with a sign for each gap."""
    text, before = "", -1
    for number in sorted(kept):
        text += ("" if number == 0 else "." if number == before + 1 else "…") + parts[number]
        before = number
    return text


def _fitting_names(names: Sequence[str], width: int) -> list[str]:
    """Names of at most this width, each other than the rest if that can be: a name alike others loses its middle."""
    shortened = [shorten_name(name, width) for name in names]
    return [
        shorten_middle(name, width) if shortened.count(short) > 1 and names.count(name) == 1 else short
        for name, short in zip(names, shortened, strict=True)
    ]


def name_of_group(names: Sequence[str]) -> str:
    """One name for parameters that differ in numbers alone, such as layers 0 to 11.

    >>> from mupscale.system import name_of_group
    >>> name_of_group([f"layers.{i}.attn.q" for i in range(12)])
    'layers.0–11.attn.q'
    >>> name_of_group(["layers.0.weight", "layers.2.weight"])
    'layers.0,2.weight'
    """
    columns = [
        sorted(set(column)) for column in zip(*([int(n) for n in _NUMBER.findall(name)] for name in names), strict=True)
    ]
    whole = 1
    for column in columns:
        whole *= len(column)
    shown = iter([_numbers(column) if whole == len(set(names)) else "*" for column in columns])
    return _NUMBER.sub(lambda _: next(shown), names[0])


def pattern_of_name(name: str) -> str:
    """A name with its numbers left open: what names of a group have in common.

    >>> from mupscale.system import pattern_of_name
    >>> pattern_of_name("layers.3.attn.q2.weight")
    'layers.*.attn.q2.weight'
    """
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

    >>> from mupscale.system import text_table
    >>> print(text_table(("parameter", "lr ×"), [("layers.0–3.weight", "0.25"), ("bias", "1")]))
    parameter          lr ×
    layers.0–3.weight  0.25
    bias                  1
    """
    cells = [tuple(map(printable, row)) for row in (header, *rows)]
    width = terminal_width() if width is None else width
    sizes = [max(len(row[i]) for row in cells) for i in range(len(header))]
    over = 0 if width is None else sum(sizes) + 2 * (len(sizes) - 1) - width
    names = [row[0] for row in cells]
    if over > 0:
        names = _fitting_names(names, max(sizes[0] - over, min(sizes[0], LEAST_NAME)))
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
    """The same for a notebook.

    >>> from mupscale.system import html_table
    >>> html_table(("parameter",), [("a<b",)], "one")
    '<table><caption>one</caption><thead><tr><th>parameter</th></tr></thead><tbody><tr><td>a&lt;b</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    said = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
