"""What results/ holds is what its recipes give, and can be drawn again; `make reproduce` runs them all."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jsonargparse")

from mupscale.cli import main, read_method
from mupscale.data import covtype_sample, tinyshakespeare
from mupscale.method.stages import Protocol
from mupscale.method.summary import Summary
from mupscale.method.transfer import transfer_verdict

RESULTS = Path(__file__).parents[1] / "results"
RECIPES = sorted(RESULTS.glob("*/recipe.yaml"))
SUMMARIES = sorted(RESULTS.glob("*/summary.json"))
CHECKS = sorted(RESULTS.glob("*/transfer-check.json"))
SHORT = ["--batch", "16", "--steps", "8", "--evaluation.every", "0", "--log_every", "1", "--precision", "fp32"]
SHORT += ["--compile", "false", "--method.seeds", "1", "--method.noises", "[0, 1]", "--method.lrs", "[]"]


def named(path: Path) -> str:
    return path.parent.name


@pytest.fixture
def reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a copy of the recipes to keep results in, and two small data sets."""
    for path in RECIPES:
        folder = tmp_path / "results" / named(path)
        folder.mkdir(parents=True)
        shutil.copy(path, folder)
    shutil.copy(RESULTS / "reproduce.py", tmp_path / "results")
    sample = covtype_sample()
    rows = np.column_stack([sample.train_x.numpy(), sample.train_y.numpy() + 1])[:3000]
    np.savetxt(tmp_path / "covtype.data", rows, delimiter=",", fmt="%g")
    books = [{"text": text} for text in tinyshakespeare()[:200_000].split("\n\n")]
    (tmp_path / "books.jsonl").write_text("\n".join(map(json.dumps, books)))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("reproduce", tmp_path / "results" / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipes_can_be_read_and_grown(path: Path, tmp_path: Path) -> None:
    recipe, method, _ = read_method("run", "", [str(path)], lambda parser: None)
    protocol = Protocol(recipe, tmp_path)
    protocol.check_small(method.widths[0])
    recipe.family().widening(recipe.width, protocol.wide)


@pytest.mark.parametrize("path", SUMMARIES, ids=named)
def test_a_summary_is_of_the_recipe_beside_it(path: Path) -> None:
    recipe, method, _ = read_method("run", "", [str(path.parent / "recipe.yaml")], lambda parser: None)
    summary = Summary.load(path.parent)
    own = {"out", "data"}  # where the data lies is each machine's own
    theirs = {name: value for name, value in summary.recipe.items() if name not in own}
    assert theirs == {
        name: value for name, value in json.loads(json.dumps(recipe.to_json())).items() if name not in own
    }
    assert summary.method == json.loads(json.dumps(asdict(method)))
    assert summary.name == named(path)
    assert all(len(runs.curves) == method.seeds for runs in summary.runs)
    assert all(word not in path.read_text() for word in ("/root", "/home", "/tmp", "/work"))


@pytest.mark.parametrize("path", SUMMARIES[:2], ids=named)
def test_its_page_can_be_drawn_again(path: Path, tmp_path: Path) -> None:
    assert main(["report", str(path.parent), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    assert Summary.load(path.parent).verdict[0].split(":")[0] in page
    assert {kept.name for kept in path.parent.glob("*.png")} <= {drawn.name for drawn in tmp_path.glob("*.png")}


@pytest.mark.parametrize("path", CHECKS, ids=named)
def test_a_check_says_what_its_numbers_say(path: Path) -> None:
    found = json.loads(path.read_text())
    assert transfer_verdict(found) == found["verdict"]
    assert len(found["lr"]) == len(found["noise"]) >= 3


def growth(width: Any) -> list[str]:
    return ["--grow", json.dumps([{"at": 4, "width": width, "noise": 1, "unit": "theory", "lr": 0.01}])]


def test_an_experiment_is_run_and_kept(reproduce: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["mlp-covtype-sgd-n64", "--covtype", "covtype.data", "--keep", "--", *SHORT, *growth(256)]
    asked += ["--method.upscaled_lrs", "[0.05, 0.1]"]
    assert reproduce.main(asked) == 0
    assert "$ mupscale run results/mlp-covtype-sgd-n64/recipe.yaml --data.path covtype.data" in capfd.readouterr().out
    kept = reproduce.HERE / "mlp-covtype-sgd-n64"
    summary = Summary.load(kept)
    assert summary.recipe["steps"] == 8
    assert summary.command.endswith("--data.path covtype.data --out runs/mlp-covtype-sgd-n64")
    assert {"training-flops.png", "gain.png", "sweep-2-width-32.png"} <= {path.name for path in kept.iterdir()}
    assert reproduce.main(asked) == 0
    assert "done already" in capfd.readouterr().out


def test_a_transfer_check_is_run_and_kept(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "WIDTHS", "[8, 16]")
    asked = ["transfer-sgd", "--covtype", "covtype.data", "--keep", "--", *SHORT, *growth(128)]
    assert reproduce.main(asked) == 0
    found = json.loads((reproduce.HERE / "transfer-sgd" / "transfer-check.json").read_text())
    assert [line["from"] for line in found["lr"]] == [8, 16]
    assert (reproduce.HERE / "transfer-sgd" / "transfer-check.png").exists()


def test_the_language_model_makes_its_tokens_first(reproduce: ModuleType) -> None:
    smaller = ["--model.layers", "1", "--model.context", "16", "--data.context", "16", "--width", "64"]
    smaller += ["--method.widths", "[32]", "--method.upscaled_lrs", "[0.001]", *growth(128)]
    assert reproduce.main(["gpt2-gutenberg", "--text", "books.jsonl", "--keep", "--", *SHORT, *smaller]) == 0
    assert Summary.load(reproduce.HERE / "gpt2-gutenberg").recipe["data"]["init_args"]["tokens"] == "runs/gutenberg"
    assert Path("runs/gutenberg/tokenizer.json").exists()


def test_what_cannot_be_run_is_said(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main([]) == 0
    assert capsys.readouterr().out.count("left out, since --covtype is not given") == len(RECIPES) - 1
    assert reproduce.main(["transfer-sgd", "--covtype", "nowhere"]) == 1
    with pytest.raises(SystemExit):
        reproduce.main(["mlp"])
    assert "there is no 'mlp'" in capsys.readouterr().err
