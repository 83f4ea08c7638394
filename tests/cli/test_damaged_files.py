"""Every kind of file that is read, damaged in many ways: read after all, or refused in a sentence; nothing else."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("optuna")

import comparisons
import mupscale as mu
import summaries
from damaged_files import damage_bytes, damage_json, damage_lines, damage_safetensors, damage_sqlite
from hf_files import llama_config, llama_tensors, write_checkpoint
from mupscale import hf
from mupscale.cli.arguments import read_yaml
from mupscale.cli.training import read_recipe, read_run
from mupscale.data import info, tokenize
from mupscale.engine import read_outcome
from mupscale.hf.record import Record
from mupscale.models import MLP
from mupscale.report.tuning import load_transfer_check
from mupscale.study import Cell, Space, SweepJob, Tried, load_summary
from mupscale.study.search import TrialBatch
from mupscale.study.trials import Storage, SweepTrials
from mupscale.system import load_torch
from mupscale.train import Recipe, RunFolder, Spec, StoredRecipe, read_snapshot, run_recipe

BEFORE = Path(__file__).parents[1] / "written_before"
FEW, MANY = 20, 1000


@dataclass(frozen=True)
class Kind:
    """A kind of file: how one is made, how it is damaged, and who reads it."""

    make: Callable[[Path], Path]
    damage: Callable[[bytes, int], bytes]
    read: Callable[[Path], Any]


def _run(folder: Path) -> Path:
    """A run of a few steps."""
    model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    recipe = Recipe(model, data, Spec("torch.optim.AdamW", {"lr": 0.1}), 8, 8, 6, 20, out=str(folder), log_every=2)
    run_recipe(recipe)
    return folder


def _snapshot(folder: Path) -> Path:
    return next((_run(folder) / "checkpoints").iterdir())


def _read_snapshot(path: Path) -> None:
    saved = read_snapshot(path)
    assert saved.run is None or saved.run.step is None or saved.run.step >= 0
    model = MLP(54, 8, 7).to(torch.float32)
    saved.restore_model(model)
    saved.restore_optimizer(torch.optim.AdamW, {"lr": 0.1}, model)


def _read_metrics(path: Path) -> None:
    values = {"out": str(path.parent), "width": 8, "base": 8, "steps": 6, "batch": 20, "log_every": 2}
    classes = {
        "model": "mupscale.models.MLP",
        "data": "mupscale.data.CoverTypeSample",
        "optimizer": "torch.optim.AdamW",
    }
    recipe = Recipe.from_json(
        {**values, **{n: {"class_path": c, "init_args": {"lr": 0.1}} for n, c in classes.items()}}
    )
    RunFolder(path.parent).records()
    read_outcome(recipe)


def _checkpoint(folder: Path) -> Path:
    return write_checkpoint(folder, {**llama_config(), "max_position_embeddings": 64}, llama_tensors(llama_config()))


def _shards(folder: Path) -> Path:
    return write_checkpoint(folder, llama_config(), llama_tensors(llama_config()), shards=2)


def _wide(folder: Path) -> Path:
    hf.upscale(_checkpoint(folder / "small"), folder / "wide", verify=False, progress=False, exact=True)
    return folder / "wide" / "mupscale.json"


def _tokens(folder: Path) -> Path:
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    tokenize(str(folder / "text.txt"), str(folder / "tokens"))
    return folder / "tokens" / "index.json"


def _copied(source: Path) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir()
        return Path(shutil.copy(source, folder))

    return make


def _optimizer(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}, folder / "optimizer.pt")
    return folder / "optimizer.pt"


def _comparison(folder: Path) -> Path:
    return summaries.write(folder, comparisons.comparison()) / "summary.json"


def _sqlite(folder: Path) -> Path:
    folder.mkdir()
    (folder / "study.db").write_bytes(gzip.decompress((BEFORE / "study.db.gz").read_bytes()))
    return folder / "study.db"


def _read_sqlite(path: Path) -> None:
    """The same of a SQLite file, for which nobody waits as for a server that may come back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mupscale.study.trials.time.sleep", _no_long_sleep)
        _read_study(path, kind="", patience=30.0)


def _no_long_sleep(seconds: float) -> None:
    assert seconds < 1, "it waits for a damaged file to come back"


def _read_study(path: Path, kind: str = "journal:", patience: float = 0.0) -> None:
    """All that a worker, and the sweep's end, read of a study."""
    storage = Storage(f"{kind}{path}", patience)
    studies = storage.use(storage.optuna.get_all_studies)
    if not studies:
        raise mu.MupscaleError(f"{path} holds no study")
    with pytest.MonkeyPatch.context() as patch:  # whatever it was that this study searched
        patch.setattr(SweepJob, "description", lambda job: {})
        patch.setattr(SweepTrials, "check_description", lambda trials: None)
        job = SweepJob(studies[0].study_name, 4, 2, Space((0.01, 0.02), (1.0,)), lambda cell: [], steps=40)
        SweepTrials(job, storage).read_results()


def _batch(folder: Path) -> Path:
    folder.mkdir()
    batch = TrialBatch.begin("s", "me", {3: Cell(0.1, 0.0), 4: Cell(0.2, 0.5)}, folder)
    batch.results = [Tried(0.1, 0.0, [1.0], curve=[(1, 2.0), (2, 1.0)], steps=2, cost=5.0)]
    batch.write()
    assert batch.path is not None
    return batch.path


def _read_batch(path: Path) -> None:
    if TrialBatch.read(path) is None:
        raise mu.MupscaleError("it is begun anew")


KINDS = {
    "recipe.json": Kind(lambda f: _run(f) / "recipe.json", damage_json, lambda p: StoredRecipe.read(p).load()),
    "metrics.jsonl": Kind(lambda f: _run(f) / "metrics.jsonl", damage_lines, _read_metrics),
    "a run's checkpoint": Kind(_snapshot, damage_safetensors, _read_snapshot),
    "recipe.yaml": Kind(_copied(BEFORE / "recipe.yaml"), damage_bytes, lambda p: read_yaml(str(p))),
    "config.json": Kind(lambda f: _checkpoint(f) / "config.json", damage_json, lambda p: hf.inspect(p.parent)),
    "model.safetensors": Kind(
        lambda f: _checkpoint(f) / "model.safetensors", damage_safetensors, lambda p: hf.inspect(p.parent)
    ),
    "index of shards": Kind(
        lambda f: _shards(f) / "model.safetensors.index.json", damage_json, lambda p: hf.inspect(p.parent)
    ),
    "mupscale.json": Kind(_wide, damage_json, Record.load),
    "optimizer.pt": Kind(_optimizer, damage_bytes, load_torch),
    "summary.json of the paper's comparison": Kind(
        lambda f: summaries.write(f) / "summary.json", damage_json, lambda p: load_summary(p.parent)
    ),
    "summary.json of a comparison": Kind(_comparison, damage_json, lambda p: load_summary(p.parent)),
    "transfer-check.json": Kind(
        _copied(BEFORE / "transfer" / "transfer-check.json"), damage_json, lambda p: load_transfer_check(p.parent)
    ),
    "index of tokens": Kind(_tokens, damage_json, lambda p: info(str(p.parent))),
    "journal of a sweep": Kind(_copied(BEFORE / "sweep-journal" / "study.log"), damage_lines, _read_study),
    "journal of a sweep, its bytes": Kind(_copied(BEFORE / "sweep-journal" / "study.log"), damage_bytes, _read_study),
    "SQLite file of a sweep": Kind(_sqlite, damage_sqlite, _read_sqlite),
    "batch of a sweep": Kind(_batch, damage_json, _read_batch),
    "plan.json": Kind(_copied(BEFORE / "plan.json"), damage_json, mu.Plan.load),
}


SLOW_TO_READ = {
    "recipe.json, to resume": replace(KINDS["recipe.json"], read=lambda p: read_run([str(p.parent)])),
    "recipe.yaml, to train": replace(KINDS["recipe.yaml"], read=lambda p: read_recipe([str(p)])),
}


def refuse_or_read(kind: Kind, folder: Path, seeds: range) -> None:
    """Nothing but a MupscaleError of one line comes out, whatever is wrong."""
    path = kind.make(folder)
    whole = path.read_bytes()
    kind.read(path)
    refused: list[str] = []
    for seed in seeds:
        damaged = kind.damage(whole, seed)
        path.unlink()  # or it would be the file that somebody may still have open
        path.write_bytes(damaged)
        try:
            kind.read(path)
        except mu.MupscaleError as error:
            refused.append(str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        for leftover in (*path.parent.glob(".lock*"), *path.parent.glob(f"{path.name}-*")):
            leftover.unlink()
    assert len(refused) > len(seeds) / 5
    assert not [sentence for sentence in refused if "\n" in sentence]


@pytest.mark.quick("*safetensors", "*checkpoint", "*.yaml", "*.jsonl", "plan.json", "recipe.json", "journal of a sweep")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_damaged_files_are_refused_in_a_sentence(kind: Kind, tmp_path: Path) -> None:
    refuse_or_read(kind, tmp_path / "files", range(FEW))


@pytest.mark.faults
@pytest.mark.parametrize("kind", [*KINDS.values(), *SLOW_TO_READ.values()], ids=[*KINDS, *SLOW_TO_READ])
def test_many_damaged_files_are_refused_in_a_sentence(kind: Kind, tmp_path: Path) -> None:
    refuse_or_read(kind, tmp_path / "files", range(FEW, FEW + MANY))
