"""Families with a depth: which size it is, what grows, and rates that follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.models import GPT2

pytestmark = pytest.mark.usefixtures("float64")

TOKENS = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))


def build(width: int, depth: int) -> nn.Module:
    return GPT2(11, 8, width=width, head_dim=4, layers=depth)


def family(rule: Any = "none") -> mu.Family:
    return mu.Family(build, base={"width": 8, "depth": 2}, inputs=TOKENS, depth_rule=rule)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TOKENS).flatten(0, 1), ((3 * TOKENS + 1) % 11).flatten())


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def hyper(optimizer: Any) -> dict[str, tuple[float, ...]]:
    names = ("lr", "weight_decay", "eps")
    return {n: tuple(g[key] for key in names) for g in optimizer.param_groups for n in g["param_names"]}


@pytest.mark.parametrize("rule", ["none", "complete"])
def test_depth_width_and_both_at_once(rule: str) -> None:
    """The function stays under Identity, and groups are those of a model that was made at that size."""
    one = family(rule)
    model = one.init({"width": 8, "depth": 2})
    optimizer = one.optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    train(model, optimizer)
    before, first = model(TOKENS).detach(), loss_of(model).detach()
    for target, grow in (
        ({"depth": 5}, None),
        ({"depth": 4}, mu.Identity(at=(2, 3))),
        ({"width": {"width": 16, "depth": 4}}, (mu.Copies(), mu.Identity())),
        ({"width": {"width": 16}}, mu.Copies()),
        ({"width": {"width": 16}, "depth": 3}, mu.Identity()),
    ):
        grown, more = one.upscale(model, optimizer, grow=grow, **target)  # type: ignore[arg-type]
        assert float((grown(TOKENS) - before).detach().abs().max()) < 1e-12
        fresh = hyper(one.optimizer(grown, torch.optim.AdamW, lr=1e-2, weight_decay=0.1))
        assert hyper(more) == {name: pytest.approx(values, rel=1e-12) for name, values in fresh.items()}
        train(grown, more)
        assert loss_of(grown) < first


def test_a_scheduler_goes_on_over_width_and_depth() -> None:
    one = family()
    model = one.init({"width": 8, "depth": 2})
    optimizer = one.optimizer(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    _, more = one.upscale(model, optimizer, width={"width": 16, "depth": 4}, grow=(mu.Fresh(), mu.Identity()))
    assert more is not None
    assert mu.widen_scheduler(scheduler, more).get_last_lr() == [group["lr"] for group in more.param_groups]


def test_any_model_of_the_class_has_a_plan() -> None:
    assert family("complete").plan(build(8, 6)) == family("complete").plan({"width": 8, "depth": 6})


@pytest.mark.parametrize("rule", ["sqrt", "None", "", None])
def test_a_rule_that_is_none_of_them_is_refused(rule: Any) -> None:
    with pytest.raises(mu.MupscaleError, match=rf"depth_rule is 'none' or 'complete', not {rule!r}"):
        family(rule)


def test_bad_input() -> None:
    one = family()
    model = one.init({"width": 8, "depth": 3})
    with pytest.raises(mu.MupscaleError, match="cannot be made 2 deep"):
        one.upscale(model, depth=2)
    with pytest.raises(mu.MupscaleError, match="says its depth"):
        one.plan({"width": 8})
    with pytest.raises(mu.MupscaleError, match="or a pair of the two"):
        one.upscale(model, depth=6, grow="identity")  # type: ignore[arg-type]
    with pytest.raises(mu.MupscaleError, match="one depth"):
        one.widening({"width": 8, "depth": 2}, {"width": 16, "depth": 4})
    plain = mu.Family(lambda width: build(width, 2), base=8)
    with pytest.raises(mu.MupscaleError, match="depth= is for a family"):
        plain.upscale(plain.init(8), depth=4)
    with pytest.raises(mu.MupscaleError, match="no size in base"):
        mu.Family(lambda width: build(width, 2), base=8, depth_rule="complete")
    with pytest.raises(mu.MupscaleError, match="pass inputs= to the Family"):
        mu.Family(build, base={"width": 8, "depth": 2}, depth_rule="complete").plan({"width": 8, "depth": 4})


def test_complete_at_the_base_depth_is_none() -> None:
    """At the base every factor is 1, and the author's own initialisation is taken as it is."""
    at = {"width": 8, "depth": 2}
    assert family("complete").plan(at) == family().plan(at)
    ours, theirs = family("complete").init(at), family().init(at)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_complete_takes_back_the_authors_own_rule() -> None:
    """GPT-2 starts its projections into the stream with 1/√(2L); the rule has the spread at the base, over r."""
    one = family("complete")
    shallow, deep = (one.init({"width": 64, "depth": depth}) for depth in (2, 8))
    std = {
        name: [float(model.get_parameter(f"h.{n}.{name}").detach().std()) for model, n in ((shallow, 0), (deep, 5))]
        for name in ("attn.c_proj.weight", "mlp.c_fc.weight")
    }
    assert std["attn.c_proj.weight"][1] * 4 == pytest.approx(std["attn.c_proj.weight"][0], rel=0.05)
    assert std["mlp.c_fc.weight"][1] == pytest.approx(std["mlp.c_fc.weight"][0], rel=0.05)
