"""Store the help of the commands whose parsers need torch: python tools/store_help.py

src/mupscale/cli/help_texts.json then has what `mupscale train --help` and others show.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from jsonargparse import ArgumentParser

import mupscale.cli
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.help_texts import HELP_FILE
from mupscale.cli.spelling import HELP_ALL

STORED = ("train", "resume", "family", "run", "sweep", "transfer-check", "curves", "data tokenize", "data info")


def parser_of(command: str) -> ArgumentParser:
    """The parser that shows a command's help."""
    seen: list[ArgumentParser] = []
    with mock.patch.object(ArgumentParser, "print_help", lambda self, *_: seen.append(self)), suppress(SystemExit):
        COMMANDS[command].run([HELP_ALL])
    return seen[0]


def contents(parser: ArgumentParser) -> dict[str, Any]:
    """Usage, description and options of a parser, in words: as it shows them where no line is too long."""
    with mock.patch.dict(os.environ, COLUMNS="100000"):
        shown = parser.format_help()
    groups: list[dict[str, Any]] = []
    start = re.search(r"^(positional arguments|options):$", shown, re.M)
    assert start is not None
    for line in shown[start.start() :].splitlines():
        option = re.fullmatch(r"  (\S.*?)(?:  +(\S.*))?", line)
        if option:
            groups[-1]["options"].append([option[1], option[2] or ""])
        elif line.startswith(" "):
            groups[-1]["options"][-1][1] = line.strip()
        elif line:
            groups.append({"title": line.removesuffix(":"), "options": []})
    return {"usage": parser.usage, "about": parser.description, "groups": groups}


def main() -> None:
    """Write the file."""
    stored = {command: contents(parser_of(command)) for command in STORED}
    file = Path(mupscale.cli.__file__).with_name(HELP_FILE)
    file.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
