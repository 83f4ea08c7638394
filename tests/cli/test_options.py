"""Options as people type them: hyphens and underscores, -q and -v, --overwrite, --out none, completion, 80 columns."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TypeGuard

import pytest

from commands import refused, told
from mupscale.cli import main
from mupscale.cli.arguments import with_hyphens
from mupscale.cli.command_lines import fill_help
from mupscale.cli.command_table import COMMANDS, options_of
from mupscale.cli.training import read_recipe
from syntax import nodes

SOURCE = Path(__file__).parents[2] / "src" / "mupscale"
TINY = ["train", "mlp-covtype-tiny", "--steps", "3", "--grow", "[]", "--device", "cpu", "--log-every", "1"]
pytestmark = pytest.mark.usefixtures("here")


# ------------------------------------------------------------------------------------------------ spelling


def test_hyphens_and_underscores_are_one() -> None:
    words = ["gpt2-text-tiny", "--optimizer.weight-decay", "0.5", "--log-every=7", "--init_at", "64"]
    words += ["--from-width", "3", "--from", "some"]
    recipe, _ = read_recipe(words)
    other, _ = read_recipe([f"--{w[2:].replace('-', '_')}" if w[0] == "-" else w for w in words])
    assert recipe == other
    assert (recipe.log_every, recipe.init_at, recipe.start_width) == (7, 64, 3)
    assert recipe.optimizer.init_args["weight_decay"] == 0.5
    names = ["--width.n-head", "4", "--base.n-head", "4", "--grow", "[]", "--init-at", "null"]
    assert read_recipe(["gpt2-text-tiny", *names])[0].width == {"n_head": 4}


def test_spelling_leaves_values_alone() -> None:
    assert with_hyphens("--at_lr of at_lr is no --model.head_dim") == "--at-lr of at_lr is no --model.head-dim"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_hyphens_and_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert not [name for name in options_of(COMMANDS[command]) if "_" in name]
    for words in ([command], []) if command == "recipes" else ([*command.split(), "--help-all"],):
        main(words)
    shown = capsys.readouterr().out
    assert not [line for line in shown.splitlines() if len(line) > 80]


def test_help_text_breaks_between_words() -> None:
    about = "One sentence that is rather long.\nIts second line.\n\n  mupscale run --a 1 --b 2   what for\n  short"
    assert fill_help(about, 30).splitlines() == [
        "One sentence that is rather",
        "long. Its second line.",
        "",
        "  mupscale run --a 1 --b 2",
        "      # what for",
        "  short",
    ]


# ----------------------------------------------------------------------------------------- what is shown and kept


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--out", "none", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    lines = told(capsys, [*TINY, "--out", "none", "-v"]).splitlines()
    assert [line.split()[1] for line in lines if "  loss" in line] == ["1/3", "2/3", "3/3"]


@pytest.mark.slow
def test_out_none_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--out", "none"]) == 0
    assert "Example 1" in (shown := told(capsys, "limit examples --widths 64 128 --networks 2 --steps 1 --out none"))
    assert "Results and pictures" not in shown
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_train_says_where_it_saved_and_overwrites_when_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--out", "run"]
    said = "saved in run: checkpoints/step-000000003.safetensors, metrics.jsonl, recipe.json\n"
    assert told(capsys, words).endswith(said)
    (here / "run" / "notes.txt").write_text("mine")
    assert "start over (--overwrite)" in refused(capsys, words, 1)
    assert main([*words, "--overwrite", "--resume"]) == 2
    assert main([*words, "--overwrite", "--steps", "2"]) == 0
    records = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2]
    assert [path.name for path in (here / "run" / "checkpoints").iterdir()] == ["step-000000002.safetensors"]
    assert (here / "run" / "notes.txt").read_text() == "mine"


def test_a_refused_run_overwrites_nothing(here: Path) -> None:
    assert main([*TINY, "--out", "run"]) == 0
    before = (here / "run" / "metrics.jsonl").read_text()
    assert main([*TINY, "--out", "run", "--overwrite", "--from", "nowhere"]) == 1
    assert (here / "run" / "metrics.jsonl").read_text() == before


# ------------------------------------------------------------------------------------------------ completion


def test_a_shell_asks_what_may_follow(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complete(*words: str) -> list[str]:
        return told(capsys, ["--complete", "mupscale", *words]).split()

    assert {"upscale", "limit", "--version"} <= {*complete("")}
    assert complete("small", "--sh") == []  # no such command
    assert complete("upscale", "small", "--sha") == ["--shard-size"]
    assert complete("limit", "ml") == ["mlp"]
    assert complete("limit", "mlp", "--act") == ["--activation"]
    assert complete("train", "mlp-covtype-t") == ["mlp-covtype-tiny"]
    assert "--study.grown-lrs" in complete("run", "mlp-covtype-tiny", "--study.")
    for shell in ("bash", "zsh", "fish"):
        assert "mupscale --complete " in told(capsys, ["--completion", shell])
    assert "bash, zsh, fish" in refused(capsys, "--completion powershell", 2)


def test_completion_in_bash(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = "COMP_WORDS=(mupscale upscale small --sha); COMP_CWORD=3; _mupscale; echo ${COMPREPLY[@]}"
    command = f"mupscale() {{ {sys.executable} -m mupscale $@; }}\n{told(capsys, '--completion bash')}\n{ask}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "--shard-size\n"


# ------------------------------------------------------------------------------------------------ advice


def calls(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def advised_options() -> dict[str, str]:
    """Options in what errors say, with the file that says it."""
    advised = {}
    for path in SOURCE.rglob("*.py"):
        said = [node for node in nodes(path) if isinstance(node, ast.Raise) or calls(node, "as_asked")]
        texts = [part.value for node in said for part in ast.walk(node) if isinstance(part, ast.Constant)]
        settings = [node.args[0] for node in nodes(path) if calls(node, "setting")]
        texts += [f"--{name.value}" for name in settings if isinstance(name, ast.Constant)]
        for text in filter(lambda text: isinstance(text, str), texts):
            advised |= {name.rstrip("."): path.name for name in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)}
    return advised


def test_the_advice_in_errors_names_options_that_exist() -> None:
    """Those of a class in a recipe (--optimizer.lr) depend on the class, so the class alone is looked for."""
    options = {"--debug", "--help"}.union(*map(options_of, COMMANDS.values()))
    advised = advised_options()
    assert {"--study.retries", "--study.engine", "--trust", "--out"} <= advised.keys()
    classes = ("--model.", "--data.", "--optimizer.", "--schedule.")
    strange = {
        name: file
        for name, file in advised.items()
        if (name.partition(".")[0] if name.startswith(classes) else name) not in options
    }
    assert not strange
