"""Files that were written before still load, resume and report; written_before/README.md says what made them."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
from commands import told
from mupscale.cli import main
from mupscale.engine import train_many
from mupscale.models import MLP
from mupscale.train import Recipe

HERE = Path(__file__).parent / "written_before"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all files, which is the current folder."""
    shutil.copytree(HERE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def records(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file, less the clock."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in lines]


def assert_close(ours: Any, theirs: Any) -> None:
    """The same values, numbers to 1e-6: another CPU rounds otherwise. A later version may record more of them."""
    if isinstance(theirs, dict):
        assert ours.keys() >= theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-6, abs=1e-9) if isinstance(theirs, float) else theirs)


def test_a_checkpoint_and_its_plan() -> None:
    family = mu.Family(lambda width: MLP(5, width, 3), base=2)
    model, wide = family.build(4).double(), family.build(8).double()
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=9.0)
    saved = mu.load("model.safetensors", model, optimizer)
    assert saved.plan is not None
    assert saved.plan == mu.Plan.load("plan.json") == mu.plan(model, wide)
    assert saved.extra["step"] == 3
    x, expected = (torch.tensor(saved.extra[name], dtype=torch.float64) for name in ("x", "expected"))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    groups = {group["lr"] for group in optimizer.param_groups}
    assert 9.0 not in groups
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
    mu.widen(model, wide, saved.plan)
    torch.testing.assert_close(wide(x), expected, rtol=0, atol=1e-12)
    mu.widen_optimizer(optimizer, family.optimizer(wide, torch.optim.AdamW, lr=0.02), saved.plan)


def test_a_run_that_was_stopped_goes_on_and_grows(folder: Path) -> None:
    assert [record["kind"] for record in records(folder / "run" / "metrics.jsonl")].count("grow") == 0
    assert main(["resume", "run"]) == 0
    ours, theirs = records(folder / "run" / "metrics.jsonl"), records(folder / "whole-metrics.jsonl")
    assert [record["kind"] for record in ours].count("grow") == 1
    assert_close(ours, theirs)


def sweep(folder: str, *options: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a sweep that goes on in its folder says, the last line of which is its choice."""
    said = told(capsys, ["sweep", "recipe.yaml", "--out", folder, *options])
    assert Path("choice.txt").read_text().strip() in said
    return said


def test_a_finished_study_in_sqlite(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trained again: the choice is read from the study."""
    pytest.importorskip("optuna")
    Path("sweep-sqlite/study.db").write_bytes(gzip.decompress((folder / "study.db.gz").read_bytes()))
    monkeypatch.delattr("mupscale.study.search.train_many")
    sweep("sweep-sqlite", capsys=capsys)


def test_an_interrupted_study_in_a_journal_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    said = sweep("sweep-journal", "--storage", "journal:sweep-journal/study.log", capsys=capsys)
    assert "going on after step" in said


def test_interrupted_runs_of_train_many_go_on(folder: Path) -> None:
    values = json.loads((folder / "stack.json").read_text())
    notes: list[str] = []
    outcomes = train_many(
        [Recipe.from_json(recipe) for recipe in values["recipes"]],
        engine="vectorised",
        points=10,
        save=folder / "stack.safetensors",
        note=notes.append,
    )
    assert any("going on after step" in note for note in notes)
    assert_close([[list(point) for point in outcome.curve] for outcome in outcomes], values["curves"])
    assert not (folder / "stack.safetensors").exists()


def test_the_record_of_an_upscaled_checkpoint(folder: Path) -> None:
    hf = pytest.importorskip("mupscale.hf")
    record = hf.Record.load(folder / "wide")
    content = json.loads((folder / "wide" / "mupscale.json").read_text())
    assert record.config["model_type"] == "gpt2"
    assert [growth.noise.std for growth in record.growths] == [0.1]
    (folder / "again").mkdir()
    record.save(folder / "again")
    assert json.loads((folder / "again" / "mupscale.json").read_text()) == content


@pytest.mark.slow
def test_a_transfer_check_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    report = pytest.importorskip("mupscale.report")
    values = json.loads((folder / "transfer" / "transfer-check.json").read_text())
    assert report.save_transfer_picture(values, folder).stat().st_size > 5000
