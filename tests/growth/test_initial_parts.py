"""Parts of one tensor that start differently, and patterns with noise: in new units, at other widths and in noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.core import part_of_units
from mupscale.growth import NewTensor
from mupscale.planning import initial_std, measure_laws
from toys import Toy

pytestmark = pytest.mark.usefixtures("float64")
Law = tuple[float, float]
BATCH = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def drawn(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * torch.randn(*shape)


def check_law(values: Tensor, law: Law) -> None:
    """Within five standard errors of a mean and a standard deviation, and exact where that is 0."""
    mean, std = law
    if std == 0:
        assert torch.allclose(values, torch.full_like(values, mean), rtol=0, atol=1e-10)
        return
    error = 5 * std / math.sqrt(values.numel())
    assert abs(float(values.mean()) - mean) < error
    assert abs(float(values.std()) - std) < error


def packed(width: int) -> nn.Module:
    """gate|value|skip in one projection: the values have five times the spread, and the skip starts at 0."""

    def forward(model: Toy, x: Tensor) -> Tensor:
        gate, value, skip = model.three(model.first(x)).chunk(3, -1)
        return model.last(gate.tanh() * value + skip)

    model = Toy(forward, first=nn.Linear(5, width), three=nn.Linear(width, 3 * width), last=nn.Linear(width, 2))
    with torch.no_grad():
        scale = width**-0.5
        zeros = torch.zeros(width, width)
        model.three.weight.copy_(torch.cat([drawn(width, width, std=scale), drawn(width, width, std=5 * scale), zeros]))
        model.three.bias.copy_(torch.cat([drawn(width, std=0.1), torch.ones(width), drawn(width, mean=-2, std=0.1)]))
    return model


PACKED_WEIGHT = [(0.0, 1.0), (0.0, 5.0), (0.0, 0.0)]
PACKED_BIAS = [(0.0, 0.1), (1.0, 0.0), (-2.0, 0.1)]


def by_turns(width: int) -> nn.Module:
    """The same two parts for each unit in turn: a gate that starts open, and a value."""

    def forward(model: Toy, x: Tensor) -> Tensor:
        gate, value = model.two(model.first(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return model.last(gate.sigmoid() * value)

    model = Toy(forward, first=nn.Linear(5, width), two=nn.Linear(width, 2 * width), last=nn.Linear(width, 2))
    with torch.no_grad():
        model.two.weight.view(width, 2, width).mul_(torch.tensor([1.0, 5.0])[:, None])
        model.two.bias.view(width, 2).copy_(torch.stack([torch.full((width,), 3.0), drawn(width, std=0.1)], 1))
    return model


TURNS_WEIGHT = [(0.0, 1 / math.sqrt(3)), (0.0, 5 / math.sqrt(3))]
TURNS_BIAS = [(3.0, 0.0), (0.0, 0.1)]


class Recurrent(nn.Module):
    """An LSTM whose forget gates start at 1, beside gates that are drawn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(5, width), nn.Linear(width, 2)
        with torch.no_grad():
            self.lstm.bias_ih_l0.normal_(std=0.1)[width : 2 * width].fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x[:, None])[0][:, 0])


LSTM_BIAS = [(0.0, 0.1), (1.0, 0.0), (0.0, 0.1), (0.0, 0.1)]


def concatenated(width: int) -> nn.Module:
    """A matrix that reads two things side by side, of which the second starts with a small share."""

    def forward(model: Toy, x: Tensor) -> Tensor:
        both = torch.cat([model.first(x), model.second(x)], -1).tanh()
        return model.last(F.linear(both, model.join))

    parts = {"first": nn.Linear(5, width), "second": nn.Linear(5, width), "last": nn.Linear(width, 2)}
    spread = torch.tensor([1.0, 0.1]).repeat_interleave(width)
    return Toy(forward, **parts, join=nn.Parameter(drawn(width, 2 * width, std=width**-0.5) * spread))


JOIN = [(0.0, 1.0), (0.0, 0.1)]


@dataclass(frozen=True)
class Parts:
    """A parameter, the laws of its parts (of a matrix in units of width^-1/2), their axis, and how many take turns."""

    name: str
    laws: list[Law]
    dim: int = 0
    run: int = 0

    def check(self, wide: nn.Module, which: Callable[[str], Tensor] | None = None) -> None:
        """What is chosen of each part follows its law; which: from a name to a mask of entries."""
        values = wide.get_parameter(self.name).detach()
        chosen = torch.ones_like(values, dtype=torch.bool) if which is None else which(self.name)
        scale = 1.0 if values.dim() == 1 else 128**-0.5
        of_units = part_of_units(values.shape[self.dim], len(self.laws), self.run)
        for number, (mean, std) in enumerate(self.laws):
            units = torch.nonzero(of_units == number).flatten()
            part, mask = (each.index_select(self.dim, units) for each in (values, chosen))
            check_law(part[mask], (mean, std * scale))


PACKED = [Parts("three.weight", PACKED_WEIGHT), Parts("three.bias", PACKED_BIAS)]
MODELS: dict[str, tuple[Callable[[int], nn.Module], list[Parts]]] = {
    "packed": (packed, PACKED),
    "by turns": (by_turns, [Parts("two.weight", TURNS_WEIGHT, run=1), Parts("two.bias", TURNS_BIAS, run=1)]),
    "forget gates": (Recurrent, [Parts("lstm.bias_ih_l0", LSTM_BIAS)]),
    "side by side": (concatenated, [Parts("join", JOIN, dim=1)]),
}


def new_entries(plan: mu.Plan) -> Callable[[str], Tensor]:
    """From a name to a mask of the entries that belong to a new unit."""

    def mask(name: str) -> Tensor:
        entry = plan[name]
        new = torch.ones(entry.wide, dtype=torch.bool)
        new[mu.index_of_old(entry.narrow, entry.axes)] = False
        return new

    return mask


@pytest.mark.parametrize("case", MODELS)
def test_parts_in_a_family(case: str) -> None:
    """A member at twice the width, and the new units of one that grows; what is constant is exact."""
    build, parameters = MODELS[case]
    family = mu.Family(build, base=64, inputs=BATCH)
    narrow, member = family.init(64, seed=1), family.init(128, seed=3)
    wide, _ = family.upscale(narrow, width=128)
    new = new_entries(family.widening(narrow, wide, grow=mu.Fresh()))
    for parts in parameters:
        parts.check(member)
        parts.check(wide, new)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("fresh", [False, True])
def test_parts_of_new_units(case: str, fresh: bool) -> None:
    """By the wide model's own values, and by those of freshly built narrow models."""
    build, parameters = MODELS[case]
    torch.manual_seed(1)
    narrow, wide = build(64), build(128)
    plan = mu.plan(narrow, wide, inputs=BATCH, grow=mu.Fresh(), fresh=(lambda: build(64)) if fresh else None)
    mu.upscale(narrow, wide, plan)
    for parts in parameters:
        parts.check(wide, new_entries(plan))


def identity_plus_noise(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(width) + drawn(width, width, std=0.02 * (64 / width) ** 0.5))
        model[2].bias.copy_(torch.linspace(-1, 1, width) + drawn(width, std=0.05))
    return model


PATTERNS = {"2.weight": torch.eye, "2.bias": lambda width: torch.linspace(-1, 1, width)}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_with_noise_stays_at_other_widths(name: str) -> None:
    """What a member starts as, and new units of a growth: the pattern of the wide width, and its noise about it."""
    family = mu.Family(identity_plus_noise, base=64, inputs=BATCH)
    torch.manual_seed(1)
    narrow = identity_plus_noise(64)
    pair = mu.upscale(narrow, identity_plus_noise(128), inputs=BATCH)[0]
    std = 0.05 if name == "2.bias" else 0.02 * 0.5**0.5
    new = slice(1, None, 2)
    for wide, units in (
        (family.init(128, seed=3), slice(None)),
        (family.upscale(narrow, width=128)[0], new),
        (pair, new),
    ):
        noise = wide.get_parameter(name).detach() - PATTERNS[name](128)
        check_law(noise[units], (0.0, std))


class Chrono(nn.Module):
    """An LSTM for long sequences: its forget gates open for times of up to 1,000 steps, its input gates close alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(5, width), nn.Linear(width, 2)
        with torch.no_grad():
            forget = torch.empty(width).uniform_(1, 999).log()
            self.lstm.bias_hh_l0.zero_()
            self.lstm.bias_ih_l0.copy_(torch.cat([-forget, forget, torch.zeros(2 * width)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x[:, None])[0][:, 0])


def test_what_follows_no_law_is_as_the_author_starts_it() -> None:
    """Input gates are the negative of forget gates, which are no normal numbers; other gates are 0, exactly."""
    family = mu.Family(Chrono, base=64, inputs=BATCH)
    torch.manual_seed(1)
    narrow = Chrono(64)
    pair = mu.upscale(narrow, Chrono(128), inputs=BATCH)[0]
    for wide in (family.init(128, seed=3), family.upscale(narrow, width=128)[0], pair):
        enter, forget, *others = wide.get_parameter("lstm.bias_ih_l0").detach().view(4, 128)
        assert torch.equal(enter, -forget)
        assert float(forget.min()) >= 0
        assert float(forget.max()) <= math.log(999)
        assert not any(bool(gate.any()) for gate in others)


class Block(nn.Module):
    """A residual block around a packed projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.packed = nn.LayerNorm(width), packed(width)
        self.packed.first, self.packed.last = nn.Identity(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.packed(self.norm(x))


def blocks(width: int, layers: int) -> nn.Module:
    inner = (Block(width) for _ in range(layers))
    return nn.Sequential(nn.Linear(5, width), nn.Sequential(*inner), nn.Linear(width, 2))


def test_parts_in_new_blocks_that_are_drawn_from_a_plan() -> None:
    """As in a folder that is grown tensor by tensor, with no model in memory."""
    family = mu.Family(blocks, base={"width": 64, "layers": 1}, inputs=BATCH)
    plan = family.growth_plan({"width": 64, "layers": 1}, {"width": 64, "layers": 2})
    for parts, scale in zip(PACKED, (64**-0.5, 1.0), strict=True):
        name = f"1.1.packed.{parts.name}"
        new = NewTensor.of(name, plan, seed=3)
        assert new is not None
        laws = [(mean, std * scale) for mean, std in parts.laws]
        values = new.whole(plan[name].wide, torch.float64)
        for number, law in enumerate(laws):
            check_law(values.chunk(3)[number], law)


@pytest.mark.parametrize("door", ["family", "pair"])
def test_new_units_of_a_uniform_law_are_uniform(door: str) -> None:
    """As Linear starts: none is farther from 0 than √3 standard deviations, each part by its own."""
    torch.manual_seed(1)
    narrow, wide = by_turns(64), by_turns(128)
    plan = mu.plan(narrow, wide, inputs=BATCH, grow=mu.Fresh(), fresh=lambda: by_turns(64))
    if door == "family":
        wide, _ = mu.Family(by_turns, base=64, inputs=BATCH).upscale(narrow, width=128)
    else:
        mu.upscale(narrow, wide, plan)
    for name, spread in (("first.weight", 5**-0.5), ("two.weight", 5 * 128**-0.5)):
        new = wide.get_parameter(name).detach()[new_entries(plan)(name)]
        assert float(new.abs().max()) < 1.03 * spread
        assert float(new.abs().max()) > 0.9 * spread


def test_noise_on_copies_follows_the_spread_of_each_part() -> None:
    """A part that starts as a constant gets none, as constants do."""
    torch.manual_seed(1)
    narrow = packed(64)
    plan = mu.plan(narrow, packed(128), inputs=BATCH, fresh=lambda: packed(64))
    exact, noisy = packed(128), packed(128)
    mu.widen(narrow, exact, plan)
    mu.perturb(mu.widen(narrow, noisy, plan), plan, 0.5, seed=1)
    with torch.no_grad():
        for p, copied in zip(noisy.parameters(), exact.parameters(), strict=True):
            p.sub_(copied)
    for parts in PACKED:
        replace(parts, laws=[(0.0, 0.5 * std) for _, std in parts.laws]).check(noisy)


@pytest.mark.parametrize("draws", [2, 4])
def test_chance_makes_no_parts(draws: int) -> None:
    """Of one law, whatever its distribution and its shape, few numbers or many."""
    torch.manual_seed(0)
    starts: list[Callable[[], Tensor]] = [
        lambda: torch.randn(64),
        lambda: torch.randn(96, 48),
        lambda: torch.rand(64, 3, 3, 3),
        lambda: nn.init.orthogonal_(torch.empty(64, 64)),
        lambda: nn.init.trunc_normal_(torch.empty(48, 48)),
        lambda: nn.init.kaiming_uniform_(torch.empty(6, 5)),
    ]
    for start in starts:
        for _ in range(20):
            models = [{"p": start()} for _ in range(draws)]
            axes = {d: mu.Axis() for d in range(models[0]["p"].dim())}
            law = measure_laws(models, initial_std(models), lambda name, axes=axes: axes)["p"]
            assert law.stds == ()
            assert len(law.means or ()) == 1
