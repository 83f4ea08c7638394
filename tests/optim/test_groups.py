"""What each optimizer is: parameter groups, rules by name, factors under schedulers, state, clipping, refusals."""

import copy
import io
import math
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import SWALR

import mupscale as mu
from mupscale.growth.upscaling import grow_optimizer
from mupscale.models import GPT2, MLP
from mupscale.optim import MuonAdamW, muon_groups
from refusals import refuses
from toys import Toy

DATA = torch.Generator().manual_seed(7)
X = torch.randn(16, 5, generator=DATA, dtype=torch.float64)
Y = torch.randn(16, 3, generator=DATA, dtype=torch.float64)


def mlp(wide: bool) -> MLP:
    """Every hidden width grows by a factor of its own: 2, 3, 4."""
    return MLP(5, [4 * 2, 6 * 3, 4 * 4] if wide else [4, 6, 4], 3, activation="tanh").double()


def gpt2(head_dim: int, **more: Any) -> GPT2:
    sizes = {"layers": 1, "heads": 2, "attention_multiplier": 1.0, **more}
    return GPT2(11, 6, head_dim=head_dim, **sizes).double()


def pair(kind: str = "mlp") -> tuple[nn.Module, nn.Module, mu.Plan]:
    narrow, wide = (mlp(False), mlp(True)) if kind == "mlp" else (gpt2(2), gpt2(6))
    plan = mu.plan(narrow, wide)
    return narrow, mu.widen(narrow, wide, plan), plan


def mse(model: nn.Module, batch: Any = None) -> Tensor:
    return F.mse_loss(model(X), Y)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model).backward()
        optimizer.step()


def flat(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each parameter's own hyperparameters, by name."""
    return {name: {k: v for k, v in group.items() if k != "params"} for group in groups for name, _ in group["params"]}


# ---------------------------------------------------------------------------------------------- factors

Table = dict[str, Callable[[float, float, float], Any]]
EPS: Table = {"eps": lambda out, in_, fold: 1 / (fold * out)}
COUPLED: Table = {"weight_decay": lambda out, in_, fold: in_ / (fold**2 * out)}
DEGREE_0: Table = {"lr": lambda out, in_, fold: fold / in_}
DEGREE_1: Table = {"lr": lambda out, in_, fold: fold**2 * out / in_}
DECOUPLED_0: Table = {"weight_decay": lambda out, in_, fold: in_ / fold}
DECOUPLED_1: Callable[[float, float, float], float] = lambda out, in_, fold: in_ / (fold**2 * out)  # noqa: E731

TABLE: dict[str, tuple[type[optim.Optimizer], dict[str, Any], Table]] = {
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}, {**DEGREE_1, **COUPLED}),
    "Adam": (optim.Adam, {"betas": (0.8, 0.95)}, {**DEGREE_0, **COUPLED, **EPS}),
    "Adam decoupled": (optim.Adam, {"decoupled_weight_decay": True}, {**DEGREE_0, **DECOUPLED_0, **EPS}),
    "AMSGrad": (optim.Adam, {"amsgrad": True}, {**DEGREE_0, **COUPLED, **EPS}),
    "AdamW": (optim.AdamW, {}, {**DEGREE_0, **DECOUPLED_0, **EPS}),
    "NAdam": (optim.NAdam, {}, {**DEGREE_0, **COUPLED, **EPS}),
    "NAdam decoupled": (optim.NAdam, {"decoupled_weight_decay": True}, {**DEGREE_0, **DECOUPLED_0, **EPS}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}, {**DEGREE_0, **COUPLED, **EPS}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}, {**DEGREE_0, **COUPLED, **EPS}),
    "Adamax": (optim.Adamax, {}, {**DEGREE_0, **COUPLED, **EPS}),
    "Adadelta": (optim.Adadelta, {}, {**DEGREE_1, **COUPLED, "eps": lambda out, in_, fold: 1 / (fold * out) ** 2}),
    "ASGD": (optim.ASGD, {"lambd": 0.3}, {**DEGREE_1, **COUPLED, "lambd": DECOUPLED_1}),
    "Rprop": (optim.Rprop, {}, {**DEGREE_0, "step_sizes": lambda *rule: (DEGREE_0["lr"](*rule),) * 2}),
    "SparseAdam": (optim.SparseAdam, {}, {**DEGREE_0, **EPS}),
    "Adafactor": (optim.Adafactor, {}, {"lr": lambda *rule: 1.0, "weight_decay": lambda *rule: 1.0}),
}


@pytest.mark.parametrize("kind", ["mlp", "gpt2"])
@pytest.mark.parametrize("name", TABLE)
def test_every_factor_is_the_one_of_the_table(name: str, kind: str) -> None:
    optimizer, more, table = TABLE[name]
    _, wide, plan = pair(kind)
    hyper: dict[str, Any] = {"lr": 0.03, **more}
    if "weight_decay" in table:
        hyper["weight_decay"] = 0.2
    if "eps" in table:
        hyper["eps"] = 1e-3
    if "step_sizes" in table:
        hyper["step_sizes"] = (1e-4, 0.5)
    groups = flat(mu.param_groups(wide, plan, optimizer, **hyper))
    assert groups.keys() == plan.parameters.keys()
    for parameter, rule in plan.rules.items():
        numbers = (float(rule.out), float(rule.in_), float(rule.fold))
        for key, value in hyper.items():
            expected = table[key](*numbers) if key in table else 1
            assert groups[parameter][key] == pytest.approx(_product(value, expected), rel=1e-15), (parameter, key)
        for key in ("lr", "weight_decay", "eps"):
            if key in table:
                assert groups[parameter][f"{key}_factor"] == pytest.approx(table[key](*numbers), rel=1e-15)
            elif key != "eps" or name != "Adafactor":
                assert f"{key}_factor" not in groups[parameter]
    assert isinstance(optimizer(mu.param_groups(wide, plan, optimizer, **hyper)), optimizer)


def _product(value: Any, factor: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(v * f for v, f in zip(value, factor if isinstance(factor, tuple) else (factor,) * 9, strict=False))
    return value if isinstance(value, bool) or not isinstance(value, float) else value * factor


@pytest.mark.parametrize("kind", ["mlp", "gpt2"])
def test_adafactors_two_eps_are_of_a_second_moment_and_of_a_weight(kind: str) -> None:
    """eps1 floors row and column means of squares, of degree 2; for vectors torch floors the root, of degree 1."""
    _, wide, plan = pair(kind)
    groups = flat(mu.param_groups(wide, plan, optim.Adafactor, eps=(1e-4, 1e-2)))
    implicit = flat(mu.param_groups(wide, plan, optim.Adafactor))
    for name, rule in plan.rules.items():
        gradient, weight = 1 / float(rule.fold * rule.out), float(rule.fold) / float(rule.in_)
        degree = 2 if len(plan[name].narrow) == 2 else 1
        assert groups[name]["eps"] == pytest.approx((1e-4 * gradient**degree, 1e-2 * weight))
        assert groups[name]["eps_factor"] == pytest.approx((gradient**degree, weight))
        assert implicit[name]["eps"] == pytest.approx(
            (torch.finfo(torch.float64).eps * gradient**degree, 1e-3 * weight)
        )


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_muons_learning_rate_takes_back_its_own_adjustment(adjust: str | None) -> None:
    narrow, wide = MLP(5, [4, 6], 3, bias=False, depth=3), MLP(5, [8, 18], 3, bias=False, depth=3)
    plan = mu.plan(narrow, wide)
    groups = flat(mu.param_groups(wide, plan, optim.Muon, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust))

    def own(rows: int, columns: int) -> float:
        if adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    for name, rule in plan.rules.items():
        effective = groups[name]["lr"] * own(*plan[name].wide)
        assert effective == pytest.approx(0.01 * own(*plan[name].narrow) * math.sqrt(rule.out / rule.in_)), name
        assert groups[name]["lr"] * groups[name]["weight_decay"] == pytest.approx(0.01 * 0.1)
        assert groups[name]["lr_factor"] == pytest.approx(groups[name]["lr"] / 0.01)
        assert groups[name]["eps_factor"] == pytest.approx(math.sqrt(rule.in_ / rule.out))


class Hidden(optim.AdamW):
    """Defaults behind keywords, which the signature does not show."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **{"eps": 1e-5, "lr": 0.02, **kwargs})


class HiddenFlag(optim.Adam):
    """A flag that decides how decay scales: coupled, its factor would be in_ / out = 2 / 3."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, decoupled_weight_decay=True)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optim.AdamW, {"lr": 1e-3 / 2, "eps": 1e-8 / 3, "weight_decay": 1e-2 * 2}),
        (optim.SGD, {"lr": 1e-3 * 3 / 2}),
        (Hidden, {"lr": 0.02 / 2, "eps": 1e-5 / 3, "weight_decay": 1e-2 * 2}),
        (HiddenFlag, {"lr": 1e-3 / 2, "eps": 1e-8 / 3, "weight_decay": 0.1 * 2}),
    ],
)
def test_hyperparameters_that_were_not_passed_are_scaled_too(optimizer: Any, expected: dict[str, float]) -> None:
    """The class itself is asked for its defaults."""
    _, wide, plan = pair()
    group = flat(mu.param_groups(wide, plan, optimizer))["layers.1.weight"]
    assert {key: group[key] for key in expected} == pytest.approx(expected)
    assert ("eps" in group) == ("eps_factor" in group) == ("eps" in expected)


# ---------------------------------------------------------------------------------------------- groups


def test_a_tied_gpt2_of_twelve_layers_needs_at_most_four_groups() -> None:
    with torch.device("meta"):
        narrow, wide = gpt2(2, layers=12), gpt2(4, layers=12)
    plan = mu.plan(narrow, wide)
    for optimizer in (optim.AdamW, optim.SGD, optim.Adam):
        groups = mu.param_groups(wide, plan, optimizer, lr=1e-3)
        assert len(groups) <= 4
        names = [name for group in groups for name, _ in group["params"]]
        assert sorted(names) == sorted(plan.parameters)


@pytest.mark.parametrize("given_as", ["tensors", "pairs", "names", "generator"])
def test_the_users_own_groups_are_kept(given_as: str) -> None:
    _, wide, plan = pair("gpt2")
    named = dict(wide.named_parameters())

    def params(names: list[str]) -> Any:
        if given_as == "names":
            return names
        if given_as == "pairs":
            return [(name, named[name]) for name in names]
        return (named[n] for n in names) if given_as == "generator" else [named[n] for n in names]

    decay = [n for n, p in named.items() if p.dim() == 2]
    rest = [n for n, p in named.items() if p.dim() != 2]
    groups = mu.param_groups(
        wide,
        plan,
        optim.AdamW,
        groups=[{"params": params(decay), "weight_decay": 0.1}, {"params": params(rest), "weight_decay": 0.0}],
        lr=1e-2,
    )
    for name, group in flat(groups).items():
        assert group["weight_decay"] == pytest.approx(0.1 * group["weight_decay_factor"] if name in decay else 0.0)
        assert group["lr"] == pytest.approx(1e-2 * group["lr_factor"])
    for group in groups:
        assert len({named[name].dim() == 2 for name, _ in group["params"]}) == 1, "decay and no decay in one group"
    assert len(groups) <= 6
    assert all(p is named[name] for group in groups for name, p in group["params"])


def test_equal_groups_of_the_user_are_merged() -> None:
    _, wide, plan = pair("gpt2")
    names = list(plan.parameters)
    one = mu.param_groups(wide, plan, optim.AdamW, lr=0.1)
    many = mu.param_groups(wide, plan, optim.AdamW, groups=[{"params": [n]} for n in names], lr=0.1)
    assert [[n for n, _ in g["params"]] for g in one] == [[n for n, _ in g["params"]] for g in many]
    apart = mu.param_groups(wide, plan, optim.AdamW, groups=[{"params": [n], "tag": n} for n in names], lr=0.1)
    assert len(apart) == len(names)
    assert {g["tag"] for g in apart} == set(names)


def test_a_groups_own_rate_goes_before_the_common_one_and_strangers_are_refused_by_name() -> None:
    _, wide, plan = pair()
    own = [{"params": "layers.0.weight", "lr": 1.0}, {"params": wide.layers[1].weight}]
    groups = flat(mu.param_groups(wide, plan, optim.SGD, groups=own, lr=0.1))
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates == pytest.approx({"layers.0.weight": 1.0 * 2, "layers.1.weight": 0.1 * 3 / 2})
    for stranger, told in (("layers.9.weight", r"layers\.9\.weight"), (nn.Parameter(torch.zeros(2)), "a tensor")):
        with pytest.raises(mu.MupscaleError, match=f"{told}'? is not a parameter of the model"):
            mu.param_groups(wide, plan, optim.SGD, groups=[{"params": [stranger]}])
    _, wide, plan = pair("gpt2")
    tied = mu.param_groups(wide, plan, optim.AdamW, groups=[{"params": ["lm_head.weight"]}])
    assert list(flat(tied)) == ["wte.weight"]


def test_everything_else_is_passed_through() -> None:
    _, wide, plan = pair()
    hyper = {"lr": 1e-3, "betas": (0.7, 0.8), "foreach": True, "amsgrad": True, "maximize": True, "capturable": False}
    for optimizer in (
        mu.make_optimizer(wide, plan, optim.AdamW, **hyper),
        optim.AdamW(mu.param_groups(wide, plan, optim.AdamW, **hyper)),
    ):
        for group in optimizer.param_groups:
            for key in ("betas", "foreach", "amsgrad", "maximize", "capturable"):
                assert group[key] == hyper[key]
            assert group["param_names"]
    for group in mu.param_groups(wide, plan, optim.AdamW, fused=True):
        assert group["fused"] is True
    sgd = mu.make_optimizer(wide, plan, optim.SGD, lr=0.1, momentum=0.8, dampening=0.1)
    assert all(group["momentum"] == 0.8 and group["dampening"] == 0.1 for group in sgd.param_groups)


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
def test_a_tensor_learning_rate_is_neither_changed_nor_shared(optimizer: type[optim.Optimizer]) -> None:
    """Not in groups, nor by a schedule, nor in a growth."""
    narrow, wide, plan = pair()
    lr = torch.tensor(0.5, dtype=torch.float64)
    made = mu.make_optimizer(wide, plan, optimizer, lr=lr, foreach=False)
    started = optimizer(narrow.parameters(), lr=lr, foreach=False)
    for groups in (
        mu.param_groups(wide, plan, optimizer, lr=lr),
        made.param_groups,
        grow_optimizer(started, narrow, wide, plan).param_groups,
    ):
        rates = [group["lr"] for group in groups]
        assert len(rates) > 2
        assert len({rate.data_ptr() for rate in [lr, *rates]}) == len(rates) + 1
        assert [rate.item() for rate in rates] == pytest.approx([0.5 * group["lr_factor"] for group in groups])
    schedule = sched.ExponentialLR(made, 0.5)
    made.step()
    schedule.step()
    assert lr.item() == started.param_groups[0]["lr"].item() == 0.5
    assert all(group["lr"].item() == pytest.approx(0.25 * group["lr_factor"]) for group in made.param_groups)


# ---------------------------------------------------------------------------------------------- rules by name

ADAMW = {"lr": 0.03, "weight_decay": 0.4, "eps": 1e-3}


def deep(times: int) -> MLP:
    return MLP(5, [4 * times, 6 * times], 3, depth=3, activation="tanh").double()


def named(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[p] for name, p in model.named_parameters()}


@pytest.mark.parametrize(("rule", "power"), [("invariant", 1.0), ("sqrt", 0.5), ("fixed", 0.0), ("inverse", 0.0)])
def test_adamws_decay_over_width(rule: Any, power: float) -> None:
    """λ ∝ width^power where the rate falls with the width; everywhere else it stays."""
    narrow, wide = deep(1), deep(4)
    plan, rules = mu.plan(narrow, wide), mu.RuleSet(decay=rule)
    for name, group in named(mu.make_optimizer(wide, plan, optim.AdamW, rules=rules, **ADAMW), wide).items():
        in_ = 4.0 if name in ("layers.1.weight", "layers.2.weight") else 1.0
        assert group["lr"] == pytest.approx(0.03 / in_, rel=1e-12)
        assert group["weight_decay"] == pytest.approx(0.4 * in_**power, rel=1e-12)
        assert group.get("weight_decay_change", 1.0) == pytest.approx(in_ ** (power - 1), rel=1e-12)
        assert group["eps"] == pytest.approx(1e-3 / (4.0 if plan[name].out else 1.0), rel=1e-12)


@pytest.mark.parametrize(("rule", "power"), [("invariant", 0.0), ("sqrt", -0.25), ("fixed", -0.5), ("inverse", -1.0)])
def test_muons_decay_over_width(rule: Any, power: float) -> None:
    """Its rate for hidden matrices falls as 1/√width, so `inverse`, by which lr·λ falls as 1/width, is not `fixed`."""
    narrow, wide = deep(1), deep(4)
    plan, rules = mu.plan(narrow, wide), mu.RuleSet(decay=rule)
    groups = muon_groups(plan)
    made = named(mu.make_optimizer(wide, plan, MuonAdamW, groups=groups, rules=rules, lr=0.03, weight_decay=0.4), wide)
    hidden = made["layers.1.weight"]
    assert hidden["muon"]
    assert hidden["lr"] == pytest.approx(0.03 / 2, rel=1e-12)
    assert hidden["lr"] * hidden["weight_decay"] == pytest.approx(0.03 * 0.4 * 4**power, rel=1e-12)


@pytest.mark.parametrize("rule", ["invariant", "sqrt"])
@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()], ids=["copies", "fresh"])
def test_factors_of_two_widenings_multiply(grow: mu.Operator, rule: Any) -> None:
    """Two growths end where one does, by the rule that groups were made by; factors are those of the first rates."""
    sizes = {n: deep(n) for n in (1, 2, 6)}
    rules, told = mu.RuleSet(decay=rule), nullcontext()
    optimizer = mu.make_optimizer(sizes[1], mu.plan(deep(1), sizes[1]), optim.AdamW, rules=rules, **ADAMW)
    for narrow, wide in ((1, 2), (2, 6)):
        plan = mu.plan(sizes[narrow], sizes[wide], grow=grow, inputs=X)
        how: dict[str, Any] = {"exact": True} if isinstance(grow, mu.Copies) else {"grow": grow}
        if "exact" in how and rule == "sqrt":
            told = pytest.warns(UserWarning, match="with decay=sqrt copies do not go on exactly")
        with told:
            _, optimizer = mu.upscale(sizes[narrow], sizes[wide], plan, optimizer, **how)
    once = named(mu.make_optimizer(sizes[6], mu.plan(deep(1), sizes[6]), optim.AdamW, rules=rules, **ADAMW), sizes[6])
    factors = {"lr_factor", "weight_decay_factor", "eps_factor", *(["weight_decay_change"] if rule == "sqrt" else [])}
    for name, group in named(optimizer, sizes[6]).items():
        for key in {*ADAMW, *factors}:
            assert group[key] == pytest.approx(once[name][key], rel=1e-12), (name, key)


def test_verify_says_that_a_decay_is_not_exact() -> None:
    narrow, wide = deep(1), deep(2)
    plan = mu.plan(narrow, wide, inputs=X)
    mu.widen(narrow, wide, plan)
    optimizer = mu.make_optimizer(narrow, mu.plan(narrow, deep(1)), optim.AdamW, rules=mu.RuleSet("fixed"), **ADAMW)
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
    assert named(grown, wide)["wte.weight"]["lr"] == 0.1
    assert not any("decay_rule" in group for group in own.param_groups)
    deep = GPT2(11, 6, width=16, head_dim=4, layers=2)
    _, deeper = mu.upscale(wide, deep, optimizer=grown, inputs=tokens, rules=mu.RuleSet(decay="fixed", depth="sqrt"))
    plan = mu.plan_depth(wide, deep, inputs=tokens, rules=mu.RuleSet(depth="sqrt"))
    theirs = named(mu.make_optimizer(deep, plan, optim.AdamW, lr=0.1), deep)["h.0.mlp.c_fc.weight"]
    assert named(deeper, deep)["h.0.mlp.c_fc.weight"]["lr"] == pytest.approx(0.05 * theirs["lr"] / 0.1)
    assert theirs["lr"] < 0.1
    with pytest.raises(mu.MupscaleError, match=r"rules\.depth=sqrt has no effect on a finished plan"):
        mu.upscale(wide, deep, plan, grown, rules=mu.RuleSet(depth="sqrt"))
    with pytest.raises(mu.MupscaleError, match="grow by decay=fixed, and the rules given now say decay=sqrt"):
        mu.upscale(wide, deep, optimizer=grown, inputs=tokens, rules=mu.RuleSet(decay="sqrt"))


def test_coupled_decay_has_no_such_rule() -> None:
    wide = deep(2)
    with pytest.raises(mu.MupscaleError, match="decay=fixed is a rule for decoupled weight decay"):
        mu.param_groups(wide, mu.plan(deep(1), wide), optim.SGD, rules=mu.RuleSet("fixed"), lr=0.1, weight_decay=0.1)
    mu.param_groups(wide, mu.plan(deep(1), wide), optim.SGD, rules=mu.RuleSet("fixed"), lr=0.1)


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
    theirs = named(plain.optimizer(wide, optim.AdamW, lr=0.05), wide)
    for name, group in named(grown, wide).items():
        factor = 4.0 if name in ("wte.weight", "wpe.weight") else 1.0
        assert group["lr"] == pytest.approx(factor * theirs[name]["lr"], rel=1e-12), name
        assert group["weight_decay"] == theirs[name]["weight_decay"]
    with pytest.raises(mu.MupscaleError, match="of which this model has none"):
        mu.make_optimizer(deep(1), mu.plan(deep(1), deep(1)), optim.AdamW, rules=mu.RuleSet(embeddings=2.0), lr=0.1)


def test_muon_and_adamw_never_both_rule_a_parameter() -> None:
    """Hidden matrices have Muon's rate, √(out/in), all others AdamW's; each is in one group, with one state."""
    narrow = GPT2(11, 6, heads=2, head_dim=4, layers=1, tied=False)
    wide = GPT2(11, 6, heads=6, head_dim=4, layers=1, tied=False)
    plan = mu.plan(narrow, wide)
    optimizer = mu.make_optimizer(wide, plan, MuonAdamW, groups=muon_groups(plan), lr=0.1, adjust_lr_fn="original")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(wide.parameters()))
    adamw = named(mu.make_optimizer(wide, plan, optim.AdamW, lr=0.1), wide)
    for name, group in named(optimizer, wide).items():
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
    plain = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = [dict(group) for group in plain.param_groups]
    decays = {}
    for decay in ("sqrt", "fixed", "invariant"):
        _, wide = family(decay).upscale(model, plain, width=32)
        decays[decay] = max(group["weight_decay"] for group in wide.param_groups)
        assert [dict(group) for group in plain.param_groups] == before
    assert decays == {"sqrt": 0.2, "fixed": 0.1, "invariant": 0.4}
    own = family("fixed").optimizer(model, optim.AdamW, lr=0.1, weight_decay=0.1)
    refuses("grow by decay=fixed, and the rules given now say decay=sqrt", family("sqrt").upscale, model, own, width=32)


# ---------------------------------------------------------------------------------------------- schedulers

Rates = Callable[[float], Any]  # a rate as the scheduler wants it: the number itself, or one per group
Maker = Callable[[optim.Optimizer, Rates], Any]
SCHEDULERS: dict[str, Maker] = {
    "LambdaLR": lambda o, r: sched.LambdaLR(o, lambda e: 1 / (1 + e)),
    "MultiplicativeLR": lambda o, r: sched.MultiplicativeLR(o, lambda e: 0.9 - 0.01 * e),
    "StepLR": lambda o, r: sched.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o, r: sched.MultiStepLR(o, [2, 5, 9], 0.3),
    "ConstantLR": lambda o, r: sched.ConstantLR(o, 0.25, total_iters=4),
    "LinearLR": lambda o, r: sched.LinearLR(o, 0.1, 0.9, total_iters=7),
    "ExponentialLR": lambda o, r: sched.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o, r: sched.PolynomialLR(o, 10, power=2.0),
    "CosineAnnealingLR": lambda o, r: sched.CosineAnnealingLR(o, 8, eta_min=0.0),
    "CosineAnnealingWarmRestarts": lambda o, r: sched.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=0.0),
    "OneCycleLR": lambda o, r: sched.OneCycleLR(o, max_lr=r(0.4), total_steps=14, three_phase=True),
    "CyclicLR": lambda o, r: sched.CyclicLR(o, base_lr=r(0.01), max_lr=r(0.4), step_size_up=3, step_size_down=2),
    "ReduceLROnPlateau": lambda o, r: sched.ReduceLROnPlateau(o, factor=0.5, patience=1, min_lr=r(0.02)),
    "SequentialLR": lambda o, r: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.1, total_iters=4), sched.CosineAnnealingLR(o, 6)], milestones=[4]
    ),
    "ChainedScheduler": lambda o, r: sched.ChainedScheduler(
        [sched.ConstantLR(o, 0.5, total_iters=4), sched.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o, r: SWALR(o, swa_lr=r(0.05), anneal_epochs=5),
}
LOSSES = [5.0, 4.0, 4.1, 4.2, 4.3, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6]


def advance(optimizer: optim.Optimizer, scheduler: Any, loss: float) -> list[float]:
    optimizer.step()
    if isinstance(scheduler, sched.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
    return [group["lr"] / group.get("lr_factor", 1.0) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: sched.CosineAnnealingLR(o, 8, eta_min=0.02),
        lambda o: sched.CosineAnnealingWarmRestarts(o, 5, eta_min=0.02),
        lambda o: sched.SequentialLR(o, [sched.LinearLR(o), sched.CosineAnnealingLR(o, 8, eta_min=0.02)], [5]),
    ],
    ids=["CosineAnnealingLR", "CosineAnnealingWarmRestarts", "SequentialLR"],
)
def test_the_floor_of_a_cosine_schedule_is_each_groups_own(
    make: Callable[[optim.Optimizer], Any], tmp_path: Path
) -> None:
    narrow, wide, plan = pair("gpt2")
    optimizer = optim.SGD(narrow.parameters(), lr=0.1)
    scheduler = make(optimizer)
    for _ in range(3):
        advance(optimizer, scheduler, 0.0)
    grown = grow_optimizer(optimizer, narrow, wide, plan)
    continued = mu.widen_scheduler(scheduler, grown)
    assert len({group["lr_factor"] for group in grown.param_groups}) >= 3
    for number in range(12):
        if number == 5:
            wider = gpt2(12)
            grown = grow_optimizer(grown, wide, wider, mu.plan(wide, wider))
            continued = mu.widen_scheduler(continued, grown)
        (expected,) = advance(optimizer, scheduler, 0.0)
        assert advance(grown, continued, 0.0) == pytest.approx([expected] * len(grown.param_groups), rel=1e-9)
    assert isinstance(continued, type(scheduler))
    file = io.BytesIO()
    torch.save(continued, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    path = mu.save(tmp_path / "wide", wider, grown, scheduler=continued.state_dict())
    resumed, plain = (make(optim.SGD(copy.deepcopy(grown.param_groups))) for _ in range(2))
    saved = mu.load(path, wider, resumed.optimizer, resumed)
    plain.load_state_dict(saved.extra["scheduler"])
    continued.step()
    for one in (again, resumed):
        one.step()
        assert one.get_last_lr() == pytest.approx(continued.get_last_lr(), rel=1e-12)
    refuses(r"mupscale\.load\(path, model, optimizer, scheduler\)", plain.step)
    refuses("holds no schedule", mu.load, mu.save(path, wider), scheduler=resumed)


@pytest.mark.parametrize("ratio", [None, 3.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_after_widening(name: str, ratio: float | None) -> None:
    """In the middle of a schedule, on its milestones and between them; the narrow one is left alone.

    ratio: upscale(lr=…) is the rate at that moment; all later rates of the schedule change in the same ratio.
    """
    for at in (1, 3, 5, 6):
        narrow, wide, plan = pair("gpt2")
        optimizer = optim.SGD(narrow.parameters(), lr=0.1, momentum=0.5)
        scheduler = SCHEDULERS[name](optimizer, lambda rate: rate)
        for loss in LOSSES[:at]:
            advance(optimizer, scheduler, loss)
        (before,) = optimizer.param_groups
        now = before["lr"]
        grown = grow_optimizer(optimizer, narrow, wide, plan, lr=None if ratio is None else ratio * now)
        factors = [group["lr_factor"] for group in grown.param_groups]
        assert len(factors) >= 3
        rates = [(ratio or 1.0) * now * factor for factor in factors]
        assert [group["lr"] for group in grown.param_groups] == pytest.approx(rates, rel=1e-12)
        for group in grown.param_groups:  # by which torch's own way to go on, last_epoch=, works, too
            if ratio is None and "initial_lr" in before:
                assert group["initial_lr"] == pytest.approx(before["initial_lr"] * group["lr_factor"], rel=1e-12)
            assert ratio is None or "initial_lr" not in group
        continued = mu.widen_scheduler(scheduler, grown)
        assert continued.get_last_lr() == pytest.approx([group["lr"] for group in grown.param_groups])
        for loss in LOSSES[at:]:
            rates = advance(grown, continued, loss)
            (expected,) = advance(optimizer, scheduler, loss)
            assert rates == pytest.approx([(ratio or 1.0) * expected] * len(rates), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("stopped", [False, True])
def test_groups_keep_their_ratio_where_the_rate_changes(stopped: bool) -> None:
    """lr= is the first group's rate; a group that trains at a fifth of it, or not at all, goes on so."""
    narrow, wide, plan = pair()
    first, second, *rest = narrow.parameters()
    groups = [{"params": [first]}, {"params": [second], "lr": 0.02}, {"params": rest, "lr": 0.0}]
    optimizer = optim.SGD(groups, lr=0.1)
    scheduler = sched.LambdaLR(optimizer, lambda epoch: float(epoch == 0 or not stopped))
    optimizer.step()
    scheduler.step()
    grown = grow_optimizer(optimizer, narrow, wide, plan, lr=0.05)
    shares = {0: 1.0, 1: 0.2, 2: 0.0}
    for group in grown.param_groups:
        expected = 0.05 * shares[group["from_group"]] * group["lr_factor"]
        assert group["lr"] == pytest.approx(expected, rel=1e-12)
    if not stopped:
        mu.widen_scheduler(scheduler, grown).step()
        assert all(group["lr"] == 0 for group in grown.param_groups if group["from_group"] == 2)
        assert mu.per_group(grown, 0.5) == pytest.approx([10 * group["lr"] for group in grown.param_groups])


def test_another_rate_where_a_schedule_is_at_zero() -> None:
    narrow, wide, plan = pair()
    optimizer = optim.SGD(narrow.parameters(), lr=0.1)
    scheduler = sched.LambdaLR(optimizer, lambda epoch: float(epoch))
    grown = grow_optimizer(optimizer, narrow, wide, plan, lr=0.2)
    refuses("at a learning rate of 0", mu.widen_scheduler, scheduler, grown)
    same = copy.deepcopy(wide)
    again = grow_optimizer(grown, wide, same, mu.plan(wide, same))
    assert "lr_change" not in again.param_groups[0]


def test_a_scheduler_with_a_function_per_group() -> None:
    narrow, wide, plan = pair()
    weights = [p for p in narrow.parameters() if p.dim() > 1]
    biases = [p for p in narrow.parameters() if p.dim() == 1]
    optimizer = optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)
    scheduler = sched.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1.0])
    advance(optimizer, scheduler, 0.0)
    grown = grow_optimizer(optimizer, narrow, wide, plan)
    continued = mu.widen_scheduler(scheduler, grown)
    rates = advance(grown, continued, 0.0)
    for group, rate in zip(grown.param_groups, rates, strict=True):
        expected = 0.1 if all(p.dim() == 1 for p in group["params"]) else 0.025
        assert rate == pytest.approx(expected)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    _, wide, plan = pair()
    optimizer = mu.make_optimizer(wide, plan, optim.SGD, lr=0.1)
    refuses("upscale made", mu.widen_scheduler, sched.ExponentialLR(optimizer, 0.9), optimizer)


# ---------------------------------------------------------------------------------------------- state


def trained(named: bool = False) -> tuple[nn.Module, nn.Module, mu.Plan, optim.Optimizer]:
    narrow, wide = mlp(False), mlp(True)
    optimizer = optim.AdamW(narrow.named_parameters() if named else narrow.parameters(), lr=0.01)
    train(narrow, optimizer)
    plan = mu.plan(narrow, wide)
    return narrow, mu.widen(narrow, wide, plan), plan, optimizer


def assert_state(grown: optim.Optimizer, wide: nn.Module, optimizer: optim.Optimizer, narrow: nn.Module) -> None:
    """By the table: first moments times 1/out, second ones times 1/out², copied; steps as they are."""
    plan = mu.plan(narrow, wide)
    theirs = dict(narrow.named_parameters())
    for name, p in wide.named_parameters():
        entry, state, source = plan[name], grown.state[p], optimizer.state[theirs[name]]
        assert state["step"] == source["step"]
        for key, degree in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = source[key] / float(entry.rule.out) ** degree
            for dim, axis in entry.axes.items():
                expected = expected.repeat_interleave(int(axis.times), dim)
            torch.testing.assert_close(state[key], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("source", ["object", "state dict", "file"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_state_of_an_optimizer_from_anywhere(source: str, named: bool, tmp_path: Path, float64: None) -> None:
    narrow, wide, plan, optimizer = trained(named)
    given: Any = optimizer if source == "object" else optimizer.state_dict()
    if source == "file":
        torch.save(given, tmp_path / "optimizer.pt")
        given = mu.load_torch(tmp_path / "optimizer.pt")
    grown = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    if not named:
        refuses(r"cannot tell which parameter is which in the narrow optimizer", mu.widen_optimizer, given, grown, plan)
        if source != "object":
            again = optim.AdamW(narrow.parameters(), lr=0.01)
            again.load_state_dict(given)
            given = again
    assert mu.widen_optimizer(given, grown, plan, narrow=narrow) is grown
    assert_state(grown, wide, optimizer, narrow)
    train(narrow, optimizer)
    train(wide, grown)
    torch.testing.assert_close(wide(X), narrow(X), rtol=1e-12, atol=1e-12)


def test_models_tell_which_parameter_is_which(float64: None) -> None:
    """In another order and of equal shapes, in several groups; the wide optimizer's, too."""
    narrow, wide = mlp(False), mlp(True)
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)
    optimizer = optim.AdamW(reversed(list(narrow.parameters())), lr=0.01)
    train(narrow, optimizer)
    split = [{"params": [p for p in wide.parameters() if p.dim() == d]} for d in (1, 2)]
    grown = optim.AdamW(split, lr=0.01)
    refuses(r"which in the wide optimizer .*pass wide=", mu.widen_optimizer, optimizer, grown, plan, narrow=narrow)
    for given in (grown, optim.AdamW(list(wide.parameters()), lr=0.01)):
        mu.widen_optimizer(optimizer, given, plan, narrow=narrow, wide=wide)
        assert_state(given, wide, optimizer, narrow)
    matrices, vectors = ([p for p in narrow.parameters() if p.dim() == d] for d in (2, 1))
    optimizer = optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    train(narrow, optimizer)
    grown = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    refuses(r"which in the narrow optimizer .* 2 groups.*pass narrow=", mu.widen_optimizer, optimizer, grown, plan)
    with pytest.raises(mu.MupscaleError, match=r"2 groups.*load it into the narrow optimizer.*named_parameters"):
        mu.widen_optimizer(optimizer.state_dict(), grown, plan)
    assert not grown.state
    mu.widen_optimizer(optimizer, grown, plan, narrow=narrow)
    assert_state(grown, wide, optimizer, narrow)


def shell(wide: bool) -> nn.Module:
    """A model with a child that is called as DDP's prefix is."""
    return Toy(lambda model, x: model.module(x), module=mlp(wide))


@pytest.mark.parametrize("build", [mlp, shell])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_in_a_saved_state_may_carry_the_wrappers_prefixes(prefix: str, build: Any, float64: None) -> None:
    narrow, wide = build(False), build(True)
    plan = mu.plan(narrow, wide)
    optimizer = optim.AdamW([(prefix + name, p) for name, p in narrow.named_parameters()], lr=0.01)
    train(narrow, optimizer)
    mu.widen({prefix + name: p for name, p in narrow.state_dict().items()}, wide, plan)
    grown = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    mu.widen_optimizer(optimizer.state_dict(), grown, plan)
    assert_state(grown, wide, optimizer, narrow)
    torch.testing.assert_close(wide(X), narrow(X), rtol=1e-12, atol=1e-12)


def test_parameters_without_state_yet_are_fine() -> None:
    narrow, wide, plan, optimizer = trained(named=True)
    bias = narrow.layers[0].bias
    del optimizer.state[bias]
    grown = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    mu.widen_optimizer(optimizer, grown, plan)
    assert wide.layers[0].bias not in grown.state
    assert len(grown.state) == len(plan.parameters) - 1
    fresh = mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01)
    mu.widen_optimizer(optim.AdamW(narrow.parameters()), fresh, plan)
    mu.widen_optimizer(optim.AdamW(narrow.parameters()).state_dict(), fresh, plan)
    assert not fresh.state
    train(wide, fresh, 1)
    assert mu.upscale(narrow, wide, plan, exact=True) == (wide, None)  # and no optimizer at all


def test_state_that_does_not_belong_to_the_wide_optimizer_is_refused() -> None:
    _, wide, plan, optimizer = trained(named=True)
    sgd = mu.make_optimizer(wide, plan, optim.SGD, lr=0.01)
    part = optim.AdamW(mu.param_groups(wide, plan, optim.AdamW, groups=[{"params": wide.layers[0].parameters()}]))
    for given, grown, told in (
        (optimizer, sgd, "state of AdamW cannot be carried over to SGD"),
        (optimizer.state_dict(), sgd, r"'layers\.0\.weight': optimizer state 'exp_avg' is unknown"),
        ({"lr": 3}, sgd, "not an optimizer state dict"),
        (optimizer, part, r"wide optimizer does not hold 'layers\.1\.weight'"),
    ):
        refuses(told, mu.widen_optimizer, given, grown, plan)
        assert not grown.state


# ---------------------------------------------------------------------------------------------- clipping


def gradients(model: nn.Module) -> None:
    tokens = torch.arange(24).reshape(4, 6) % 11
    loss = mse(model) if isinstance(model, MLP) else F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    model.zero_grad()
    loss.backward()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("kind", ["mlp", "gpt2"])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_is_what_it_is_on_the_narrow_model(norm_type: float, kind: str, foreach: bool | None) -> None:
    narrow, wide, plan = pair(kind)
    for model in (narrow, wide):
        gradients(model)
    before = [p.grad.clone() for p in narrow.parameters()]
    max_norm = 0.3 * float(nn.utils.get_total_norm(before, norm_type))
    expected = nn.utils.clip_grad_norm_(narrow.parameters(), max_norm, norm_type)
    total = mu.clip_grad_norm_(wide, max_norm, plan, norm_type, foreach=foreach)
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    for p, source, (name, entry) in zip(wide.parameters(), narrow.parameters(), plan.parameters.items(), strict=True):
        clipped = source.grad / float(entry.rule.fold * entry.rule.out)
        for dim, axis in entry.axes.items():
            clipped = clipped.repeat_interleave(int(axis.times), dim)
        torch.testing.assert_close(p.grad, clipped, rtol=1e-12, atol=1e-16, msg=name)
    assert not torch.equal(next(narrow.parameters()).grad, before[0]), "nothing was clipped"
    plain = nn.utils.get_total_norm([p.grad for p in wide.parameters()], norm_type).item()
    assert math.isinf(norm_type) or abs(plain / max_norm - 1) > 0.05, "torch's own norm would do"
    again = mu.clip_grad_norm_(wide, math.inf, plan, norm_type)
    assert again.item() == pytest.approx(max_norm, rel=1e-5)  # torch adds 1e-6 to the norm it divides by


def test_clipping_without_gradients() -> None:
    _, wide, plan = pair()
    assert mu.clip_grad_norm_(wide, 1.0, plan).item() == 0.0
    gradients(wide)
    whole = mu.clip_grad_norm_(wide, math.inf, plan).item()
    wide.layers[0].weight.grad = None
    assert 0 < mu.clip_grad_norm_(wide, 1e-3, plan).item() < whole
    assert wide.layers[0].weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_gradients_that_are_not_finite(value: float, norm_type: float) -> None:
    _, wide, plan = pair()
    gradients(wide)
    wide.layers[1].weight.grad[0, 0] = value
    before = [p.grad.clone() for p in wide.parameters()]
    refuses(r"norm is (nan|inf)", mu.clip_grad_norm_, wide, 1.0, plan, norm_type, error_if_nonfinite=True)
    for p, gradient in zip(wide.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
    assert not math.isfinite(mu.clip_grad_norm_(wide, 1.0, plan, norm_type).item())


def net(width: int) -> nn.Module:
    hidden = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(width, 2)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3).double(), 30 * torch.randn(16, 2).double()


def step(model: nn.Module, optimizer: optim.Optimizer, batch: Any, clip: Any = lambda model, optimizer: None) -> float:
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    clip(model, optimizer)
    optimizer.step()
    return loss.item()


def plainly(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def by_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
    return mu.clip_grad_norm_(model, 1.0, optimizer)


@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.AdamW, {"lr": 0.01, "eps": 0.1}),
        (optim.Adafactor, {"lr": 0.01}),
    ],
)
def test_it_clips_as_the_narrow_model_was_after_two_growths_and_a_save(
    cls: type[optim.Optimizer], hyper: dict[str, float], batch: tuple[Tensor, Tensor]
) -> None:
    narrow = net(8)
    optimizer: optim.Optimizer = cls(narrow.parameters(), **hyper)
    step(narrow, optimizer, batch, by_optimizer)  # before any growth it is torch's
    wide, first = mu.upscale(narrow, net(16), optimizer=optimizer, inputs=batch[0], exact=True)
    wider, second = mu.upscale(wide, net(48), optimizer=first, inputs=batch[0], exact=True)
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    again = cls(second.param_groups)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        plain = step(narrow, optimizer, batch, plainly)
        assert step(wider, again, batch, by_optimizer) == pytest.approx(plain, rel=1e-10)


def test_what_an_optimizer_cannot_tell_is_refused() -> None:
    model, other = net(4), net(4)
    optimizer = optim.SGD(other.parameters(), lr=0.1)
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(mu.MupscaleError, match=r"'0\.weight' has a gradient, but this optimizer does not hold it"):
        mu.clip_grad_norm_(model, 1.0, optimizer)
    refuses(r"norm_type= is 1\.0\. Pass a plan", mu.clip_grad_norm_, model, 1.0, optimizer, norm_type=1.0)
    optimizer.param_groups[0]["lr_factor"] = 0.5  # made by hand
    refuses("do not say how their gradients enter a norm", mu.clip_grad_norm_, model, 1.0, optimizer)


def by_value(model: nn.Module, optimizer: optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


@pytest.mark.parametrize("way_on", ["at once", "mupscale.load", "load_state_dict", "deepcopy"])
@pytest.mark.parametrize(
    ("clip", "remedy"),
    [(plainly, "mupscale.clip_grad_norm_(model, 1, optimizer)"), (by_value, "as after torch's clip_grad_value_")],
)
def test_torchs_clipping_of_a_grown_model_is_noticed_once(
    batch: tuple[Tensor, Tensor], clip: Any, remedy: str, way_on: str, tmp_path: Path
) -> None:
    narrow = net(8)
    optimizer: optim.Optimizer | None = optim.SGD(narrow.parameters(), lr=0.01)
    wide, optimizer = mu.upscale(narrow, net(16), optimizer=optimizer, inputs=batch[0])
    if way_on == "mupscale.load":  # as in another process
        path = mu.save(tmp_path / "wide.safetensors", wide, optimizer, mu.plan(narrow, wide, inputs=batch[0]))
        optimizer = optim.SGD(mu.param_groups(wide, mu.load(path).plan, optim.SGD, lr=0.01))
        mu.load(path, wide, optimizer)
    if way_on == "load_state_dict":
        made_anew = optim.SGD(mu.param_groups(wide, mu.plan(narrow, wide, inputs=batch[0]), optim.SGD, lr=0.01))
        made_anew.load_state_dict(optimizer.state_dict())
        optimizer = made_anew
    if way_on == "deepcopy":
        wide, optimizer = copy.deepcopy((wide, optimizer))
    for other in ([by_optimizer], []):
        for _ in range(4):
            step(wide, optimizer, batch, *other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            step(wide, optimizer, batch, clip)
    (said,) = [str(one.message) for one in caught]
    assert remedy in said


def test_muon_with_adamw_is_copied_and_notices_clipping_once(batch: tuple[Tensor, Tensor]) -> None:
    narrow = net(8)
    matrices = [p for p in narrow.parameters() if p.dim() == 2]
    others = [p for p in narrow.parameters() if p.dim() != 2]
    optimizer = MuonAdamW([{"params": matrices, "muon": True}, {"params": others}], lr=0.01)
    grown = mu.upscale(narrow, net(16), optimizer=optimizer, inputs=batch[0])
    losses = []
    for wide, its_optimizer in (copy.deepcopy(grown), grown):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses.append([step(wide, its_optimizer, batch, plainly) for _ in range(8)])
        assert len(caught) == 1
    assert losses[0] == losses[1]


def test_one_rate_set_by_hand_for_all_groups_of_a_grown_model_is_noticed_once(batch: tuple[Tensor, Tensor]) -> None:
    narrow = net(8)
    optimizer = optim.AdamW(narrow.parameters(), lr=0.01)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 2))
    wide, optimizer, scheduler = mu.upscale(
        narrow, net(16), optimizer=optimizer, scheduler=scheduler, inputs=batch[0], exact=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):  # the first at a rate of 0
            step(wide, optimizer, batch, by_optimizer)
            scheduler.step()
        for rates_of in (lambda group: 0.01 * group["lr_factor"], lambda group: 0.01):
            assert not caught
            for group in optimizer.param_groups:
                group["lr"] = rates_of(group)
            for _ in range(3):
                step(wide, optimizer, batch, by_optimizer)
    (said,) = [str(one.message) for one in caught]
    assert 'write group["lr"] = lr * group.get("lr_factor", 1.0)' in said


# ---------------------------------------------------------------------------------------------- registration


class Lion(optim.Optimizer):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled decay."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


def lion() -> type[optim.Optimizer]:
    """A class of its own for each test, as registration lasts."""
    return type("Lion", (Lion,), {"step": lambda self, closure=None: Lion.step(self, closure)})


def verdict(optimizer: type[optim.Optimizer], **hyper: Any) -> Any:
    narrow, wide, plan = pair()
    started = optimizer(narrow.parameters(), **hyper)
    train(narrow, started, 10)
    mu.widen(narrow, wide, plan)
    return mu.verify(narrow, wide, plan, [None], mse, optimizer=started, steps=20)


def test_a_users_optimizer_is_registered_and_equivalent(float64: None) -> None:
    ours = lion()
    mu.register_optimizer(ours, degree=0, decoupled=True, eps=(), state={"exp_avg": 1})
    report = verdict(ours, lr=0.02, weight_decay=0.5)
    assert report.ok, report
    assert report.losses[-1][0] < 0.99 * report.losses[0][0], "the model does not learn"


@pytest.mark.parametrize("wrong", [{"degree": 1}, {"decoupled": False}, {"state": {"exp_avg": 2}}], ids=str)
def test_a_wrong_registration_is_told_with_the_right_one_and_shows_in_verify(
    wrong: dict[str, Any], float64: None
) -> None:
    ours = lion()
    right = re.escape("mupscale.register_optimizer(Lion, degree=0, decoupled=True, eps=(), state={'exp_avg': 1})")
    with pytest.warns(UserWarning, match=f"does not train as the original: its .* differ.*{right}"):
        mu.register_optimizer(ours, **{"degree": 0, "decoupled": True, "eps": (), "state": {"exp_avg": 1}, **wrong})
    report = verdict(ours, lr=0.02, weight_decay=0.5)
    assert not report.ok
    assert report.differences[0] < 1e-10
    assert report.max_relative_difference > 1e-3
    assert report.first.kind == "parameter"
    assert "registered with a wrong degree" in str(report)


class Renamed(optim.Optimizer):
    """AdamW with options and state of other names, and one more average."""

    def __init__(self, params: Any, lr: float = 1e-3, wd: float = 0.0, eps: float = 1e-8, floor: float = 0.0):
        super().__init__(params, {"lr": lr, "wd": wd, "eps": eps, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                state.setdefault("slow", torch.zeros_like(p)).lerp_(p.grad, 0.01)
                size = square.sqrt().clamp(min=group["floor"]) + group["eps"]
                p.mul_(1 - group["lr"] * group["wd"]).sub_(group["lr"] * (mean + state["slow"]) / size)


def renamed() -> type[optim.Optimizer]:
    return type("Renamed", (Renamed,), {"step": lambda self, closure=None: Renamed.step(self, closure)})


@pytest.mark.parametrize(
    "said",
    [{"like": optim.AdamW, "state": {"slow": 1}}, {"state": {"exp_avg": 1, "exp_avg_sq": 2, "slow": 1}}],
    ids=str,
)
def test_options_that_change_with_the_width_are_asked_about(said: dict[str, Any], float64: None) -> None:
    ours = renamed()
    refuses(
        r"has the options 'wd', 'floor'.*decay='wd'.*unscaled=\('wd', 'floor'\)", mu.register_optimizer, ours, **said
    )
    refuses(r"has the option 'floor', and", mu.register_optimizer, ours, decay="wd", **said)
    refuses("has no option 'flor'", mu.register_optimizer, ours, decay="wd", unscaled=("flor",), **said)
    mu.register_optimizer(ours, decay="wd", unscaled=("floor",), **said)
    report = verdict(ours, lr=0.01, wd=0.5, eps=1e-2)
    assert report.ok, report
    _, wide, plan = pair()
    groups = mu.param_groups(wide, plan, ours, lr=0.1, wd=0.5)
    assert {group["wd"] for group in groups} == {0.5 * group["wd_factor"] for group in groups} != {0.5}


def test_what_like_says_is_not_said_twice() -> None:
    refuses(
        "says how Renamed scales, and so does decoupled=",
        mu.register_optimizer,
        renamed(),
        like=optim.AdamW,
        decoupled=True,
    )


def test_an_optimizer_that_nobody_knows_is_examined_by_steps() -> None:
    """The line that the error gives registers it; what cannot be registered is told apart."""
    _, wide, plan = pair()
    ours = renamed()
    line = (
        "mupscale.register_optimizer(Renamed, degree=0, decoupled=True, eps=('eps',), decay='wd', "
        "unscaled=('floor',), state={'exp_avg': 1, 'exp_avg_sq': 2, 'slow': 1})"
    )
    refuses(
        f"entrywise and homogeneous of degree 0. Write {re.escape(line)}", mu.param_groups, wide, plan, ours, lr=0.1
    )
    eval(line, {"mupscale": mu, "Renamed": ours})
    assert verdict(ours, lr=0.01, wd=0.5, eps=1e-2).ok

    class ByNorm(optim.SGD):
        def step(self, closure: Any = None) -> None:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
            optim.SGD.step(self)

    class ByTanh(optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].grad.tanh_()
            optim.SGD.step(self)

    class ByLoss(optim.SGD):
        def step(self, closure: Any) -> None:
            closure()

    for cls, told in (
        (ByNorm, "is not entrywise"),
        (ByTanh, "is entrywise but not homogeneous"),
        (ByLoss, "took no steps on a small CPU tensor .TypeError.*closure"),
    ):
        refuses(f"unknown optimizer {cls.__name__}.*{told}", mu.param_groups, wide, plan, cls, lr=0.1)


def test_state_in_8_bits_is_not_multiplied() -> None:
    """An 8-bit optimizer's blocks of numbers are no gradients, whatever a registration says."""
    narrow, wide, plan = pair()
    ours = renamed()
    ours.__module__, ours.__name__ = "bitsandbytes.optim", "Adam8bit"
    refuses(
        "in 8 bits or fewer. cannot be rescaled: grow without optimizer=", mu.param_groups, wide, plan, ours, lr=0.1
    )
    mu.register_optimizer(ours, state={"exp_avg": 1}, decay="wd", unscaled=("floor",))
    optimizer = ours(narrow.parameters(), lr=0.1)
    for p in narrow.parameters():
        optimizer.state[p]["exp_avg"] = torch.ones(p.shape, dtype=torch.uint8)
    refuses("'layers.0.weight/exp_avg' is stored as torch.uint8", grow_optimizer, optimizer, narrow, wide, plan)


def test_like_another_optimizer(float64: None) -> None:
    class Logged(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    refuses("unknown optimizer Logged", verdict, Logged, lr=0.01)
    mu.register_optimizer(Logged, like=optim.AdamW)
    report = verdict(Logged, lr=0.01, weight_decay=0.3, eps=1e-3)
    assert report.ok, report
    refuses("RAdam cannot follow the width", mu.register_optimizer, Logged, like=optim.RAdam)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("base", [optim.SGD, optim.Adam, optim.AdamW, optim.Muon, "registered"])
def test_a_subclass_that_keeps_step_is_known_before_and_after_its_first_use(base: Any) -> None:
    """torch puts a wrapped step on every class it instantiates, which is no step of its own."""
    if base == "registered":
        base = lion()
        mu.register_optimizer(base, degree=0, eps=(), state={"exp_avg": 1})
    unused, used = (type("Ours", (base,), {}) for _ in range(2))
    used([nn.Parameter(torch.zeros(1, 1))])
    is_wrapped = "step" in vars(used) or hasattr(base.step, "hooked")
    assert is_wrapped, "it is wrapped no longer: of no use"
    _, wide, plan = pair()
    matrices = [{"params": [name for name, entry in plan.parameters.items() if len(entry.narrow) == 2]}]
    expected = flat(mu.param_groups(wide, plan, base, groups=matrices, lr=0.1))
    for ours in (unused, used):
        assert flat(mu.param_groups(wide, plan, ours, groups=matrices, lr=0.1)) == expected
        assert isinstance(mu.make_optimizer(wide, plan, ours, groups=matrices, lr=0.1), ours)


def test_an_unknown_optimizers_error_gives_the_line_to_write() -> None:
    """Also of a subclass with a step of its own, before and after its first use."""

    class Ours(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return None

    _, wide, plan = pair()
    for unknown in (lion(), Ours, Ours):
        name = unknown.__name__
        with pytest.raises(mu.MupscaleError, match=rf"unknown optimizer {name}.*mupscale\.register_optimizer\({name}"):
            mu.param_groups(wide, plan, unknown, lr=0.1)
        unknown([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [(optim.RAdam, "first steps are linear in the gradient"), (optim.LBFGS, "no per-parameter learning rates")],
)
def test_what_is_not_homogeneous_is_refused_with_the_reason(optimizer: type[optim.Optimizer], reason: str) -> None:
    class Derived(optimizer):
        pass

    narrow, wide, plan = pair()
    for cls in (optimizer, Derived):
        with pytest.raises(mu.MupscaleError, match=reason) as error:
            mu.param_groups(wide, plan, cls, lr=0.1)
        assert "Use " in str(error.value)
        refuses(reason, grow_optimizer, cls(narrow.parameters(), lr=0.1), narrow, wide, plan)


@pytest.mark.parametrize(
    ("optimizer", "hyper", "told"),
    [
        (optim.Adagrad, {"initial_accumulator_value": 0.1}, r"initial_accumulator_value.*Use 0"),
        (optim.Muon, {}, r"'layers\.0\.bias' has shape \(8,\)"),
    ],
)
def test_what_an_optimizer_cannot_do_at_another_width_is_told(optimizer: Any, hyper: Any, told: str) -> None:
    _, wide, plan = pair()
    refuses(told, mu.param_groups, wide, plan, optimizer, lr=0.1, **hyper)


def test_a_required_rate_that_is_missing_is_asked_for() -> None:
    class Needy(Lion):
        def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    mu.register_optimizer(Needy, degree=0, eps=(), state={"exp_avg": 1})
    _, wide, plan = pair()
    refuses("Needy needs lr: pass lr=", mu.param_groups, wide, plan, Needy)
    assert mu.param_groups(wide, plan, Needy, lr=0.1)
    assert mu.param_groups(wide, plan, Needy, groups=[{"params": list(plan), "lr": 0.2}])


def test_making_groups_changes_nothing_else() -> None:
    """No weight, not the narrow optimizer, and no key of a group's own, though it end like ours."""
    narrow, wide, plan = pair("gpt2")
    before = copy.deepcopy([narrow.state_dict(), wide.state_dict()])
    own = {"params": list(narrow.parameters()), "warmup_factor": 3.0, "note": "mine"}
    optimizer = optim.AdamW([own])
    groups = copy.deepcopy(optimizer.state_dict())
    mu.make_optimizer(wide, plan, optim.AdamW, lr=0.1)
    for group in grow_optimizer(optimizer, narrow, wide, plan, lr=3.0).param_groups:
        assert (group["warmup_factor"], group["note"]) == (3.0, "mine")
    for model, saved in zip((narrow, wide), before, strict=True):
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict() == groups


def test_a_weight_with_an_offset_refuses_what_goes_by_the_stored_value() -> None:
    """w is not what scales where the model adds 1 to it: decay pulls elsewhere, and sizes are no multiples."""
    narrow, wide = (Toy(None, weight=nn.Parameter(torch.zeros(d))) for d in (4, 8))
    plan = mu.plan(narrow, wide, roles={"weight": mu.Role(out=0, fold=0.5, offset=1)})
    with pytest.raises(mu.MupscaleError, match=r"'weight' is stored without the 1 .*weight_decay=0 \(groups="):
        mu.param_groups(wide, plan, optim.AdamW, lr=0.1, weight_decay=0.1)
    for optimizer in (optim.Adafactor, optim.ASGD):
        with pytest.raises(mu.MupscaleError, match=r"depends on the size of the stored values.*Use AdamW"):
            mu.param_groups(wide, plan, optimizer, lr=0.1, weight_decay=0.0)
    assert mu.param_groups(wide, plan, optim.AdamW, lr=0.1, weight_decay=0.0)[0]["lr"] == 0.05
    unfolded = mu.plan(narrow, wide, roles={"weight": mu.Role(out=0, offset=1)})
    assert mu.param_groups(wide, unfolded, optim.AdamW, lr=0.1, weight_decay=0.1)
