"""Files that an earlier version wrote still load, resume and report; written_before/README.md says what made them."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
from mupscale.cli import main
from mupscale.engine import train_many
from mupscale.models import MLP
from mupscale.study.contenders import COPIES
from mupscale.study.paper import Protocol
from mupscale.sweep import Cell, Space, Sweep, SweepJob, run_sweep
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
    """The same values, numbers to 1e-6: another CPU rounds otherwise."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
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
    pytest.importorskip("jsonargparse")
    assert [record["kind"] for record in records(folder / "run" / "metrics.jsonl")].count("grow") == 0
    assert main(["resume", "run"]) == 0
    ours, theirs = records(folder / "run" / "metrics.jsonl"), records(folder / "whole-metrics.jsonl")
    assert [record["kind"] for record in ours].count("grow") == 1
    before = [record["kind"] for record in theirs].index("grow") + 1
    assert_close(ours[:before], theirs[:before])
    # its noise is drawn otherwise by now, so what comes then is another run of the same kind
    for one, other in zip(ours[before:], theirs[before:], strict=True):
        assert (one["kind"], one["step"], one["flops"]) == (other["kind"], other["step"], other["flops"])
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=0.2)


def sweep_2(folder: Path, storage: str, notes: list[str]) -> Sweep:
    """The sweep in a folder, joined under the name that it had."""
    from mupscale.cli.studies import read_study

    asked = read_study("sweep", "", ["recipe.yaml"], lambda parser: None, ())
    protocol = Protocol(asked.recipe, "train")
    system = protocol.system(asked.settings)
    space = Space(tuple(asked.settings.grown_lrs), tuple(asked.settings.noises))

    def recipes(cell: Cell) -> list[Recipe]:
        trial = protocol.recipe_of(system.smaller(2).leaf(COPIES, 0.02, cell.lr, cell.noise, 0), folder)
        return [replace(trial, start=str(folder / "small" / "width-2" / "seed-0"), out=None)]

    job = SweepJob("sweep-2-width-2", 4, 2, space, recipes, system.grown_steps)
    return run_sweep(job, storage, folder=folder / "sweeps", note=notes.append)


def assert_chosen(sweep: Sweep) -> None:
    noise, lr = Path("choice.txt").read_text().strip().removeprefix("For the large models: ").split("; ")[1].split(", ")
    assert noise.endswith(f"noise {sweep.best.noise:g}")
    assert lr == f"lr {sweep.best.lr:g}"


def test_a_finished_study_in_sqlite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained again: the choice is read from the study."""
    pytest.importorskip("optuna")
    Path("sweep-sqlite/study.db").write_bytes(gzip.decompress((folder / "study.db.gz").read_bytes()))
    monkeypatch.delattr("mupscale.sweep.search.train_many")
    assert_chosen(sweep_2(Path("sweep-sqlite"), "sweep-sqlite/study.db", []))


def test_an_interrupted_study_in_a_journal_goes_on(folder: Path) -> None:
    pytest.importorskip("optuna")
    notes: list[str] = []
    assert_chosen(sweep_2(Path("sweep-journal"), "journal:sweep-journal/study.log", notes))
    assert any("going on after step" in note for note in notes)


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
    assert [growth.noise for growth in record.growths] == [0.1]
    (folder / "again").mkdir()
    record.save(folder / "again")
    assert json.loads((folder / "again" / "mupscale.json").read_text()) == content


def test_a_summary_of_before_there_was_one_format_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "method"]) == 1
    assert "is not the summary of a study" in capsys.readouterr().err


@pytest.mark.slow
def test_a_transfer_check_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    report = pytest.importorskip("mupscale.report")
    values = json.loads((folder / "transfer" / "transfer-check.json").read_text())
    assert report.save_transfer_picture(values, folder).stat().st_size > 5000
