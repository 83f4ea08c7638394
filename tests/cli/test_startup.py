"""What the command line imports before there is anything to compute, and the lazy face of the package."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path

import pytest

import mupscale
from mupscale.cli.command_lines import CommandLine, Section
from mupscale.cli.command_table import COMMANDS

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "numpy", "safetensors", "transformers", "optuna", "matplotlib")


def imported_by(script: str) -> tuple[str, set[str]]:
    """What a script prints, and the modules that it has imported when it ends."""
    ending = "import json, sys\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    words = [sys.executable, "-c", f"{script}\n{ending}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.strip().rpartition("\n")
    return said + done.stderr, set(json.loads(modules))


ANSWERS: list[tuple[list[str], str]] = [
    (["--help"], "usage: mupscale COMMAND"),
    (["--version"], f"mupscale {mupscale.__version__}"),
    (["trian"], "did you mean train?"),
    (["recipes"], "mlp-covtype-tiny"),
    (["upscale", "small", "wide", "--tims", "2"], "did you mean --times?"),
    (["upscale", "small", "wide", "--times", "1.5"], "is not a whole number"),
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
        main(words)
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


SECTIONS = {part.path: part for line in COMMANDS.values() for part in line.parts if isinstance(part, Section)}


@pytest.mark.parametrize("path", SECTIONS)
def test_help_is_of_what_a_class_or_function_takes(path: str) -> None:
    """Its parameters are read off its source: all are there, with their defaults, and each has a meaning."""
    module, _, name = path.rpartition(".")
    taken = inspect.signature(getattr(import_module(module), name)).parameters
    read = {each.name: each for each in SECTIONS[path].parameters()}
    assert read.keys() == taken.keys() - SECTIONS[path].skip - {"_"}
    for each in read.values():
        default = taken[each.name].default
        assert each.help
        assert each.default is MISSING or each.default == default or "factory" in str(default)
        assert (each.default is MISSING) == (default is inspect.Parameter.empty)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_shows_the_options_that_matter_and_help_all_the_rest(command: CommandLine) -> None:
    main, everything = ([row.option for row in command.rows(more)] for more in (False, True))
    assert len(main) <= 13
    if command.main:
        assert len(main) == len(command.main.split()) + 2
        assert {*main} < {*everything}


def test_importing_the_package_does_not_import_torch() -> None:
    assert not imported_by("import mupscale")[1] & set(HEAVY)


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
