"""Training on CUDA: growth without a kink, compiled bf16 through a growth, and a resume."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Spec, run_recipe
from small_runs import column, copies, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def recipe(out: Path, **changes: Any) -> Recipe:
    given: dict[str, Any] = {
        "model": Spec("mupscale.models.GPT2", {"vocab": 257, "context": 64, "layers": 2, "head_dim": 16}),
        "data": Spec("mupscale.data.Shakespeare", {"context": 64}),
        "optimizer": Spec("torch.optim.AdamW", {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6}),
        "width": 64,
        "base": 64,
        "steps": 60,
        "batch": 32,
        "clip": 1.0,
        "checkpoints": Checkpoints(every=25),
        "evaluation": Evaluation(every=30),
        "device": "cuda",
        "out": str(out),
    }
    return Recipe(**{**given, **changes})


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in metrics(out) if "loss" in record]


def test_no_kink_on_cuda(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "narrow", precision="fp64"))
    run_recipe(recipe(tmp_path / "grown", precision="fp64", grow=[copies(20, 128), copies(40, 256)]))
    noisy = recipe(tmp_path / "noisy", precision="fp64", grow=[Growth(20, 128, noise=0.5)])
    run_recipe(noisy)
    assert losses(tmp_path / "grown") == pytest.approx(losses(tmp_path / "narrow"), rel=1e-10)
    assert losses(tmp_path / "noisy") != pytest.approx(losses(tmp_path / "narrow"), rel=1e-6)


FRESH = Growth(20, 96, how="fresh")


@pytest.mark.parametrize("growth", [Growth(20, 128, noise=0.5, lr=5e-4), FRESH], ids=["noise", "fresh"])
def test_the_device_does_not_matter(tmp_path: Path, growth: Growth) -> None:
    for device in ("cpu", "cuda"):
        run_recipe(recipe(tmp_path / device, precision="fp64", device=device, grow=[growth], steps=40))
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-7)  # the fused step rounds more


COMPILED = [
    *product(["fp32", "tf32", "bf16"], [True, "reduce-overhead"], [[copies(30, 128)]]),
    *product(["fp32", "bf16"], [True], [[FRESH, Growth(40, 112, how="lossless")]]),
]


@pytest.mark.parametrize(("precision", "mode", "grow"), COMPILED)
def test_compiled_through_a_growth(tmp_path: Path, precision: str, mode: bool | str, grow: list[Growth]) -> None:
    """To widths that are multiples, and to others: 64 to 96, then lossless to 112."""
    changes: dict[str, Any] = {"precision": precision, "grow": grow, "log_every": 5}
    run_recipe(recipe(tmp_path / "eager", **changes))
    result = run_recipe(recipe(tmp_path / "compiled", compile=mode, **changes))
    assert result.optimizer.param_groups[0]["fused"]
    eager, compiled = losses(tmp_path / "eager"), losses(tmp_path / "compiled")
    assert compiled == pytest.approx(eager, rel=2e-2)
    assert compiled[-1] < 0.8 * compiled[0]


def test_graphs_with_accumulation(tmp_path: Path) -> None:
    for mode in (False, "reduce-overhead"):
        run_recipe(recipe(tmp_path / str(mode), compile=mode, accumulate=4, log_every=1))
    assert losses(tmp_path / "reduce-overhead") == pytest.approx(losses(tmp_path / "False"), rel=1e-2)


def test_resume_on_cuda(tmp_path: Path) -> None:
    grow, outs = [Growth(20, 128, noise=0.5), copies(35, 256)], (tmp_path / "whole", tmp_path / "halves")
    run_recipe(recipe(outs[0], precision="fp64", grow=grow))
    run_recipe(recipe(outs[1], precision="fp64", grow=grow, steps=36))
    run_recipe(recipe(outs[1], precision="fp64", grow=grow), resume=True)
    whole, halves = (dict(zip(column(out, "step"), column(out, "loss"), strict=True)) for out in outs)
    assert [halves[step] for step in (50, 60)] == pytest.approx([whole[step] for step in (50, 60)], rel=1e-10)
