"""Mixtures of experts: what is exact at the start and over training, what is carried over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from expert_models import HIDDEN, D, FeedForward, Listed, Model, Renamed, Stacked
from refusals import refuses
from weights import unchanged

pytestmark = pytest.mark.usefixtures("float64")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, weight_decay=0.1),
}


def batch() -> Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(7))


def train(model: nn.Module, optimizer: Any, steps: int, clip: bool = False) -> list[Tensor]:
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs.append(model(batch()))
        (outputs[-1] - 1).square().mean().backward()
        if clip:
            mu.clip_grad_norm_(model, 0.05, optimizer)
        optimizer.step()
    return [output.detach() for output in [*outputs, model(batch())]]


def trained(part: Any = FeedForward, optimizer: str = "adamw", blocks: int = 2) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model(part, blocks)
    made = OPTIMIZERS[optimizer](model.parameters())
    train(model, made, 3)
    return model, made


def freeze_routers(model: nn.Module, frozen: bool = True) -> None:
    """At zero, all experts tie; a router that learns would break ties by its rounding."""
    for name, p in model.named_parameters():
        if "router" in name:
            p.requires_grad_(not frozen)


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("part", [Listed, Stacked])
@pytest.mark.parametrize("active", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_a_silent_router_training_goes_on_as_the_dense_model_would(part: Any, active: int, optimizer: str) -> None:
    """Gradients are shared by as many experts as are active: momentum, second moments, eps, rates, decay, clipping.

    Where all are active the router may learn: equal experts give it no gradient beyond rounding.
    """
    dense, before = trained(optimizer=optimizer)
    silent = mu.Experts(router="silent")
    sparse, after = mu.upscale(dense, Model(lambda: part(4, active)), optimizer=before, inputs=batch(), grow=silent)
    freeze_routers(sparse, frozen=active < 4)
    assert apart(train(dense, before, 5, clip=True), train(sparse, after, 5, clip=True)) < 1e-10
    ours, theirs = dict(dense.named_parameters()), dict(sparse.named_parameters())
    experts = (
        theirs["h.0.mlp.up_weight"] if part is Stacked else [theirs[f"h.0.mlp.experts.{i}.up.weight"] for i in range(4)]
    )
    same = [float((each - ours["h.0.mlp.up.weight"]).detach().abs().max()) < 1e-10 for each in experts]
    assert sum(same) == active  # the others were sent no token
    assert float(theirs["h.0.mlp.router.weight"].detach().abs().max()) < 1e-12


def test_a_wrong_share_of_the_gradient_is_seen() -> None:
    """What the exactness above rests on: with a factor of 1 the two part at once."""
    dense, before = trained()
    plan = mu.plan_experts(dense, sparse := Model(lambda: Listed(4, 2)), inputs=batch(), grow=mu.Experts("silent"))
    wrong = mu.Plan({n: mu.Entry(e.narrow, e.wide, names=e.names, source=e.source) for n, e in plan.parameters.items()})
    sparse, after = mu.upscale(dense, sparse, wrong, before)
    assert apart(train(dense, before, 5), train(sparse, after, 5)) > 1e-6


@pytest.mark.parametrize("part", [Listed, Stacked])
def test_with_a_drawn_router_outputs_and_the_sum_of_gradients_stay(part: Any) -> None:
    """So the first step of the rest is the dense model's, and the router moves when experts have come to differ."""
    dense, before = trained()
    sparse, after = mu.upscale(dense, Model(lambda: part(4, 2)), optimizer=before, inputs=batch())
    assert apart([dense(batch())], [sparse(batch())]) < 1e-12
    for model in (dense, sparse):
        model.zero_grad()
        (model(batch()) - 1).square().mean().backward()
    ours, theirs = dict(dense.named_parameters()), dict(sparse.named_parameters())
    for name, p in ours.items():
        copies = [q.grad for n, q in theirs.items() if n in (name, *copies_of(name))]
        total = sum(g.sum(0) if g is not None and g.dim() > p.dim() else g for g in copies if g is not None)
        assert isinstance(total, Tensor)
        assert torch.allclose(total, p.grad, rtol=0, atol=1e-14)
    router = theirs["h.0.mlp.router.weight"]
    assert float(router.grad.abs().max()) < 1e-15
    kept = router.detach().clone()
    state = after.state[theirs["embed.weight"]]
    assert torch.equal(state["exp_avg"], before.state[ours["embed.weight"]]["exp_avg"])
    assert router not in after.state
    expert = theirs.get("h.0.mlp.up_weight", theirs.get("h.0.mlp.experts.3.up.weight"))
    moment = before.state[ours["h.0.mlp.up.weight"]]
    last = {key: value[3] if part is Stacked else value for key, value in after.state[expert].items() if value.dim()}
    assert torch.equal(last["exp_avg"], moment["exp_avg"] / 4)  # of four that share the tokens
    assert torch.equal(last["exp_avg_sq"], moment["exp_avg_sq"] / 16)
    train(sparse, after, 2)
    assert float((router - kept).detach().abs().max()) > 1e-4


def copies_of(name: str) -> list[str]:
    block, _, local = name.partition(".mlp.")
    return [f"{block}.mlp.experts.{i}.{local}" for i in range(4)] + [f"{block}.mlp.{local.replace('.', '_')}"]


@pytest.mark.parametrize("part", [Listed, Stacked])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_more_experts_are_exact_if_as_many_more_are_active(part: Any, optimizer: str) -> None:
    """Each of 2 experts, which differ, becomes 2; with 1 of 2 active 2 of 4 are, for ever, with routers that learn."""
    small, before = trained(lambda: part(2, 1), optimizer)
    large, after = mu.upscale(small, Model(lambda: part(4, 2)), optimizer=before, inputs=batch(), exact=True)
    assert apart(train(small, before, 5, clip=True), train(large, after, 5, clip=True)) < 1e-10


def test_parts_under_other_names_are_matched_by_running() -> None:
    """Gate and up have one shape; the order in which they are stored is not the dense model's."""
    dense, _ = trained()
    plan = mu.plan_experts(dense, Model(lambda: Listed(3, 2, kind=Renamed)), inputs=batch())
    assert plan.sources["h.1.mlp.experts.2.w1.weight"].name == "h.1.mlp.gate.weight"
    assert plan.checked
    assert "the function stays" in str(plan)


@pytest.mark.parametrize("how", ["fresh", "noise"])
@pytest.mark.parametrize("part", [Listed, Stacked])
def test_experts_with_new_parts_differ(part: Any, how: str) -> None:
    """Drawn entries are those that the mixture was built with, without optimizer state; noise is on experts alone."""
    dense, before = trained()
    sparse = Model(lambda: part(4, 2))
    built = {name: p.detach().clone() for name, p in sparse.named_parameters()}
    asked: dict[str, Any] = {"grow": mu.Experts(fresh=0.5)} if how == "fresh" else {"noise": 0.1}
    with pytest.warns(UserWarning, match="what is new in experts changes the function"):
        sparse, after = mu.upscale(dense, sparse, optimizer=before, inputs=batch(), **asked)
    ours, theirs = dict(dense.named_parameters()), dict(sparse.named_parameters())
    assert torch.equal(ours["readout.weight"], theirs["readout.weight"])
    name = "h.0.mlp.up_weight" if part is Stacked else "h.0.mlp.experts.1.up.weight"
    copied = (theirs[name] == ours["h.0.mlp.up.weight"]).detach()
    if how == "noise":
        assert not copied.any()
        return
    assert 0.3 < float(copied.double().mean()) < 0.7
    assert torch.equal(theirs[name][~copied], built[name][~copied])
    assert not after.state[theirs[name]]["exp_avg"][~copied].any()
    assert after.state[theirs[name]]["exp_avg"][copied].all()


@pytest.mark.parametrize("part", [Listed, Stacked])
@pytest.mark.parametrize("first", ["width", "experts"])
def test_plans_compose_with_width_and_survive_a_file(part: Any, first: str) -> None:
    """Wider by copies and then a mixture, or the other way round, in one growth: the function, and training, stay."""
    dense, before = trained(blocks=1)
    silent, inputs = mu.Experts(router="silent"), batch()
    wide_part: Any = lambda: FeedForward(2 * D, 2 * HIDDEN)  # noqa: E731
    sparse = Model(lambda: part(4, 2, 2 * D), blocks=1, d=2 * D)
    if first == "width":
        middle = Model(wide_part, blocks=1, d=2 * D)
        plan = mu.plan(dense, middle, inputs=inputs).then(mu.plan_experts(middle, sparse, inputs=inputs, grow=silent))
    else:
        middle = Model(lambda: part(4, 2), blocks=1)
        plan = mu.plan_experts(dense, middle, inputs=inputs, grow=silent).then(mu.plan(middle, sparse, inputs=inputs))
    assert mu.Plan.from_json(plan.to_json()) == plan
    name = "h.0.mlp.up_weight" if part is Stacked else "h.0.mlp.experts.1.up.weight"
    assert plan[name].source.name == "h.0.mlp.up.weight"
    assert (plan[name].rule.out, plan[name].rule.in_, plan[name].rule.depth) == (2, 2, 2)
    sparse, after = mu.upscale(dense, sparse, mu.Plan.from_json(plan.to_json()), before, exact=True)
    freeze_routers(sparse)
    assert apart(train(dense, before, 4), train(sparse, after, 4)) < 1e-10


class Fused(Stacked):
    """Gate and up in one tensor."""

    def __init__(self, experts: int, active: int) -> None:
        super().__init__(experts, active)
        both = [torch.cat([getattr(self, f"{n}_{kind}") for n in ("gate", "up")], 1) for kind in ("weight", "bias")]
        for name in ("gate_weight", "gate_bias", "up_weight", "up_bias"):
            delattr(self, name)
        self.both_weight, self.both_bias = map(nn.Parameter, both)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (lambda: Listed(4, 2, renormalised=False), "must sum to 1 for every token"),
        (lambda: Fused(4, 2), "not transposed, and no two in one"),
        (lambda: Listed(4, 2, kind=lambda: FeedForward(D, 5)), "Build experts of the same size"),
    ],
)
def test_what_cannot_stay_is_refused_with_the_reason(part: Any, sentence: str) -> None:
    dense, _ = trained()
    sparse = Model(part)
    with unchanged(sparse):
        refuses(sentence, mu.upscale, dense, sparse, inputs=batch())


def test_more_that_is_refused() -> None:
    small, _ = trained(lambda: Listed(2, 1))
    with pytest.raises(mu.MupscaleError, match="r times as many must be active"):
        mu.upscale(small, Model(lambda: Listed(6, 2)), inputs=batch(), exact=True)
    refuses("so build 4, or another multiple", mu.upscale, small, Model(lambda: Listed(3, 1)), inputs=batch())
    dense, _ = trained()
    refuses("has no experts that the smaller one lacks", mu.plan_experts, dense, Model())
    refuses(r"Pass inputs=", mu.plan_experts, dense, Model(lambda: Listed(4, 2)), grow=mu.Experts("silent"))
    refuses(r"the plans compose", mu.plan_experts, dense, Model(lambda: Listed(4, 2), blocks=3))
    refuses(r"is not for them", mu.upscale, dense, Model(lambda: Listed(4, 2)), grow=mu.Fresh())
    refuses(r"0 to below 1", mu.Experts, fresh=1.0)
    with pytest.warns(mu.UncheckedPlan):
        mu.upscale(dense, Model(lambda: Listed(4, 2)))
    untried = mu.plan_experts(dense, Model(lambda: Listed(4, 2)))
    assert not untried.checked
    assert "experts are copies, among which a gradient is shared (4)" in str(mu.Plan.from_json(untried.to_json()))


@pytest.mark.parametrize("part", [Listed, Stacked])
def test_verify_compares_them_in_training(part: Any) -> None:
    dense, _ = trained(blocks=1)
    sparse = Model(lambda: part(3, 3), blocks=1)
    plan = mu.plan_experts(dense, sparse, inputs=batch(), grow=mu.Experts("silent"))
    mu.upscale(dense, sparse, plan)
    told = mu.verify(
        dense, sparse, plan, [batch()], lambda m, x: m(x).square().mean(), optimizer=torch.optim.SGD, lr=0.1, steps=2
    )
    assert told.ok
