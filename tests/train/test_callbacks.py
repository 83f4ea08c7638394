"""Callbacks of a recipe, its parameter groups, and Muon with AdamW for the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mupscale as mu
import small_runs
from mupscale.models import MLP
from mupscale.optim import MuonAdamW, muon_groups
from mupscale.train import Callback, Evaluation, Recipe, Spec, lightning_growth, run_recipe
from refusals import refuses
from small_runs import copies
from zoo import Unrounded

TOLD: list[tuple[str, int, Any]] = []


class Told(Callback):
    """Notes down what it is told."""

    def __init__(self, name: str = "told") -> None:
        self.name = name

    def begin(self, run: Any) -> None:
        TOLD.append(("begin", run.step, run.width))

    def step(self, run: Any) -> None:
        TOLD.append(("step", run.step, run.width))

    def evaluation(self, run: Any, record: Any) -> None:
        TOLD.append(("evaluation", run.step, record["loss"] > 0))

    def growth(self, run: Any, record: Any) -> None:
        assert sum(p.numel() for p in run.model.parameters()) > 0
        TOLD.append(("growth", run.step, run.width))

    def end(self, run: Any, record: Any) -> None:
        TOLD.append(("end", run.step, record["status"]))


def recipe(**more: Any) -> Recipe:
    usual: dict[str, Any] = {"steps": 4, "log_every": 2, "grow": [copies(2, 16)]}
    return small_runs.recipe(more.pop("out", None), **{**usual, "evaluation": Evaluation(every=3), **more})


def test_callbacks_are_told_in_order() -> None:
    TOLD.clear()
    run_recipe(recipe(callbacks=[{"class_path": "test_callbacks.Told", "init_args": {"name": "x"}}]))
    expected = [("begin", 0, 8), ("step", 1, 8), ("step", 2, 8), ("growth", 2, 16), ("step", 3, 16)]
    expected += [("evaluation", 3, True), ("step", 4, 16), ("evaluation", 4, True), ("end", 4, "finished")]
    assert expected == TOLD


def test_json_lines_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    callbacks: list[str | dict[str, Any]] = ["mupscale.train.JsonLines"]
    board = {"class_path": "mupscale.train.TensorBoard", "init_args": {"folder": str(tmp_path / "board")}}
    run_recipe(recipe(callbacks=[*callbacks, board], out=str(tmp_path / "run")))
    own, copied = ((tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", "metrics-copy.jsonl"))
    assert own == copied
    assert [json.loads(line)["kind"] for line in own.splitlines()] == ["train", "grow", "eval", "train", "eval", "end"]
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, without its server."""
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    init = {"project": "widening", "mode": "offline", "dir": str(tmp_path)}
    run_recipe(recipe(callbacks=[{"class_path": "mupscale.train.WeightsAndBiases", "init_args": init}]))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (["nowhere.Told"], "cannot be imported"),
        (["torch.nn.Identity"], "is no mupscale.train.Callback"),
        ([{"path": "x"}], "neither a class path nor"),
        (["mupscale.train.JsonLines"], "needs a folder to write to"),
    ],
)
def test_callbacks_that_cannot_be(callbacks: list[Any], said: str) -> None:
    refuses(said, run_recipe, recipe(callbacks=callbacks))


# ------------------------------------------------------------------------------------------------ groups


def decays(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "mupscale.optim.MuonAdamW"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of torch's Muon in bfloat16, on CPUs without it
def test_no_decay_before_and_after_growth(optimizer: str) -> None:
    spec = Spec(optimizer, {"lr": 1e-3, "weight_decay": 0.1})
    found = decays(run_recipe(recipe(optimizer=spec, no_decay=["bias", "layers.0.*"])).optimizer)
    spared = {"layers.0.weight", *(f"layers.{number}.bias" for number in range(3))}
    assert {name for name, decay in found.items() if decay == 0} == spared
    assert found.keys() - spared == {"layers.1.weight", "layers.2.weight"}
    refuses("no_decay: embedding matches no parameter", run_recipe, recipe(no_decay=["embedding"]))


def test_muon_is_refused_with_the_remedy() -> None:
    refuses(r"mupscale\.optim\.MuonAdamW", run_recipe, recipe(optimizer=Spec("torch.optim.Muon", {"lr": 1e-3})))


def test_muon_with_adamw_is_exact_over_steps() -> None:
    torch.manual_seed(0)
    narrow, wide = (MLP(5, width, 3, depth=4).double() for width in (8, 16))
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)
    hyper = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3, "adam_scale": 0.5}
    kinds = [{group["muon"]: group["params"]} for group in muon_groups(plan)]
    assert kinds[0] == {True: ["layers.1.weight", "layers.2.weight"]}
    same = mu.plan(narrow, MLP(5, 8, 3, depth=4).double())
    first = mu.make_optimizer(narrow, same, MuonAdamW, groups=muon_groups(plan), **hyper)
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.randint(3, (32,))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> torch.Tensor:
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with Unrounded():
                optimizer.step()
        return model(x).detach()

    steps(narrow, first, 5)
    mu.widen(narrow, wide, plan)
    second = mu.make_optimizer(wide, plan, MuonAdamW, groups=muon_groups(plan), **hyper)
    mu.widen_optimizer(first, second, plan)
    torch.testing.assert_close(steps(wide, second, 10), steps(narrow, first, 10), rtol=1e-10, atol=1e-10)
    wrong = mu.make_optimizer(
        wide, mu.plan(wide, MLP(5, 16, 3, depth=4).double()), MuonAdamW, groups=muon_groups(plan), **hyper
    )
    assert (steps(wide, wrong, 3) - steps(narrow, first, 3)).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_muon_with_adamw_in_a_recipe_resumes(tmp_path: Path) -> None:
    spec = Spec("mupscale.optim.MuonAdamW", {"lr": 1e-3, "weight_decay": 0.1})
    whole = run_recipe(recipe(optimizer=spec, out=str(tmp_path / "whole")))
    run_recipe(recipe(optimizer=spec, steps=3, out=str(tmp_path / "part")))
    resumed = run_recipe(recipe(optimizer=spec, out=str(tmp_path / "part")), resume=True)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert {g["muon"] for g in resumed.optimizer.param_groups} == {True, False}
    grown = run_recipe(recipe(optimizer=spec, start=str(tmp_path / "whole"), width=16, grow=[], steps=1))
    assert all(state for state in grown.optimizer.state.values())


def test_lightning_grows_by_fresh_units_and_takes_inner_schedulers_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning would call it; tests/train/test_lightning.py has the real one, where it is installed."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    family = mu.Family(lambda width: MLP(5, width, 3), base=8, inputs=torch.randn(4, 5))
    module = SimpleNamespace(model=family.init(8))
    optimizer = family.optimizer(module.model, torch.optim.SGD, lr=0.1)
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    schedule = lr_scheduler.SequentialLR(optimizer, parts, [2])
    trainer = SimpleNamespace(global_step=3, world_size=1, optimizers=[optimizer])
    trainer.lr_scheduler_configs = [SimpleNamespace(scheduler=schedule)]
    lightning_growth(3, family, 16).on_train_batch_end(trainer, module)
    assert module.model.layers[1].weight.shape == (16, 16)
    assert [inner.optimizer is optimizer for inner in schedule._schedulers] == [True, True]
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert {group["lr"] / group["lr_factor"] for group in optimizer.param_groups} == {0.05}
