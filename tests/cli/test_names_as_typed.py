"""A file, folder, model or column is called what somebody typed: no option reads its name as YAML."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import mupscale.data
from commands import refused
from mupscale.cli import main
from mupscale.cli.arguments import UsageError, Words, read_value
from mupscale.cli.command_lines import Option
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.own_modules import finding_own_modules
from mupscale.cli.recipe_options import RECIPE, class_arguments, read_recipe_and_options
from mupscale.cli.training import read_recipe
from mupscale.system import parse_given
from mupscale.train import import_path
from mupscale.train.callbacks import make_callbacks

pytestmark = pytest.mark.usefixtures("here")

HOSTILE = ["a #2", "null", "~", "&x", "&x y", "!!str b", "'b'", '"b"', "b ", " b", "1e3", "0x10", "on", "2024-01-01"]
HOSTILE += [
    "*x",
    "- a",
    "a: b",
    "#x",
    "| x",
    "{a: b}",
    "[a",
    "a] #b",
    "%20",
    "?",
    "@x",
    "`x`",
    "!!python/name:os.system",
]
"""Names that YAML takes for something else."""


def is_text(hint: Any) -> bool:
    """Whether an option takes text, or a list of texts, as the table's source spells its type."""
    said = str(hint)
    return "str" in said and not any(other in said for other in ("int", "float", "bool", "dict", "Literal"))


def text_options() -> Iterator[tuple[str, str, Any]]:
    """Every option of every command that takes text, by its name, with its type."""
    for command, line in COMMANDS.items():
        for part in line.parts:
            if isinstance(part, Option):
                if is_text(part.type):
                    yield command, part.name, part.type
                continue
            target = import_path(part.path)
            takes = target.__init__ if isinstance(target, type) and not is_dataclass(target) else target
            hints = get_type_hints(takes)
            start = f"--{part.prefix}." if part.prefix else "--"
            for parameter in part.parameters():
                if is_text(hints[parameter.name]):
                    yield command, f"{start}{parameter.name}", hints[parameter.name]


OPTIONS = {f"{command} {name}": hint for command, name, hint in text_options()}


def test_the_table_has_the_options_that_name_something() -> None:
    """The list above is derived; that it is not empty where it matters is said here."""
    known = {"train --out", "run --study.storage", "upscale out", "upscale checkpoint", "verify --text", "curves --out"}
    known |= {"report --out", "limit mlp --out", "data tokenize --source", "data tokenize --out", "data info --skip"}
    known |= {
        "data info --target",
        "data info tokens",
        "upscale --optimizer-state",
        "upscale --model",
        "resume --trust",
    }
    assert known <= OPTIONS.keys()


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_typed_for_a_name_is_the_name(option: str) -> None:
    hint = OPTIONS[option]
    for text in HOSTILE:
        value = parse_given(hint, Words(text), (option,), UsageError)
        assert value in (text, [text]), text
    with pytest.raises(UsageError, match="must be a text that is not empty"):
        parse_given(hint, Words(""), (option,), UsageError)


@pytest.mark.parametrize("command", [name for name, line in COMMANDS.items() if RECIPE[0] in line.parts])
def test_recipes_take_out_and_from_as_they_are_typed(command: str) -> None:
    for text in HOSTILE:
        words = ["mlp-covtype-tiny", f"--out={text}", f"--from={text}"]
        recipe, _ = read_recipe_and_options(COMMANDS[command], words)
        assert (recipe.out, recipe.start) == (text, text)


@pytest.mark.parametrize("command", ["upscale", "verify", "data tokenize"])
def test_names_of_two_places(command: str) -> None:
    line = COMMANDS[command]
    for text in HOSTILE:
        if text.startswith("-"):
            continue
        _, options = line.read([text, f"{text}."])
        assert {text, f"{text}."} <= {value for value in vars(options).values() if isinstance(value, str)}


def test_another_name_does_not_replace_a_finished_run(here: Path) -> None:
    (here / "a").mkdir()
    for name in ("metrics.jsonl", "recipe.json"):
        (here / "a" / name).write_text("{}\n")
    words = ["train", "mlp-covtype-tiny", "--steps", "1", "--grow", "[]", "--width", "8", "--base", "8", "-q"]
    assert main([*words, "--out", "a #2", "--overwrite"]) == 0
    assert {path.read_text() for path in (here / "a").iterdir()} == {"{}\n"}
    assert (here / "a #2" / "metrics.jsonl").is_file()


def test_an_empty_name_is_not_the_current_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.yaml").write_text("out: ''\n")
    assert "'out' is ''" in refused(capsys, ["train", "mlp-covtype-tiny", "mine.yaml"])
    assert "--out is ''" in refused(capsys, ["limit", "examples", "--out", ""])
    for words in (["resume"], ["curves"], ["report"], ["upscale", "x"], ["data", "info"]):
        assert "an empty name" in refused(capsys, [*words, ""], 2)


# ------------------------------------------------------------------------------------ arguments of a recipe's classes


def texts_of(target: Any) -> list[str]:
    return [name for name, argument in class_arguments(target)[0].items() if is_text(argument.type)]


DATA = {
    f"{name}.{argument}": (name, argument)
    for name in mupscale.data.__all__
    for argument in texts_of(getattr(mupscale.data, name))
    if isinstance(getattr(mupscale.data, name), type)
}


@pytest.mark.parametrize("argument", DATA)
def test_files_and_columns_of_data(argument: str) -> None:
    data, name = DATA[argument]
    needed = {"TableFile": {"path": "x"}, "Text": {"tokens": "x"}, "CIFAR100": {"path": "x"}}.get(data, {})
    for text in HOSTILE:
        arguments = {**needed, name: text}
        options = [f"--data.{each}={value}" for each, value in arguments.items()]
        recipe, _ = read_recipe(["mlp-covtype-tiny", "--data", data, *options])
        assert recipe.data.init_args[name] in (text, [text])


OWN = """
import os
from pathlib import Path
from mupscale.data import CoverTypeSample

class Mine(CoverTypeSample):
    def __init__(
        self, untyped="x", path: Path = None, like: str | os.PathLike = "x", many: str | list[str] = "x",
        files: list[Path] = (), anything=None,
    ):
        super().__init__()
"""


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Options that name a class of one's own in the current folder."""
    (here / "data_of_names.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "data_of_names", raising=False)
    with finding_own_modules():
        yield ["mlp-covtype-tiny", "--data", "data_of_names.Mine"]


@pytest.mark.parametrize("argument", ["untyped", "path", "like", "many", "files"])
def test_names_in_classes_of_ones_own(own: list[str], argument: str) -> None:
    for text in HOSTILE:
        recipe, _ = read_recipe([*own, f"--data.{argument}={text}"])
        assert recipe.data.init_args[argument] in (text, [text])


def test_an_argument_of_any_type_is_yaml_that_loses_nothing(own: list[str]) -> None:
    """A number is a number there, and quotes make it a text; what YAML would drop without a word stays."""
    expected = {"5": 5, "1e3": 1e3, "null": None, "~": None, "true": True, "[1, a]": [1, "a"], "{a: 1}": {"a": 1}}
    expected |= {"'5'": "5", '"null"': "null"}
    expected |= {
        text: text for text in ("a #2", "5 #2", "&x", "&x y", "!!str 5", "b ", " b", "null #", "*x", "#x", "a")
    }
    assert {text: read_value(text) for text in expected} == expected
    for text, value in expected.items():
        recipe, _ = read_recipe([*own, f"--data.anything={text}"])
        assert recipe.data.init_args["anything"] == value


def test_lists_of_names() -> None:
    def skipped(*words: str) -> Any:
        start = ["mlp-covtype-tiny", "--data", "TableFile", "--data.path", "x"]
        return read_recipe([*start, *words])[0].data.init_args["skip"]

    assert skipped("--data.skip", "a #2,null") == ["a #2", "null"]
    assert skipped("--data.skip", "['a, #2', null x]") == ["a, #2", "null x"]
    assert read_recipe(["mlp-covtype-tiny", "--no-decay+", "- a", "--no-decay+", "&x"])[0].no_decay == ["- a", "&x"]


def test_the_class_of_a_recipe_is_named_as_typed() -> None:
    with pytest.raises(UsageError, match="MLP #2"):
        read_recipe(["mlp-covtype-tiny", "--model", "MLP #2"])
    with pytest.raises(UsageError, match="null"):
        read_recipe(["mlp-covtype-tiny", "--model", "null"])


# ------------------------------------------------------------------------------------------------- recipes in files

READ = {
    "1e3": "the number 1000.0",
    "0x10": "the number 16",
    "2024-01-01": "the date 2024-01-01",
    "on": "true",
    "2_000": "the number 2000",
    "2024-01-01 10:00:00": "the datetime 2024-01-01 10:00:00",
}


@pytest.mark.parametrize("written", READ)
def test_a_recipe_says_what_its_file_was_read_as(here: Path, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    for entry, shown in {
        f"out: {written}": "'out'",
        f"from: {written}": "'from'",
        f"no_decay: [{written}]": "'no_decay[0]'",
        f"data: {{class_path: TableFile, init_args: {{path: {written}}}}}": "'data.path'",
        f"data: {{class_path: TableFile, init_args: {{path: x, skip: [{written}]}}}}": "'data.skip[0]'",
    }.items():
        (here / "mine.yaml").write_text(f"{entry}\n")
        said = refused(capsys, ["train", "mlp-covtype-tiny", "mine.yaml"], 2)
        assert f"{shown} was read as {READ[written]}, but must be text: put what you wrote in quotes" in said


@pytest.mark.parametrize("written", ["", "#2", "&x", "null", "~"])
def test_a_recipe_without_a_folder_says_that_nothing_is_written(
    here: Path, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.yaml").write_text(f"out: {written}\n")
    assert read_recipe(["mlp-covtype-tiny", "mine.yaml"])[0].out is None
    assert "the recipe's out is null, so nothing is written" in capsys.readouterr().err
    assert read_recipe(["mlp-covtype-tiny", "mine.yaml", "--out", "none"])[0].out is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("start", ["--callbacks", "--callbacks+"])
@pytest.mark.parametrize(
    "value",
    ["of_ones_own.A", "[of_ones_own.A]", "mupscale.train.TensorBoard,of_ones_own.A", "[{class_path: of_ones_own.A}]"],
)
def test_every_class_in_a_list_may_be_of_ones_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, start: str, value: str
) -> None:
    (here / "of_ones_own.py").write_text("from mupscale.train import Callback\nclass A(Callback): pass\n")
    monkeypatch.delitem(sys.modules, "of_ones_own", raising=False)
    with finding_own_modules():
        recipe, _ = read_recipe(["mlp-covtype-tiny", start, value])
        made = make_callbacks(recipe.callbacks)
    assert type(made[-1]).__name__ == "A"
