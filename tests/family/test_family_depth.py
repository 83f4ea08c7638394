"""Families with a depth: which size it is, what grows, and rates that follow it."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from deep_models import ResidualTable
from mupscale.core import Width
from mupscale.models import GPT2
from own_norms import OwnScale
from refusals import refuses
from toys import Toy
from weights import identical, take_step

pytestmark = pytest.mark.usefixtures("float64")

TOKENS = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))


def build(width: int, depth: int) -> nn.Module:
    return GPT2(11, 8, width=width, head_dim=4, layers=depth)


@cache  # what is measured of its members is measured once for all tests
def family(rule: Any = "none") -> mu.Family:
    return mu.Family(build, base={"width": 8, "depth": 2}, inputs=TOKENS, rules=mu.RuleSet(depth=rule))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TOKENS).flatten(0, 1), ((3 * TOKENS + 1) % 11).flatten())


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        take_step(optimizer, loss_of(model))


def hyper(optimizer: Any) -> dict[str, tuple[float, ...]]:
    names = ("lr", "weight_decay", "eps")
    return {n: tuple(g[key] for key in names) for g in optimizer.param_groups for n in g["param_names"]}


@pytest.mark.parametrize("rule", [pytest.param("none", marks=pytest.mark.slow), "complete"])
def test_depth_width_and_both_at_once(rule: str) -> None:
    """The function stays under Identity, and groups are those of a model that was made at that size."""
    one = family(rule)
    model = one.init({"width": 8, "depth": 2})
    optimizer = one.optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    train(model, optimizer)
    before, first = model(TOKENS).detach(), loss_of(model).detach()
    for target, grow in (({"depth": 5}, None), ({"width": {"width": 16, "depth": 4}}, (mu.Copies(), mu.Identity()))):
        grown, more = one.upscale(model, optimizer, grow=grow, exact=True, **target)
        assert float((grown(TOKENS) - before).detach().abs().max()) < 1e-12
        fresh = hyper(one.optimizer(grown, torch.optim.AdamW, lr=1e-2, weight_decay=0.1))
        assert hyper(more) == {name: pytest.approx(values, rel=1e-12) for name, values in fresh.items()}
        train(grown, more)
        assert loss_of(grown) < first


@pytest.mark.quick("target2")
@pytest.mark.parametrize("target", [{"width": 16}, {"depth": 4}, {"width": 16, "depth": 4}])
def test_the_scheduler_comes_back_as_the_third(target: dict[str, int]) -> None:
    """Its schedule goes on over growth in width, in depth and in both, and the three train on."""
    one = family()
    model = one.init({"width": 8, "depth": 2})
    optimizer = one.optimizer(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 1)
    scheduler.step()
    grown, more, schedule = one.upscale(model, optimizer, scheduler=scheduler, **target)
    ratios = [group["lr"] / group["initial_lr"] for group in more.param_groups]
    assert ratios == pytest.approx([0.5] * len(ratios))
    train(grown, more, 1)
    schedule.step()
    assert [group["lr"] / group["initial_lr"] for group in more.param_groups] == pytest.approx([0.25] * len(ratios))


def test_one_number_is_the_one_size_beside_the_depth() -> None:
    one = family()
    model = one.init({"width": 8, "depth": 2})
    assert one.width_of(one.upscale(model, width=16, depth=4, exact=True)[0]) == Width.of({"width": 16, "depth": 4})
    assert one.width_of(one.upscale(model, width={"depth": 4}, exact=True)[0]) == Width.of({"width": 8, "depth": 4})
    assert one.upscale(model, width=16, exact=True)[0].get_parameter("h.1.ln_1.weight").shape == (16,)


def test_a_model_that_somebody_else_built_counts_as_tried() -> None:
    """With one size beside the depth it is that which grows, and small members were tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for depth in (2, 4):
            assert family().plan({"width": 16, "depth": depth}).tried_by == "small members"
            family().upscale(build(8, depth), width={"width": 16}, exact=True)
    with pytest.warns(mu.UncheckedPlan):
        mu.Family(build, base={"width": 8, "depth": 2}).upscale(build(8, 2), width={"width": 16}, exact=True)


@pytest.mark.parametrize("rule", ["none", "complete", "sqrt"])
def test_the_plan_of_a_growth_by_copied_blocks_has_the_rates_of_the_rule(rule: Any) -> None:
    """Under the square root it was refused for want of a batch, which the family has."""
    narrow, wide = {"width": 8, "depth": 2}, {"width": 16, "depth": 4}
    plan = family(rule).growth_plan(narrow, wide, (mu.Copies(), mu.Stack()))
    assert plan["h.3.mlp.c_fc.weight"].constants.depth == (1 if rule == "none" else 2)


def test_a_family_without_a_depth_has_its_members_at_none() -> None:
    one = mu.Family(lambda width: build(width, 2), base=8)
    assert (one.depth_size, one.depth_of(one.build(8))) == (None, 0)
    assert one.plan(16) == one.at(0).plan(16)


def test_a_family_says_what_it_is() -> None:
    assert repr(family("complete")) == (
        "Family(width, depth, base={'width': 8, 'depth': 2}, init_at={'width': 64, 'depth': 2}, rules='depth=complete')"
    )
    assert repr(mu.Family(lambda width: build(width, 2), base=8)) == "Family(width, base=8, init_at=64)"


def test_any_model_of_the_class_has_a_plan() -> None:
    assert family("complete").plan(build(8, 4)) == family("complete").plan({"width": 8, "depth": 4})


@pytest.mark.parametrize("rule", ["cubic", "None", ""])
def test_a_rule_that_is_none_of_them_is_refused(rule: Any) -> None:
    refuses(rf"rules\.depth is {rule!r}: choose from none, complete, sqrt", family, rule)


def test_bad_input() -> None:
    one = family()
    model = one.init({"width": 8, "depth": 3})
    refuses("cannot grow to depth 2", one.upscale, model, depth=2, exact=True)
    refuses("give the size to grow to: width=, depth=, or both", one.upscale, model, exact=True)
    refuses(r"has depth 3.*Choose a larger depth", one.upscale, model, depth=3, exact=True)
    with pytest.raises(mu.MupscaleError, match="width= names depth 4, but depth= is 6: give one of them"):
        one.upscale(model, width={"width": 16, "depth": 4}, depth=6, exact=True)
    for wrong in ({"widht": 16}, {"widht": 16, "depth": 4}, {"width": 16, "heads": 4}):
        with pytest.raises(mu.MupscaleError, match=r"sizes of this family are width and depth.*Write width=\{'width"):
            one.upscale(model, width=wrong, exact=True)
    refuses("sizes of this family are width and depth", one.init, {"widht": 16, "depth": 4})
    with pytest.raises(mu.MupscaleError, match=r"base model lacks the module '0' .*pass a model of the class"):
        one.upscale(nn.Sequential(nn.Linear(3, 4)), width={"width": 16}, exact=True)
    refuses("must name its depth", one.plan, {"width": 8})
    refuses("or a tuple of these", one.upscale, model, depth=6, grow="identity")
    refuses("one depth", one.widening, {"width": 8, "depth": 2}, {"width": 16, "depth": 4})
    plain = mu.Family(lambda width: build(width, 2), base=8)
    with pytest.raises(mu.MupscaleError, match=r"width=16 .* names it as build does, .* {'width': 8, 'layers': 4}"):
        plain.upscale(plain.init(8), depth=4, exact=True)
    named = mu.Family(lambda hidden: build(hidden, 2), base={"hidden": 8})
    refuses(r"width={'hidden': 16} .* {'hidden': 8, 'layers': 4}", named.upscale, named.init(8))
    refuses("no size in base", mu.Family, lambda width: build(width, 2), base=8, rules=mu.RuleSet(depth="complete"))
    refuses(
        "Pass inputs= to the Family",
        mu.Family(build, base={"width": 8, "depth": 2}, rules=mu.RuleSet(depth="complete")).plan,
        {"width": 8, "depth": 4},
    )


def test_complete_at_the_base_depth_is_none() -> None:
    """At the base every factor is 1, and the author's own initialisation is taken as it is."""
    at = {"width": 8, "depth": 2}
    assert family("complete").plan(at) == family().plan(at)
    assert identical(family("complete").init(at), family().init(at))


@pytest.mark.slow
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


def tied_blocks(width: int, depth: int) -> nn.Module:
    """Only a run tells which norm takes the 1/k of the tied readout."""

    def block() -> nn.Module:
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        return Toy(lambda m, x: x + m.down(m.up(m.norm(x)).relu()), norm=OwnScale(width), up=up, down=down)

    def forward(model: Any, tokens: Tensor) -> Tensor:
        x = model.tok(tokens)
        for each in model.blocks:
            x = each(x)
        return model.head(model.last(x))

    blocks, head = nn.ModuleList(block() for _ in range(depth)), nn.Linear(width, 11, bias=False)
    model = Toy(forward, tok=nn.Embedding(11, width), last=OwnScale(width), blocks=blocks, head=head)
    model.head.weight = model.tok.weight
    return model


@pytest.mark.slow
def test_roles_are_learnt_where_rates_follow_the_depth() -> None:
    one = mu.Family(tied_blocks, base={"width": 8, "depth": 1}, inputs=TOKENS, rules=mu.RuleSet(depth="complete"))
    model = one.init({"width": 8, "depth": 1})
    wide, _ = one.upscale(model, width=16, depth=2, inputs=TOKENS, exact=True)
    assert torch.allclose(wide(TOKENS), model(TOKENS), rtol=1e-9, atol=1e-12)


def test_a_width_that_names_no_sizes_is_told_them_at_the_depth_that_there_is() -> None:
    base = {"width": 8, "ffn": 32, "depth": 2}
    family = mu.Family(
        lambda width, ffn, depth: ResidualTable(5, 2, width, depth, ffn), base=base, inputs=torch.randn(4, 5)
    )
    model = family.init(base)
    refuses(r"Write width={'width': 128, 'ffn': 512}, and add depth", family.upscale, model, width=128)
