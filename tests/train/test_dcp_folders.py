"""Folders of torch.distributed.checkpoint: torch's own read here, ours read by torch, and nothing that is code."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hostile_folders import Harmful
from mupscale.models import MLP
from mupscale.system import MupscaleError
from mupscale.train import Recipe, Spec, load_dcp, load_dcp_model, run_recipe, save_dcp
from mupscale.train.dcp import _IndexReader


@pytest.fixture(autouse=True)
def one_process() -> None:
    warnings.filterwarnings("ignore", message=".*single process.*")


def trained() -> tuple[MLP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP(54, 16, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 54)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("nested", [True, False])
def test_what_torch_wrote(tmp_path: Path, nested: bool) -> None:
    """With the model under `model`, and at the top as torchtitan has it."""
    model, optimizer = trained()
    weights = model.state_dict()
    state = {"model": weights} if nested else dict(weights)
    dcp.save({**state, "optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    found = load_dcp_model(tmp_path / "dcp")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert any(name.startswith("optimizer.") for name in load_dcp(tmp_path / "dcp"))


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_dcp(tmp_path / "dcp", model, optimizer)
    other = MLP(54, 16, 7)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(a, b) for a, b in zip(state["model"].values(), model.state_dict().values(), strict=True))
    assert "optimizer.state.layers.0.weight.exp_avg" in load_dcp(tmp_path / "dcp")


def test_a_run_starts_from_a_dcp_folder(tmp_path: Path) -> None:
    model, _ = trained()
    save_dcp(tmp_path / "dcp", model)
    recipe = Recipe(
        model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        data=Spec("mupscale.data.CoverTypeSample"),
        optimizer=Spec("torch.optim.SGD", {"lr": 0.0}),
        width=32,
        base=16,
        steps=1,
        batch=8,
        start=str(tmp_path / "dcp"),
        start_width=16,
        how="copies",
        device="cpu",
    )
    wide, x = run_recipe(recipe).model, torch.randn(5, 54)
    torch.testing.assert_close(wide(x), model(x), rtol=1e-4, atol=1e-5)


def test_an_index_that_holds_code_is_not_read(tmp_path: Path) -> None:
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path)))
    with pytest.raises(MupscaleError, match=r"holds posix\.mkdir"):
        load_dcp(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(MupscaleError, match="damaged"):
        load_dcp(folder)
    with pytest.raises(MupscaleError, match=r"it has no \.metadata"):
        load_dcp(tmp_path / "nowhere")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["storage_meta", "planner_data", "storage_data", "state_dict_metadata", "all"])
def test_torch_unpickles_nothing_of_the_folder(tmp_path: Path, field: str) -> None:
    """An index that passes and that torch's own reader fails on, beside code in the file that it reads instead."""
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    index = pickle.loads((folder / ".metadata").read_bytes())
    if field == "all":
        index = 5
    else:
        setattr(index, field, 5)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / "__0.metadata").write_bytes(pickle.dumps(Harmful(tmp_path)))
    if field in ("storage_meta", "planner_data"):
        assert load_dcp_model(folder).keys() == model.state_dict().keys()
    else:
        with pytest.raises(MupscaleError, match=r"\.metadata is damaged"):
            load_dcp(folder)
    assert not (tmp_path / "ran").exists()


def test_the_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever exchanges the file after the check exchanges nothing."""
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    index, read = folder / ".metadata", _IndexReader.load

    def exchange(reader: Any) -> Any:
        found = read(reader)
        index.write_bytes(pickle.dumps(Harmful(tmp_path)))
        return found

    monkeypatch.setattr(_IndexReader, "load", exchange)
    assert load_dcp_model(folder).keys() == model.state_dict().keys()
    assert not (tmp_path / "ran").exists()


def test_objects_beside_tensors_are_left_alone(tmp_path: Path) -> None:
    """Torch loads what an index calls bytes as a pickle without restriction."""
    model, _ = trained()
    state = {"model": model.state_dict(), "train_state": {"code": Harmful(tmp_path)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert set(load_dcp(tmp_path / "dcp")) == {f"model.{name}" for name in model.state_dict()}
    assert not (tmp_path / "ran").exists()


def test_an_index_sets_nothing_in_this_process(tmp_path: Path) -> None:
    """A pickle may set attributes of a class that it names: of pathlib's, for one, what the parent of every path is."""
    folder = save_dcp(tmp_path / "dcp", nn.Linear(2, 1))
    (folder / ".metadata").write_bytes(b"cpathlib\nPosixPath\n(N(dVtouched\nI1\nstb.")
    with pytest.raises(MupscaleError, match="damaged"):
        load_dcp(folder)
    assert not hasattr(Path, "touched")
    assert not hasattr(PosixPath, "touched")


@pytest.mark.parametrize("file", ["../elsewhere", "/etc/hostname", "pipe", "nested/file"])
def test_shards_elsewhere_are_not_read(tmp_path: Path, file: str) -> None:
    folder = save_dcp(tmp_path / "dcp", nn.Linear(2, 1))
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / "nested").mkdir()
    for place in (tmp_path / "elsewhere", folder / "nested" / "file"):
        shutil.copy(folder / "__0_0.distcp", place)
    os.mkfifo(folder / "pipe")
    for info in index.storage_data.values():
        info.relative_path = file
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MupscaleError, match=f"it has no file '{file}'"):
        load_dcp(folder)


def test_a_tensor_of_which_a_part_is_missing(tmp_path: Path) -> None:
    """Torch would leave that part as it finds the memory."""
    folder = save_dcp(tmp_path / "dcp", nn.Linear(2, 1))
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.state_dict_metadata["model.weight"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MupscaleError, match=r"a part of 'model\.weight' is missing"):
        load_dcp(folder)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(MupscaleError, match="cannot be read"):
        load_dcp(folder)
