"""Options as people type them: hyphens and underscores, -q and -v, --overwrite, --out none, completion, 80 columns."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mupscale.cli import main
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.completion import completion_script, options_of
from mupscale.cli.spelling import as_the_parser_has_them, fill_help, with_hyphens
from mupscale.cli.training import read_recipe
from mupscale.system import set_loudness
from syntax import tree

SOURCE = Path(__file__).parents[2] / "src" / "mupscale"
TINY = ["train", "mlp-covtype-tiny", "--steps", "3", "--grow", "[]", "--device", "cpu", "--log-every", "1"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    set_loudness("normal")


# ------------------------------------------------------------------------------------------------ spelling


def test_hyphens_and_underscores_are_one() -> None:
    words = [
        "mlp-covtype-tiny",
        "--optimizer.weight-decay",
        "0.5",
        "--log-every=7",
        "--init_at",
        "64",
        "--from-width",
        "3",
    ]
    recipe, _ = read_recipe([*words, "--from", "some"])
    other, _ = read_recipe([*(f"--{w[2:].replace('-', '_')}" if w[0] == "-" else w for w in words), "--from", "some"])
    assert recipe == other
    assert (recipe.log_every, recipe.init_at, recipe.start_width) == (7, 64, 3)
    assert recipe.optimizer.init_args["weight_decay"] == 0.5


def test_widths_by_name_with_hyphens() -> None:
    recipe, _ = read_recipe(
        ["gpt2-text-tiny", "--width.n-head", "4", "--base.n-head", "4", "--grow", "[]", "--init-at", "null"]
    )
    assert recipe.width == {"n_head": 4}


def test_spelling_leaves_values_alone() -> None:
    assert as_the_parser_has_them(["--dry_run", "--a-b=c-d", "x_y"], ["--dry-run", "--a_b"]) == [
        "--dry-run",
        "--a_b=c-d",
        "x_y",
    ]
    assert with_hyphens("--at_lr of at_lr is no --model.head_dim") == "--at-lr of at_lr is no --model.head-dim"


def test_mistakes_are_told_with_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mlp-covtype-tiny", "--log-evry", "3"]) == 2
    assert capsys.readouterr().err == "mupscale train: there is no option --log-evry; did you mean --log-every?\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_hyphens_and_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = options_of(COMMANDS[command].load())
    assert not [name for name in options if "_" in name]
    if command == "recipes":
        main([command])
    else:
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
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


def test_the_overview_fits_and_tells_exit_statuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "Exit status: 0 done; 1 refused" in shown


# ----------------------------------------------------------------------------------------- what is shown and kept


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--out", "none", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*TINY, "--out", "none", "-v"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "  loss" in line] == [
        "1/3",
        "2/3",
        "3/3",
    ]


@pytest.mark.slow
def test_out_none_writes_nothing(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--out", "none"]) == 0
    assert main(["limit", "examples", "--widths", "64", "128", "--networks", "2", "--steps", "1", "--out", "none"]) == 0
    assert "Example 1" in (shown := capsys.readouterr().out)
    assert "Results and pictures" not in shown
    assert list(own_folder.iterdir()) == []


@pytest.mark.slow
def test_train_says_where_it_saved_and_overwrites_when_told(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--out", "run"]
    assert main(words) == 0
    said = "saved in run: checkpoints/step-000000003.safetensors, metrics.jsonl, recipe.json\n"
    assert capsys.readouterr().out.endswith(said)
    (own_folder / "run" / "notes.txt").write_text("mine")
    assert main(words) == 1
    assert "start over (--overwrite)" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--resume"]) == 2
    assert main([*words, "--overwrite", "--steps", "2"]) == 0
    records = [json.loads(line) for line in (own_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2]
    assert [path.name for path in (own_folder / "run" / "checkpoints").iterdir()] == ["step-000000002.safetensors"]
    assert (own_folder / "run" / "notes.txt").read_text() == "mine"


def test_a_refused_run_overwrites_nothing(own_folder: Path) -> None:
    assert main([*TINY, "--out", "run"]) == 0
    before = (own_folder / "run" / "metrics.jsonl").read_text()
    assert main([*TINY, "--out", "run", "--overwrite", "--from", "nowhere"]) == 1
    assert (own_folder / "run" / "metrics.jsonl").read_text() == before


# ------------------------------------------------------------------------------------------------ completion


def test_completion_in_bash(own_folder: Path) -> None:
    script = completion_script(
        "bash", {name: options_of(COMMANDS[name].load()) for name in ("upscale", "limit mlp", "recipes")}
    )
    (own_folder / "complete.sh").write_text(script)

    def complete(*words: str) -> list[str]:
        ask = f"source complete.sh; COMP_WORDS=({' '.join(words)} ''); COMP_CWORD={len(words)}; _mupscale; "
        if words[-1].startswith("-") or len(words) == 1:
            ask = ask.replace(" '')", ")").replace(f"COMP_CWORD={len(words)}", f"COMP_CWORD={len(words) - 1}")
        done = subprocess.run(
            ["bash", "-c", f'{ask} printf "%s\\n" "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert complete("mupscale", "small", "--sh") == []  # no such command
    assert complete("mupscale", "upscale", "small", "--sh") == ["--shard-size"]
    assert "mlp" in complete("mupscale", "limit")
    assert complete("mupscale", "limit", "mlp", "--act") == ["--activation"]


def test_completion_for_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {name: options_of(COMMANDS[name].load()) for name in ("upscale", "recipes")}
    assert "#compdef mupscale" in completion_script("zsh", runs)
    assert "-l shard-size" in completion_script("fish", runs)
    assert main(["--completion", "powershell"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ colour


def test_no_color(own_folder: Path) -> None:
    pty = pytest.importorskip("pty")
    shown = {}
    for name, more in (("plain", {"NO_COLOR": "1"}), ("coloured", {})):
        reader, writer = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "PYTEST_CURRENT_TEST")}
        environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **more}
        script = (
            "from mupscale.system import open_display\n"
            "display = open_display(['bar', 'percentage'], 4)\n"
            "display.update(2)\n"
            "display.close()\n"
        )
        subprocess.run([sys.executable, "-c", script], env=environment, stderr=writer, check=True)
        os.close(writer)
        shown[name] = os.read(reader, 1 << 16).decode()
        os.close(reader)
    assert "\x1b[38;5" in shown["coloured"]
    assert "\x1b[38;5" not in shown["plain"]
    assert "50%" in shown["plain"]


def advised_options() -> dict[str, str]:
    """Options in what errors say, with the file that says it."""
    advised = {}
    for path in SOURCE.rglob("*.py"):
        raised = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Raise)]
        texts = [part.value for node in raised for part in ast.walk(node) if isinstance(part, ast.Constant)]
        for text in filter(lambda text: isinstance(text, str), texts):
            advised |= {name.rstrip("."): path.name for name in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)}
    return advised


def test_the_advice_in_errors_names_options_that_exist() -> None:
    """Those of a class in a recipe (--optimizer.lr) depend on the class, so the class alone is looked for."""
    options = {"--debug", "--help"}.union(*(options_of(command.load()) for command in COMMANDS.values()))
    advised = advised_options()
    assert {"--study.retries", "--study.engine", "--trust", "--out"} <= advised.keys()
    classes = ("--model.", "--data.", "--optimizer.", "--schedule.")
    strange = {
        name: file
        for name, file in advised.items()
        if (name.partition(".")[0] if name.startswith(classes) else name) not in options
    }
    assert not strange
