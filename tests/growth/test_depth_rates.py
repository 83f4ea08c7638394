"""Rates over depth: exact where blocks do not read each other, flat over depths 2 … 64 where they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import linear_regression
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.growth import grow_optimizer

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, CLASSES = 6, 4


class Branch(nn.Module):
    """A branch that reads `source`: the stream, or what all blocks are given alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.multiplier = 1.0

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return x + self.multiplier * self.down(torch.tanh(self.up(self.norm(source))))


class Sum(nn.Module):
    """Blocks that add to one stream; where they do not read it, r copies at 1/r are exactly what one is."""

    def __init__(self, layers: int, reads_stream: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.reads_stream = nn.Linear(5, width), reads_stream
        self.blocks = nn.ModuleList(Branch(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def stream(self, u: Tensor) -> Tensor:
        """The sum over all blocks."""
        x = first = self.embed(u)
        for block in self.blocks:
            x = block(x, x if self.reads_stream else first)
        return x

    def forward(self, u: Tensor) -> Tensor:
        return self.head(self.norm(self.stream(u)))


INPUTS = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).double()
TARGETS = torch.arange(16) % CLASSES


def step(model: nn.Module, optimizer: Any, clip: Callable[[], Any] = lambda: None) -> Tensor:
    output = model(INPUTS)
    optimizer.zero_grad()
    F.cross_entropy(output, TARGETS).backward()
    clip()
    optimizer.step()
    return output.detach()


_O = torch.optim
TRAININGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (_O.SGD, {"lr": 0.3, "momentum": 0.8, "weight_decay": 0.02}),
    "Adam": (_O.Adam, {"lr": 3e-2, "eps": 1e-2, "weight_decay": 0.03}),
    "AdamW": (_O.AdamW, {"lr": 3e-2, "eps": 1e-2, "weight_decay": 0.5}),
    "RMSprop": (_O.RMSprop, {"lr": 5e-3, "eps": 1e-2, "weight_decay": 0.03, "momentum": 0.5}),
    "Adadelta": (_O.Adadelta, {"lr": 1.0, "eps": 1e-3, "weight_decay": 0.02}),
    "Rprop": (_O.Rprop, {"lr": 2e-3, "step_sizes": (1e-3, 5e-3)}),
}


def difference(name: str, *, clip: bool = False, tamper: Callable[[Any], None] = lambda group: None) -> float:
    """Train two blocks, stack them to six under the rule, train both on, and compare outputs at every step."""
    torch.manual_seed(0)
    shallow, deep = Sum(2, reads_stream=False), Sum(6, reads_stream=False)
    cls, hyper = TRAININGS[name]
    optimizer = cls(shallow.parameters(), **hyper)
    for _ in range(5):
        step(shallow, optimizer)
    grow = mu.Stack("interleaved")
    plan = mu.plan_depth(shallow, deep, inputs=INPUTS, grow=grow, rules=mu.RuleSet(depth="complete"))
    mu.upscale(shallow, deep, plan)
    deeper = grow_optimizer(optimizer, shallow, deep, plan)
    for group in deeper.param_groups:
        tamper(group)
    worst = 0.0
    for _ in range(10):
        ours = step(shallow, optimizer, lambda: clip and nn.utils.clip_grad_norm_(shallow.parameters(), 0.05))
        theirs = step(deep, deeper, lambda: clip and mu.clip_grad_norm_(deep, 0.05, plan))
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


@pytest.mark.parametrize("name", TRAININGS)
def test_copies_of_blocks_train_as_one(name: str) -> None:
    """Dynamic equivalence over depth: weights, state, rates, decay and eps of the rule, to rounding."""
    assert difference(name) < 1e-11


def test_clipping_does_not_depend_on_the_depth() -> None:
    assert difference("SGD", clip=True) < 1e-11


@pytest.mark.filterwarnings("ignore:all groups have the learning rate")  # that is the tampering
@pytest.mark.quick("AdamW-*")
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_wrong_exponent_fails(name: str, key: str) -> None:
    """Take one factor back, or square it, and the outputs part by far more than rounding."""
    if key not in TRAININGS[name][1]:
        pytest.skip(f"{name} has no {key}")

    def undone(group: dict[str, Any]) -> None:
        group[key] /= group[f"{key}_factor"]

    def squared(group: dict[str, Any]) -> None:
        group[key] *= group[f"{key}_factor"]

    assert min(difference(name, tamper=undone), difference(name, tamper=squared)) > 1e-5


@cache
def family_under(rule: Any) -> mu.Family:
    at = {"width": WIDTH, "depth": 2}
    return mu.Family(
        lambda width, depth: Sum(depth, True, width), at, init_at=at, inputs=INPUTS, rules=mu.RuleSet(depth=rule)
    )


def difference_from_multiplier(rule: Any, name: str, power: float) -> float:
    """A family's model of 6 blocks beside one that multiplies its branches by r^-power, with the rates of that."""
    family = family_under(rule)
    folded, explicit, times = family.init({"width": WIDTH, "depth": 6}), Sum(6, True), 3.0
    explicit.load_state_dict(folded.state_dict())
    for block in explicit.blocks:
        block.multiplier = times**-power
        for p in block.down.parameters():
            p.data *= times**power
    cls, hyper = TRAININGS[name]
    rate = times ** (2 * power - 1 if name == "SGD" else power - 1)
    blocks = {"lr": hyper["lr"] * rate, "weight_decay": hyper["weight_decay"] / rate}
    if "eps" in hyper:
        blocks["eps"] = hyper["eps"] * times**-power
    rest = [p for n, p in explicit.named_parameters() if not n.startswith("blocks.")]
    theirs = cls([{"params": rest}, {"params": explicit.blocks.parameters(), **blocks}], **hyper)
    ours = family.optimizer(folded, cls, **hyper)
    return max(float((step(folded, ours) - step(explicit, theirs)).abs().max()) for _ in range(6))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(("rule", "power"), [("complete", 1.0), ("sqrt", 0.5)])
def test_a_rule_is_a_residual_multiplier_with_its_rates(rule: str, power: float, name: str) -> None:
    """Rates, decay, eps and initial values; another power parts the two."""
    assert difference_from_multiplier(rule, name, power) < 1e-10
    assert difference_from_multiplier(rule, name, power + 0.25) > 1e-5


def test_growing_under_sqrt_keeps_old_blocks_and_ends_with_its_rates() -> None:
    """New blocks write nothing, so weights stay; the optimizer then has what a model of that depth begins with."""
    family = family_under("sqrt")
    shallow = family.init({"width": WIDTH, "depth": 2})
    optimizer = family.optimizer(shallow, _O.AdamW, lr=0.1)
    deep, grown = family.upscale(shallow, optimizer, depth=6)
    assert torch.equal(deep(INPUTS), shallow(INPUTS))
    fresh = family.optimizer(deep, _O.AdamW, lr=0.1)
    for key in ("lr", "weight_decay", "eps"):
        ours, theirs = ({p: g[key] for g in o.param_groups for p in g["params"]} for o in (grown, fresh))
        assert {p: pytest.approx(value, rel=1e-12) for p, value in ours.items()} == theirs


@pytest.mark.parametrize("rule", ["complete", "sqrt"])
def test_a_rule_for_decay_over_width_leaves_the_depth_alone(rule: Any) -> None:
    """With more blocks lr·λ stays, whatever λ does over width: fixed, it differs from exact by the width alone."""
    small, wide, deep = Sum(2, True), Sum(2, True, 2 * WIDTH), Sum(6, True, 2 * WIDTH)
    width = mu.plan(small, wide, inputs=INPUTS)
    plan = width.then(mu.plan_depth(wide, deep, inputs=INPUTS, grow=mu.Stack(), rules=mu.RuleSet(depth=rule)))
    groups = mu.param_groups(deep, plan, _O.AdamW, rules=mu.RuleSet(decay="fixed"), lr=0.1, weight_decay=0.5)
    made = {name: group for group in groups for name, _ in group["params"]}
    for name, group in made.items():
        in_ = float(plan[name].rule.in_)
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 * 0.5 / in_, rel=1e-12), name
    assert made["blocks.3.down.weight"]["lr"] != made["head.weight"]["lr"]


DEPTHS, WIDER = (2, 8, 64), 24


def slope(rule: Any, name: str) -> float:
    """The power of the depth with which the stream's change in three steps goes."""
    cls, hyper = TRAININGS[name]
    at = {"width": WIDER, "depth": 2}
    family = mu.Family(
        lambda width, depth: Sum(depth, True, width), base=at, init_at=at, inputs=INPUTS, rules=mu.RuleSet(depth=rule)
    )
    changes = []
    hyper = {**hyper, "lr": hyper["lr"] / 30, "weight_decay": 0.0, **({"eps": 1e-8} if "eps" in hyper else {})}
    for depth in DEPTHS:
        change = 0.0
        for seed in range(2):
            model: Any = family.init({"width": WIDER, "depth": depth}, seed)
            before = model.stream(INPUTS).detach()
            optimizer = family.optimizer(model, cls, **hyper)
            for _ in range(3):
                step(model, optimizer)
            change += float((model.stream(INPUTS).detach() - before).square().mean().sqrt())
        changes.append(change)
    return linear_regression([*map(math.log, DEPTHS)], [*map(math.log, changes)]).slope


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_changes_are_flat_over_depth_under_the_rule_alone(name: str) -> None:
    """A coordinate check over depths 2 … 64: with 1/L what a step changes is flat; without, it grows."""
    under, without = slope("complete", name), slope("none", name)
    assert abs(under) < 0.2, (under, without)
    assert without > 0.3, (under, without)
    assert without - under > 0.5, (under, without)
