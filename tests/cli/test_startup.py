"""What the command line imports before there is anything to compute, and the lazy face of the package."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from argparse import SUPPRESS
from importlib import import_module
from pathlib import Path

import pytest

import mupscale
from mupscale.cli.command_lines import option_names
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.recipe_options import RECIPE, _recipe_parser

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "numpy", "safetensors", "transformers", "optuna", "matplotlib")


def imported_by(script: str) -> tuple[str, set[str]]:
    """What a script prints, and the modules that it has imported when it ends."""
    ending = "import json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", f"{script}\n{ending}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.strip().rpartition("\n")
    return said + done.stderr, set(json.loads(modules))


ANSWERS: list[tuple[list[str], str]] = [
    (["--help"], "usage: mupscale COMMAND"),
    (["--version"], f"mupscale {mupscale.__version__}"),
    (["trian"], "did you mean train?"),
    (["recipes"], "mlp-covtype-tiny"),
    (["upscale", "small", "wide", "--tims", "2"], "did you mean --times?"),
    (["upscale", "small", "wide", "--times", "1.5"], "is no whole number"),
    (["inspect", str(SOURCE)], "there is no config.json in"),
    (["upscale", "small", str(SOURCE)], "already exists"),
    (["train", "--help-all"], "--evaluation.every"),
    (["run", "--help"], "--study.widths"),
    (["sweep", "-h"], "--study.widths"),
    *(([*name.split(), "--help"], f"usage: mupscale {name}") for name in COMMANDS if name != "recipes"),
]
COMMANDS_IN_TURN = """
import contextlib, io, json, sys
from mupscale.cli import main
found = []
for words in {lines}:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit:
            pass
    found.append((said.getvalue(), [name for name in {heavy} if name in sys.modules]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, list[str]]]:
    """What each of them says, and what of HEAVY is there after it: all in one process, in this order."""
    said, _ = imported_by(COMMANDS_IN_TURN.format(lines=[words for words, _ in ANSWERS], heavy=HEAVY))
    return [(shown, heavy) for shown, heavy in json.loads(said)]


@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=[" ".join(words) for words, _ in ANSWERS])
def test_answers_without_torch(number: int, answers: list[tuple[str, list[str]]]) -> None:
    shown, heavy = answers[number]
    assert ANSWERS[number][1] in shown
    assert not heavy


LINES = {name: line for name, command in COMMANDS.items() if (line := getattr(command.load(), "line", None))}


@pytest.mark.parametrize("command", LINES)
def test_help_is_of_what_the_parser_takes(command: str) -> None:
    """The parser has classes, and help their sources: names, meanings, defaults and what is required are the same."""
    line = LINES[command]
    reads_recipes = RECIPE[0] in line.parts
    parser = _recipe_parser(line, ["width"]) if reads_recipes else line.parser()
    shown = {name: row for row in line.rows() for name in option_names(row.option) or [row.option]}
    taken = {
        name.removeprefix("--").removeprefix("-").replace("_", "-"): action
        for action in parser._actions
        if action.help != SUPPRESS and type(action).__name__ != "_ActionConfigLoad"  # --schedule FILE and the like
        for name in action.option_strings or [action.dest]
    }
    assert shown.keys() - {"help-all"} == taken.keys()
    own = {"h", "help", *(name for part in RECIPE for name in option_names(part[0]) if reads_recipes and not part[1])}
    for name in taken.keys() - own:
        meaning, action = " ".join((taken[name].help or "").split()), taken[name]
        if name.endswith(".help"):
            continue
        is_silent = action.default is False or action.default in (None, SUPPRESS, []) or "(default" in meaning
        end = "" if is_silent or not action.option_strings else f" (default: {action.default})"
        required = " (required)" if action.required and action.option_strings else ""
        assert shown[name].meaning == meaning + (required or end)


@pytest.mark.parametrize("command", [name for name, line in LINES.items() if line.main])
def test_help_shows_the_options_that_matter_and_help_all_the_rest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            COMMANDS[command].run([asked])
        shown[asked] = re.findall(r"^  (?:-h, )?(--[\w.-]+)", capsys.readouterr().out, re.M)
    assert {f"--{name}" for name in LINES[command].main.split()} | {"--help", "--help-all"} == set(shown["--help"])
    assert len(shown["--help"]) <= 13
    assert len(shown["--help-all"]) > 40


def test_importing_the_package_does_not_import_torch() -> None:
    assert not imported_by("import mupscale")[1] & set(HEAVY)


def test_every_command_has_a_function() -> None:
    for command in COMMANDS.values():
        module, name = command.function.split(".")
        assert callable(getattr(import_module(f"mupscale.cli.{module}"), name))


def test_the_lazy_face_is_what_type_checkers_see() -> None:
    """Names that are imported for mypy alone, and those that are imported when they are used, are the same."""
    tree = ast.parse((SOURCE / "mupscale" / "__init__.py").read_text())
    seen = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for name in mupscale.__all__:
        value = getattr(mupscale, name)
        assert any(getattr(import_module(str(module)), n) is value for module, n in seen if n == name), name
    assert {name for module, name in seen if str(module).startswith("mupscale")} == {*mupscale.__all__, "VERSION"}


def test_packages_and_unknown_names() -> None:
    assert mupscale.growth.upscale is mupscale.upscale
    assert {"upscale", "hf", "Family"} <= set(dir(mupscale))
    with pytest.raises(AttributeError, match="no attribute 'upscaled'"):
        mupscale.upscaled  # noqa: B018
    folders = {path.parent.name for path in (SOURCE / "mupscale").glob("*/__init__.py")}
    assert all(getattr(mupscale, name).__name__ == f"mupscale.{name}" for name in folders - {"hf"})
