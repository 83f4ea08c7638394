"""Rule sets in parameter groups: decay over width, the embeddings' rate, and what they do to exact copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import mupscale as mu
from mupscale.models import GPT2, MLP
from mupscale.optim import MuonAdamW, muon_groups

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
ADAMW = {"lr": 0.03, "weight_decay": 0.4, "eps": 1e-3}


def mlp(times: int) -> MLP:
    return MLP(5, [4 * times, 6 * times], 3, depth=3, activation="tanh").double()


def flat(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[p] for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("rule", "power"), [("invariant", 1.0), ("sqrt", 0.5), ("fixed", 0.0), ("inverse", 0.0)])
def test_adamws_decay_over_width(rule: Any, power: float) -> None:
    """λ ∝ width^power where the rate falls with the width; everywhere else it stays."""
    narrow, wide = mlp(1), mlp(4)
    plan, rules = mu.plan(narrow, wide), mu.RuleSet(decay=rule)
    for name, group in flat(mu.make_optimizer(wide, plan, optim.AdamW, rules=rules, **ADAMW), wide).items():
        in_ = 4.0 if name in ("layers.1.weight", "layers.2.weight") else 1.0
        assert group["lr"] == pytest.approx(0.03 / in_, rel=1e-12)
        assert group["weight_decay"] == pytest.approx(0.4 * in_**power, rel=1e-12)
        assert group.get("weight_decay_change", 1.0) == pytest.approx(in_ ** (power - 1), rel=1e-12)
        assert group["eps"] == pytest.approx(1e-3 / (4.0 if plan[name].out else 1.0), rel=1e-12)


@pytest.mark.parametrize(("rule", "power"), [("invariant", 0.0), ("sqrt", -0.25), ("fixed", -0.5), ("inverse", -1.0)])
def test_muons_decay_over_width(rule: Any, power: float) -> None:
    """Its rate for hidden matrices falls as 1/√width, so `inverse`, by which lr·λ falls as 1/width, is not `fixed`."""
    narrow, wide = mlp(1), mlp(4)
    plan, rules = mu.plan(narrow, wide), mu.RuleSet(decay=rule)
    groups = muon_groups(plan)
    made = flat(mu.make_optimizer(wide, plan, MuonAdamW, groups=groups, rules=rules, lr=0.03, weight_decay=0.4), wide)
    hidden = made["layers.1.weight"]
    assert hidden["muon"]
    assert hidden["lr"] == pytest.approx(0.03 / 2, rel=1e-12)
    assert hidden["lr"] * hidden["weight_decay"] == pytest.approx(0.03 * 0.4 * 4**power, rel=1e-12)


@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()], ids=["copies", "fresh"])
def test_groups_grow_by_the_rule_that_they_were_made_by(grow: mu.Operator) -> None:
    """Two growths end where one does."""
    sizes = {n: mlp(n) for n in (1, 2, 6)}
    rules, exact = mu.RuleSet(decay="sqrt"), isinstance(grow, mu.Copies)
    optimizer = mu.make_optimizer(sizes[1], mu.plan(mlp(1), sizes[1]), optim.AdamW, rules=rules, **ADAMW)
    for narrow, wide in ((1, 2), (2, 6)):
        plan, told = mu.plan(sizes[narrow], sizes[wide], grow=grow, inputs=X), nullcontext()
        how: dict[str, Any] = {"exact": True} if exact else {"grow": grow}
        if exact:
            told = pytest.warns(UserWarning, match="with decay=sqrt copies do not go on exactly")
        with told:
            _, optimizer = mu.upscale(sizes[narrow], sizes[wide], plan, optimizer, **how)
    once = flat(mu.make_optimizer(sizes[6], mu.plan(mlp(1), sizes[6]), optim.AdamW, rules=rules, **ADAMW), sizes[6])
    for name, group in flat(optimizer, sizes[6]).items():
        for key in ("lr", "weight_decay", "eps", "lr_factor", "weight_decay_factor", "weight_decay_change"):
            assert group[key] == pytest.approx(once[name][key], rel=1e-12), (name, key)


def parted(rule: Any, mend: Callable[[dict[str, Any]], float]) -> float:
    """How far copies part from the narrow model in training, where `mend` multiplies each group's decay."""
    torch.manual_seed(0)
    narrow, wide = mlp(1), mlp(3)
    optimizer = mu.make_optimizer(narrow, mu.plan(narrow, mlp(1)), optim.AdamW, rules=mu.RuleSet(decay=rule), **ADAMW)
    for _ in range(3):
        step(narrow, optimizer)
    plan = mu.plan(narrow, wide, inputs=X)
    if rule == "invariant":
        wide, grown = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    else:
        with pytest.warns(UserWarning, match="0.3333|0.5774"):
            wide, grown = mu.upscale(narrow, wide, plan, optimizer, exact=True)
    for group in grown.param_groups:
        group["weight_decay"] *= mend(group)
    return max(float((step(narrow, optimizer) - step(wide, grown)).abs()) for _ in range(8))


@pytest.mark.parametrize("rule", ["fixed", "sqrt"])
def test_what_a_group_says_is_what_copies_lack_to_be_exact(rule: str) -> None:
    assert parted("invariant", lambda group: 1.0) < 1e-12
    assert parted(rule, lambda group: 1.0) > 1e-6
    assert parted(rule, lambda group: 1 / group["weight_decay_change"]) < 1e-10
    assert parted(rule, lambda group: group["weight_decay_change"] ** -0.5) > 1e-6


def test_verify_says_that_a_decay_is_not_exact() -> None:
    narrow, wide = mlp(1), mlp(2)
    plan = mu.plan(narrow, wide, inputs=X)
    mu.widen(narrow, wide, plan)
    optimizer = mu.make_optimizer(narrow, mu.plan(narrow, mlp(1)), optim.AdamW, rules=mu.RuleSet("fixed"), **ADAMW)
    with pytest.warns(UserWarning, match="'layers.1.weight' and 1 more. For exact copies use decay=invariant"):
        report = mu.verify(narrow, wide, plan, [X], lambda m, x: m(x).square().mean(), optimizer=optimizer, steps=5)
    assert not report.ok


def test_a_family_has_its_rules_and_gives_them_to_a_strangers_optimizer() -> None:
    family = mu.Family(lambda width: MLP(5, width, 3, depth=3), 8, inputs=X.float(), rules=mu.RuleSet(decay="fixed"))
    model = family.init(32)
    assert {g["weight_decay"] for g in family.optimizer(model, optim.AdamW, lr=0.1, weight_decay=0.4).param_groups} == {
        0.4
    }
    assert {g["decay_rule"] for g in family.param_groups(model, optim.AdamW, lr=0.1)} == {"fixed"}
    own = optim.AdamW(model.parameters(), weight_decay=0.4)
    _, grown = family.upscale(model, own, width=64)
    assert {group["weight_decay"] for group in grown.param_groups} == {0.4}


def test_one_call_grows_by_rules_and_says_what_it_cannot_apply() -> None:
    """An optimizer of the user's own grows by the rules that `upscale` is given; its embeddings keep their rate."""
    small, wide = (GPT2(11, 6, width=width, head_dim=4, layers=1) for width in (8, 16))
    own = optim.AdamW(small.parameters(), lr=0.1, weight_decay=0.4)
    tokens, rules = torch.zeros(1, 6, dtype=torch.int64), mu.RuleSet(decay="fixed", embeddings=4.0)
    with pytest.warns(UserWarning, match="rules: embeddings=4 counts when an optimizer is made"):
        _, grown = mu.upscale(small, wide, optimizer=own, inputs=tokens, rules=rules)
    assert {group["weight_decay"] for group in grown.param_groups} == {0.4}
    assert flat(grown, wide)["wte.weight"]["lr"] == 0.1
    assert not any("decay_rule" in group for group in own.param_groups)
    deep = GPT2(11, 6, width=16, head_dim=4, layers=2)
    _, deeper = mu.upscale(wide, deep, optimizer=grown, inputs=tokens, rules=mu.RuleSet(decay="fixed", depth="sqrt"))
    plan = mu.plan_depth(wide, deep, inputs=tokens, rules=mu.RuleSet(depth="sqrt"))
    theirs = flat(mu.make_optimizer(deep, plan, optim.AdamW, lr=0.1), deep)["h.0.mlp.c_fc.weight"]
    assert flat(deeper, deep)["h.0.mlp.c_fc.weight"]["lr"] == pytest.approx(0.05 * theirs["lr"] / 0.1)
    assert theirs["lr"] < 0.1
    with pytest.raises(mu.MupscaleError, match=r"rules\.depth=sqrt has no effect on a finished plan"):
        mu.upscale(wide, deep, plan, grown, rules=mu.RuleSet(depth="sqrt"))
    with pytest.raises(mu.MupscaleError, match="grow by decay=fixed, and the rules given now say decay=sqrt"):
        mu.upscale(wide, deep, optimizer=grown, inputs=tokens, rules=mu.RuleSet(decay="sqrt"))


def test_coupled_decay_has_no_such_rule() -> None:
    wide = mlp(2)
    with pytest.raises(mu.MupscaleError, match="decay=fixed is a rule for decoupled weight decay"):
        mu.param_groups(wide, mu.plan(mlp(1), wide), optim.SGD, rules=mu.RuleSet("fixed"), lr=0.1, weight_decay=0.1)
    mu.param_groups(wide, mu.plan(mlp(1), wide), optim.SGD, rules=mu.RuleSet("fixed"), lr=0.1)


def test_the_embeddings_rate_is_a_factor_at_every_width_and_after_growth() -> None:
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    family = mu.Family(
        lambda width: GPT2(11, 6, width=width, head_dim=4, layers=1, tied=False),
        8,
        inputs=tokens,
        rules=mu.RuleSet(embeddings=4.0),
    )
    plain = mu.Family(lambda width: GPT2(11, 6, width=width, head_dim=4, layers=1, tied=False), 8, inputs=tokens)
    model = family.init(8)
    optimizer = family.optimizer(model, optim.AdamW, lr=0.1)
    wide, grown = family.upscale(model, optimizer, width=24, lr=0.05)
    theirs = flat(plain.optimizer(wide, optim.AdamW, lr=0.05), wide)
    for name, group in flat(grown, wide).items():
        factor = 4.0 if name in ("wte.weight", "wpe.weight") else 1.0
        assert group["lr"] == pytest.approx(factor * theirs[name]["lr"], rel=1e-12), name
        assert group["weight_decay"] == theirs[name]["weight_decay"]
    with pytest.raises(mu.MupscaleError, match="of which this model has none"):
        mu.make_optimizer(mlp(1), mu.plan(mlp(1), mlp(1)), optim.AdamW, rules=mu.RuleSet(embeddings=2.0), lr=0.1)


def test_a_user_of_megatron_finds_his_multipliers() -> None:
    """`--use-mup` divides the rate of matrices by the width, leaves embeddings and vectors alone, and all decays."""
    narrow, wide = (GPT2(11, 6, heads=heads, head_dim=4, layers=1, tied=False) for heads in (2, 6))
    made = flat(mu.make_optimizer(wide, mu.plan(narrow, wide), optim.AdamW, rules=mu.RuleSet("fixed"), **ADAMW), wide)
    for name, p in wide.named_parameters():
        is_vector_like = p.dim() < 2 or name in ("wte.weight", "wpe.weight")
        assert made[name]["lr"] == pytest.approx(0.03 if is_vector_like else 0.03 / 3, rel=1e-12), name
        assert made[name]["weight_decay"] == pytest.approx(0.4, rel=1e-12), name


def test_muon_and_adamw_never_both_rule_a_parameter() -> None:
    """Hidden matrices have Muon's rate, √(out/in), all others AdamW's; each is in one group, with one state."""
    narrow = GPT2(11, 6, heads=2, head_dim=4, layers=1, tied=False)
    wide = GPT2(11, 6, heads=6, head_dim=4, layers=1, tied=False)
    plan = mu.plan(narrow, wide)
    optimizer = mu.make_optimizer(wide, plan, MuonAdamW, groups=muon_groups(plan), lr=0.1, adjust_lr_fn="original")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(wide.parameters()))
    adamw = flat(mu.make_optimizer(wide, plan, optim.AdamW, lr=0.1), wide)
    for name, group in flat(optimizer, wide).items():
        rule = plan[name].rule
        is_hidden = bool(plan[name].out and plan[name].in_)
        assert group["muon"] is is_hidden, name
        expected = 0.1 * (float(rule.out) / float(rule.in_)) ** 0.5 if is_hidden else adamw[name]["lr"]
        assert group["lr"] == pytest.approx(expected, rel=1e-12), name
        assert group["lr_factor"] == pytest.approx(expected / 0.1, rel=1e-12)
    wide(torch.zeros(1, 6, dtype=torch.int64)).square().mean().backward()
    optimizer.step()
    for name, p in wide.named_parameters():
        keys = {"momentum_buffer"} if plan[name].out and plan[name].in_ else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[p]) == keys, name


def test_a_growth_leaves_the_narrow_optimizers_rule_alone_and_refuses_another() -> None:
    """Four rules can be compared from one half-trained model; what a family made keeps its rule or is refused."""

    def family(decay: Any) -> mu.Family:
        build = lambda width: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))  # noqa: E731
        return mu.Family(build, 8, inputs=torch.randn(4, 3), rules=mu.RuleSet(decay=decay))

    model = family("invariant").init(8)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = [dict(group) for group in plain.param_groups]
    decays = {}
    for decay in ("sqrt", "fixed", "invariant"):
        _, wide = family(decay).upscale(model, plain, width=32)
        decays[decay] = max(group["weight_decay"] for group in wide.param_groups)
        assert [dict(group) for group in plain.param_groups] == before
    assert decays == {"sqrt": 0.2, "fixed": 0.1, "invariant": 0.4}
    own = family("fixed").optimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    with pytest.raises(mu.MupscaleError, match="grow by decay=fixed, and the rules given now say decay=sqrt"):
        family("sqrt").upscale(model, own, width=32)
