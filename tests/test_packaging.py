"""What is installed: the extras that messages name are there, and dependencies cover what the command line imports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
USERS = {"hf", "sweep", "plots", "text", "all"}


def test_messages_name_extras_that_remain() -> None:
    """In the sources, the recipes and the docs."""
    named = dict[str, set[str]]()
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*"), *ROOT.glob("src/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        groups = re.findall(r"(?:mupscale|'\.)\[([a-z,]+)\]'", text) + re.findall(r'extra="(\w+)"', text)
        for group in groups:
            named.setdefault(group, set()).add(path.name)
    assert {"hf", "sweep", "plots", "text"} <= set(named)
    assert not {word for group in named for word in group.split(",")} - USERS, named


def test_extras_are_there_and_all_is_all() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) >= USERS
    assert "mupscale[hf,sweep,plots,text]" in extras["all"]


def test_the_command_line_needs_no_extra() -> None:
    plain = {re.split(r"[\[<>=]", name)[0].lower() for name in PROJECT["dependencies"]}
    assert {"jinja2", "jsonargparse", "pyyaml", "rich", "torch", "numpy", "safetensors"} == plain
