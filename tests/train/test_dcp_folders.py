"""Folders of torch.distributed.checkpoint: torch's own read here, ours read by torch, and nothing that is code."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mupscale.models import MLP
from mupscale.system import MupscaleError
from mupscale.train import Recipe, Spec, load_dcp, load_dcp_model, run_recipe, save_dcp


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
        device="cpu",
    )
    wide, x = run_recipe(recipe).model, torch.randn(5, 54)
    torch.testing.assert_close(wide(x), model(x), rtol=1e-4, atol=1e-5)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


def test_an_index_that_holds_code_is_not_read(tmp_path: Path) -> None:
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(MupscaleError, match=r"holds builtins\.eval"):
        load_dcp(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(MupscaleError, match="damaged"):
        load_dcp(folder)
    with pytest.raises(MupscaleError, match=r"it has no \.metadata"):
        load_dcp(tmp_path)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    model, _ = trained()
    folder = save_dcp(tmp_path / "dcp", model)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(MupscaleError, match="cannot be read"):
        load_dcp(folder)
