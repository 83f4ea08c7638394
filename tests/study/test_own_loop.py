"""A comparison in a loop of one's own: what it trains is what one would have trained by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from mupscale.study import LoopComparison, OwnLoop
from mupscale.study.own_loop import copy_training
from mupscale.system import MupscaleError
from mupscale.train import Schedule

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sin().sum(1, keepdim=True)
LR, BASE_STEPS, STEPS = 0.02, 12, 16


class Mine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside, self.mixing, self.outside = nn.Linear(5, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number."""
        return self.outside(self.mixing(self.inside(x).tanh()).tanh())


def train(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Callable[[int], float]) -> list[float]:
    scheduler, losses = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule), []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def family() -> mu.Family:
    return mu.Family(lambda width: Mine(width).double(), base=4, inputs=X)


def optimizer_of(family: mu.Family) -> Callable[[nn.Module, float], Optimizer]:
    return lambda model, lr: family.optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.1, eps=1e-3)


def base_model(family: mu.Family) -> tuple[nn.Module, Optimizer]:
    model = family.init(8)
    optimizer = optimizer_of(family)(model, LR)
    train(model, optimizer, BASE_STEPS, lambda step: 1.0)
    return model, optimizer


def compare(family: mu.Family, base: tuple[nn.Module, Optimizer], names: list[str]) -> LoopComparison:
    make = optimizer_of(family)
    loop = OwnLoop(family, train, make, LR, BASE_STEPS, STEPS, 4, [1.0], [1.0], [0.5, 1.0], contenders=names)
    return loop.compare(*base, 8, 16)


def test_budgets_are_what_training_by_hand_gives_and_the_model_stays_as_it_was(family: mu.Family) -> None:
    base = base_model(family)
    weights = copy.deepcopy(base[0].state_dict())
    names = ["continued", "copies-without-noise", "fresh"]
    result = compare(family, base, names)
    for name, value in base[0].state_dict().items():
        assert torch.equal(value, weights[name])
    assert str(result).endswith(".")
    exact = result.runs.get("copies-without-noise")
    assert exact is not None
    for point in exact.points:
        wide, optimizer = family.upscale(*base_model(family), width=16, lr=LR, exact=True)
        assert optimizer is not None
        schedule = Schedule("wsd", decay=point.steps // 4)
        losses = train(wide, optimizer, point.steps, lambda step, s=schedule, n=point.steps: s.at(step, n))  # type: ignore[misc]
        last = losses[-(point.steps // 4) :]
        expected = sum(last[-max(1, len(last) // 10) :]) / max(1, len(last) // 10)
        assert point.losses == pytest.approx([expected, expected], rel=1e-10)


def test_continuing_at_the_same_steps_is_copies_without_noise(family: mu.Family) -> None:
    """By cost the narrow model has more steps; its first legs are compared where they have as many."""
    narrow, optimizer = base_model(family)
    wide, wide_optimizer = family.upscale(narrow, optimizer, width=16, lr=LR, exact=True)
    assert wide_optimizer is not None
    twin, other = copy_training(narrow, optimizer)
    ours = train(twin, other, 10, lambda step: 1.0)
    assert ours == pytest.approx(train(wide, wide_optimizer, 10, lambda step: 1.0), rel=1e-9)


def test_a_copy_steps_for_itself_though_a_scheduler_was_attached(family: mu.Family) -> None:
    """Schedulers wrap the optimizer's step; a deep copy would go on stepping the original."""
    model, optimizer = base_model(family)
    before = copy.deepcopy(model.state_dict())
    twin, other = copy_training(model, optimizer)
    train(twin, other, 3, lambda step: 1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert train(*copy_training(model, optimizer), 3, lambda step: 1.0) == train(model, optimizer, 3, lambda step: 1.0)


def test_all_contenders_cost_the_same_and_have_every_seed(family: mu.Family) -> None:
    result = compare(family, base_model(family), ["from-scratch", "continued", "copies", "fresh"])
    runs = result.runs
    assert runs.base_cost is not None
    for one in runs.contenders:
        cost = one.points[-1].cost + (0 if one.name == "from-scratch" else runs.base_cost)
        assert cost == pytest.approx(
            runs.base_cost + STEPS * 336, rel=0.05
        )  # 5 · 16 + 16 · 16 weights, without the last
        assert [len(point.losses) for point in one.points] == [2, 2]


def test_another_width_than_the_model_has_is_refused(family: mu.Family) -> None:
    loop = OwnLoop(family, train, optimizer_of(family), LR, BASE_STEPS, STEPS, small=4)
    with pytest.raises(MupscaleError, match=r"not the family's at width 4: its 'inside.weight' has shape \(8, 5\)"):
        loop.compare(*base_model(family), 4, 16)
    plain = Mine(8).double()  # not built by the family
    with pytest.raises(MupscaleError, match="not the family's at width 4"):
        loop.compare(plain, optimizer_of(family)(plain, LR), 4, 16)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "train returned NoneType, but is to return the losses of its 12 steps, as numbers"),
        (["low"], "train returned list, but is to return the losses"),
        ([1.0], "train returned 1 losses for 12 steps: return the loss of every step"),
    ],
)
def test_what_the_loop_returns_is_checked(family: mu.Family, returned: object, message: str) -> None:
    told: list[str] = []
    forgetful = lambda *given: returned  # noqa: E731
    loop = OwnLoop(family, forgetful, optimizer_of(family), LR, BASE_STEPS, STEPS, small=4, note=told.append)  # type: ignore[arg-type]
    with pytest.raises(MupscaleError, match=message):
        loop.compare(*base_model(family), 8, 16)
    assert told == ["1/9 a base model of width 4, 12 steps"]


def loop_of(family: mu.Family, **given: Any) -> OwnLoop:
    """A short one, which says nothing."""
    values = {"train": train, "small": 4, "factors": [1.0], "noises": [1.0], "note": lambda text: None, **given}
    return OwnLoop(family, make_optimizer=optimizer_of(family), lr=LR, base_steps=BASE_STEPS, steps=STEPS, **values)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("continued", "copy"), "'copy' is no contender here: take from from-scratch, continued, "),
        (("continued",), "contenders needs the base model continued, and a grown model"),
        (("from-scratch", "fresh"), "contenders needs the base model continued"),
    ],
)
def test_contenders_between_which_nothing_can_be_asked(
    family: mu.Family, names: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(MupscaleError, match=sentence):
        loop_of(family, contenders=names).compare(*base_model(family), 8, 16)


def test_copies_need_a_multiple_and_fresh_units_none(family: mu.Family) -> None:
    with pytest.raises(MupscaleError, match="width 12 is no multiple of 8, as copies need: take a multiple, or leave"):
        loop_of(family).compare(*base_model(family), 8, 12)
    result = loop_of(family, contenders=("continued", "fresh")).compare(*base_model(family), 8, 12)
    assert set(result.answer["ranking"]) == {"continued", "fresh"}


def test_depth_alone_has_nothing_to_fill() -> None:
    class Deep(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, width), nn.Linear(width, 1)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            """A residual stream."""
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.last(x)

    family = mu.Family(Deep, base={"width": 4, "depth": 2}, inputs=X.float())
    model = family.init({"width": 8, "depth": 2})
    loop = loop_of(family, small={"width": 4, "depth": 2})
    with pytest.raises(MupscaleError, match="the model becomes no wider, and the contenders differ in"):
        loop.compare(model, optimizer_of(family)(model, LR), {"width": 8, "depth": 2}, {"width": 8, "depth": 4})
    for given in ({"noise": 1.0}, {"grow": mu.Copies(2.0)}, {"grow": mu.Fresh()}):
        with pytest.raises(MupscaleError, match="in depth alone, which has no new units"):
            family.upscale(model, depth=4, **given)  # type: ignore[call-overload]
    deep, _ = family.upscale(model, depth=4, grow=(mu.Fresh(), mu.Identity()))
    assert torch.equal(deep(X.float()), model(X.float()))


def test_all_losses_that_are_no_numbers_name_what_an_own_loop_has(family: mu.Family) -> None:
    loop = loop_of(family, train=lambda model, optimizer, steps, schedule: [float("nan")] * steps)
    with pytest.raises(MupscaleError, match="in an OwnLoop factors"):
        loop.compare(*base_model(family), 8, 16)


def test_every_stretch_begins_at_the_tuned_rate_though_the_base_model_had_a_scheduler(family: mu.Family) -> None:
    """A scheduler leaves the rate that it began with in the groups, and the next one begins there."""
    model, optimizer = base_model(family)
    for group in optimizer.param_groups:
        assert group["initial_lr"] == group["lr"]
        group["initial_lr"] *= 2  # as in the middle of a cosine
    seen: list[tuple[int, float]] = []

    def watched(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Callable[[int], float]) -> list[float]:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        group = optimizer.param_groups[0]
        seen.append((len(model.inside.bias), group["lr"] / group["lr_factor"]))  # type: ignore[arg-type]
        return [1.0] * steps

    loop_of(family, train=watched, factors=[0.5], budgets=[0.5, 1.0]).compare(model, optimizer, 8, 16)
    rates = [lr for _, lr in seen]
    assert {width for width, _ in seen} == {4, 8, 16}
    assert rates == pytest.approx([LR] + [LR / 2] * (len(rates) - 1))  # the first is the small base model


def test_every_contender_warms_up_where_it_begins_and_only_there(family: mu.Family) -> None:
    seen: list[tuple[int, list[float]]] = []

    def watched(model: nn.Module, optimizer: Optimizer, steps: int, schedule: Callable[[int], float]) -> list[float]:
        seen.append((steps, [schedule(step) for step in range(min(3, steps))]))
        return [1.0] * steps

    told: list[str] = []
    more = {"seeds": 1, "factors": [1.0], "noises": [1.0], "budgets": [0.5, 1.0]}
    loop_of(family, train=watched, warmup=2, note=told.append, **more).compare(*base_model(family), 8, 16)
    begun = [rates for _, rates in seen if rates[0] == 0.5 and rates[1] == 1.0]
    assert len(begun) == 1 + 4 + 4, "the small base model, and all four tuned and large"
    large = sum(int(line.split("× ")[1].split()[0]) for line in told[5:])
    assert large == sum(steps for steps, _ in seen[5:]), "as many steps as were told"


def test_too_long_a_warm_up_is_refused_before_anything_trains(family: mu.Family) -> None:
    told: list[str] = []
    with pytest.raises(MupscaleError, match=r"too few for warm-up \(1000\)"):
        loop_of(family, warmup=1000, note=told.append).compare(*base_model(family), 8, 16)
    assert told == []
