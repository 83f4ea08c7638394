"""Every registered module type, widened in the middle of training: the wide model goes on as the narrow one does.

Each case is a tiny net around one module whose input and output widths grow by different factors, so that an
input axis taken for an output one cannot pass.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from exactness import assert_goes_on, train_and_widen
from mupscale import Axis, MupscaleError, Role
from mupscale.checks.equivalence import Report
from mupscale.planning.from_modules import _REGISTRY, MATRIX, register_roles, registered
from refusals import refuses
from slow_cases import with_slow
from toys import of, toy

pytestmark = pytest.mark.usefixtures("float64")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}),
}
FEW, MANY = (4, 6), (8, 18)  # the two widths of a net, which grow 2 and 3 times


class Net(nn.Module):
    """Input (…, 3) → a units → the module under test → b units → output (…, 2)."""

    def __init__(self, a: int, b: int, body: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(3, a), body, nn.Linear(b, 2)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = self.body(x) if self.call is None else self.call(self.body, x)
        return self.head(torch.tanh(2 * x))


@dataclass(frozen=True)
class Case:
    """How to build the module from the widths a and b, the inputs' shape, and how to call it."""

    body: Callable[[int, int], nn.Module]
    shape: tuple[int, ...] = (5, 3)
    call: Callable[[nn.Module, Tensor], Tensor] | None = None
    square: bool = False

    def net(self, widths: tuple[int, int]) -> Net:
        a, b = widths
        b = a if self.square else b
        torch.manual_seed(1)
        return Net(a, b, self.body(a, b), self.call)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(4, *self.shape, generator=generator)
        return list(zip(x, x[..., :2].sin() + x[..., 1:].cos(), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def report_of(
    narrow: nn.Module,
    wide: nn.Module,
    batches: list[Any],
    optimizer: str,
    **plan: Any,
) -> Report:
    """Train, widen, and train both on."""
    kind, hyper = OPTIMIZERS[optimizer]
    return train_and_widen(narrow, wide, batches, loss, kind, hyper=hyper, **plan)


def assert_equivalent(*args: Any, **kwargs: Any) -> None:
    assert_goes_on(report_of(*args, **kwargs))


def channels_last(body: nn.Module, x: Tensor) -> Tensor:
    """Convolutions and channel-wise norms see (B, C, …)."""
    return body(x.movedim(-1, 1)).movedim(1, -1)


def first_of(body: nn.Module, x: Tensor) -> Tensor:
    return body(x)[0]


def cell(body: nn.Module, x: Tensor) -> Tensor:
    """A recurrent cell along the second dimension, its last state."""
    state = None
    for step in x.unbind(1):
        state = body(step, state)
    return state[0] if isinstance(state, tuple) else state


def attend(body: nn.Module, x: Tensor) -> Tensor:
    return body(x, x, x, need_weights=False)[0]


@toy(lambda embedding, a, b: of(embedding=embedding, inner=(a, b)))
def tokens(m: Any, x: Tensor) -> Tensor:
    """An embedding of two tokens' ids, which are the signs of the input; and the input itself, so the stem matters."""
    ids = (x[..., :1] > 0).long() + 2 * (x[..., -1:] > 0).long()
    embedded = m.embedding(ids if isinstance(m.embedding, nn.EmbeddingBag) else ids.squeeze(-1))
    return embedded + m.inner(x)


class SelfAndOther(nn.Module):
    """Attention whose keys and values come from two further widths (kdim, vdim)."""

    def __init__(self, a: int, b: int, **kwargs: Any) -> None:
        super().__init__()
        self.to_key, self.to_value = nn.Linear(a, b, bias=False), nn.Linear(a, b // 2)
        self.attention = nn.MultiheadAttention(a, a // 2, kdim=b, vdim=b // 2, batch_first=True, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.to_key(x), self.to_value(x), need_weights=False)[0]


class Conv1D(nn.Module):
    """transformers' Conv1D as it is there: known by its name and by `nf`, stored in × out."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.3 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@toy(lambda a, b: of(other=(a, b), bilinear=nn.Bilinear(a, b, b)))
def pair(m: Any, x: Tensor) -> Tensor:
    """Bilinear on two widths."""
    return m.bilinear(x, m.other(x))


def conv(dims: int, transposed: bool = False, **kwargs: Any) -> Callable[[int, int], nn.Module]:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    return lambda a, b: kind(a, b, 3, padding=1, **kwargs)


def depthwise(dims: int, transposed: bool = False) -> Callable[[int, int], nn.Module]:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    return lambda a, b: kind(a, a, 3, padding=1, groups=a)


def image(dims: int) -> tuple[int, ...]:
    return (3, *(3,) * dims, 3)


def channelwise(body: Callable[[int], nn.Module], dims: int) -> Case:
    return Case(lambda a, b: body(a), image(dims), channels_last, square=True)


CASES: dict[str, Case] = {
    "Linear": Case(nn.Linear),
    "Linear without bias": Case(lambda a, b: nn.Linear(a, b, bias=False)),
    "Bilinear": Case(pair),
    "Embedding": Case(lambda a, b: tokens(nn.Embedding(4, b), a, b)),
    "EmbeddingBag": Case(lambda a, b: tokens(nn.EmbeddingBag(4, b, mode="sum"), a, b)),
    **{f"Conv{d}d": Case(conv(d), image(d), channels_last) for d in (1, 2, 3)},
    **{f"Conv{d}d of 2 groups": Case(conv(d, groups=2), image(d), channels_last) for d in (1, 2, 3)},
    **{f"Conv{d}d depthwise": Case(depthwise(d), image(d), channels_last, square=True) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": Case(conv(d, transposed=True), image(d), channels_last) for d in (1, 2, 3)},
    **{
        f"ConvTranspose{d}d of 2 groups": Case(conv(d, transposed=True, groups=2), image(d), channels_last)
        for d in (1, 2, 3)
    },
    **{
        f"ConvTranspose{d}d depthwise": Case(depthwise(d, transposed=True), image(d), channels_last, square=True)
        for d in (1, 2, 3)
    },
    "LayerNorm": Case(lambda a, b: nn.LayerNorm(a), square=True),
    "LayerNorm without bias": Case(lambda a, b: nn.LayerNorm(a, bias=False), square=True),
    "LayerNorm of 2 dimensions": Case(lambda a, b: nn.LayerNorm((4, a)), (3, 4, 3), square=True),
    "RMSNorm": Case(lambda a, b: nn.RMSNorm(a), square=True),
    "RMSNorm of 2 dimensions": Case(lambda a, b: nn.RMSNorm((4, a)), (3, 4, 3), square=True),
    "BatchNorm1d": channelwise(nn.BatchNorm1d, 1),
    "BatchNorm2d": channelwise(nn.BatchNorm2d, 2),
    "BatchNorm3d": channelwise(nn.BatchNorm3d, 3),
    "GroupNorm of 2 groups": channelwise(lambda a: nn.GroupNorm(2, a), 2),
    "GroupNorm of 1 group": channelwise(lambda a: nn.GroupNorm(1, a), 2),
    "GroupNorm of single channels": channelwise(lambda a: nn.GroupNorm(a, a), 2),
    "InstanceNorm1d": channelwise(lambda a: nn.InstanceNorm1d(a, affine=True), 1),
    "InstanceNorm2d": channelwise(lambda a: nn.InstanceNorm2d(a, affine=True, track_running_stats=True), 2),
    "InstanceNorm3d": channelwise(lambda a: nn.InstanceNorm3d(a, affine=True), 3),
    "PReLU per channel": channelwise(nn.PReLU, 1),
    "PReLU of one slope": channelwise(lambda a: nn.PReLU(), 1),
    "MultiheadAttention": Case(
        lambda a, b: nn.MultiheadAttention(a, a // 2, batch_first=True), (3, 4, 3), attend, square=True
    ),
    "MultiheadAttention without bias": Case(
        lambda a, b: nn.MultiheadAttention(a, a // 2, bias=False, batch_first=True), (3, 4, 3), attend, square=True
    ),
    "MultiheadAttention with bias_k and bias_v": Case(
        lambda a, b: nn.MultiheadAttention(a, a // 2, add_bias_kv=True, batch_first=True),
        (3, 4, 3),
        attend,
        square=True,
    ),
    "MultiheadAttention with kdim and vdim": Case(SelfAndOther, (3, 4, 3), square=True),
    "MultiheadAttention with kdim, vdim, bias_k and bias_v": Case(
        lambda a, b: SelfAndOther(a, b, add_bias_kv=True), (3, 4, 3), square=True
    ),
    "RNN": Case(lambda a, b: nn.RNN(a, b, batch_first=True), (3, 4, 3), first_of),
    "RNN of 2 layers, both ways": Case(
        lambda a, b: nn.RNN(a, b // 2, num_layers=2, bidirectional=True, batch_first=True), (3, 4, 3), first_of
    ),
    "LSTM": Case(lambda a, b: nn.LSTM(a, b, batch_first=True), (3, 4, 3), first_of),
    "LSTM of 2 layers, both ways": Case(
        lambda a, b: nn.LSTM(a, b // 2, num_layers=2, bidirectional=True, batch_first=True), (3, 4, 3), first_of
    ),
    "LSTM with projections": Case(lambda a, b: nn.LSTM(a, 6 * a, proj_size=b, batch_first=True), (3, 4, 3), first_of),
    "LSTM with projections, 2 layers, both ways": Case(
        lambda a, b: nn.LSTM(a, 2 * a, 2, proj_size=b // 2, bidirectional=True, batch_first=True), (3, 4, 3), first_of
    ),
    "GRU": Case(lambda a, b: nn.GRU(a, b, batch_first=True), (3, 4, 3), first_of),
    "GRU of 2 layers, both ways": Case(
        lambda a, b: nn.GRU(a, b // 2, num_layers=2, bidirectional=True, batch_first=True), (3, 4, 3), first_of
    ),
    "RNNCell": Case(nn.RNNCell, (3, 4, 3), cell),
    "LSTMCell": Case(nn.LSTMCell, (3, 4, 3), cell),
    "GRUCell": Case(nn.GRUCell, (3, 4, 3), cell),
    "Conv1D look-alike": Case(lambda a, b: Conv1D(b, a)),
}


def batches_for(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Cells give one output per sequence."""
    return [(x, y[:, -1] if case.call is cell else y) for x, y in case.batches()]


@pytest.mark.quick("*-adamw")
@pytest.mark.parametrize("optimizer", with_slow(OPTIMIZERS, fast=["adamw"]))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_widened_in_training(case: Case, optimizer: str) -> None:
    assert_equivalent(case.net(FEW), case.net(MANY), batches_for(case), optimizer)


def test_every_registered_type_has_a_case() -> None:
    """What is in the registry is trained above."""
    bodies = [module for case in CASES.values() for module in case.body(*FEW).modules()]
    for kind in [kind for kind in _REGISTRY if kind.__module__.startswith("torch.")]:  # other tests add theirs
        assert any(isinstance(module, kind) for module in bodies), kind


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_conv1d_of_transformers(optimizer: str) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    case = Case(lambda a, b: conv1d(b, a))
    narrow, wide = case.net(FEW), case.net(MANY)
    assert registered(narrow.body) is not None
    assert_equivalent(narrow, wide, case.batches(), optimizer)


# Controls: the checks above can fail.


@pytest.mark.quick("LSTM-*", "MultiheadAttention-*", "Embedding-*", "Bilinear-*")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Linear", {"body.weight": Role(out=1, in_=0)}),
        ("Linear", {"body.weight": Role(out=(0, 1))}),
        ("ConvTranspose2d", {"body.weight": Role(out=0, in_=1)}),
        ("ConvTranspose2d of 2 groups", {"body.weight": Role(out=0, in_=1)}),
        ("ConvTranspose2d depthwise", {"body.weight": Role(in_=0)}),
        ("Conv2d depthwise", {"body.weight": Role(in_=0)}),
        ("Bilinear", {"body.bilinear.weight": Role(out=(0, 1), in_=2)}),
        ("Embedding", {"body.embedding.weight": Role(in_=1)}),
        ("LayerNorm", {"body.*": Role(in_=0)}),
        ("MultiheadAttention", {"body.in_proj_weight": Role(out=0, in_=1), "body.in_proj_bias": Role(out=0)}),
        ("MultiheadAttention", {"body.out_proj.weight": Role(out=0, in_=1)}),
        ("MultiheadAttention with bias_k and bias_v", {"body.bias_k": Role(out=2)}),
        ("MultiheadAttention with kdim and vdim", {"*.v_proj_weight": Role(out=0, in_=1)}),
        ("LSTM", {"body.weight_hh_l0": Role(out=0, in_=1, out_block=2)}),
        ("LSTM with projections", {"body.weight_hr_l0": Role(out=1, in_=0)}),
        ("Conv1D look-alike", {"body.weight": Role(out=0, in_=1)}),
    ],
)
def test_a_wrong_role_shows(name: str, wrong: dict[str, Role]) -> None:
    case = CASES[name]
    narrow, wide = case.net(FEW), case.net(MANY)
    report = report_of(narrow, wide, batches_for(case), "adamw", roles=wrong)
    assert report.max_relative_difference > 1e-4
    assert not report.ok
    assert report.first is not None


# Groups: of single channels they are copied like channels, of a fixed number they keep; others are refused.


def pooled(*layers: nn.Module, out: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(out, 2))


def signals(channels: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(4, 5, channels, 6)
    return [(batch, batch[:, 0, :2].sin()) for batch in x]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_outputs_of_a_fixed_number_of_single_channel_groups_may_grow(kind: type[nn.Module], optimizer: str) -> None:
    """groups == in_channels does not make a convolution depthwise where it is the outputs per group that grow."""
    narrow, wide = (pooled(kind(3, out, 3, groups=3), out=out) for out in (6, 12))
    assert_equivalent(narrow, wide, signals(3), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("few", "many"),
    [
        (lambda: nn.Conv1d(2, 2, 3, groups=2), lambda: nn.Conv1d(8, 8, 3, groups=4)),
        (lambda: nn.GroupNorm(2, 2), lambda: nn.GroupNorm(4, 8)),
    ],
)
def test_single_channel_groups_may_become_groups_of_copies(
    few: Callable[[], nn.Module], many: Callable[[], nn.Module], optimizer: str
) -> None:
    """From 2 groups of one channel to 4 groups of 2 copies of one."""
    narrow = pooled(nn.Conv1d(3, 2, 1, bias=False), few(), out=2)
    wide = pooled(nn.Conv1d(3, 8, 1, bias=False), many(), out=8)
    assert_equivalent(narrow, wide, signals(3), optimizer)


def test_a_first_axis_that_is_output_and_input_at_once_is_refused() -> None:
    """The same in a ConvTranspose, whose first axis is groups × inputs per group."""
    few, many = OneModule(2, nn.ConvTranspose1d(2, 2, 3, groups=2)), OneModule(8, nn.ConvTranspose1d(8, 8, 3, groups=4))
    refuses(r"output and input at once. Keep the number of groups", mu.plan, few, many)
    told = {"body.*": Role(out=0)}
    assert mu.plan(few, OneModule(8, nn.ConvTranspose1d(8, 8, 3, groups=8)), roles=told)["body.weight"].rule.out == 4


class OneModule(nn.Module):
    """One module between Linear layers; only its plan is made here, it is never called."""

    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(3, width), body, nn.Linear(width, 2)


GROUPED: dict[str, tuple[Callable[[int], nn.Module], int, int]] = {
    "GroupNorm": (lambda width: nn.GroupNorm(width // 4, width), 8, 16),
    "Conv2d": (lambda width: nn.Conv2d(width, width, 3, groups=width // 2), 8, 16),
    "ConvTranspose2d": (lambda width: nn.ConvTranspose2d(width, width, 3, groups=width // 2), 8, 16),
    "Conv2d, depthwise with two outputs each": (lambda width: nn.Conv2d(width, 2 * width, 3, groups=width), 8, 16),
    "GroupNorm, channels that would be mixed": (lambda width: nn.GroupNorm({8: 8, 16: 4}[width], width), 8, 16),
}


@pytest.mark.parametrize(("body", "few", "many"), GROUPED.values(), ids=GROUPED)
def test_growing_groups_cannot_be_copied_but_scale_under_mup(
    body: Callable[[int], nn.Module], few: int, many: int
) -> None:
    def build(width: int) -> nn.Module:
        return OneModule(width, body(width))

    refuses(r"'body\.weight'.*keep the number of groups, or pass roles= with blocks", mu.plan, build(few), build(many))
    family = mu.Family(build, base=few)
    assert family.plan(many)["body.weight"].rule.out == 2
    refuses("keep the number of groups", family.widening, few, many)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_growing_groups_are_copied_whole_with_blocks_on_all_of_their_channels(optimizer: str) -> None:
    """The remedy that the refusal names: groups of 2 channels stay together from the stem to the head."""

    def net(width: int) -> nn.Module:
        groups = width // 2
        return pooled(
            nn.Conv1d(3, width, 1), nn.GroupNorm(groups, width), nn.Conv1d(width, width, 3, groups=groups), out=width
        )

    blocks = {
        "0.*": Role(out=0, out_block=2),
        "1.*": Role(out=0, out_block=2),
        "2.*": Role(out=0, out_block=2),
        "6.weight": Role(in_=1, in_block=2),
    }
    assert_equivalent(net(4), net(8), signals(3), optimizer, roles=blocks)


# Bare parameters: with one width axis, some are certainly outputs; others, and those with two, the user must tell.


@pytest.fixture
def registry() -> Iterator[None]:
    """Registrations of a test are forgotten after it."""
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


class Positions(nn.Module):
    """A learned position of shape (1, T, d), and a bare gain of shape (d,) and temperature of shape ()."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, d))
        self.gain, self.temperature = nn.Parameter(torch.rand(d)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.positions) * self.gain * self.temperature


class Mixer(nn.Module):
    """A bare matrix, stored in × out or out × in."""

    def __init__(self, a: int, b: int, transposed: bool) -> None:
        super().__init__()
        self.mix = nn.Parameter(0.5 * torch.randn((a, b) if transposed else (b, a)))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.mix if self.transposed else self.mix.T)


@toy(lambda a, b: of(mixes=nn.ParameterList([0.5 * torch.randn(b, a) for _ in range(2)])))
def mixers(m: Any, x: Tensor) -> Tensor:
    """Matrices in a ParameterList, whose names are numbers."""
    return sum(x @ mix.T for mix in m.mixes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_positions_and_gains_are_outputs(optimizer: str) -> None:
    """Also with leading axes of size 1: parameters of shape (1, T, d) are not skipped."""
    case = Case(lambda a, b: Positions(a), (3, 4, 3), square=True)
    narrow, wide = case.net(FEW), case.net(MANY)
    rules = mu.plan(narrow, wide).rules
    assert (rules["body.positions"], rules["body.gain"], rules["body.temperature"]) == (
        mu.Rule(2, 1),
        mu.Rule(2, 1),
        mu.Rule(1, 1),
    )
    assert_equivalent(narrow, wide, case.batches(), optimizer)


class Vector(nn.Module):
    """A vector over the width with a name that says nothing: multiplied with each unit, or summed over."""

    def __init__(self, d: int, *, summed: bool) -> None:
        super().__init__()
        self.q, self.summed = nn.Parameter(torch.randn(d)), summed

    def forward(self, x: Tensor) -> Tensor:
        return x * (x @ self.q)[..., None] if self.summed else x * self.q


class Rank(nn.Linear):
    """A linear layer with bare low-rank factors."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.down, self.up = nn.Parameter(torch.randn(2, a)), nn.Parameter(torch.randn(b, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Graph(nn.Module):
    """A graph layer with a linear layer of its own that is not torch's, here with a fixed number of outputs."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(a, 5)), nn.Parameter(torch.zeros(5))
        self.back = nn.Linear(5, b)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(x.roll(1, 0) @ self.weight + self.bias)


UNCERTAIN = {
    "h @ q": (Case(lambda a, b: Vector(a, summed=True), square=True), {"body.q": Role(in_=0)}),
    "low-rank factors": (Case(Rank), {"body.down": Role(in_=1), "body.up": Role(out=0)}),
    "graph layer": (Case(Graph), {"body.weight": Role(in_=0)}),
}


@pytest.mark.parametrize("which", UNCERTAIN)
def test_what_may_be_summed_over_is_refused_without_a_batch(which: str) -> None:
    """The message gives the roles to pass; with them, or with a batch, the widening is exact."""
    case, roles = UNCERTAIN[which]
    narrow, wide = case.net(FEW), case.net(MANY)
    told: dict[str, Role] = {}
    for name, role in roles.items():  # one after the other, as the messages ask for them
        with pytest.raises(mu.PlanError, match=re.escape(f"'{name}' (in ")) as refused:
            mu.plan(narrow, wide, roles=told)
        out, in_ = role.dims(9)
        assert f"roles={{'{name}': mupscale.Role(out={(out or in_)[0]})}}" in str(refused.value)
        assert f"Role(in_={(out or in_)[0]}) if it is summed over" in str(refused.value)
        assert "inputs=" in str(refused.value)
        told[name] = role
    assert_equivalent(narrow, wide, case.batches(), "adamw", roles=roles)
    assert_equivalent(case.net(FEW), case.net(MANY), case.batches(), "adamw", inputs=case.batches()[0][0])


def test_a_family_refuses_what_may_be_summed_over_unless_it_has_a_batch() -> None:
    case, _ = UNCERTAIN["h @ q"]
    family = mu.Family(lambda width: case.net((width, width)), base=8)
    with pytest.raises(mu.PlanError, match=r"'body\.q' \(in Vector"):
        family.init(16)
    learnt = mu.Family(lambda width: case.net((width, width)), base=8, inputs=case.batches()[0][0].float())
    assert learnt.plan(16)["body.q"].rule == mu.Rule(1, 2)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("transposed", [False, True])
def test_the_error_for_a_bare_matrix_gives_the_role_to_pass_or_register(transposed: bool) -> None:
    case = Case(lambda a, b: Mixer(a, b, transposed))
    narrow, wide = case.net(FEW), case.net(MANY)
    error = refuses(r"'body\.mix'.*grows along dimensions \[0, 1\], but Mixer", mu.plan, narrow, wide)
    assert "input: pass a batch, inputs=, and a run of the model shows it, or pass roles=" in error
    line = re.search(r"mupscale\.Role\(.*?\)", error)
    role = eval(line[0].replace("out=0, in_=1", "out=1, in_=0") if transposed else line[0], {"mupscale": mu})
    assert_equivalent(narrow, wide, case.batches(), "adamw", roles={"body.mix": role})
    register_roles(Mixer, mix=role)
    assert_equivalent(narrow, case.net(MANY), case.batches(), "sgd")


@pytest.mark.usefixtures("registry")
def test_roles_for_a_class_derived_from_a_known_one_add_to_what_is_known() -> None:
    class Adapted(nn.Linear):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.extra, self.more = (nn.Parameter(0.3 * torch.randn(b, a)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ (self.extra + self.more).T

    case = Case(Adapted)
    narrow, wide = case.net(FEW), case.net(MANY)
    for name in ("extra", "more"):
        refuses(rf"'body\.{name}'.*grows along dimensions \[0, 1\]", mu.plan, narrow, wide)
        register_roles(Adapted, **{name: MATRIX})
    assert_equivalent(narrow, wide, case.batches(), "adamw")


def test_a_bare_matrix_can_be_told_by_pattern() -> None:
    case = Case(mixers)
    narrow, wide = case.net(FEW), case.net(MANY)
    error = refuses(r"'body\.mixes\.0'", mu.plan, narrow, wide)
    assert "register_roles" not in error, "a number is no name of a keyword argument"
    found = re.search(r"roles=(\{'body\.mixes\.0': mupscale\.Role\(out=0, in_=1\)\})", error)
    assert found is not None, error
    first = eval(found[1], {"mupscale": mu})
    assert_equivalent(narrow, wide, case.batches(), "adamw", roles={**first, "body.mixes.1": MATRIX})


@pytest.mark.usefixtures("registry")
def test_the_registry_takes_functions_subclasses_and_dotted_names() -> None:
    """A class is known by its nearest registered base, and what a parent says goes before what the child says."""

    class Kept(Mixer):
        pass

    seen: list[tuple[nn.Module, nn.Module]] = []

    def told(narrow: nn.Module, wide: nn.Module) -> dict[str, Role]:
        seen.append((narrow, wide))
        return {"mix": MATRIX}

    register_roles(Mixer, told)
    case = Case(lambda a, b: Kept(a, b, transposed=False))
    narrow, wide = case.net(FEW), case.net(MANY)
    assert_equivalent(narrow, wide, case.batches(), "adamw")
    assert seen == [(narrow.body, wide.body)]
    register_roles(Net, **{"body.mix": Role(out=1, in_=0)})
    assert mu.plan(narrow, wide).rules["body.mix"] == mu.Rule(2, 3)


def test_role_patterns_go_before_what_modules_say() -> None:
    few, many = CASES["Linear"].net(FEW), CASES["Linear"].net(MANY)
    assert mu.plan(few, many).rules["body.weight"] == mu.Rule(3, 2)
    told = mu.plan(few, many, roles={"*.weight": Role(out=1, in_=0), "stem.*": Role(out=0)})
    assert told.rules["body.weight"] == mu.Rule(2, 3)
    assert told.rules["body.bias"] == mu.Rule(3, 1)
    assert told.rules["stem.bias"] == mu.Rule(2, 1)


@pytest.mark.parametrize("role", [Role(out=0, in_=1), Role(out=0, in_=0), Role(out=-2), Role(out=0, in_=-1)])
def test_a_pattern_whose_role_does_not_fit_is_an_error(role: Role) -> None:
    """As where one pattern is meant for a weight and its bias."""
    few, many = CASES["Linear"].net(FEW), CASES["Linear"].net(MANY)
    with pytest.raises(MupscaleError, match=r"'body\.bias' of shape \(6,\) cannot have Role.*its own pattern"):
        mu.plan(few, many, roles={"body.bias": role})


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    few, many = CASES["Linear"].net(FEW), CASES["Linear"].net(MANY)
    with pytest.raises(MupscaleError, match=r"the pattern 'heda\.weight' matches no parameter or buffer"):
        mu.plan(few, many, roles={"heda.weight": MATRIX})


def test_an_axis_that_is_no_width_must_not_grow() -> None:
    few, many = (nn.Sequential(nn.Embedding(tokens, 4), nn.Linear(4, 2)) for tokens in (5, 10))
    refuses(r"'0\.weight'.*grows along dimension 0, .*that dimension is not a width", mu.plan, few, many)
    few, many = (nn.Conv2d(3, 4, size) for size in (3, 5))
    refuses(r"'weight'.*grows along dimension 2, .*that dimension is not a width", mu.plan, few, many)


@pytest.mark.usefixtures("registry")
def test_register_roles_checks_what_it_is_given() -> None:
    with pytest.raises(MupscaleError, match="module= is a Linear, but must be the class of a model"):
        register_roles(nn.Linear(2, 2), weight=MATRIX)  # type: ignore[arg-type]
    refuses("either a function, or one Role per parameter", register_roles, Mixer)
    refuses("either a function, or one Role per parameter", register_roles, Mixer, lambda narrow, wide: {}, mix=MATRIX)


def test_roles_count_dimensions_from_the_end_too() -> None:
    assert Role(out=-1, in_=(0, -2)).dims(3) == ((2,), (0, 1))
    assert Role(out=0).dims(0) == ((), ())
    assert Role(out=0, out_block=Axis(3, block=4, side="out")) == Role(out=0, out_block=4)
    assert Role(out=0, out_block=Axis(sections=((4, 2), (2, 1)))) == Role(out=0, out_block=((4, 2), (2, 1)))
    assert copy.deepcopy(MATRIX) == Role(out=(0,), in_=(1,))
