"""MLPs as tensor programs: at finite width what the library trains, at infinite width what finite networks tend to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import MLP as TorchMLP
from mupscale.system.errors import MupscaleError
from mupscale.theory import Activation, Adam, Diverged, Estimate, Finite, Limit, MLPSetup, Network, Sign, Stage
from mupscale.theory import finite as finite_estimate
from mupscale.theory import limit as limit_estimate
from mupscale.theory import run as train
from mupscale.theory.mlp_training import ACTIVATIONS, count_copies, squared_error


def batch(inputs: int = 4, features: int = 3, outputs: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(inputs, features + outputs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return 1.5 * nn.functional.normalize(drawn[:, :features], dim=1), drawn[:, features:]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# ------------------------------------------------------------------------ the program that the library trains


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.softplus(-targets.sign() * outputs).sum(-1).mean()


OPTIMIZERS: dict[str, tuple[dict[str, object], type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": ({}, torch.optim.SGD, {}),
    "momentum": ({"momentum": 0.8}, torch.optim.SGD, {"momentum": 0.8}),
    "sign": ({"entrywise": Sign(eps=0.3)}, torch.optim.Adam, {"betas": (0.0, 0.0), "eps": 0.3}),
    "Adam": ({"entrywise": Adam(0.7, 0.9, 0.2)}, torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 0.2}),
}


SHAPES: list[tuple[Any, ...]] = [
    (2, "gelu", [2], squared_error, None),
    (3, "tanh", [3], squared_error, None),
    (4, "relu", [2], logistic, [True, False, True, True]),
    (4, "linear", [2, 2], squared_error, [False, True, True, False]),
]


@pytest.mark.parametrize(  # every optimizer and every shape twice; all pairs are slow
    ("name", "layers", "activation", "times", "loss", "trained"),
    [
        pytest.param(name, *shape, marks=() if (i + j) % 4 in (0, 1) else pytest.mark.slow)
        for i, name in enumerate(OPTIMIZERS)
        for j, shape in enumerate(SHAPES)
    ],
)
def test_a_finite_program_is_what_the_library_trains(
    float64: None,
    name: str,
    layers: int,
    activation: str,
    times: list[int],
    loss: Callable[[Tensor, Tensor], Tensor],
    trained: Sequence[bool] | None,
) -> None:
    """Autograd, μP's groups at the paper's units (base = 1) and the library's widening: all outputs and weights."""
    ours, optimizer, hyper = OPTIMIZERS[name]
    n, (inputs, targets) = 6, batch(outputs=2)
    lr = 0.1
    mlp = MLPSetup(layers, activation, 1.2, trained, loss=loss, **ours)
    program = Finite(n, math.prod(times), seed=1, device="cpu")
    net = Network(program, mlp, inputs.shape[1], targets.shape[1])
    stages = [Stage(4, lr), *(Stage(4, lr / (i + 2), k, 0.4) for i, k in enumerate(times))]
    again = Finite(n, math.prod(times), seed=1, device="cpu")
    wanted = train(again, mlp, inputs, targets, stages).outputs

    family = mu.Family(
        lambda width: TorchMLP(3, width, 2, depth=layers, bias=False, activation=activation), base=1, init_at=64
    )
    model = family.init(n)
    for p, weight in zip(model.parameters(), net.weights(), strict=True):
        p.data = _narrow(weight, p.shape, program.k)
    for p, learns in zip(model.parameters(), trained or [True] * layers, strict=True):
        p.requires_grad_(learns)
    opt = family.optimizer(model, optimizer, lr=lr, **hyper)
    outputs: list[Tensor] = []

    def steps() -> None:
        for _ in range(4):
            y = model(inputs)
            theirs = net.forward(inputs)
            torch.testing.assert_close(y, theirs, rtol=0, atol=1e-10)
            outputs.append(y.detach())
            opt.zero_grad()
            value = loss(y, targets)
            (slope,) = torch.autograd.grad(value, y, retain_graph=True)
            value.backward()
            opt.step()
            net.step(slope, lr)

    width = n
    steps()
    for stage in stages[1:]:
        width, lr = width * stage.times, stage.lr
        before = net.weights()
        net.upscale(stage.times, stage.noise)
        model, opt = family.upscale(model, opt, width=width, lr=stage.lr, exact=True)  # type: ignore[assignment]
        assert opt is not None
        for p, was, now in zip(model.parameters(), before, net.weights(), strict=True):
            torch.testing.assert_close(p.data, _narrow(was, p.shape, net.equal), rtol=0, atol=1e-10)
            p.data += _narrow(now - was, p.shape, net.equal)
        steps()
    with torch.no_grad():
        outputs.append(model(inputs))
    torch.testing.assert_close(torch.stack(outputs), wanted, rtol=0, atol=1e-10)
    assert rms(wanted[-1] - wanted[0]) > 0.02
    for p, weight in zip(model.parameters(), net.weights(), strict=True):
        torch.testing.assert_close(p.data, weight, rtol=0, atol=1e-10)


def _narrow(weight: Tensor, shape: torch.Size, copies: int) -> Tensor:
    """One of `copies` equal units in place of all of them: the inverse of widening."""
    rows, columns = weight.shape[0] // shape[0], weight.shape[1] // shape[1]
    assert {rows, columns} <= {1, copies}
    return weight[::rows, ::columns] * columns


def test_noise_has_the_papers_size() -> None:
    """Algorithm 'Upscaling for MLPs under SGD': σ̄_Δ on the input, σ̄_Δ/√N on hidden, σ̄_Δ/N on the folded readout."""
    n, k, levels = 80, 3, [0.5, 0.7, 0.9]
    net = Network(Finite(n, k, device="cpu"), MLPSetup(3), 3, 1)
    before = net.weights()
    net.upscale(k, levels)
    after = net.weights()
    for was, now, level, unit in zip(before, after, levels, (1.0, (n * k) ** -0.5, 1 / (n * k)), strict=True):
        assert float((now - was).std()) == pytest.approx(level * unit, rel=0.1)


@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_noise_of_a_family_at_base_1(sigma: float) -> None:
    """In unit "theory" it is the program's; a number counts initial standard deviations, and means level / sigma."""
    n, k, level = 64, 2, 0.8

    def build(width: int) -> nn.Module:
        layers = [nn.Linear(a, b, bias=False) for a, b in ((30, width), (width, width), (width, 30))]
        for layer, std in zip(layers, (1.0, width**-0.5, 1 / width), strict=True):
            nn.init.normal_(layer.weight, std=sigma * std)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    net = Network(Finite(n, k, device="cpu"), MLPSetup(3, sigma=sigma), 30, 30)
    before = net.weights()
    net.upscale(k, level)
    wanted = [float((now - was).std()) for was, now in zip(before, net.weights(), strict=True)]
    family = mu.Family(build, base=1, init_at=n)
    model = family.init(n)
    exact, *noisy = (
        dict(family.upscale(model, width=k * n, noise=noise, exact=not noise)[0].named_parameters())
        for noise in (0.0, mu.GaussianNoise(level, unit="theory"), level / sigma, level)
    )
    in_theory, divided, plain = (
        [float((wide[name] - p).detach().std()) for name, p in exact.items()] for wide in noisy
    )
    assert in_theory == pytest.approx(wanted, rel=0.05)
    assert divided == pytest.approx(wanted, rel=0.05)
    assert plain == pytest.approx([sigma * std for std in wanted], rel=0.05)


@pytest.mark.parametrize(("factor", "meets"), [(1.0, True), (2.0, False)])
def test_a_family_at_base_1_with_adam_tends_to_the_limit(
    float64: None, adam_limit: float, factor: float, meets: bool
) -> None:
    """Its lr and eps are those of theory.Adam: another eps meets another limit."""
    n, (inputs, targets) = 200, batch()

    def build(width: int) -> nn.Module:
        layers = [nn.Linear(a, b, bias=False) for a, b in ((inputs.shape[1], width), (width, width), (width, 1))]
        for layer, std in zip(layers, (1.0, width**-0.5, 1 / width), strict=True):
            nn.init.normal_(layer.weight, std=std)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    family = mu.Family(build, base=1, init_at=n)
    fallen: list[float] = []
    for seed in range(20):
        model = family.init(n, seed=seed)
        opt = family.optimizer(model, torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), eps=factor * 0.2)
        losses: list[float] = []
        for _ in range(4):
            loss = squared_error(model(inputs), targets)
            losses.append(loss.item())
            opt.zero_grad()
            loss.backward()
            opt.step()
        fallen.append(losses[0] - losses[-1])
    assert (fmean(fallen) == pytest.approx(adam_limit, rel=0.05)) is meets


@pytest.fixture(scope="module")
def adam_limit() -> float:
    """By how much the loss falls in three steps."""
    mlp, (inputs, targets) = MLPSetup(3, "tanh", entrywise=Adam(0.8, 0.9, 0.2)), batch()
    losses = train(Limit(800, device="cpu"), mlp, inputs, targets, [Stage(3, 0.1)]).losses
    return float(losses[0] - losses[-1])


# ------------------------------------------------------------------------ finite networks meet the limit


def case(activation: str, layers: int, k: int) -> Callable[[Finite | Limit], Tensor]:
    """All layers trained, 5 + 5 steps."""
    inputs, targets = batch()
    mlp, stages = MLPSetup(layers, activation), [Stage(5, 0.5), Stage(5, 0.4, k, 0.5)]
    return lambda program: train(program, mlp, inputs, targets, stages).outputs


def apart(a: Estimate, b: Estimate) -> tuple[float, float]:
    """How far two means are apart, and the standard error of that: root mean squares over outputs and times."""
    return rms(a.mean - b.mean), rms((a.standard_error**2 + b.standard_error**2).sqrt())


@pytest.mark.parametrize(
    ("activation", "layers", "k"), [("tanh", 3, 2), pytest.param("relu", 3, 3, marks=pytest.mark.slow)]
)
def test_wide_networks_are_at_the_limit_and_dot_kets_are_why(activation: str, layers: int, k: int) -> None:
    program = case(activation, layers, k)
    limit = limit_estimate(program, k=k, samples=2000, seeds=2)
    without = limit_estimate(program, k=k, samples=1000, seeds=2, dots=False)
    distance, error = apart(finite_estimate(program, 2500, k=k, seeds=4, dense=False), limit)
    assert distance < 3 * error < 0.025
    assert rms(without.mean - limit.mean) > 10 * max(distance, error)


@pytest.mark.slow
def test_real_matrices_are_at_the_limit_too() -> None:
    program = case("tanh", 3, 2)
    limit = limit_estimate(program, k=2, samples=5000, seeds=4)
    distance, error = apart(finite_estimate(program, 512, k=2, seeds=16), limit)
    assert distance < 3 * error < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "layers", "k"), [("tanh", 4, 2), ("relu", 3, 3)])
def test_real_networks_of_width_2048_are_at_the_limit(activation: str, layers: int, k: int) -> None:
    program = case(activation, layers, k)
    limit = limit_estimate(program, k=k, samples=12_000, seeds=4)
    without = limit_estimate(program, k=k, samples=4000, seeds=2, dots=False)
    off = rms(without.mean - limit.mean)
    assert limit.note == ""
    for dense, seeds in ((True, 10), (False, 32)):
        distance, error = apart(finite_estimate(program, 2048, k=k, seeds=seeds, dense=dense), limit)
        print(f"{activation} {layers} layers k={k} dense={dense}: {distance:.4f} ± {error:.4f}, no dots {off:.3f}")
        assert distance < 3 * error
        assert off > 10 * max(distance, error)


@pytest.mark.parametrize(
    "mlp",
    [
        pytest.param(MLPSetup(3, "relu", entrywise=Sign(0.3)), marks=pytest.mark.slow),
        pytest.param(MLPSetup(3, "gelu", entrywise=Adam(0.8, 0.9, 0.2)), marks=pytest.mark.slow),
        MLPSetup(4, lambda h: h / (1 + h.square()).sqrt(), [1, 1.5, 1.5, 0.5], [False, True, True, True], momentum=0.5),
    ],
    ids=["sign", "Adam", "momentum and an activation of one's own"],
)
def test_other_optimizers_and_activations_meet_their_limit(mlp: MLPSetup) -> None:
    """The entrywise ones as OuterNonlin with r = 1 of all vectors of the past."""
    inputs, targets = batch(outputs=2)
    stages = [Stage(2, 0.2), Stage(3, 0.2, 2, 0.5)]

    def program(backend: Finite | Limit) -> Tensor:
        return train(backend, mlp, inputs, targets, stages).outputs

    large = mlp.entrywise is None
    limit = limit_estimate(program, k=2, samples=1000 if large else 700, seeds=3 if large else 6)
    wide = finite_estimate(program, 1200 if large else 300, k=2, seeds=5 if large else 16, dense=False)
    distance, error = apart(wide, limit)
    assert distance < 3 * error < 0.06
    assert rms(limit.mean[-1] - limit.mean[0]) > 5 * 3 * error


# ------------------------------------------------------------------------ identities of the limit

KINDS = [MLPSetup(3, "tanh"), MLPSetup(4, "relu", momentum=0.7), MLPSetup(3, "tanh", entrywise=Sign(0.3))]


def outputs(mlp: MLPSetup, *stages: Stage, samples: int = 320) -> Tensor:
    inputs, targets = batch(2)
    samples = samples if mlp.entrywise is None else samples // 2
    return train(Limit(samples, count_copies(stages), 5, device="cpu"), mlp, inputs, targets, stages).outputs


@pytest.mark.parametrize("mlp", KINDS, ids=["SGD", "momentum", "sign"])
def test_zero_noise_is_never_upscaled(mlp: MLPSetup) -> None:
    k = 3
    found, wanted = outputs(mlp, Stage(3, 0.3), Stage(3, 0.2, k)), outputs(mlp, Stage(3, 0.3), Stage(3, 0.2))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mlp", KINDS, ids=["SGD", "momentum", "sign"])
def test_the_lifted_run_before_an_upscaling_is_the_run(mlp: MLPSetup) -> None:
    lifted = outputs(mlp, Stage(4, 0.3), Stage(2, 0.2, 3, 0.5))
    torch.testing.assert_close(lifted[:4], outputs(mlp, Stage(4, 0.3))[:4], rtol=0, atol=1e-12)
    assert rms(lifted[4] - outputs(mlp, Stage(4, 0.3))[4]) > 1e-3


@pytest.mark.quick("momentum")
@pytest.mark.parametrize("mlp", KINDS, ids=["SGD", "momentum", "sign"])
def test_two_upscalings_of_which_one_is_silent_are_one(mlp: MLPSetup) -> None:
    """Noise in the first alone: copies of the second stay equal. Noise in the second alone: as if all came at once."""
    a, b, c = Stage(1, 0.3), {"steps": 1, "lr": 0.25}, {"steps": 1, "lr": 0.2}
    first = outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(times=2, **c))
    torch.testing.assert_close(first, outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(**c)), rtol=0, atol=1e-12)
    second = outputs(mlp, a, Stage(times=2, **b), Stage(times=2, noise=0.5, **c))
    torch.testing.assert_close(second, outputs(mlp, a, Stage(**b), Stage(times=4, noise=0.5, **c)), rtol=0, atol=1e-12)
    both = outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(times=2, noise=0.5, **c))
    assert rms(both - first) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_pairs_of_entries_under_sgd_are_outer_products(momentum: float) -> None:
    """The two ways in which a weight keeps its updates."""
    stages = Stage(3, 0.3), Stage(3, 0.2, 2, 0.5)
    low_rank = outputs(MLPSetup(3, "tanh", momentum=momentum), *stages, samples=160)
    pairs = outputs(MLPSetup(3, "tanh", momentum=momentum, entrywise=lambda g: g), *stages)
    torch.testing.assert_close(pairs, low_rank, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_two_noisy_upscalings_meet_their_limit() -> None:
    """The second one's noise is iid, the first one's in pairs: a class between W₁ and W₂."""
    inputs, targets = batch()
    stages = [Stage(3, 0.4), Stage(3, 0.3, 2, 0.6), Stage(3, 0.3, 2, 0.4)]

    def program(backend: Finite | Limit) -> Tensor:
        found = train(backend, MLPSetup(3, "tanh"), inputs, targets, stages)
        return torch.cat([found.outputs.flatten(), found.kernels[-1].mean(0).flatten()])

    limit = limit_estimate(program, k=4, samples=4000, seeds=4)
    distance, error = apart(finite_estimate(program, 300, k=4, seeds=16), limit)
    assert distance < 3 * error < 0.04
    kernel = limit.mean[-16:].reshape(4, 4)
    alone, pair, others = kernel.diagonal().mean(), kernel[[0, 2], [1, 3]].mean(), kernel[:2, 2:].mean()
    assert alone > pair + 3 * error > others + 6 * error


def test_copies_are_equal_until_noise_tells_them_apart() -> None:
    inputs, targets = batch()
    stages = [Stage(2, 0.3), Stage(2, 0.3, 3, 0.5)]
    found = train(Limit(500, 3, device="cpu"), MLPSetup(3), inputs, targets, stages)
    assert found.upscaled == (2,)
    kernels = found.kernels
    torch.testing.assert_close(kernels[:2], kernels[:2, :, :1, :1].expand(2, 4, 3, 3), rtol=0, atol=1e-12)
    same, other = kernels[3, 0].diagonal().mean(), kernels[3, 0, 0, 1]
    assert 0.3 * same < other < 0.9 * same
    assert found.hidden.shape == (4, 500, 3)
    torch.testing.assert_close(found.losses[-1], squared_error(found.outputs[-1], targets), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------ cost


def held(thing: object, seen: dict[int, int]) -> int:
    """Bytes of all tensors that can be reached from here."""
    if isinstance(thing, Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif id(thing) not in seen:
        seen[id(thing)] = 0
        parts = thing if isinstance(thing, list | tuple) else thing.values() if isinstance(thing, dict) else ()
        for part in [*parts, *getattr(thing, "__dict__", {}).values()]:
            held(part, seen)
    return sum(seen.values())


@pytest.mark.quick("3")
@pytest.mark.parametrize("k", [1, 3])
def test_memory_is_linear_in_samples_times_latents(k: int) -> None:
    inputs, targets = batch()

    def bytes_each(samples: int, steps: int) -> float:
        program = Limit(samples, k, device="cpu")
        net = Network(program, MLPSetup(3), 3, 1)
        net.upscale(k, 0.5)
        for _ in range(steps):
            net.step(net.forward(inputs) - targets, 0.1)
        return held(net, {}) / (samples * program.latents)

    figures = [bytes_each(samples, steps) for samples in (300, 900) for steps in (4, 8)]
    assert max(figures) < 8 * 6  # float64: six numbers for each sample and latent
    assert max(figures) < 1.6 * min(figures)


# ------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLPSetup(1), "not 1 layers"),
        (lambda: MLPSetup(3, "swish"), "'swish' is no activation"),
        (lambda: MLPSetup(3, trained=[True]), "of 1 layers whether they learn, and there are 3"),
        (lambda: MLPSetup(3, sigma=[1.0, 2.0]), "sigma is one number or 3"),
        (lambda: MLPSetup(3, momentum=0.9, entrywise=Adam()), "leave momentum out"),
        (lambda: Adam(eps=0.0), "ε must be above 0"),
        (lambda: Sign(eps=-1.0), "ε must be above 0"),
        (lambda: Stage(3, 0.1, times=0), "not 3 and 0"),
        (lambda: outputs(MLPSetup(3), Stage(1, 0.1), Stage(1, 0.1, 2, [0.1, 0.2])), "noise is one number or 3"),
        (lambda: train(Limit(50, 2), MLPSetup(3), *batch(), [Stage(1, 0.1)]), "give it k=1"),
        (
            lambda: outputs(MLPSetup(3), Stage(1, 0.1, 2, torch.ones(2))),
            "noise is one number or 3, one for each layer, not 2",
        ),
        (lambda: outputs(MLPSetup(3), Stage(1, 0.1, 2, torch.ones(3, 1))), r"not an array of shape \(3, 1\)"),
        (
            lambda: outputs(MLPSetup(3), Stage(1, 0.1, 2, "loud")),
            "noise is one number or 3, one for each layer, not 'loud'",
        ),
        (lambda: Finite(5, dtype=torch.float16), r"torch\.float32 or torch\.float64, not in torch\.float16"),
        (lambda: train(Limit(50), MLPSetup(3), torch.ones(3), torch.ones(3), []), r"not \(3,\) and \(3,\)"),
        (lambda: outputs(MLPSetup(3, lambda h: h.sum(-1)), Stage(1, 0.1)), "act entry by entry"),
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: y - t), Stage(1, 0.1)), r"shape \(2, 1\)"),
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: 1.0), Stage(1, 0.1)), "depends on the outputs, not 1.0"),
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: t.sum()), Stage(1, 0.1)), "depends on the outputs"),
        (lambda: outputs(MLPSetup(3), Stage(9, 0.1), samples=30), "take [0-9]+ samples"),
        (lambda: outputs(MLPSetup(3, entrywise=Sign()), Stage(1, 0.1), samples=40_000), "every pair of 20000 entries"),
        (lambda: Network(Limit(50), MLPSetup(3), 3, 1).weights(), "real matrices"),
        (
            lambda: outputs(MLPSetup(3, entrywise=lambda g: g.sum()), Stage(1, 0.1)),
            r"returned shape \(\) for a gradient",
        ),
        (lambda: Network(Limit(50, 3), MLPSetup(3), 3, 1).upscale(2, 0.1), "3 equal copies"),
        (lambda: Stage(5, 0.5, times=2, noise=-0.5), "noise is a standard deviation, 0 or more and finite, not -0.5"),
        (lambda: Stage(5, 0.5, 2, [0.1, float("nan"), 0.1]), "noise is a standard deviation, 0 or more and finite"),
        (lambda: MLPSetup(3, sigma=-1.0), "sigma is a standard deviation, 0 or more and finite, not -1.0"),
        (lambda: Stage(5, -1.0), "a learning rate is 0 or more, and finite, not -1.0"),
        (lambda: Stage(1.5, 0.5), "in whole numbers, not 1.5 and 1"),  # type: ignore[arg-type]
        (lambda: MLPSetup(3, entrywise="adam"), r"mupscale\.theory\.Adam\(\), .*; 'adam' is neither"),  # type: ignore
        (lambda: MLPSetup(3, entrywise=torch.optim.Adam), "; Adam is neither"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words) as caught:
        make()
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("backend", [Limit, Finite])
def test_divergence_says_when(backend: type[Finite | Limit]) -> None:
    inputs, targets = batch()
    with pytest.raises(Diverged, match=r"diverged.*smaller learning rate"):
        train(backend(200), MLPSetup(3, "linear"), inputs, targets, [Stage(30, 1e60)])


@pytest.mark.parametrize("noise", [torch.tensor([0.2, 0.5, 0.3]), np.array([0.2, 0.5, 0.3]), (0.2, 0.5, 0.3)])
def test_noise_may_be_any_array(noise: Any) -> None:
    wanted = outputs(MLPSetup(3), Stage(1, 0.3), Stage(2, 0.3, 2, [0.2, 0.5, 0.3]))
    torch.testing.assert_close(outputs(MLPSetup(3), Stage(1, 0.3), Stage(2, 0.3, 2, noise)), wanted, rtol=0, atol=1e-6)


def test_noise_may_be_a_number_of_any_kind() -> None:
    same = outputs(MLPSetup(3), Stage(1, 0.3), Stage(1, 0.3, 2, np.float64(0.5)))
    assert torch.equal(outputs(MLPSetup(3), Stage(1, 0.3), Stage(1, 0.3, 2, torch.tensor(0.5))), same)


def test_functions_that_work_in_place_are_as_good() -> None:
    stages = Stage(2, 0.3), Stage(2, 0.3, 2, 0.5)
    known = ACTIVATIONS["tanh"]
    wanted = outputs(MLPSetup(3, known), *stages)
    torch.testing.assert_close(outputs(MLPSetup(3, torch.tanh_), *stages), wanted, rtol=0, atol=1e-12)
    with_slope = Activation(torch.tanh_, lambda h: h.tanh_().square_().neg_().add_(1))
    torch.testing.assert_close(outputs(MLPSetup(3, with_slope), *stages), wanted, rtol=0, atol=1e-12)
    h = torch.linspace(-1, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(with_slope.derivative(h), known.derivative(h), rtol=0, atol=1e-12)
    assert torch.equal(h, torch.linspace(-1, 1, 5, dtype=torch.float64))
    steady = outputs(MLPSetup(3, momentum=0.7, entrywise=torch.tanh), *stages)
    torch.testing.assert_close(
        outputs(MLPSetup(3, momentum=0.7, entrywise=torch.tanh_), *stages), steady, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_are_derivatives(name: str) -> None:
    h = torch.linspace(-3, 3, 101, dtype=torch.float64)[:, None]
    known = ACTIVATIONS[name]
    torch.testing.assert_close(known.derivative(h), Activation(known.value).derivative(h), rtol=0, atol=1e-12)
