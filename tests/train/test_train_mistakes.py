"""What people do: optimizer state in files of their own, data in another precision, a folder twice, wrong shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mupscale as mu
from mupscale.data import Split, Table
from mupscale.train import Checkpoints, Recipe, Schedule, Seeds, Spec, run_recipe
from mupscale.train.run_folder import RunFolder, find_checkpoint

HERE = __name__


class Rows(Table):
    """Thirty rows, in any precision."""

    def __init__(self, dtype: str = "float32", train: int = 30) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 8, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        y = torch.randint(3, (40,), generator=generator)
        super().__init__(Split(x[:30], y[:30], x[30:], y[30:]), classes=3)
        self.count = train

    @property
    def size(self) -> int:
        return self.count

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Table:
        return self  # as a source of somebody's own that knows nothing of precisions


def each_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def recipe(out: Path | None = None, **changes: Any) -> Recipe:
    given: dict[str, Any] = {
        "model": Spec("mupscale.models.MLP", {"d_in": 8, "d_out": 3}),
        "data": Spec(f"{HERE}.Rows"),
        "optimizer": Spec("torch.optim.AdamW", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
        "width": 8,
        "base": 8,
        "steps": 8,
        "batch": 10,
        "log_every": 2,
        "out": None if out is None else str(out),
    }
    return Recipe(**{**given, **changes})


def counts(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state.values()}


@pytest.mark.quick("AdamW")
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "NAdam"])
def test_moments_come_along_from_a_file_of_ones_own_and_from_a_run(tmp_path: Path, name: str) -> None:
    what = recipe(tmp_path / "run", optimizer=Spec(f"torch.optim.{name}", {"lr": 1e-2}))
    result = run_recipe(what)
    path = mu.save(tmp_path / "own.safetensors", result.model, result.optimizer)
    for start, width in ((tmp_path / "run", None), (tmp_path / "run" / "checkpoints", None), (path, 8)):
        grown = run_recipe(replace(what, out=None, start=str(start), start_width=width, width=16))
        assert counts(grown.optimizer) == {16.0}, f"from {start}"


def test_nadam_resumes_exactly_in_float64(tmp_path: Path) -> None:
    what = recipe(tmp_path / "whole", precision="fp64", optimizer=Spec("torch.optim.NAdam", {"lr": 1e-2}))
    run_recipe(what)
    run_recipe(replace(what, out=str(tmp_path / "parts"), steps=4))
    run_recipe(replace(what, out=str(tmp_path / "parts")), resume=True)
    whole, parts = (mu.load(find_checkpoint(tmp_path / name)) for name in ("whole", "parts"))
    assert all(torch.equal(parts.model[name], tensor) for name, tensor in whole.model.items())
    assert whole.optimizer is not None
    assert parts.optimizer is not None
    for key, state in whole.optimizer["state"].items():
        for name, value in state.items():
            assert parts.optimizer["state"][key][name].dtype == value.dtype
            assert torch.equal(parts.optimizer["state"][key][name], value)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_data_in_another_precision(dtype: str) -> None:
    assert run_recipe(recipe(data=Spec(f"{HERE}.Rows", {"dtype": dtype}))).status == "finished"


def test_fewer_steps_than_are_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe(recipe(tmp_path))
    before = (tmp_path / "recipe.json").read_text()
    with pytest.raises(mu.MupscaleError, match="is already at step 8, but you asked for 5 steps"):
        run_recipe(recipe(tmp_path, steps=5), resume=True)
    assert (tmp_path / "recipe.json").read_text() == before
    assert run_recipe(recipe(tmp_path), resume=True).status == "finished"
    assert "it is finished" in capsys.readouterr().out


def test_a_history_without_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    diverging = recipe(tmp_path, optimizer=Spec("torch.optim.SGD", {"lr": 1e30}), checkpoints=Checkpoints(every=0))
    assert run_recipe(diverging).status == "diverged"
    before = RunFolder(tmp_path).metrics.read_text()
    with pytest.raises(mu.MupscaleError, match="history of a run without checkpoints"):
        run_recipe(recipe(tmp_path))
    assert RunFolder(tmp_path).metrics.read_text() == before


def test_a_damaged_line_of_metrics_costs_itself_alone(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path))
    folder = RunFolder(tmp_path)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([lines[0], "not JSON\n", "3\n", *lines[2:]]))
    assert [record["step"] for record in folder.records()][:2] == [2, 6]
    run_recipe(recipe(tmp_path, steps=10), resume=True)
    assert [r["step"] for r in folder.records() if r["kind"] == "train"] == [2, 6, 8, 10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": 1.0}, "noise is for a run that starts from a checkpoint"),
        ({"start_width": 8}, "from_width is for a run that starts from a checkpoint"),
        ({"start": "x", "start_width": 0}, "from_width is 0"),
        ({"schedule": Schedule("cosine", floor=-3.0)}, "schedule.floor is -3.0"),
        ({"schedule": Schedule(warmup=-1)}, "schedule.warmup is -1"),
        ({"seeds": Seeds(init=1 << 70)}, "seeds.init is"),
        ({"loss": "torch.pi"}, "no function of outputs and targets"),
        ({"loss": "mine"}, "give module.name"),
        ({"loss": f"{HERE}.each_one"}, r"gives shape \(10,\), not one number"),
        ({"data": Spec(f"{HERE}.Rows", {"train": 0})}, "nothing to train on"),
        ({"model": Spec("mupscale.models.MLP", {"d_in": 9, "d_out": 3})}, r"cannot take .* of shape \(8,\)"),
        ({"device": "mps"}, "device mps cannot be used here"),
    ],
)
def test_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(mu.MupscaleError, match=words) as caught:
        run_recipe(recipe(**changes))
    assert "\n" not in str(caught.value)
