"""Recipes that ship with the package, by their names; the command `recipes`."""

from __future__ import annotations

import difflib
from pathlib import Path

from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import CommandLine
from mupscale.system import show, wrap_text


def shipped_recipes() -> dict[str, Path]:
    """Recipes by name: inside an installed package, or beside its sources."""
    here = Path(__file__).parents[1]
    folder = next((f for f in (here / "recipes", here.parents[1] / "recipes") if f.is_dir()), here)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> str:
    """A recipe that ships, by its name, or a file; a file of such a name is given as ./NAME."""
    shipped = shipped_recipes()
    if name in shipped:
        return str(shipped[name])
    if Path(name).is_file():
        return name
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    raise UsageError(f"there is no recipe {name}" + (f"; did you mean {near[0]}, which ships?" if near else ""))


RECIPES = CommandLine(
    "recipes",
    "list the recipes that come with mupscale",
    "",
    "List the recipes that come with mupscale, each with what it trains.",
    (),
)


@RECIPES.command
def recipes_command(words: list[str]) -> int:
    """mupscale recipes."""
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        show(wrap_text(f"  {name:<24}{first.lstrip('# ')}", hanging=" " * 26))
    show(wrap_text("mupscale train NAME trains one; mupscale train NAME --print-config shows it."))
    return 0
