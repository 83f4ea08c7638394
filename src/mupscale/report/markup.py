"""The few pieces of HTML a report is made of; every text that comes in is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from mupscale.plots import UNKNOWN, Picture
from mupscale.system import VERSION

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def make_document(title: str, body: str) -> str:
    """The whole page, with its style and a policy that forbids it to fetch anything."""
    style = files("mupscale.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>Written by mupscale {escape(VERSION)}</footer>\n</main>\n</body>\n</html>\n"
    )


def make_section(title: str, *parts: str) -> str:
    """A heading and what is below it; nothing if nothing is."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def make_paragraph(text: str, kind: str = "") -> str:
    """A sentence or several."""
    return f"<p{_kind(kind)}>{escape(text)}</p>" if text else ""


def make_bullets(title: str, sentences: Sequence[str], kind: str = "") -> str:
    """A box with a list."""
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(str(sentence))}</li>" for sentence in sentences)
    return f'<div class="box {escape(kind)}"><strong>{escape(title)}</strong><ul>{items}</ul></div>'


def make_cards(items: Iterable[tuple[str, str, str]]) -> str:
    """What, the number, and what else to say of it."""
    inside = "\n".join(
        f'<div class="card"><div class="what">{escape(what)}</div><div class="number">{escape(number)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for what, number, more in items
    )
    return f'<div class="cards">\n{inside}\n</div>' if inside else ""


def make_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True, kind: str = "stacks"
) -> str:
    """Rows of texts, the first of each its name; a table that is too wide scrolls by itself. numbers: aligned right.

    kind stacks: on a phone every row is a block of its own, with the columns' names in it.
    """
    rows = list(rows)
    if not rows:
        return ""
    align = ' class="n"' if numbers else ""

    def cells(row: Sequence[str]) -> Iterable[tuple[str, str]]:
        return zip(head[1:], row[1:], strict=True)

    top = "".join(f'<th scope="col"{align if i else ""}>{escape(cell)}</th>' for i, cell in enumerate(head))
    lines = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{align}{_named(kind, name)}>{escape(cell) if cell else UNKNOWN}</td>" for name, cell in cells(row)
        )
        + "</tr>"
        for row in rows
    )
    inside = f"<thead><tr>{top}</tr></thead><tbody>\n{lines}\n</tbody>"
    return f'<div class="table {escape(kind)}"><table>{inside}</table></div>'


def make_pictures(items: Iterable[Picture | tuple[Picture, Picture]]) -> str:
    """Side by side where there is room; a pair is a picture and the same for a phone."""
    inside = "\n".join(make_picture(*item) if isinstance(item, tuple) else make_picture(item) for item in items)
    return f'<div class="pictures">\n{inside}\n</div>' if inside else ""


def make_picture(item: Picture, narrow: Picture | None = None, kind: str = "") -> str:
    """One picture, for light and for dark pages. narrow: the same, drawn for a phone."""
    dark, light = escape(item.source(dark=True)), escape(item.source())
    small = ""
    if narrow is not None:
        at = "(max-width: 640px)"
        small = (
            f'<source media="{at} and (prefers-color-scheme: dark)" srcset="{escape(narrow.source(dark=True))}">'
            f'<source media="{at}" srcset="{escape(narrow.source())}">'
        )
    return (
        f'<figure{_kind(kind)}><picture>{small}<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(item.alt)}"></picture>'
        f"<figcaption>{escape(item.caption)}</figcaption></figure>"
    )


def make_columns(parts: Iterable[str], kind: str = "") -> str:
    """In columns where there is room."""
    inside = "\n".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div class="columns {escape(kind)}">\n{inside}\n</div>' if inside else ""


def make_folded(title: str, *parts: str) -> str:
    """Something to be opened by those who want to know."""
    inside = "\n".join(part for part in parts if part)
    return f"<details><summary>{escape(title)}</summary>\n{inside}\n</details>" if inside else ""


def make_code(text: str) -> str:
    """As it is."""
    return f"<pre>{escape(text)}</pre>" if text else ""


def _named(kind: str, name: str) -> str:
    return f' data-column="{escape(name)}"' if kind == "stacks" else ""


def _kind(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""
