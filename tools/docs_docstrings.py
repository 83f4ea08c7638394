"""Docstrings as the API reference shows them: examples as code, and `name: what it is` as a list."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import griffe


class AsMarkdown(griffe.Extension):
    """Rewrites every docstring once, after its object is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the text of an object's docstring."""
        if obj.docstring is not None:
            parameters = [] if not isinstance(obj, griffe.Function) else [each.name for each in obj.parameters]
            obj.docstring.value = as_markdown(obj.docstring.value, parameters)


def as_markdown(text: str, parameters: Sequence[str] = ()) -> str:
    """A docstring with its examples fenced and the words that its lines explain made a list."""
    return "\n\n".join(_paragraph(part, parameters) for part in re.split(r"\n\s*\n", text.strip()))


def _paragraph(part: str, parameters: Sequence[str]) -> str:
    if section := re.match(r"(?:Args|Attributes|Example|Examples):\n", part):  # what follows tells as much
        part = textwrap.dedent(part[section.end() :])
    if part.lstrip().startswith(">>>"):
        return f"```pycon\n{part}\n```"
    if re.match(r"(    |- |\|)", part):
        return part
    for name in parameters:  # explained in the middle of a line
        part = re.sub(rf"(?<=[.;]) (?={re.escape(name)}: )", "\n", part)
    lines: list[str] = []
    for line in part.splitlines():
        explained = re.match(r"([a-z][a-z_0-9]*(?:, [a-z_0-9]+)*): (?=\S)", line)
        if explained:
            first = not lines or not lines[-1].startswith(("- ", "  "))
            lines += [""] * (first and bool(lines)) + [f"- **{explained[1]}**: {line[explained.end() :]}"]
        elif lines and lines[-1].startswith(("- ", "  ")):
            lines.append(f"  {line}")
        else:
            lines.append(line)
    return "\n".join(lines)
