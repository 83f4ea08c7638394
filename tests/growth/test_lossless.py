"""Lossless growth where a norm is not the only one that reads an axis: a run shows who reads what."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import mupscale as mu
from mupscale.planning.from_modules import kind_of_norm
from toys import Toy
from weights import take_step

LOSSLESS = mu.Fresh(lossless=True)


class Residual(nn.Module):
    """The model of docs/start.md: a norm reads the stream, and so does the head."""

    def __init__(self, width: int, times: int = 2, activation: Callable[[Tensor], Tensor] = gelu) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(20, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)
        self.head = nn.Linear(width, 5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(self.activation(self.up(self.norm(x)))))


class RootMeanSquare(Residual):
    """The same with an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.RMSNorm(width)


class Table(Residual):
    """The stream is normed, and a layer reads a table that is as wide and that no norm made."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.far = nn.Linear(width, 6)
        self.register_buffer("table", torch.arange(1.0, width + 1).pow(0.5).sin().expand(6, -1).clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tanh(self.far(self.table)).mean(1, keepdim=True)


def recurrent(width: int) -> nn.Module:
    """A norm reads units of a GRU, which are sums and products of others and cannot start at their mean."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.norm(model.gru(model.embed(x)[:, None])[0][:, -1]))

    parts = {"gru": nn.GRU(width, width, batch_first=True), "norm": nn.LayerNorm(width), "head": nn.Linear(width, 5)}
    return Toy(forward, embed=nn.Linear(20, width), **parts)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "start.md": Residual,
    "as wide inside as the stream": lambda width: Residual(width, 1),
    "not 0 at 0": lambda width: Residual(width, 1, torch.sigmoid),
    "rms": RootMeanSquare,
    "a table": Table,
}


def exact(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = 1e-18
    return model.double()


def trained(build: Callable[[int], nn.Module], x: Tensor) -> nn.Module:
    """No gain, bias or weight at its initial value."""
    torch.manual_seed(0)
    model = exact(build(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(5):
        take_step(optimizer, model(x).square().mean())
    return model


def difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    before, after = one(x).detach(), other(x).detach()
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.quick("*-12")
@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("name", MODELS)
def test_who_reads_past_a_norm_starts_without_weights(name: str, width: int) -> None:
    """To 1e-10, with the batch given to the plan or to the growth, and every parameter trains on."""
    build, x = MODELS[name], torch.randn(6, 20, dtype=torch.float64)
    narrow = trained(build, x)
    for with_plan in (False, True):
        wide = exact(build(width))
        plan = mu.plan(narrow, wide, fresh=lambda: build(8), grow=LOSSLESS, inputs=x if with_plan else None)
        mu.upscale(narrow, wide, plan, grow=LOSSLESS, inputs=x)
        assert difference(narrow, wide, x) < 1e-10
        assert mu.Plan.from_json(plan.to_json()).past_norms == plan.past_norms
    wide(x).square().mean().backward()
    assert all(bool(p.grad.any()) for p in wide.parameters() if p.grad is not None)
    hidden = wide.get_parameter("up.weight").detach()
    assert len(hidden.unique(dim=0)) == len(hidden) or name == "rms"  # none is another's twin for ever


@pytest.mark.parametrize("name", ["start.md", "as wide inside as the stream", "not 0 at 0"])
def test_shapes_alone_would_change_the_function(name: str) -> None:
    build, x = MODELS[name], torch.randn(6, 20, dtype=torch.float64)
    narrow, wide = trained(build, x), exact(build(12))
    plan = mu.plan(narrow, wide, fresh=lambda: build(8), grow=LOSSLESS, inputs=x)
    with pytest.warns(mu.UncheckedPlan, match="has not been tried: shapes alone tell which weights .* Pass inputs="):
        mu.upscale(narrow, wide, plan.with_initial("past_norms", None), grow=LOSSLESS)
    assert difference(narrow, wide, x) > 1e-3


def test_a_family_tries_it_once_on_small_members() -> None:
    x = torch.randn(6, 20)
    family = mu.Family(Residual, base=32, inputs=x)
    model = family.init(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide, _ = family.upscale(model, width=48, grow=LOSSLESS)
    assert difference(model, wide, x) < 1e-3  # a norm's eps leaves a trace


@pytest.mark.filterwarnings("ignore:the batch does not show")  # a state that is never passed on
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_says_by_how_much_and_why(dtype: torch.dtype) -> None:
    family = mu.Family(recurrent, base=16, inputs=torch.randn(6, 20))
    with pytest.warns(
        UserWarning, match=r"outputs differ by [\d.]+ % on the batch.*'gru.weight_ih_l0' .* a norm reads .* a gate"
    ):
        family.upscale(family.init(16).to(dtype), width=24, grow=LOSSLESS)


def test_a_batch_on_which_a_model_does_not_run_is_no_end_of_a_growth() -> None:
    narrow, wide = Residual(8), Residual(12)
    plan = mu.plan(narrow, wide, fresh=narrow, grow=LOSSLESS)
    with pytest.warns(mu.UncheckedPlan, match=r"on the batch \(RuntimeError"):
        mu.upscale(narrow, wide, plan, grow=LOSSLESS, inputs=torch.ones(2, 3))


def own_norm(name: str, eps: float = 1e-12, *, centred: bool = False) -> Callable[[int], nn.Module]:
    """A norm written by hand, of a class of this name."""

    def __init__(self: Any, width: int) -> None:
        nn.Module.__init__(self)
        self.gain, self.epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centred else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.gain

    return type(name, (nn.Module,), {"__init__": __init__, "forward": forward})


def stream(norm: Callable[[int], nn.Module], size: float = 1.0) -> Callable[[int], nn.Module]:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = size * model.embed(x)
        return model.out(x + model.down(model.up(model.norm(x)).relu()))

    def build(width: int) -> nn.Module:
        parts = {"norm": norm(width), "out": nn.Linear(width, 5), "up": nn.Linear(width, 2 * width)}
        return Toy(forward, embed=nn.Linear(20, width), **parts, down=nn.Linear(2 * width, width))

    return build


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("name", ["RMS", "MyNorm", "Scaler"])
def test_a_norm_is_told_by_what_it_does_and_not_by_its_name(name: str, centred: bool) -> None:
    build, x = stream(own_norm(name, centred=centred)), torch.randn(6, 20)
    narrow = trained(build, x.double())
    wide, _ = mu.upscale(narrow, exact(build(12)), inputs=x.double(), fresh=lambda: build(8), grow=LOSSLESS)
    assert difference(narrow, wide, x.double()) < 1e-9


class Gained(nn.Module):
    """What acts on units, times a gain for each."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gain, self.act = nn.Parameter(torch.ones(8)), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * self.gain


NO_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "unit length": lambda x: nn.functional.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "over the batch": lambda x: x / x.square().mean(0, keepdim=True).sqrt(),
    "noise": lambda x: x + torch.randn_like(x),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm_over_the_units_is_not_taken_for_one(name: str) -> None:
    before = torch.get_rng_state()
    assert kind_of_norm(Gained(NO_NORMS[name])) == ""
    assert torch.equal(torch.get_rng_state(), before)


def test_where_eps_is_the_cause_the_warning_says_which_is_exact() -> None:
    x = torch.randn(6, 20)
    for norm, said in (
        (own_norm("RMS", 1e-5), r"epsilon=5e-06 in 'norm' of"),
        (nn.LayerNorm, r"eps=5e-06 in 'norm' of"),
    ):
        build = stream(norm, 1e-3)
        narrow, wide = build(8), build(16)
        with pytest.warns(UserWarning, match=rf"not lossless: .* {said} the wide model is exact"):
            mu.upscale(narrow, wide, inputs=x, fresh=lambda build=build: build(8), grow=LOSSLESS)
        assert difference(narrow, wide, x) > 1e-3
        setattr(wide.norm, "eps" if norm is nn.LayerNorm else "epsilon", 5e-6)
        assert difference(narrow, wide, x) < 1e-5


class ChannelsFirst(nn.LayerNorm):
    """As ConvNeXt has it: of the channels, which come before the positions."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def images(width: int) -> nn.Module:
    """Convolutions with such a norm between them."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.second(gelu(model.norm(model.first(x)))).mean((2, 3)))

    parts = {"norm": ChannelsFirst(width), "second": nn.Conv2d(width, width, 1), "head": nn.Linear(width, 5)}
    return Toy(forward, first=nn.Conv2d(3, width, 2, 2), **parts).double()


@pytest.mark.parametrize("width", [12, 16])
def test_norms_of_channels_that_come_before_positions(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 10, dtype=torch.float64)
    narrow, wide = images(8), images(width)
    mu.upscale(narrow, wide, inputs=x, fresh=lambda: images(8), grow=LOSSLESS)
    torch.testing.assert_close(narrow(x), wide(x), rtol=1e-4, atol=1e-4)


def within(width: int) -> nn.Module:
    """A norm that is no module of its own."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.embed(x)
        return model.out(x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * model.gain)

    return Toy(forward, embed=nn.Linear(3, width), gain=nn.Parameter(torch.ones(width)), out=nn.Linear(width, 5))


def mixer(width: int) -> nn.Module:
    """What an MLP-Mixer writes for a new channel is no mean of what it writes for the old ones."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.embed(x)
        return model.head(model.last(x + model.tokens(model.norm(x).mT).mT).mean(1))

    tokens = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4))
    parts = {"embed": nn.Linear(3, width), "norm": nn.LayerNorm(width), "last": nn.LayerNorm(width)}
    return Toy(forward, **parts, tokens=tokens, head=nn.Linear(width, 5))


def pooled(width: int, normed: bool = False) -> nn.Module:
    """A mean over hidden units beside what the readout reads, which no new unit can be silent for."""

    def forward(model: Any, x: Tensor) -> Tensor:
        h = torch.tanh(model.a(x))
        h = h / h.square().mean(-1, keepdim=True).sqrt() if normed else h
        return model.b(h) + h.mean(-1, keepdim=True)

    return Toy(forward, a=nn.Linear(3, width), b=nn.Linear(width, 2))


def innocent(width: int, bare: bool = False) -> nn.Module:
    """Norms that keep what they read, beside a mean square over units that does not.

    One has its gains rescaled; a bare one has none, and reads inputs, as many as there are units, which do not grow.
    """

    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.a(model.input(x))
        return model.b(model.norm(h)) + h.square().mean(-1, keepdim=True)

    read = nn.LayerNorm(8, elementwise_affine=False) if bare else nn.Identity()
    norm = nn.Identity() if bare else nn.LayerNorm(width)
    return Toy(forward, input=read, a=nn.Linear(8, width), norm=norm, b=nn.Linear(width, 2))


UNKNOWN = r"a norm that was not recognised \(write it as a module that holds only"
MEAN = "without weights of its own, such as a mean"
BESIDE = "they agree up to 'b', and the model's outputs differ. Likely: something reads new units"
CAUSES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], str, bool]] = {
    "a norm in no module": (
        within,
        (6, 3),
        UNKNOWN,
        True,
    ),
    "tokens mixed": (mixer, (6, 4, 3), "'last' is the first to differ.* mixes positions channel by channel", True),
    "a mean": (pooled, (4, 3), MEAN, False),
    "a mean of what is normed": (partial(pooled, normed=True), (4, 3), MEAN, True),
    "a mean beside a norm": (innocent, (16, 8), BESIDE, False),
    "a mean beside a norm of inputs": (partial(innocent, bare=True), (16, 8), BESIDE, False),
}
"""A model, the shape of its batch, what is said of it, and whether norms may be a reason: only where there are any."""


@pytest.mark.parametrize("name", CAUSES)
def test_what_may_be_the_cause_is_said_and_no_norm_is_blamed_that_keeps_what_it_reads(name: str) -> None:
    build, shape, said, norms = CAUSES[name]
    with pytest.warns(UserWarning, match=rf"not lossless: .*{said}") as warned:
        mu.upscale(build(8), build(16), inputs=torch.randn(shape), fresh=lambda: build(8), grow=LOSSLESS)
    assert ("norm" in str(warned[0].message)) is norms
