"""The help of commands whose options are found out by importing torch, stored so that it is shown at once.

`python tools/store_help.py` writes the file from the parsers; a test holds it against them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from operator import itemgetter
from typing import Any

from mupscale.cli.spelling import HELP_ALL, HELP_COLUMN, fill_help, is_main_option
from mupscale.system import terminal_width, wrap_text

HELP_FILE = "help_texts.json"


def stored_help(command: str, words: Sequence[str]) -> str | None:
    """What `mupscale COMMAND --help` shows; None if more was asked, or nothing is stored for the command."""
    if list(words) not in (["-h"], ["--help"], [HELP_ALL]):
        return None
    stored = json.loads(files(__package__).joinpath(HELP_FILE).read_text(encoding="utf-8"))
    if command not in stored:
        return None
    help = stored[command]
    if HELP_ALL not in words:
        for group in help["groups"]:
            group["options"] = [pair for pair in group["options"] if is_main_option(command, _names(pair[0]))]
    return _laid_out(help, terminal_width() or 120)


def _names(option: str) -> list[str]:
    """The names in `-o, --out FOLDER`."""
    return [word.rstrip(",") for word in option.split() if word.startswith("-")]


def _laid_out(help: dict[str, Any], width: int) -> str:
    """As argparse lays it out: every option, and beside it or below what it is for."""
    usage = " ".join(f"usage: {help['usage']}".split())
    longest = max(len(option) for group in help["groups"] for option, _ in group["options"])
    column = min(longest + 4, HELP_COLUMN, max(width - 20, 4))
    sections = [wrap_text(usage, width, hanging=" " * 7), fill_help(help["about"], width)]
    for group in filter(itemgetter("options"), help["groups"]):
        lines = [f"{group['title']}:"]
        for option, meaning in group["options"]:
            about = textwrap.wrap(" ".join(meaning.split()), max(width - column, 11))
            beside = len(option) <= column - 4 and about
            lines.append(f"  {option:<{column - 4}}  {about.pop(0)}" if beside else f"  {option}")
            lines += [f"{'':<{column}}{line}" for line in about]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)
