"""Copies and their noise: its size in both units, its streams, signal-normalised noise with its constants; Net2Net."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.growth.copies import Net2Net, random_copies, spectral_norm, unit_std
from mupscale.models import GPT2, MLP
from refusals import refuses
from toys import Toy
from weights import unchanged


def net(width: int, order: tuple[str, ...] = ("embedding", "norm", "hidden", "readout")) -> nn.Module:
    """One of each: embedding, norm, hidden matrix, readout with bias, in any order of registration."""
    parts: dict[str, Callable[[], nn.Module]] = {
        "embedding": lambda: nn.Embedding(40, width),
        "norm": lambda: nn.LayerNorm(width),
        "hidden": lambda: nn.Linear(width, width),
        "readout": lambda: nn.Linear(width, 30),
    }
    return Toy(None, **{name: parts[name]() for name in order})


def convs(n: int) -> nn.Module:
    """Convolutions and their transposes as input, hidden and readout layers."""
    hidden, up, last = nn.Conv2d(n, 2 * n, (3, 2)), nn.ConvTranspose2d(2 * n, n, (2, 5)), nn.ConvTranspose2d(n, 4, 3)
    return Toy(None, first=nn.Conv2d(3, n, 3), norm=nn.BatchNorm2d(n), hidden=hidden, up=up, last=last)


class Conv1D(nn.Module):
    """As in transformers: stored in × out."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.zeros(nf))


def transposed(width: int) -> nn.Module:
    """Conv1D as input, hidden and readout layer."""
    return Toy(None, input=Conv1D(width, 6), hidden=Conv1D(width, width), readout=Conv1D(5, width))


def pair(
    build: Callable[[int], nn.Module], n: int, wide: int, *, fresh: bool = False
) -> tuple[nn.Module, nn.Module, mu.Plan]:
    """A narrow model, it widened, and the plan."""
    narrow, large = build(n), build(wide)
    plan = mu.plan(narrow, large, fresh=(lambda: build(n)) if fresh else None)
    return narrow, mu.widen(narrow, large, plan), plan


def noise_of(wide: nn.Module, plan: mu.Plan, noise: Any, seed: int = 0) -> dict[str, Tensor]:
    """What perturb adds, by name; the model stays as it is."""
    noisy = copy.deepcopy(wide)
    mu.perturb(noisy, plan, noise, seed)
    return {n: (p - wide.get_parameter(n)).detach() for n, p in noisy.named_parameters()}


@torch.no_grad()
def zeroed(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.zero_()
    return model


def norm(matrix: Tensor) -> float:
    return float(np.linalg.norm(matrix.detach().double().numpy(), 2))  # torch 2.15's own is NaN for low ranks


# in units of the initialisation


def test_noise_one_is_as_much_as_a_fresh_initialisation_has_at_the_wide_width() -> None:
    """Not divided by k together with the weight, as peers do: k is 4 here. A readout that starts at zero has none."""

    def build(width: int) -> nn.Module:
        model = net(width)
        model.add_module("silent", nn.Linear(width, 3, bias=False))
        nn.init.zeros_(model.get_parameter("silent.weight"))
        return model

    family = mu.Family(build, base=32)
    plan, model = family.widening(128, 512), family.init(128)
    nn.init.normal_(model.get_parameter("silent.weight"))
    clean, _ = family.upscale(model, width=512, exact=True)
    noisy, _ = family.upscale(model, width=512, noise=1.0, seed=3)
    fresh = family.init(512, seed=9)
    for name, p in clean.named_parameters():
        delta = (noisy.get_parameter(name) - p).detach()
        if name.startswith(("norm", "silent")):
            assert not delta.any(), name
            assert plan.fresh[name] == 0
        else:
            few = 0.5 if p.numel() < 100 else 0.12 if p.numel() < 1000 else 0.03
            assert float(delta.std()) == pytest.approx(plan.fresh[name], rel=few), name
            assert float(delta.std()) == pytest.approx(float(fresh.get_parameter(name).detach().std()), rel=few), name
            assert abs(float(delta.mean())) < 5 * plan.fresh[name] / math.sqrt(p.numel()), name


@pytest.mark.parametrize("as_module", [True, False], ids=["module", "callable"])
def test_fresh_may_be_a_model_or_the_function_that_builds_it(as_module: bool) -> None:
    narrow, wide = net(128), net(256)
    plan = mu.plan(narrow, wide, fresh=net(128) if as_module else lambda: net(128))
    deltas = noise_of(mu.widen(narrow, wide, plan), plan, 0.5)
    std = 1 / math.sqrt(3 * 128)  # PyTorch's own for a Linear of 128 inputs
    assert float(deltas["embedding.weight"].std()) == pytest.approx(0.5, rel=0.03)
    assert float(deltas["hidden.weight"].std()) == pytest.approx(0.5 * std / math.sqrt(2), rel=0.03)
    assert float(deltas["readout.weight"].std()) == pytest.approx(0.5 * std / 2, rel=0.03)
    assert not deltas["norm.weight"].any()


def test_without_fresh_the_error_names_it_and_one_of_another_width_is_refused() -> None:
    narrow, wide, plan = pair(net, 8, 16)
    with unchanged(wide):
        refuses(r"fresh=.*Family.*unit=.theory", mu.perturb, wide, plan, 0.1)
        mu.perturb(wide, plan, 0.0)  # nothing to know for no noise
    with torch.device("meta"):
        target = net(16)  # one with values would be measured itself
    refuses("fresh=", mu.upscale, narrow, target, plan, noise=0.1)
    refuses("builds another model", mu.plan, net(8), net(16), fresh=net(16))


# in the paper's units


def test_algorithm_upscaling_for_mlps_under_sgd() -> None:
    """σ on the input weights, σ/√N_in on hidden matrices, σ/N_in on the folded readout, none on biases."""
    _, wide, plan = pair(lambda n: MLP(200, [n, 2 * n], 100), 100, 300)
    deltas = noise_of(wide, plan, mu.GaussianNoise(0.7, unit="theory"))
    stds = {"layers.0": 0.7, "layers.1": 0.7 / math.sqrt(300), "layers.2": 0.7 / 600}
    for layer, std in stds.items():
        assert float(deltas[f"{layer}.weight"].std()) == pytest.approx(std, rel=0.01), layer
        assert not deltas[f"{layer}.bias"].any(), layer


@pytest.mark.parametrize(
    ("build", "wide", "expected"),
    [
        (
            convs,  # whose taps count
            24,
            {"first": 1.0, "hidden": (24 * 6) ** -0.5, "up": (48 * 10) ** -0.5, "last": 1 / (24 * 9)},
        ),
        (transposed, 16, {"input": 1.0, "hidden": 1 / 4, "readout": 1 / 16}),
    ],
    ids=["convolutions", "in × out"],
)
def test_theory_units_of_other_weights(
    build: Callable[[int], nn.Module], wide: int, expected: dict[str, float]
) -> None:
    _, _, plan = pair(build, 8, wide)
    for name in plan:
        std = expected.get(name.removesuffix(".weight"), 0.0)
        assert unit_std(plan, name, "theory") == pytest.approx(std), name


# zero and nonsense


@pytest.mark.parametrize("noise", [0, 0.0, mu.GaussianNoise(0.0, unit="theory"), mu.SignalNoise(0.0)], ids=repr)
def test_zero_noise_changes_no_bit(noise: Any) -> None:
    """-0.0 stays -0.0, too, where adding 0.0 would make it 0.0."""
    _, wide, plan = pair(net, 8, 16, fresh=True)
    with torch.no_grad():
        wide.get_parameter("hidden.weight").zero_().neg_()
    with unchanged(wide):
        mu.perturb(wide, plan, noise)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, "much", True])
def test_noise_that_is_none_is_refused_and_nothing_changes(noise: Any) -> None:
    narrow, _, plan = pair(net, 8, 16, fresh=True)
    wide = net(16)
    for make in (
        lambda: mu.perturb(wide, plan, noise),
        lambda: mu.upscale(narrow, wide, plan, noise=noise),
        lambda: mu.GaussianNoise(noise),
        lambda: mu.SignalNoise(noise),
        lambda: mu.GaussianNoise({"hidden.weight": noise}),
    ):
        with unchanged(wide):
            refuses(rf"(?i)noise.* is {noise!r}, but must be .*0 or more", make)
    refuses("'init' or 'theory'", mu.GaussianNoise, 0.1, unit="sigma")


def test_constants_for_another_model_are_refused() -> None:
    _, wide, plan = pair(net, 8, 16, fresh=True)
    noise = mu.GaussianNoise({"layers.0.weight": 1.0, "hidden.weight": 1.0}, unit="theory")
    with unchanged(wide):
        refuses(r"'layers\.0\.weight'.*different model", mu.upscale, net(8), wide, plan, noise=noise)
        refuses(r"'layers\.0\.weight'.*different model", mu.perturb, wide, plan, noise)


# streams


def test_same_seed_same_noise() -> None:
    _, wide, plan = pair(net, 8, 16, fresh=True)
    torch.manual_seed(1)
    a = noise_of(wide, plan, 0.5, seed=4)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    b, c = noise_of(wide, plan, 0.5, seed=4), noise_of(wide, plan, 0.5, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a if a[n].any())


def test_noise_depends_on_neither_the_order_nor_the_other_parameters() -> None:
    orders = [("embedding", "norm", "hidden", "readout"), ("readout", "hidden", "norm", "embedding"), ("hidden",)]
    given = []
    for order in orders:
        _, wide, plan = pair(lambda n, order=order: net(n, order), 8, 16)
        given.append(noise_of(zeroed(wide), plan, mu.GaussianNoise(0.5, unit="theory")))
    for name, delta in given[0].items():
        assert torch.equal(delta, given[1][name]), name
    assert torch.equal(given[0]["hidden.weight"], given[2]["hidden.weight"])
    assert given[2]["hidden.weight"].any()


def test_equal_shapes_get_different_noise() -> None:
    _, wide, plan = pair(lambda n: MLP(5, n, 3, depth=4), 8, 16)
    deltas = noise_of(wide, plan, mu.GaussianNoise(1.0, unit="theory"))
    correlation = torch.corrcoef(torch.stack([deltas[f"layers.{i}.weight"].flatten() for i in (1, 2)]))[0, 1]
    assert abs(float(correlation)) < 0.25


def test_every_precision_gets_the_same_noise_up_to_rounding() -> None:
    _, wide, plan = pair(net, 8, 16, fresh=True)
    full, half, double = (
        noise_of(zeroed(copy.deepcopy(wide).to(dtype)), plan, 0.5)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    for name in full:
        assert half[name].dtype == torch.bfloat16
        torch.testing.assert_close(half[name].float(), full[name], rtol=2**-8, atol=0)
        torch.testing.assert_close(double[name].float(), full[name], rtol=2**-22, atol=0)
    assert not torch.equal(double["hidden.weight"], full["hidden.weight"].double())


# signal-normalised


@pytest.mark.parametrize("build", [net, convs, transposed, lambda n: MLP(5, n, 3)], ids=["net", "convs", "t", "mlp"])
def test_the_spectral_norm_of_signal_noise_is_t_times_the_weights(build: Callable[[int], nn.Module]) -> None:
    """Appendix 'Alternative algorithm: signal-normalized noise'; in double precision, so that 1e-5 is meant."""
    _, wide, plan = pair(lambda n: build(n).double(), 8, 24)
    deltas = noise_of(wide, plan, mu.SignalNoise(0.3))
    for name, p in wide.named_parameters():
        if name.endswith("bias") or name.startswith("norm"):
            assert not deltas[name].any(), name
        else:  # as output × (input · taps)
            signal, noise = (
                norm((w.transpose(0, 1) if name.startswith(("up", "last")) else w).flatten(1))
                for w in (p.detach(), deltas[name])
            )
            assert noise == pytest.approx(0.3 * signal, rel=1e-5), name


def test_the_papers_formula_for_the_effective_constants() -> None:
    """σ̄ = t·√(k_out/k_in)·‖W‖/‖Δ‖, with Δ drawn at σ̄ = 1 and different multipliers in each layer."""
    narrow, wide = MLP(20, [8, 10], 7), MLP(20, [16, 50], 7)
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)
    delta = noise_of(wide, plan, mu.GaussianNoise(1.0, unit="theory"), seed=6)
    noise = mu.SignalNoise(0.2)
    returned = mu.perturb(copy.deepcopy(wide), plan, noise, seed=6)
    assert noise.effective == returned
    assert returned.unit == "theory"
    multipliers = {"layers.0.weight": (2, 1), "layers.1.weight": (5, 2), "layers.2.weight": (1, 5)}
    assert returned.std.keys() == multipliers.keys()
    for name, (k_out, k_in) in multipliers.items():
        signal = norm(narrow.get_parameter(name).detach())
        expected = 0.2 * math.sqrt(k_out / k_in) * signal / norm(delta[name])
        assert returned.std[name] == pytest.approx(expected, rel=1e-4), name
    again, same = noise_of(wide, plan, noise, seed=6), noise_of(wide, plan, returned, seed=6)
    for name in again:
        torch.testing.assert_close(again[name], same[name])


def test_effective_constants_are_given_at_another_width() -> None:
    family = mu.Family(net, base=16)
    noise = mu.SignalNoise(0.25)
    family.upscale(family.init(16), width=32, noise=noise)
    big = family.init(128)
    clean, _ = family.upscale(big, width=256, exact=True)
    noisy, _ = family.upscale(big, width=256, noise=noise.effective)
    stds = {"embedding.weight": 1.0, "hidden.weight": 1 / 16, "readout.weight": 1 / 256}
    for name, p in clean.named_parameters():
        delta = (noisy.get_parameter(name) - p).detach()
        if name in stds:
            assert float(delta.std()) == pytest.approx(noise.effective.std[name] * stds[name], rel=0.03), name
        else:
            assert not delta.any(), name


def test_signal_noise_on_a_zero_weight_is_none() -> None:
    _, wide, plan = pair(net, 8, 16)
    with torch.no_grad():
        wide.get_parameter("readout.weight").zero_()
    noise = mu.SignalNoise(0.5)
    mu.perturb(wide, plan, noise)
    assert not wide.get_parameter("readout.weight").any()
    assert noise.effective.of("readout.weight") == 0


def test_signal_noise_on_a_tied_model_and_on_a_large_matrix() -> None:
    for name, build, n, k in (
        ("wte.weight", lambda n: GPT2(11, 8, layers=1, heads=n // 4, head_dim=4), 8, 2),
        ("layers.1.weight", lambda n: MLP(5, n, 3, depth=3), 20, 30),
    ):
        _, wide, plan = pair(build, n, n * k)
        delta = noise_of(wide, plan, mu.SignalNoise(0.3))[name]
        assert norm(delta) == pytest.approx(0.3 * norm(wide.get_parameter(name)), rel=1e-4)


# spectral norms


def clustered() -> Tensor:
    """Two hundred singular values within a hundredth of the largest, the others far below."""
    left = torch.linalg.qr(torch.randn(600, 400, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(900, 400, dtype=torch.float64)).Q
    values = torch.cat([torch.linspace(3.0, 2.97, 200), torch.full((200,), 0.1)]).double()
    return (left * values) @ right.T


MATRICES: dict[str, Callable[[], Tensor]] = {
    "small": lambda: torch.randn(3, 700),
    "one number": lambda: torch.randn(1, 1),
    "random": lambda: torch.randn(600, 900),
    "tall": lambda: torch.randn(900, 600),
    "float64": lambda: torch.randn(600, 900, dtype=torch.float64),
    "clustered": clustered,
    "clustered float32": lambda: clustered().float(),
    "rank 1": lambda: torch.outer(torch.randn(600), torch.randn(900)),
    "rank 5": lambda: torch.randn(600, 5) @ torch.randn(5, 900),
    "widened": lambda: torch.randn(20, 30).repeat_interleave(30, 0).repeat_interleave(30, 1) / 30,
    "identity": lambda: torch.eye(600),
    "ones": lambda: torch.ones(600, 900),
    "one entry": lambda: torch.zeros(600, 900).index_put_((torch.tensor(3), torch.tensor(7)), torch.tensor(2.0)),
    "zero": lambda: torch.zeros(600, 900),
    "tiny values": lambda: 1e-12 * torch.randn(600, 900),
    "large values": lambda: 1e12 * torch.randn(600, 900),
}


@pytest.mark.quick("small", "one number", "random", "widened", "zero")
@pytest.mark.parametrize("name", MATRICES)
def test_spectral_norms_are_those_of_the_svd(name: str) -> None:
    matrix = MATRICES[name]()
    exact = norm(matrix)
    assert spectral_norm(matrix) == pytest.approx(exact, rel=1e-5, abs=1e-30)
    assert spectral_norm(matrix.bfloat16()) == pytest.approx(norm(matrix.bfloat16()), rel=1e-5, abs=1e-30)


# Net2Net's random copies


@pytest.mark.usefixtures("float64")
def test_net2net_keeps_the_function_of_an_mlp() -> None:
    """Random copies, what reads them divided by how many there are of each."""
    narrow, wide = MLP(6, 8, 3), MLP(6, 24, 3)
    mu.upscale(narrow, wide, mu.plan(narrow, wide), grow=Net2Net(), seed=3)
    x = torch.randn(32, 6)
    assert (wide(x) - narrow(x)).abs().max() < 1e-10
    ours, theirs = (model.layers[0].weight for model in (narrow, wide))
    counts = [int((theirs == row).all(1).sum()) for row in ours]
    assert len(set(counts)) > 1  # copied at random, not each as often as the others


def test_net2net_refuses_a_norm_over_the_width() -> None:
    narrow, wide = (GPT2(11, 6, layers=1, heads=heads, head_dim=4) for heads in (1, 2))
    with pytest.raises(mu.MupscaleError, match=r"a norm over the width computes \('.*'\).* without changing its"):
        mu.upscale(narrow, wide, mu.plan(narrow, wide), grow=Net2Net())


def test_copies_are_whole_blocks_and_none_is_left_out() -> None:
    sources = random_copies(6, mu.Axis(3, block=2), seed=0)
    assert sources.tolist()[:6] == list(range(6))
    assert all(a % 2 == 0 and b == a + 1 for a, b in sources.view(-1, 2).tolist())
    assert len(sources) == 18
