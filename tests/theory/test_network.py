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
from mupscale.core import index_of_old, places
from mupscale.models import MLP as TorchMLP
from mupscale.system.errors import MupscaleError
from mupscale.theory import Adam, Diverged, Entrywise, Estimate, Finite, Limit, MLPSetup, Network, Sign, Stage
from mupscale.theory import finite as finite_estimate
from mupscale.theory import limit as limit_estimate
from mupscale.theory import run as train
from mupscale.theory.mlp_training import ACTIVATIONS, count_copies, squared_error
from weights import take_step

slow = pytest.mark.slow


def batch(inputs: int = 4, features: int = 3, outputs: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(inputs, features + outputs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return 1.5 * nn.functional.normalize(drawn[:, :features], dim=1), drawn[:, features:]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def weights(net: Network) -> list[Tensor]:
    """Those of the nn.Linear layers that a network is, the readout's with its 1/(nk)."""
    size = net.program.units * net.program.k
    eye = torch.eye(size, dtype=torch.float64).reshape(size, net.program.units, net.program.k)
    hidden = [layer.times(eye).reshape(size, size).T for layer in net.hidden]
    first, last = (layer.values.flatten(1) for layer in (net.input, net.readout))
    return [first.T, *hidden, last / size]


# ------------------------------------------------------------------------ the program that the library trains


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.softplus(-targets.sign() * outputs).sum(-1).mean()


OPTIMIZERS: dict[str, tuple[dict[str, object], type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": ({}, torch.optim.SGD, {}),
    "momentum": ({"momentum": 0.8}, torch.optim.SGD, {"momentum": 0.8}),
    "sign": ({"entrywise": Sign(eps=0.3)}, torch.optim.Adam, {"betas": (0.0, 0.0), "eps": 0.3}),
    "Adam": ({"entrywise": Adam(0.7, 0.9, 0.2)}, torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 0.2}),
}


def copies(times: int, noise: float = 0.4) -> Stage:
    return Stage(3, 0.05, times, noise)


def fresh(outgoing: float = 1.0) -> Stage:
    return Stage(3, 0.07, 1.5, how="fresh", outgoing=outgoing)


SHAPES: list[tuple[Any, ...]] = [
    (2, "gelu", [copies(2)], squared_error, None),
    (3, "tanh", [copies(3)], squared_error, None),
    (4, "relu", [copies(2)], logistic, [True, False, True, True]),
    (4, "linear", [copies(2), copies(2)], squared_error, [False, True, True, False]),
]


@pytest.mark.parametrize(  # every optimizer and every shape twice; all pairs are slow
    ("name", "layers", "activation", "growths", "loss", "trained"),
    [
        *(
            pytest.param(name, *shape, marks=() if (i + j) % 4 in (0, 1) else slow)
            for i, name in enumerate(OPTIMIZERS)
            for j, shape in enumerate(SHAPES)
        ),
        ("SGD", 3, "tanh", [fresh(0.5)], squared_error, None),
        ("momentum", 4, "relu", [fresh(), fresh(0.25)], squared_error, None),
        ("sign", 2, "gelu", [fresh(0.0)], squared_error, None),
        ("Adam", 3, "tanh", [copies(2, 0.0), fresh(0.5)], squared_error, None),
        ("Adam", 4, "relu", [fresh(0.5), copies(2)], squared_error, None),
    ],
)
def test_a_finite_program_is_what_the_library_trains(
    float64: None,
    name: str,
    layers: int,
    activation: str,
    growths: list[Stage],
    loss: Callable[[Tensor, Tensor], Tensor],
    trained: Sequence[bool] | None,
) -> None:
    """Autograd, μP's groups at the paper's units (base = 1) and the library's growths: all outputs, weights and state.

    Weights are the library's after its own growth, but for noise and fresh units, whose numbers it takes from here.
    """
    ours, optimizer, hyper = OPTIMIZERS[name]
    n, (inputs, targets), stages = 4, batch(outputs=2), [Stage(3, 0.1), *growths]
    mlp = MLPSetup(layers, activation, 1.2, trained, loss=loss, **ours)
    net, again = (Network(Finite(n, count_copies(stages), 1, device="cpu"), mlp, 3, 2) for _ in range(2))
    wanted = train(Finite(n, again.program.k, 1, device="cpu"), mlp, inputs, targets, stages).outputs

    family = mu.Family(lambda width: TorchMLP(3, width, 2, depth=layers, bias=False, activation=activation), base=1)
    model = family.init(n)
    for p, weight in zip(model.parameters(), weights(net), strict=True):
        p.data = narrowed(weight, p.shape, net.equal)
    for p, learns in zip(model.parameters(), trained or [True] * layers, strict=True):
        p.requires_grad_(learns)
    opt = family.optimizer(model, optimizer, lr=0.1, **hyper)
    place, outputs = torch.arange(n), list[Tensor]()  # of our units among the library's

    def as_library(weight: Tensor, p: Tensor) -> Tensor:
        rows, columns = (place if size == len(place) else torch.arange(size) for size in p.shape)
        placed = torch.empty_like(p)
        placed[rows[:, None], columns] = narrowed(weight, p.shape, net.equal)
        return placed

    for stage in stages:
        if stage.times != 1:
            before, was = [p.detach().clone() for p in model.parameters()], weights(net)
            how = mu.Fresh(stage.outgoing) if stage.how == "fresh" else mu.Copies()
            width, exact = int(stage.times * len(place)), stage.how == "copies"
            model, opt = family.upscale(model, opt, width=width, grow=how, lr=stage.lr, exact=exact)  # type: ignore
            if exact:
                net.upscale(stage.copies, stage.noise)
                place = (stage.copies * place[:, None] + torch.arange(stage.copies)).flatten()
                for p, weight in zip(model.parameters(), was, strict=True):
                    torch.testing.assert_close(p.data, as_library(weight, p), rtol=0, atol=1e-10)
            else:
                net.grow(stage.times, stage.outgoing)
                in_order = old_units_first(len(place), stage.times)
                place = torch.cat([in_order[: len(place)][place], in_order[len(place) :]])
            for p, old, weight in zip(model.parameters(), before, weights(net), strict=True):
                if not exact:
                    axes = {d: mu.Axis(stage.times) for d, size in enumerate(p.shape) if size == width}
                    kept = index_of_old(tuple(old.shape), axes)
                    torch.testing.assert_close(p.data[kept], as_library(weight, p)[kept], rtol=0, atol=1e-10)
                    assert not torch.equal(p.data, as_library(weight, p))
                p.data = as_library(weight, p)
        for _ in range(stage.steps):
            y = model(inputs)
            torch.testing.assert_close(y, net.forward(inputs), rtol=0, atol=1e-10)
            outputs.append(y.detach())
            opt.zero_grad()
            value = loss(y, targets)
            (slope,) = torch.autograd.grad(value, y, retain_graph=True)
            value.backward()
            opt.step()
            net.step(slope, stage.lr)
    outputs.append(model(inputs).detach())
    torch.testing.assert_close(torch.stack(outputs), wanted, rtol=0, atol=1e-10)
    assert rms(wanted[-1] - wanted[0]) > 0.02
    for p, weight in zip(model.parameters(), weights(net), strict=True):
        torch.testing.assert_close(p.data, as_library(weight, p), rtol=0, atol=1e-10)


def old_units_first(n: int, times: float) -> Tensor:
    """Where the library puts our units: the n old ones, and then the new ones."""
    old = places(mu.Axis(times), n)
    new = torch.ones(int(n * times), dtype=torch.bool).index_fill(0, old, False)
    return torch.cat([old, new.nonzero().flatten()])


def narrowed(weight: Tensor, shape: torch.Size, copies: int) -> Tensor:
    """One of `copies` equal units in place of all of them: the inverse of widening."""
    rows, columns = weight.shape[0] // shape[0], weight.shape[1] // shape[1]
    assert {rows, columns} <= {1, copies}
    return weight[::rows, ::columns] * columns


def test_fresh_blocks_have_the_librarys_spread() -> None:
    """All four of a hidden matrix, and both parts of input and readout."""
    n, amplitude = 128, 0.5
    family = mu.Family(lambda width: plain(width, 3, 2, 1.2), base=1, init_at=n)
    model, _ = family.upscale(family.init(n), width=3 * n, grow=mu.Fresh(amplitude))
    net = Network(Finite(n, device="cpu"), MLPSetup(3, sigma=1.2), 3, 2)
    net.grow(3, amplitude)
    place = old_units_first(n, 3)
    for p, weight in zip(model.parameters(), weights(net), strict=True):
        rows, columns = (place if size == 3 * n else torch.arange(size) for size in p.shape)
        theirs = p.detach().double()[rows[:, None], columns]
        for out in (slice(n), slice(n, None)):
            for in_ in (slice(n), slice(n, None)):
                if weight[out, in_].numel():
                    assert float(weight[out, in_].std()) == pytest.approx(float(theirs[out, in_].std()), rel=0.15)


def plain(width: int, features: int, outputs: int, sigma: float) -> nn.Module:
    """Initial values as the program has them."""
    layers = [nn.Linear(a, b, bias=False) for a, b in ((features, width), (width, width), (width, outputs))]
    for layer, std in zip(layers, (1.0, width**-0.5, 1 / width), strict=True):
        nn.init.normal_(layer.weight, std=sigma * std)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_noise_of_a_family_at_base_1(sigma: float) -> None:
    """In unit "theory" it is the program's; a number counts initial standard deviations, and means level / sigma.

    Algorithm 'Upscaling for MLPs under SGD': σ̄_Δ on the input, σ̄_Δ/√N on hidden, σ̄_Δ/N on the folded readout.
    """
    n, k, level = 64, 2, 0.8
    net = Network(Finite(n, k, device="cpu"), MLPSetup(3, sigma=sigma), 30, 30)
    before = weights(net)
    net.upscale(k, level)
    wanted = [float((now - was).std()) for was, now in zip(before, weights(net), strict=True)]
    assert wanted == pytest.approx([level, level * (n * k) ** -0.5, level / (n * k)], rel=0.05)
    family = mu.Family(lambda width: plain(width, 30, 30, sigma), base=1, init_at=n)
    model = family.init(n)
    exact, *noisy = (
        dict(family.upscale(model, width=k * n, noise=noise, exact=not noise)[0].named_parameters())
        for noise in (0.0, mu.GaussianNoise(level, unit="theory"), level / sigma, level)
    )
    in_theory, divided, number = (
        [float((wide[name] - p).detach().std()) for name, p in exact.items()] for wide in noisy
    )
    assert in_theory == pytest.approx(wanted, rel=0.05)
    assert divided == pytest.approx(wanted, rel=0.05)
    assert number == pytest.approx([sigma * std for std in wanted], rel=0.05)


def test_a_family_at_base_1_with_adam_tends_to_the_limit(float64: None) -> None:
    """Its lr and eps are those of theory.Adam: another eps meets another limit."""
    n, (inputs, targets) = 200, batch()
    mlp = MLPSetup(3, "tanh", entrywise=Adam(0.8, 0.9, 0.2))
    start, *_, end = train(Limit(800, device="cpu"), mlp, inputs, targets, [Stage(3, 0.1)]).losses
    family = mu.Family(lambda width: plain(width, inputs.shape[1], 1, 1.0), base=1, init_at=n)
    for factor, meets in ((1.0, True), (2.0, False)):
        fallen: list[float] = []
        for seed in range(20):
            model = family.init(n, seed=seed)
            opt = family.optimizer(model, torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), eps=factor * 0.2)
            losses = [take_step(opt, squared_error(model(inputs), targets)) for _ in range(4)]
            fallen.append(losses[0] - losses[-1])
        assert (fmean(fallen) == pytest.approx(float(start - end), rel=0.05)) is meets


# ------------------------------------------------------------------------ finite networks meet the limit


def case(activation: str, layers: int, k: int) -> Callable[[Finite | Limit], Tensor]:
    """All layers trained, 5 + 5 steps."""
    inputs, targets = batch()
    mlp, stages = MLPSetup(layers, activation), [Stage(5, 0.5), Stage(5, 0.4, k, 0.5)]
    return lambda program: train(program, mlp, inputs, targets, stages).outputs


def apart(a: Estimate, b: Estimate) -> tuple[float, float]:
    """How far two means are apart, and the standard error of that: root mean squares over outputs and times."""
    return rms(a.mean - b.mean), rms((a.standard_error**2 + b.standard_error**2).sqrt())


@pytest.mark.parametrize(("activation", "layers", "k"), [("tanh", 3, 2), pytest.param("relu", 3, 3, marks=slow)])
def test_wide_networks_are_at_the_limit_and_dot_kets_are_why(activation: str, layers: int, k: int) -> None:
    program = case(activation, layers, k)
    limit = limit_estimate(program, k=k, samples=2000, seeds=2)
    without = limit_estimate(program, k=k, samples=1000, seeds=2, dots=False)
    distance, error = apart(finite_estimate(program, 2500, k=k, seeds=4, dense=False), limit)
    assert distance < 3 * error < 0.04
    assert rms(without.mean - limit.mean) > 8 * max(distance, error)  # 10 here, 9.97 on another machine


def test_momentum_and_an_activation_of_ones_own_meet_their_limit() -> None:
    inputs, targets = batch(outputs=2)
    phi, trained = (lambda h: h / (1 + h.square()).sqrt()), [False, True, True, True]
    mlp = MLPSetup(4, phi, [1, 1.5, 1.5, 0.5], trained, momentum=0.5)

    def program(backend: Finite | Limit) -> Tensor:
        return train(backend, mlp, inputs, targets, [Stage(2, 0.2), Stage(3, 0.2, 2, 0.5)]).outputs

    limit = limit_estimate(program, k=2, samples=1000, seeds=3)
    distance, error = apart(finite_estimate(program, 1200, k=2, seeds=5, dense=False), limit)
    assert distance < 3 * error < 0.06
    assert rms(limit.mean[-1] - limit.mean[0]) > 5 * 3 * error


# ------------------------------------------------------------------------ identities of the limit

KINDS = [MLPSetup(3, "tanh"), MLPSetup(4, "relu", momentum=0.7), MLPSetup(3, "tanh", entrywise=Sign(0.3))]
each_kind = pytest.mark.parametrize("mlp", KINDS, ids=["SGD", "momentum", "sign"])


def outputs(mlp: MLPSetup, *stages: Stage, samples: int = 320) -> Tensor:
    inputs, targets = batch(2)
    samples = samples if mlp.entrywise is None else samples // 2
    return train(Limit(samples, count_copies(stages), 5, device="cpu"), mlp, inputs, targets, stages).outputs


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@each_kind
def test_zero_noise_is_never_upscaled_and_noise_acts_from_its_upscaling_on(mlp: MLPSetup) -> None:
    never = outputs(mlp, Stage(3, 0.3), Stage(2, 0.2))
    same(outputs(mlp, Stage(3, 0.3), Stage(2, 0.2, 3)), never)
    noisy = outputs(mlp, Stage(3, 0.3), Stage(2, 0.2, 3, 0.5))
    same(noisy[:3], never[:3])
    assert rms(noisy[3] - never[3]) > 1e-3


@pytest.mark.quick("momentum")
@each_kind
def test_two_upscalings_of_which_one_is_silent_are_one(mlp: MLPSetup) -> None:
    """Noise in the first alone: copies of the second stay equal. Noise in the second alone: as if all came at once."""
    a, b, c = Stage(1, 0.3), {"steps": 1, "lr": 0.25}, {"steps": 1, "lr": 0.2}
    first = outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(times=2, **c))
    same(first, outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(**c)))
    second = outputs(mlp, a, Stage(times=2, **b), Stage(times=2, noise=0.5, **c))
    same(second, outputs(mlp, a, Stage(**b), Stage(times=4, noise=0.5, **c)))
    both = outputs(mlp, a, Stage(times=2, noise=0.5, **b), Stage(times=2, noise=0.5, **c))
    assert rms(both - first) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_pairs_of_entries_under_sgd_are_outer_products(momentum: float) -> None:
    """The two ways in which a weight keeps its updates."""
    stages = Stage(3, 0.3), Stage(3, 0.2, 2, 0.5)
    low_rank = outputs(MLPSetup(3, "tanh", momentum=momentum), *stages, samples=160)
    same(outputs(MLPSetup(3, "tanh", momentum=momentum, entrywise=lambda g: g), *stages), low_rank)


# ------------------------------------------------------------------------ cost, and input of any kind


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


class Stubborn(Entrywise):
    def update(self, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        state["mine"] = gradient
        return gradient


ONE = Stage(1, 0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLPSetup(1), "layers= is 1, but must be a whole number, 2 or more"),
        (lambda: MLPSetup(3, "swish"), "'swish' is no activation"),
        (lambda: MLPSetup(3, trained=[True]), "of 1 layers whether they learn, and there are 3"),
        (lambda: MLPSetup(3, sigma=[1.0, 2.0]), "sigma is one number or 3"),
        (lambda: MLPSetup(3, sigma=-1.0), "sigma= is -1.0, but must be standard deviations, 0 or more"),
        (lambda: MLPSetup(3, momentum=0.9, entrywise=Adam()), "leave momentum out"),
        (lambda: MLPSetup(3, entrywise="adam"), r"entrywise= is 'adam', but must be .*such as Sign\(\)"),  # type: ignore
        (lambda: MLPSetup(3, entrywise=torch.optim.Adam), r"entrywise= is .*but must be .*such as Sign\(\)"),  # type: ignore
        (lambda: Adam(eps=0.0), "eps= is 0.0, but must be a number above 0"),
        (lambda: Sign(eps=-1.0), "eps= is -1.0, but must be a number above 0"),
        (lambda: Stage(3, 0.1, times=0), "times= is 0, but must be 1 or more"),
        (lambda: Stage(5, -1.0), "lr= is -1.0, but must be a number that is finite and 0 or more"),
        (lambda: Stage(1.5, 0.5), "steps= is 1.5, but must be a whole number, 0 or more"),  # type: ignore[arg-type]
        (lambda: Stage(1, 0.1, 2, how="new"), "how= is 'new', but must be 'copies' or 'fresh'"),  # type: ignore[arg-type]
        (lambda: Stage(1, 0.1, 2, 0.5, how="fresh"), "noise is for copies"),
        (lambda: Stage(1, 0.1, 1.5), "a whole number of times wider, not 1.5: how='fresh' can"),
        (lambda: Stage(1, 0.1, 0.5, how="fresh"), "times= is 0.5, but must be 1 or more, and finite"),
        (lambda: Stage(1, 0.1, math.inf, how="fresh"), "times= is inf, but must be 1 or more, and finite"),
        (lambda: Stage(1, 0.1, 2, how="fresh", outgoing=1.5), "outgoing= is 1.5, but must be a number between 0 and 1"),
        (lambda: Stage(5, 0.5, times=2, noise=-0.5), "noise= is -0.5, but must be standard deviations, 0 or more"),
        (lambda: Stage(5, 0.5, 2, [0.1, math.nan, 0.1]), "noise= .*must be standard deviations, 0 or more and finite"),
        (lambda: Stage(1, 0.1, 2, "loud"), "noise= is 'loud', but must be"),  # type: ignore[arg-type]
        (lambda: outputs(MLPSetup(3), ONE, Stage(1, 0.1, 2, [0.1, 0.2])), "noise is one number or 3"),
        (lambda: outputs(MLPSetup(3), Stage(1, 0.1, 2, torch.ones(2))), "3, one for each layer, not 2"),
        (lambda: outputs(MLPSetup(3), Stage(1, 0.1, 2, torch.ones(3, 1))), r"not an array of shape \(3, 1\)"),
        (lambda: train(Limit(50, 2), MLPSetup(3), *batch(), [ONE]), "give it k=1"),
        (lambda: train(Limit(50), MLPSetup(3), torch.ones(3), torch.ones(3), []), r"not \(3,\) and \(3,\)"),
        (lambda: outputs(MLPSetup(3, lambda h: h.sum(-1)), ONE), r"the activation returned shape .* entry by entry"),
        (lambda: outputs(MLPSetup(3, entrywise=lambda g: g.sum()), ONE), r"the optimizer returned shape \(\) for"),
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: y - t), ONE), r"shape \(2, 1\)"),
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: 1.0), ONE), "depends on the outputs, not 1.0"),  # type: ignore
        (lambda: outputs(MLPSetup(3, loss=lambda y, t: t.sum()), ONE), "depends on the outputs"),
        (lambda: outputs(MLPSetup(3), Stage(9, 0.1), samples=30), "take [0-9]+ samples"),
        (lambda: outputs(MLPSetup(3, entrywise=Sign()), ONE, samples=40_000), "every pair of 20000 entries"),
        (lambda: outputs(MLPSetup(entrywise=Stubborn()), ONE, fresh()), "'mine' of Stubborn cannot be"),
        (lambda: Network(Limit(50, 3), MLPSetup(3), 3, 1).upscale(2, 0.1), "3 equal copies"),
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", [Limit, Finite])
def test_divergence_says_when(backend: type[Finite | Limit]) -> None:
    with pytest.raises(Diverged, match=r"diverged.*smaller learning rate"):
        train(backend(200), MLPSetup(3, "linear"), *batch(), [Stage(30, 1e60)])


@pytest.mark.parametrize(
    ("noise", "plainly"),
    [
        (torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), [0.2, 0.5, 0.3]),
        (np.array([0.2, 0.5, 0.3]), [0.2, 0.5, 0.3]),
        ((0.2, 0.5, 0.3), [0.2, 0.5, 0.3]),
        (np.float64(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
    ],
)
def test_noise_may_be_any_number_or_array(noise: Any, plainly: Any) -> None:
    same(*(outputs(MLPSetup(3), Stage(1, 0.3), Stage(2, 0.3, 2, each)) for each in (noise, plainly)))


def test_functions_that_work_in_place_are_as_good() -> None:
    stages = Stage(2, 0.3), Stage(2, 0.3, 2, 0.5)
    same(outputs(MLPSetup(3, torch.tanh_), *stages), outputs(MLPSetup(3, "tanh"), *stages))
    steady, in_place = (MLPSetup(3, momentum=0.7, entrywise=phi) for phi in (torch.tanh, torch.tanh_))
    same(outputs(in_place, *stages), outputs(steady, *stages))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_are_derivatives(name: str) -> None:
    h, mlp = torch.linspace(-3, 3, 50, dtype=torch.float64)[:, None], MLPSetup(3, name)
    numeric = (mlp.activate(h + 1e-6) - mlp.activate(h - 1e-6)) / 2e-6
    torch.testing.assert_close(mlp.slope(h), numeric, rtol=0, atol=1e-8)
