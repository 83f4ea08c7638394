"""What results/ holds is what its recipes give, and can be drawn again; `make reproduce` runs them all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mupscale.cli import main
from mupscale.core import Width
from mupscale.data import covtype_sample, tinyshakespeare
from mupscale.study import ContenderRuns, StudySettings, StudySummary, load_summary
from mupscale.study.contenders import USUAL_IN_PAPER
from mupscale.study.transfer import judge_transfer, read_width_line
from mupscale.study.wording import count_of, write_paper_words, write_pay_words
from mupscale.train import Recipe
from result_scripts import load_script
from slow_cases import with_slow

RESULTS = Path(__file__).parents[2] / "results"
DOCS = RESULTS.parent / "docs" / "results"
RECIPES = sorted(RESULTS.glob("*/recipe.yaml"))
SUMMARIES = sorted(RESULTS.glob("*/summary.json"))
PAPERS = [path for path in SUMMARIES if (path.parent / "recipe.yaml").exists()]
CHECKS = sorted(RESULTS.glob("*/transfer-check.json"))


def named(path: Path) -> str:
    return path.parent.name


class InProcess:
    """A command of mupscale where the script would start a process, which would load torch first."""

    def __init__(self, words: Sequence[str]) -> None:
        assert list(words[:3]) == [sys.executable, "-m", "mupscale"]
        self.words = words[3:]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> int:
        return main(self.words)


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a copy of the recipes to keep results in, and two small data sets."""
    for path in RECIPES:
        folder = tmp_path / "results" / named(path)
        folder.mkdir(parents=True)
        shutil.copy(path, folder)
    shutil.copy(RESULTS / "reproduce.py", tmp_path / "results")
    sample = covtype_sample()
    rows = np.column_stack([sample.train_x.numpy(), sample.train_y.numpy() + 1])[:1000]
    np.savetxt(tmp_path / "covtype.data", rows, delimiter=",", fmt="%g")
    books = [{"text": text} for text in tinyshakespeare()[:80_000].split("\n\n")]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, books)))
    monkeypatch.chdir(tmp_path)
    module = load_script("reproduce", tmp_path / "results")
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=InProcess))
    return module


def read(path: Path) -> tuple[Recipe, StudySettings]:
    """A recipe and its section `study`."""
    import yaml

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = StudySettings(**values.pop("study")).resolved(USUAL_IN_PAPER, "train")
    return Recipe.from_json(values), settings


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipes_can_be_read_and_grown(path: Path) -> None:
    recipe, settings = read(path)
    narrow, wide = Width.of(recipe.width), Width.of(recipe.grow[0].width)
    recipe.family().widening(recipe.width, recipe.grow[0].width)
    small = Width.of(settings.widths[0])
    recipe.family().widening(small.whole, small.scaled_as(narrow, wide).whole)


@pytest.mark.parametrize("path", PAPERS, ids=named)
def test_a_summary_is_of_the_recipe_beside_it(path: Path) -> None:
    recipe, settings = read(path.parent / "recipe.yaml")
    summary = load_summary(path.parent)
    theirs, ours = Recipe.from_json(summary.recipe), recipe
    for part in ("model", "optimizer"):  # which say more there: what they have unless told otherwise
        assert getattr(ours, part).class_path == getattr(theirs, part).class_path
        given = {**getattr(theirs, part).init_args, **getattr(ours, part).init_args}
        assert json.loads(json.dumps(given)) == getattr(theirs, part).init_args
    own = {"out", "data", "model", "optimizer"}  # where the data lies is each machine's own
    left, right = ({n: v for n, v in one.to_json().items() if n not in own} for one in (theirs, ours))
    assert json.loads(json.dumps(left)) == json.loads(json.dumps(right))
    assert type(settings)(**summary.settings) == settings  # a later setting has its default
    assert summary.name == named(path)
    assert all(len(one.curves) == settings.seeds for one in summary.large.contenders)
    assert all(word not in path.read_text() for word in ("/root", "/home", "/tmp", "/work"))


@pytest.mark.parametrize("path", SUMMARIES, ids=named)
def test_a_summary_says_what_its_numbers_say(path: Path) -> None:
    summary = load_summary(path.parent)
    write = {"pay": write_pay_words, "paper": write_paper_words}[summary.preset]
    assert write(summary) == summary


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
@pytest.mark.parametrize("path", with_slow(SUMMARIES, [SUMMARIES[0], PAPERS[0]]), ids=named)
def test_its_page_can_be_drawn_again(path: Path, tmp_path: Path) -> None:
    assert main(["report", str(path.parent), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    assert load_summary(path.parent).sentences[0].split(":")[0] in page
    assert {kept.name for kept in path.parent.glob("*.png")} <= {drawn.name for drawn in tmp_path.glob("*.png")}


@pytest.mark.parametrize("path", CHECKS, ids=named)
def test_a_check_says_what_its_numbers_say(path: Path) -> None:
    found = json.loads(path.read_text())
    assert judge_transfer(found) == found["verdict"]
    assert len(found["lr"]) == len(found["noise"]) >= 3


MLPS = [f"mlp-covtype-{optimizer}{width}" for width in ("", "-n128", "-n64") for optimizer in ("sgd", "adamw")]
GPTS = ["gpt2-gutenberg-short", "gpt2-gutenberg"]
ROWS = {
    "base": "base model",
    "from-scratch": "(a) the wide model from scratch",
    "from-scratch-changed": "(b) the same with the change of the learning rate that (e) has",
    "from-scratch-own": "(b′) the same with a change to the rate that is best without noise",
    "continued": "(c) base model continued, with the learning rate of (e)",
    "continued-own": "(c′) base model continued, with the rate that is best without noise",
    "continued-late": "(c″) base model continued, with a change to that rate halfway",
    "copies-without-noise": "(d) upscaled without noise",
    "copies": "(e) upscaled with noise",
    "copies-own": "(e′) the same with a change to that rate halfway",
}


def runs_of(summary: StudySummary, name: str) -> ContenderRuns | None:
    return summary.large.get(name)


def is_as(runs: ContenderRuns) -> bool:
    """Whether its learning rate changes to what it was, so that it is another contender's."""
    return runs.change is not None and runs.change[1] == runs.lr


def missing(summary: StudySummary, name: str) -> str:
    """Why a run has no numbers of its own; (b′), (c″) and (e′) are younger than some of the results."""
    same = {"from-scratch-changed": "as (a)", "from-scratch-own": "as (b)", "copies-own": "as (e)"}
    same |= dict.fromkeys(("continued-own", "continued-late"), "as (c)")
    one_rate = runs_of(summary, "continued-own") is None
    return same[name] if one_rate or name == "from-scratch-changed" else "not trained"


def table(columns: Sequence[str], cell: Callable[[StudySummary, str], str]) -> list[str]:
    """The rows of a table of the docs, from the summaries."""
    loaded = [load_summary(RESULTS / name) for name in columns]
    return [f"| {shown} | {' | '.join(cell(one, name) for one in loaded)} |" for name, shown in ROWS.items()]


def test_the_tables_of_the_docs_are_those_of_the_summaries() -> None:
    def mlp(summary: StudySummary, name: str) -> str:
        runs = runs_of(summary, name)
        if runs is None or is_as(runs):
            return missing(summary, name)
        finished = [curve for curve in runs.curves if curve.status == "finished"]
        accuracy = fmean(curve.accuracy[-1] for curve in finished)
        return f"{fmean(runs.finals):.3g} ({100 * accuracy:.1f} %){' †' * (len(finished) < len(runs.curves))}"

    def gpt(summary: StudySummary, name: str) -> str:
        runs = runs_of(summary, name)
        if runs is None or is_as(runs):
            return f"{missing(summary, name)} |"
        return f"{fmean(runs.finals):.3f} | {fmean(curve.held_out_losses[-1] for curve in runs.curves):.3f}"

    pages = {
        "paper-mlp": table(MLPS[:2], mlp),
        "smaller-bases": table(MLPS[2:], mlp),
        "gpt2": table(GPTS, gpt),
        "small-gpt2": table(["gpt2-shakespeare"], gpt),
    }
    for name, rows in pages.items():
        page = (DOCS / f"{name}.md").read_text(encoding="utf-8").replace("**", "")
        assert not [row for row in rows if row not in page], f"docs/results/{name}.md"


def test_the_table_of_the_optima_is_that_of_the_checks() -> None:
    page = (DOCS / "transfer.md").read_text(encoding="utf-8")
    for path, optimizer in zip(CHECKS, ("AdamW", "SGD"), strict=True):
        found = json.loads(path.read_text())
        for axis, what in {"lr": "learning rate", "noise": "noise"}.items():
            lines = [read_width_line(entry) for entry in found[axis]]
            grid, bests = sorted(point["x"] for point in found[axis][0]["points"]), [line.best for line in lines]
            moved = max(map(grid.index, bests)) - min(map(grid.index, bests))
            more = 100 * (lines[-1].loss(bests[0]) / lines[-1].loss(bests[-1]) - 1)
            row = [f"best {what}, {optimizer}", *(f"{best:g}" for best in bests), count_of(moved, "grid step")]
            assert f"| {' | '.join(row)} | {more:.1f} % |" in page


def shorten(reproduce: ModuleType, name: str, **changes: Any) -> None:
    """Make a recipe's copy one for a test."""
    import yaml

    path = reproduce.HERE / name / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    wide = 2 * changes.get("width", recipe["width"])
    study = {**recipe["study"], "seeds": 1, "noises": [0, 1], "lrs": [0.1], "grown_lrs": [0.05, 0.1]}
    grow = [{"at": 4, "width": wide, "noise": 1, "noise_unit": "theory", "lr": 0.01}]
    small = {"batch": 16, "steps": 8, "log_every": 1, "precision": "fp32", "compile": False, "evaluation": {"every": 0}}
    path.write_text(
        json.dumps({**recipe, **small, "grow": grow, **changes, "study": {**study, **changes.get("study", {})}})
    )


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
def test_an_experiment_is_run_and_kept(reproduce: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    shorten(reproduce, "mlp-covtype-sgd-n64")
    asked = ["mlp-covtype-sgd-n64", "--covtype", "covtype.data", "--keep"]
    assert reproduce.main(asked) == 0
    assert "$ mupscale run results/mlp-covtype-sgd-n64/recipe.yaml --data.path covtype.data" in capfd.readouterr().out
    kept = reproduce.HERE / "mlp-covtype-sgd-n64"
    summary = load_summary(kept)
    assert summary.command == (
        "mupscale run results/mlp-covtype-sgd-n64/recipe.yaml --data.path covtype.data --out runs/mlp-covtype-sgd-n64 "
        "--paper"
    )
    assert {"training-flops.png", "gain.png", "sweep-2-width-32.png"} <= {path.name for path in kept.iterdir()}
    assert reproduce.main(asked) == 0
    assert "done already" in capfd.readouterr().out


@pytest.mark.slow
def test_a_transfer_check_is_run_and_kept(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "WIDTHS", "[8, 16]")
    shorten(reproduce, "transfer-sgd")
    assert reproduce.main(["--covtype", "covtype.data", "transfer-sgd", "--keep"]) == 0
    found = json.loads((reproduce.HERE / "transfer-sgd" / "transfer-check.json").read_text())
    assert [line["from"] for line in found["lr"]] == [8, 16]
    assert (reproduce.HERE / "transfer-sgd" / "transfer-check.png").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("pictures_without_pixels")
def test_the_language_model_makes_its_tokens_first(reproduce: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """And says what it would take, or that the tokens are of another text."""
    model = {
        "class_path": "mupscale.models.GPT2",
        "init_args": {"vocab": 8192, "context": 16, "layers": 1, "head_dim": 32},
    }
    data = {"class_path": "mupscale.data.Text", "init_args": {"tokens": "-", "context": 16}}
    shorten(reproduce, "gpt2-gutenberg", model=model, data=data, width=64, batch=2, study={"widths": [32]})
    asked = ["gpt2-gutenberg", "transfer-sgd", "--text", "books.jsonl", "--covtype", "covtype.data"]
    assert reproduce.main([*asked, "--dry-run", "--", "--seeds.data", "1"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^together .* (s|min)$", said, re.M)
    assert "transfer-sgd: left out, since only runs of the method" in said
    assert Path("runs/gutenberg/tokenizer.json").exists()
    Path("other.jsonl").write_text(Path("books.jsonl").read_text()[:2000].rsplit("\n", 1)[0])
    assert reproduce.main(["gpt2-gutenberg", "--text", "other.jsonl"]) == 1
    assert "books.jsonl" in capfd.readouterr().err


def test_what_fails_does_not_keep_others_from_running(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = iter([3, 0, reproduce.INTERRUPTED, 0])
    monkeypatch.setattr(reproduce, "_call", lambda words: next(codes))
    names = ["transfer-sgd", "transfer-adamw", "mlp-covtype-sgd", "mlp-covtype-adamw"]
    assert reproduce.main([*names, "--covtype", "covtype.data"]) == 3
    assert next(codes) == 0
    assert reproduce.main(["gpt2-gutenberg", "--covtype", "covtype.data"]) == 0
    assert capsys.readouterr().out == "gpt2-gutenberg: left out, since --text is not given\n"


@pytest.mark.slow
def test_ctrl_c_waits_for_what_is_kept(reproduce: ModuleType, tmp_path: Path) -> None:
    """The command gets the signal from the terminal, too, and needs some time to write where it stands."""
    slow = (
        "import signal, sys, time, pathlib\n"
        "def keep(*_):\n    time.sleep(1.5); pathlib.Path('kept').touch(); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, keep); pathlib.Path('ready').touch(); time.sleep(600)\n"
    )
    (tmp_path / "mupscale.py").write_text(slow)
    script = f"import sys; sys.path.insert(0, {str(reproduce.HERE)!r}); import reproduce; sys.exit(reproduce._call([]))"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True, env={"PYTHONPATH": "."}) as process:
        for _ in range(12000):
            if Path("ready").exists():
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(600) == reproduce.INTERRUPTED
    assert Path("kept").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "give --covtype, --text or both"),
        (["--covtype", "nowhere"], "there is no file nowhere"),
        (["mlp", "--covtype", "covtype.data"], "there is no 'mlp'"),
        (["--covtype", "covtype.data", "--keep", "--", "--steps", "4"], "--keep keeps what the recipes give"),
    ],
)
def test_mistakes(reproduce: ModuleType, asked: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(asked)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
