"""How options are spelled: hyphens wherever they are shown, underscores accepted; lines of help that fit."""

from __future__ import annotations

import re
import textwrap

HELP_ALL = "--help-all"


def with_underscores(name: str) -> str:
    """An option as Python and YAML spell it: `--log-every` is `--log_every`."""
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


def with_hyphens(text: str) -> str:
    """Text with its options as the command line spells them."""
    return re.sub(r"(?<![\w-])--[a-z][\w.]*", lambda match: match[0].replace("_", "-"), text)


def fill_help(text: str, width: int) -> str:
    """A description in lines of at most `width`: paragraphs are filled anew, long examples (indented) are broken."""
    lines, paragraph = list[str](), list[str]()
    for line in [*text.strip("\n").splitlines(), ""]:
        if line.strip() and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(" ".join(paragraph), width, break_long_words=False, break_on_hyphens=False)
        paragraph.clear()
        lines += _break_example(line, width) if line.strip() else [""]
    return "\n".join(lines).rstrip("\n")


def _break_example(line: str, width: int) -> list[str]:
    """A command, and what it is for below it where both are too long for a line; a long command goes on after a \\."""
    if len(line) <= width:
        return [line]
    command, _, about = (part.rstrip() for part in _split_comment(line))
    lines = [command]
    while len(lines[-1]) > width and (cut := lines[-1].rfind(" --", 8, width - 2)) > 0:
        lines[-1:] = [f"{lines[-1][:cut]} \\", f"      {lines[-1][cut + 1 :]}"]
    return [*lines, *([f"      # {about}"] if about else [])]


def _split_comment(line: str) -> tuple[str, str, str]:
    match = re.match(r"(\s*\S.*?)(\s{3,})(.*)$", line)
    return (match[1], match[2], match[3]) if match else (line, "", "")
