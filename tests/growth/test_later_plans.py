"""Which plan goes with a model that has grown deeper, or twice; another one is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import GPT2

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def build(layers: int, width: int = 8) -> nn.Module:
    return GPT2(11, 8, width=width, head_dim=4, layers=layers).double()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


USES: dict[str, Callable[[nn.Module, nn.Module, Any, Path], object]] = {
    "clip": lambda small, large, plan, out: mu.clip_grad_norm_(large, 0.3, plan),
    "save": lambda small, large, plan, out: mu.save(out / "deep.safetensors", large, plan=plan),
    "param_groups": lambda small, large, plan, out: mu.param_groups(large, plan, torch.optim.AdamW, lr=0.1),
    "widen": lambda small, large, plan, out: mu.widen(small, large, plan),
    "upscale": lambda small, large, plan, out: mu.upscale(small, large, plan, exact=True),
    "perturb": lambda small, large, plan, out: mu.perturb(large, plan, 0.1),
    "verify": lambda small, large, plan, out: mu.verify(small, large, plan, [TOKENS], loss),
    "widen_optimizer": lambda small, large, plan, out: mu.widen_optimizer(
        optimizer(small), optimizer(large), plan, narrow=small
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_depth_plan_is_no_plan_of_widths(use: str, tmp_path: Path) -> None:
    shallow, deep = build(1), build(2)
    plan = mu.plan_depth(shallow, deep, inputs=TOKENS)
    with pytest.raises(
        mu.MupscaleError, match=r"is DepthPlan\(.*; pass one .* mupscale\.plan\(base, model, inputs=…\)"
    ):
        USES[use](shallow, deep, plan, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_plan_of_widths_is_no_depth_plan() -> None:
    shallow, deep = build(1), build(2)
    plan: Any = mu.plan(build(2), build(2, 16), inputs=TOKENS)
    with pytest.raises(mu.MupscaleError, match="must be a plan of depth"):
        mu.deepen(shallow, deep, plan)
    with pytest.raises(mu.MupscaleError, match="must be a plan of depth"):
        mu.deepen_optimizer(optimizer(shallow), shallow, deep, plan)


def norm(model: nn.Module, plan: mu.Plan | None = None) -> float:
    model.zero_grad()
    loss(model, TOKENS).backward()
    if plan is None:
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    return float(mu.clip_grad_norm_(model, 1e9, plan))


def test_what_the_message_says_is_right_for_a_deepened_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    narrow = build(1)
    wide, _ = mu.upscale(narrow, build(1, 16), inputs=TOKENS, exact=True)
    deep = mu.deepen(wide, build(2, 16), inputs=TOKENS)
    deepened = mu.deepen(narrow, base := build(2), inputs=TOKENS)
    plan = mu.plan(base, deep, inputs=TOKENS)
    same = mu.widen(deepened, build(2, 16), plan)
    assert norm(same, plan) == pytest.approx(norm(deepened), rel=1e-9)
    mu.save(tmp_path / "deep.safetensors", deep, plan=plan)
    assert mu.load(tmp_path / "deep.safetensors", build(2, 16)).plan == plan


def test_after_growing_twice_the_plan_is_from_the_first_width(tmp_path: Path) -> None:
    torch.manual_seed(0)
    narrow = build(1)
    opt = torch.optim.AdamW(narrow.parameters(), lr=0.01)
    norm(narrow)
    opt.step()
    first = mu.plan(narrow, build(1, 16), inputs=TOKENS)
    wide, wide_opt = mu.upscale(narrow, build(1, 16), first, opt, exact=True)
    second = mu.plan(wide, build(1, 32), inputs=TOKENS)
    wider, wider_opt = mu.upscale(wide, build(1, 32), second, wide_opt, exact=True)
    whole = first.then(second)
    assert whole == mu.plan(narrow, build(1, 32), inputs=TOKENS)
    assert norm(wider, whole) == pytest.approx(norm(narrow), rel=1e-9)
    assert norm(wider, second) != pytest.approx(norm(narrow), rel=0.1)
    mu.save(tmp_path / "wider.safetensors", wider, wider_opt, whole)
    again = build(1, 32)
    again_opt = torch.optim.AdamW(mu.param_groups(again, whole, torch.optim.AdamW, lr=0.01))
    rates = [group["lr"] for group in again_opt.param_groups]
    mu.load(tmp_path / "wider.safetensors", again, again_opt)
    assert [group["lr"] for group in again_opt.param_groups] == rates
