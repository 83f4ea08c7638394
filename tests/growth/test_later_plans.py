"""Which plan goes with a model that has grown deeper, or twice; another one is refused in words."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.growth import grow_optimizer
from mupscale.models import GPT2

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def build(layers: int, width: int = 8) -> nn.Module:
    return GPT2(11, 8, width=width, head_dim=4, layers=layers).double()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build(layers)
    adam = optimizer(model)
    loss(model, TOKENS).backward()
    adam.step()
    return model, adam


@pytest.mark.parametrize("grow", [mu.Identity(), mu.Stack("interleaved")], ids=["identity", "stack"])
def test_a_plan_for_blocks_is_a_plan(grow: Any, tmp_path: Path) -> None:
    """It goes through a file, gives groups and a norm to clip by, and `upscale` grows by it."""
    (shallow, adam), deep, other = trained(1), build(2), build(2)
    other.load_state_dict(deep.state_dict())
    plan = mu.plan_depth(shallow, deep, inputs=TOKENS, grow=grow)
    assert mu.Plan.from_json(plan.to_json()) == plan
    deepened = mu.upscale(shallow, other, plan)[0]
    grown, deep_adam = mu.upscale(shallow, deep, plan, adam)
    assert all(torch.equal(p, q) for p, q in zip(grown.parameters(), deepened.parameters(), strict=True))
    old, new = shallow.get_parameter("h.0.mlp.c_fc.weight"), grown.get_parameter("h.1.mlp.c_fc.weight")
    assert (new in deep_adam.state) == isinstance(grow, mu.Stack)
    if isinstance(grow, mu.Stack):
        assert torch.equal(deep_adam.state[new]["exp_avg"], adam.state[old]["exp_avg"])
    mu.save(tmp_path / "deep.safetensors", grown, deep_adam, plan)
    assert mu.load(tmp_path / "deep.safetensors", build(2)).plan == plan
    assert norm(grown, plan) == norm(grown)
    assert {group["lr"] for group in mu.param_groups(grown, plan, torch.optim.AdamW, lr=0.1)} == {0.1}


def test_upscale_grows_what_differs() -> None:
    (shallow, adam), deep = trained(1), build(3)
    deep, deep_adam = mu.upscale(shallow, deep, optimizer=adam, inputs=TOKENS)
    assert torch.equal(deep(TOKENS), shallow(TOKENS))
    assert deep_adam is not None
    with pytest.warns(UserWarning, match="copied blocks change the function"):
        mu.upscale(shallow, build(2), grow=mu.Stack(), inputs=TOKENS)
    for said in ({"noise": 1.0}, {"grow": mu.Copies()}):
        with pytest.raises(mu.MupscaleError, match="only the depth grows"):
            mu.upscale(shallow, build(2), inputs=TOKENS, **said)


@pytest.mark.parametrize("grow", [mu.Identity(), mu.Stack("interleaved")], ids=["identity", "stack"])
def test_wider_and_deeper_in_one_call(grow: Any) -> None:
    """What one call writes, to the bit, is what two would: weights, optimizer state and groups."""
    narrow, adam = trained(2)
    deep, other = build(4, 16), build(4, 16)
    other.load_state_dict(deep.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "copied blocks change the function")
        grown, one = mu.upscale(narrow, deep, None, adam, grow=(mu.Copies(), grow), exact=True, inputs=TOKENS)
        wide, first = mu.upscale(narrow, build(2, 16), None, adam, exact=True, inputs=TOKENS)
        expected, two = mu.upscale(wide, other, None, first, grow=grow, inputs=TOKENS)
    if isinstance(grow, mu.Identity):
        torch.testing.assert_close(grown(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)
    rates = [{n: g["lr"] for g in opt.param_groups for n in g["param_names"]} for opt in (one, two)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    for p, q in zip(grown.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
        assert one.state[p].keys() == two.state[q].keys()
        for key in one.state[p]:
            torch.testing.assert_close(one.state[p][key], two.state[q][key], rtol=1e-12, atol=0)


def test_fresh_units_and_silent_blocks_in_one_call() -> None:
    """The default: old units keep their weights in old blocks, at any wider width; new blocks write nothing."""
    (narrow, adam), deep = trained(1), build(2, 12)
    grown, _ = mu.upscale(narrow, deep, optimizer=adam, inputs=TOKENS, fresh=lambda: build(1))
    old = narrow.get_parameter("h.0.mlp.c_fc.weight")
    plan = mu.plan(narrow, build(1, 12), inputs=TOKENS, grow=mu.Fresh())
    entry = plan["h.0.mlp.c_fc.weight"]
    there = grown.get_parameter("h.0.mlp.c_fc.weight")[mu.index_of_old(entry.narrow, entry.axes)]
    assert torch.equal(there, old)
    assert not grown.get_parameter("h.1.mlp.c_proj.weight").any()


@pytest.mark.parametrize("grow", [mu.Identity(), mu.Stack()], ids=["identity", "stack"])
def test_wider_and_then_deeper_is_one_plan(grow: Any) -> None:
    """What a tensor is made of after two growths, and its rule, are in `first.then(second)`, and back from a file."""
    narrow, wide, deep = build(2), build(2, 16), build(4, 16)
    first = mu.plan(narrow, wide, inputs=TOKENS)
    whole = first.then(mu.plan_depth(wide, deep, inputs=TOKENS, grow=grow))
    assert whole.rules["h.3.mlp.c_fc.weight"] == first.rules["h.1.mlp.c_fc.weight"]
    assert whole.sources["h.3.mlp.c_fc.weight"].name == "h.1.mlp.c_fc.weight"
    assert whole.sources["h.3.mlp.c_fc.weight"].kind == ("copy" if isinstance(grow, mu.Stack) else "drawn")
    assert mu.Plan.from_json(whole.to_json()) == whole
    whole.check(narrow, "narrow"), whole.check(deep)


def test_a_plan_of_another_model_is_refused() -> None:
    shallow, deep = build(1), build(2)
    plan = mu.plan(build(2), build(2, 16), inputs=TOKENS)
    with pytest.raises(mu.MupscaleError, match="lacks"):
        mu.upscale(shallow, deep, plan, exact=True)
    with pytest.raises(mu.MupscaleError, match="lacks"):
        grow_optimizer(optimizer(shallow), shallow, deep, plan)
    depth = mu.plan_depth(shallow, deep, inputs=TOKENS)
    with pytest.raises(mu.MupscaleError, match="fresh units"):
        mu.widen(shallow, deep, depth)
    with pytest.raises(mu.MupscaleError, match="fresh units"):
        mu.upscale(shallow, deep, depth, exact=True)


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
    deep = mu.upscale(wide, build(2, 16), inputs=TOKENS)[0]
    deepened = mu.upscale(narrow, base := build(2), inputs=TOKENS)[0]
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
