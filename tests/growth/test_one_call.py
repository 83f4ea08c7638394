"""`upscale` in one call: model, optimizer and scheduler in, all three out; what is meant if nothing is said; modes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import mupscale as mu
from mupscale.growth import choose_operator
from mupscale.models import MLP
from mupscale.train import Growth
from refusals import refuses
from toys import Toy
from weights import identical, take_step


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, x: Tensor, y: Tensor) -> None:
    for _ in range(5):
        take_step(optimizer, cross_entropy(model(x), y))
        scheduler.step()


def _half_way() -> tuple[nn.Module, AdamW, CosineAnnealingLR, Tensor, Tensor]:
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(0, 2, (16,))
    model = MLP(3, 8, 2).double()
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=12, eta_min=1e-3)
    _train(model, optimizer, scheduler, x, y)
    return model, optimizer, scheduler, x, y


@pytest.mark.parametrize("door", ["pair", "family"])
def test_all_three_go_on_as_the_narrow_ones_would(door: str) -> None:
    model, optimizer, scheduler, x, y = _half_way()
    given = {"scheduler": scheduler, "exact": True}
    if door == "pair":
        grown = mu.upscale(model, MLP(3, 32, 2).double(), optimizer=optimizer, inputs=x, **given)
    else:
        family = mu.Family(lambda width: MLP(3, width, 2), 8, inputs=x.float())
        grown = family.upscale(model, optimizer, width=32, **given)
    _train(*grown, x, y)
    _train(model, optimizer, scheduler, x, y)
    assert torch.allclose(grown[0](x), model(x), rtol=1e-10, atol=1e-12)
    assert grown[2].last_epoch == scheduler.last_epoch == 10
    _, fresh_optimizer, again = mu.upscale(
        model, MLP(3, 11, 2).double(), optimizer=optimizer, scheduler=scheduler, inputs=x, fresh=model
    )
    assert again.get_last_lr() == [group["lr"] for group in fresh_optimizer.param_groups]


def test_a_rate_far_above_the_schedules_is_said() -> None:
    """In mid-schedule the peak of it is no rate of today's; half of what the optimizer has now is."""
    x = torch.randn(4, 3)
    family = mu.Family(lambda width: MLP(3, width, 2), 8, inputs=x)
    model = family.init(16)
    optimizer = family.optimizer(model, AdamW, lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=100)
    for _ in range(90):
        optimizer.step()
        scheduler.step()
    with pytest.warns(UserWarning, match=r"^lr is 20\.4 times the .*, 7\.34e-05\. .*give lr=3\.67e-05$") as met:
        family.upscale(model, optimizer, scheduler=scheduler, width=32, grow=mu.Fresh(), lr=1.5e-3)
    assert [warning.filename for warning in met] == [__file__]
    wide = MLP(3, 32, 2)
    with pytest.warns(UserWarning, match="lr is 20.4 times"):
        mu.upscale(model, wide, family.widening(16, 32), optimizer, scheduler=scheduler, lr=1.5e-3, exact=True)
    group = optimizer.param_groups[-1]
    lr = group["lr"] / group["lr_factor"] / 2  # as the page on choosing has it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grown, schedule = family.upscale(model, optimizer, scheduler=scheduler, width=32, grow=mu.Fresh(), lr=lr)
    assert schedule.get_last_lr() == pytest.approx([3.67e-05 * g["lr_factor"] for g in grown.param_groups], rel=1e-3)


def test_what_does_not_go_together_is_refused() -> None:
    model, optimizer, scheduler, x, _ = _half_way()
    wide = MLP(3, 32, 2).double()
    other = AdamW(model.parameters())
    with pytest.raises(mu.MupscaleError, match="Give that one as optimizer="):
        mu.upscale(model, wide, optimizer=other, scheduler=scheduler, inputs=x, exact=True)
    plan = mu.plan(model, wide)
    refuses("leave the plan out", mu.upscale, model, wide, plan, optimizer, fresh=model, exact=True)
    with pytest.raises(mu.MupscaleError, match=r"nothing would grow.*Build it wider"):
        mu.upscale(model, MLP(3, 8, 2).double(), optimizer=optimizer, inputs=x, exact=True)


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before() -> None:
    """What `fresh` builds is drawn from seeds of its own, too."""
    torch.manual_seed(0)
    narrow, batch = MLP(3, 8, 2), torch.randn(4, 3)
    given: dict[str, Any] = {"inputs": batch, "fresh": lambda: MLP(3, 8, 2), "noise": 1.0, "seed": 0}
    assert identical(*(mu.upscale(narrow, MLP(3, 16, 2), **given)[0] for _ in range(2)))


# ---------------------------------------------------------------------------------------------- if nothing is said


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 3)


def build(width: int) -> MLP:
    return MLP(3, width, 2, depth=2, activation="tanh")


def rows_that_differ(model: nn.Module) -> int:
    return len({tuple(row) for row in model.get_parameter("layers.0.weight").tolist()})


def test_new_units_of_a_bare_pair_are_drawn_as_the_wide_model_was(x: Tensor) -> None:
    narrow, wide = build(32), build(64)
    spread = float(wide.layers[1].weight.detach().std())
    optimizer = torch.optim.AdamW(narrow.parameters())
    grown, _ = mu.upscale(narrow, wide, optimizer=optimizer, inputs=x)
    assert rows_that_differ(grown) == 64
    plan = mu.plan(narrow, build(64), inputs=x, grow=mu.Fresh())
    old = mu.index_of_old((2, 32), plan["layers.1.weight"].axes)
    assert torch.equal(grown.layers[1].weight[old], narrow.layers[1].weight)
    new = grown.layers[1].weight.detach().clone()
    new[old] = torch.nan
    assert float(new[~new.isnan()].std()) == pytest.approx(spread, rel=0.5)


def test_copies_without_noise_say_that_they_stay_a_replica(x: Tensor) -> None:
    narrow, family = build(8), mu.Family(build, base=8, inputs=x)
    for grow in (mu.Copies(), mu.Copies(mu.GaussianNoise({"layers.0.weight": 0.0}))):
        with pytest.warns(mu.ReplicaWarning, match=r"stays a replica .*Copies\(noise=1.0\).* exact=True"):
            mu.upscale(narrow, build(16), inputs=x, grow=grow)
    with pytest.warns(mu.ReplicaWarning):
        mu.upscale(narrow, build(16), mu.plan(narrow, build(16), inputs=x), inputs=x)  # a plan for copies
    with pytest.warns(mu.ReplicaWarning):
        family.upscale(narrow, width=16, noise=0.0)
    exact = [mu.upscale(narrow, build(16), inputs=x, exact=True)[0], family.upscale(narrow, width=16, exact=True)[0]]
    for wide in exact:
        assert torch.allclose(wide(x), narrow(x), atol=1e-6)
    noisy, _ = mu.upscale(narrow, build(16), inputs=x, grow=mu.Copies(noise=1.0))  # measured on the wide model
    assert rows_that_differ(noisy) == 16


def test_a_family_and_a_plan_for_them_grow_by_fresh_units(x: Tensor) -> None:
    family, narrow = mu.Family(build, base=8, inputs=x), build(8)
    by_plan, _ = mu.upscale(narrow, build(12), mu.plan(narrow, build(12), inputs=x, grow=mu.Fresh()))
    for wide in (family.upscale(family.init(8), width=12)[0], by_plan):
        assert rows_that_differ(wide) == 12


def test_exact_goes_alone(x: Tensor) -> None:
    for given in ({"noise": 0.5}, {"grow": mu.Fresh()}, {"grow": mu.Copies(0.5)}):
        with pytest.raises(mu.MupscaleError, match="exact=True copies every unit without noise: leave out grow="):
            mu.upscale(build(8), build(16), inputs=x, exact=True, **given)


def test_where_fresh_units_cannot_be_drawn_copies_are_named() -> None:
    """Where they could not be copied either, or were not the default, nothing is said of them."""
    with torch.device("meta"):  # where a model has no initial values
        wide, wider = build(12), build(16)
    refuses(r"need an initialisation .*can be copied here: grow=.*Copies\(", mu.upscale, build(8), wider)
    refusals = (
        (wide, {}, "need an initialisation"),
        (wider, {"grow": mu.Fresh()}, "need an initialisation"),
        (build(16), {"fresh": lambda: build(4)}, "fresh= builds another model"),
    )
    for other, said, why in refusals:
        with pytest.raises(mu.MupscaleError, match=why) as refused:
            mu.upscale(build(8), other, **said)
        assert "can be copied here" not in str(refused.value)


def test_recipes_follow_the_one_place_that_decides() -> None:
    assert not choose_operator(None).needs_multiples
    assert not Growth(at=1, width=8).build_operator().needs_multiples
    assert Growth(at=1, width=8, noise=0.5).build_operator() == mu.Copies(mu.GaussianNoise(0.5))
    replica = Growth(at=1, width=8, how="copies")
    assert "the wide model remains a replica" in replica.in_words


def gated(width: int) -> nn.Module:
    """Units that share a softmax: each new one takes from the old ones."""
    return Toy(lambda m, x: m.last(m.gate(x).softmax(-1)), gate=nn.Linear(3, width), last=nn.Linear(width, 2))


def test_a_refused_softmax_over_units_names_no_remedy_that_was_taken(x: Tensor) -> None:
    """A batch, and a wide model at a multiple of the width, are there."""
    with pytest.raises(
        mu.MupscaleError, match=r"as in a softmax over units.* Copies work, at whole multiples"
    ) as refused:
        mu.upscale(gated(8), gated(16), inputs=x)
    assert "inputs=" not in str(refused.value)
    with pytest.raises(mu.MupscaleError, match="as in a softmax over units") as refused:
        mu.Family(gated, base=8, inputs=x).check_growth(8, 16)
    assert "inputs=" not in str(refused.value)


# ------------------------------------------------------------------------------ growing right after an evaluation


def net(width: int, depth: int = 2) -> nn.Module:
    """Residual blocks with BatchNorms."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.norm(model.first(x))
        for block in model.blocks:
            x = x + block(x)
        return model.last(x)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))

    parts = {"first": nn.Linear(3, width), "norm": nn.BatchNorm1d(width), "last": nn.Linear(width, 2)}
    return Toy(forward, **parts, blocks=nn.ModuleList(block() for _ in range(depth)))


@pytest.fixture
def evaluated(x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = net(8)
    model(x)
    return model.eval()


def modes(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


@pytest.mark.parametrize(
    ("width", "grow", "training"),
    [(16, mu.Copies(), False), (16, mu.Copies(), True), (16, mu.Fresh(), False), (12, mu.Fresh(), False)],
)
def test_both_models_are_run_in_the_mode_of_the_narrow_one(
    width: int, grow: mu.Operator, training: bool, evaluated: nn.Module, x: Tensor
) -> None:
    narrow, wide = evaluated.train(training), net(width).train(not training)
    mu.upscale(narrow, wide, inputs=x, fresh=lambda: net(8), grow=grow, exact=grow == mu.Copies())
    assert (modes(narrow), modes(wide)) == ({training}, {not training})


def test_a_deeper_model_and_the_check_over_steps(evaluated: nn.Module, x: Tensor) -> None:
    deep = mu.upscale(evaluated, net(8, 4), inputs=x)[0]
    assert (modes(evaluated), modes(deep)) == ({False}, {True})
    assert torch.allclose(deep.eval()(x), evaluated(x), atol=1e-6)
    plan = mu.plan(evaluated, net(16), inputs=x)
    wide = mu.widen(evaluated, net(16), plan)
    report = mu.verify(evaluated, wide, plan, [x], lambda model, batch: model(batch).square().mean(), steps=2)
    assert report.ok
    assert (modes(evaluated), modes(wide)) == ({False}, {True})
