"""Fresh units in the limit: two populations as the library grows them, in closed form, and beside finite networks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import index_of_old, places
from mupscale.models import MLP as TorchMLP
from mupscale.system.errors import MupscaleError
from mupscale.theory import (
    Adam,
    Entrywise,
    Experiment,
    Finite,
    Limit,
    LimitComparison,
    MLPSetup,
    Network,
    Program,
    Sign,
    Stage,
    best_way,
    compare_ways_to_grow,
    finite,
    gaussian_batch,
    limit,
    list_ways,
    run,
)
from mupscale.theory.limit_study import compare_with_limit, fit_slope
from mupscale.theory.mlp_training import count_copies, squared_error
from mupscale.theory.worked_examples import linear_with_fresh_units

# ------------------------------------------------------------------------ what the library grows

OPTIMIZERS: dict[str, tuple[dict[str, object], type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": ({}, torch.optim.SGD, {}),
    "momentum": ({"momentum": 0.8}, torch.optim.SGD, {"momentum": 0.8}),
    "sign": ({"entrywise": Sign(eps=0.3)}, torch.optim.Adam, {"betas": (0.0, 0.0), "eps": 0.3}),
    "Adam": ({"entrywise": Adam(0.7, 0.9, 0.2)}, torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 0.2}),
}


def family(layers: int, activation: str, sigma: float = 1.2, init_at: int = 64) -> mu.Family:
    def build(width: int) -> nn.Module:
        model = TorchMLP(3, width, 2, depth=layers, bias=False, activation=activation)
        stds = [1.0, *[width**-0.5] * (layers - 2), 1 / width]
        for p, std in zip(model.parameters(), stds, strict=True):
            nn.init.normal_(p, std=sigma * std)
        return model

    return mu.Family(build, base=1, init_at=init_at)


@pytest.mark.parametrize(
    ("name", "layers", "activation", "growths"),
    [
        ("SGD", 3, "tanh", [mu.Fresh(0.5)]),
        ("momentum", 4, "relu", [mu.Fresh(), mu.Fresh(0.25)]),
        ("sign", 2, "gelu", [mu.Fresh(0.0)]),
        ("Adam", 3, "tanh", [mu.Copies(), mu.Fresh(0.5)]),
        ("Adam", 4, "relu", [mu.Fresh(0.5), mu.Copies()]),
    ],
)
def test_a_finite_program_grows_as_the_library_does(
    float64: None, name: str, layers: int, activation: str, growths: Sequence[mu.Fresh | mu.Copies]
) -> None:
    """Old weights and state are the library's after its own upscale; then both train on from the same fresh numbers."""
    ours, optimizer, hyper = OPTIMIZERS[name]
    n, lr, times = 4, 0.1, {mu.Fresh: 1.5, mu.Copies: 2}
    inputs, targets = gaussian_batch(4, 3)
    targets = torch.cat([targets, -targets.square()], 1)
    mlp = MLPSetup(layers, activation, 1.2, **ours)
    program = Finite(n, 2 ** sum(isinstance(how, mu.Copies) for how in growths), seed=1, device="cpu")
    net = Network(program, mlp, 3, 2)
    line = family(layers, activation)
    model = line.init(n)
    for p, weight in zip(model.parameters(), net.weights(), strict=True):
        p.data = narrow(weight, p.shape, net.equal)
    opt = line.optimizer(model, optimizer, lr=lr, **hyper)
    place = torch.arange(n)  # of our units among the library's

    def steps() -> None:
        for _ in range(3):
            y = model(inputs)
            torch.testing.assert_close(y, net.forward(inputs), rtol=0, atol=1e-10)
            opt.zero_grad()
            value = squared_error(y, targets)
            (slope,) = torch.autograd.grad(value, y, retain_graph=True)
            value.backward()
            opt.step()
            net.step(slope, lr)

    steps()
    for how in growths:
        lr *= 0.7
        width = int(times[type(how)] * len(place))
        before = [p.detach().clone() for p in model.parameters()]
        exact = isinstance(how, mu.Copies)
        model, opt = line.upscale(model, opt, width=width, grow=how, lr=lr, exact=exact)  # type: ignore[assignment]
        if isinstance(how, mu.Fresh):
            net.grow(1.5, how.outgoing)
            in_order = old_units_first(len(place), 1.5)
            place = torch.cat([in_order[: len(place)][place], in_order[len(place) :]])
        else:
            net.upscale(2, 0.0)
            place = (2 * place[:, None] + torch.arange(2)).flatten()
        for p, was, weight in zip(model.parameters(), before, net.weights(), strict=True):
            rows, columns = (place if size == width else torch.arange(size) for size in p.shape)
            wanted = torch.empty_like(p)
            wanted[rows[:, None], columns] = narrow(weight, p.shape, net.equal)
            if isinstance(how, mu.Copies):
                torch.testing.assert_close(p.data, wanted, rtol=0, atol=1e-10)
                continue
            axes = {d: mu.Axis(1.5) for d, size in enumerate(p.shape) if size == width}
            kept = index_of_old(tuple(was.shape), axes)
            torch.testing.assert_close(p.data[kept], wanted[kept], rtol=0, atol=1e-10)
            assert not torch.equal(p.data, wanted)
            p.data = wanted
        steps()


def old_units_first(n: int, times: float) -> Tensor:
    """Where the library puts our units: the n old ones, and then the new ones."""
    old = places(mu.Axis(times), n)
    new = torch.ones(int(n * times), dtype=torch.bool).index_fill(0, old, False)
    return torch.cat([old, new.nonzero().flatten()])


def narrow(weight: Tensor, shape: torch.Size, copies: int) -> Tensor:
    """One of `copies` equal units in place of all of them."""
    rows, columns = weight.shape[0] // shape[0], weight.shape[1] // shape[1]
    assert {rows, columns} <= {1, copies}
    return weight[::rows, ::columns] * columns


def test_all_four_blocks_have_the_librarys_spread() -> None:
    n, wide, amplitude = 128, 384, 0.5
    line = family(3, "tanh", init_at=n)
    model, _ = line.upscale(line.init(n), width=wide, grow=mu.Fresh(amplitude))
    net = Network(Finite(n, device="cpu"), MLPSetup(3, sigma=1.2), 3, 2)
    net.grow(3, amplitude)
    place = old_units_first(n, 3)
    for p, weight in zip(model.parameters(), net.weights(), strict=True):
        rows, columns = (place if size == wide else torch.arange(size) for size in p.shape)
        theirs = p.detach().double()[rows[:, None], columns]
        for out in (slice(n), slice(n, None)):
            for in_ in (slice(n), slice(n, None)):
                if weight[out, in_].numel():
                    assert float(weight[out, in_].std()) == pytest.approx(float(theirs[out, in_].std()), rel=0.15)


# ------------------------------------------------------------------------ linear networks in closed form

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[float], float]]] = {
    "quadratic": (lambda y, t: 0.5 * (y - t).square().sum(), lambda y: y - 1.0),
    "logistic": (lambda y, t: nn.functional.softplus(-3 * y * t).sum(), lambda y: -3 / (1 + math.exp(3 * y))),
}


def fresh(steps: int, lr: float, times: float = 2, outgoing: float = 1.0) -> Stage:
    return Stage(steps, lr, times, how="fresh", outgoing=outgoing)


def trained(layers: int, program: Program, stages: Sequence[Stage], loss: str = "quadratic") -> Tensor:
    learns = [True] * 2 if layers == 2 else [False, *[True] * (layers - 2), False]
    mlp = MLPSetup(layers, "linear", 1.1, learns, loss=LOSSES[loss][0])
    found = run(program, mlp, torch.tensor([[0.8]], dtype=torch.float64), torch.ones(1, 1), stages)
    return found.outputs.flatten()


def closed(layers: int, stages: Sequence[Stage], loss: str = "quadratic") -> Tensor:
    values = linear_with_fresh_units(layers, LOSSES[loss][1], stages, x=0.8, sigma=1.1)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "stages",
    [
        [Stage(4, 0.1), fresh(4, 0.07, 2, 0.5)],
        [Stage(3, 0.1), fresh(3, 0.03, 4)],
        [Stage(3, 0.1), fresh(3, 0.1, 1.25, 0)],
        [Stage(2, 0.1), fresh(2, 0.08, 1.5), fresh(3, 0.06, 2, 0.7)],
        [Stage(2, 0.1), fresh(2, 0.08, 1.5, 0.6), Stage(2, 0.07, 2)],
        [Stage(2, 0.1), Stage(2, 0.1, 2), fresh(3, 0.06, 2, 0.7)],
    ],
    ids=["a = ½", "r = 4", "a = 0", "twice", "fresh, then copies", "copies, then fresh"],
)
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_the_limit_of_linear_networks_is_the_closed_form(layers: int, stages: list[Stage]) -> None:
    """The paper's worked examples with fresh units, and a network of two layers that both learn."""
    loss = "quadratic" if len(stages) == 2 else "logistic"
    found = trained(layers, Limit(100, count_copies(stages), device="cpu"), stages, loss)
    torch.testing.assert_close(found, closed(layers, stages, loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_a_wrong_weight_of_the_mixture_or_a_wrong_power_is_found(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that are those of another r, and old readouts that are not multiplied by r: neither is the closed form."""
    stages = [Stage(3, 0.1), fresh(3, 0.05, 3, 0.5)]
    wanted = closed(layers, stages)

    def difference() -> float:
        return float((trained(layers, Limit(100, device="cpu"), stages) - wanted)[4:].abs().max())

    assert difference() < 1e-12
    grow, drawn = Program.grow, Network.grow
    with monkeypatch.context() as patch:
        patch.setattr(Program, "grow", lambda self, times: grow(self, times**1.1))
        assert difference() > 1e-3
    for power in (0.5, 1.5):
        with monkeypatch.context() as patch:

            def wrong(self: Network, times: float, outgoing: float, power: float = power) -> None:
                self.readout = self.readout * times ** (power - 1)
                drawn(self, times, outgoing)

            patch.setattr(Network, "grow", wrong)
            assert difference() > 1e-3


def test_closed_forms_at_the_ends() -> None:
    """r → 1 is no growth. r → ∞ at a rate of γ/r is example 1 as before. a → 0 keeps the function."""
    before, rest = Stage(4, 0.1), (3, 0.1)
    for layers in (2, 3, 4):
        never = closed(layers, [before, Stage(*rest)])
        torch.testing.assert_close(closed(layers, [before, fresh(*rest, times=1)]), never, rtol=0, atol=0)
        near = closed(layers, [before, fresh(*rest, times=1 + 1e-9)])
        torch.testing.assert_close(near, never, rtol=0, atol=1e-8)
    far = closed(3, [before, fresh(3, 0.1 / 1e9, 1e9)])
    torch.testing.assert_close(far, closed(3, [before, Stage(3, 0.1)]), rtol=0, atol=1e-8)
    for times, a in ((2, 1.0), (4, 0.5), (3, 0.0)):  # the rate that leaves example 1 unchanged
        matched = 0.1 / (times + a**2 * (1 - 1 / times))
        unchanged = closed(3, [before, fresh(3, matched, times, a)])
        torch.testing.assert_close(unchanged, closed(3, [before, Stage(3, 0.1)]), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------ the limit itself


def outputs(mlp: MLPSetup, *stages: Stage, samples: int = 500) -> Tensor:
    program = Limit(samples, count_copies(stages), 5, device="cpu")
    return run(program, mlp, *gaussian_batch(3, 3), stages).outputs


KINDS = {
    "SGD": MLPSetup(3, "tanh"),
    "momentum": MLPSetup(4, "relu", momentum=0.7),
    "Adam": MLPSetup(3, "tanh", entrywise=Adam(0.7, 0.9, 0.2)),
}


@pytest.mark.parametrize("mlp", KINDS.values(), ids=KINDS)
def test_without_outgoing_weights_the_function_stays(mlp: MLPSetup) -> None:
    """And what is learned next is not what the base model would learn; with outgoing weights it moves at once."""
    inputs, targets = gaussian_batch(3, 3)
    moved = {}
    for a in (None, 0.0, 1.0):
        net = Network(Limit(250, 1, 5, device="cpu"), mlp, 3, 1)
        for _ in range(3):
            net.step((net.forward(inputs) - targets) / 3, 0.1)
        before = net.forward(inputs)
        if a is not None:
            net.grow(2, a)
        after = net.forward(inputs)
        net.step((after - targets) / 3, 0.1)
        moved[a] = after - before, net.forward(inputs) - after
    assert float(moved[0.0][0].abs().max()) < 1e-12
    assert float(moved[1.0][0].abs().max()) > 1e-3
    assert float((moved[0.0][1] - moved[None][1]).abs().max()) > 1e-3


@pytest.mark.parametrize("mlp", KINDS.values(), ids=KINDS)
def test_hardly_any_new_units_are_hardly_a_growth(mlp: MLPSetup) -> None:
    """r → 1; r = 1 is none at all."""
    base = outputs(mlp, Stage(3, 0.1), Stage(2, 0.1), samples=250)
    nearly = outputs(mlp, Stage(3, 0.1), fresh(2, 0.1, 1.0001), samples=250)
    torch.testing.assert_close(nearly, base, rtol=0, atol=5e-3)
    assert torch.equal(outputs(mlp, Stage(3, 0.1), fresh(2, 0.1, 1), samples=250), base)


@pytest.mark.parametrize(("layer", "power"), [(0, 1.0), (1, 0.0), (2, -1.0)])
def test_what_old_units_learn_changes_by_layer(layer: int, power: float) -> None:
    """With a = 0: the part of the kernel from old to old units is r times what it was, the same, and 1/r of it.

    What one layer does to the output in a small step. Its part from new inputs is taken away: units whose activations
    are zero have none (a relu with biased preactivations would do the same; here the input weights of new units are 0).
    """
    times, mlp = 3.0, MLPSetup(3, "tanh", trained=[at == layer for at in range(3)])
    inputs, targets = gaussian_batch(3, 3)

    def moved(grown: bool) -> Tensor:
        net = Network(Limit(400, 1, 5, device="cpu"), mlp, 3, 1)
        for _ in range(3):
            net.step((net.forward(inputs) - targets) / 3, 0.3)
        slope = (net.forward(inputs) - targets) / 3
        if grown:
            net.sigma = [0.0, 0.0, 0.0]
            net.grow(times, 0.0)
        before = net.forward(inputs)
        net.step(slope, 1e-6)
        return (net.forward(inputs) - before) / 1e-6

    torch.testing.assert_close(moved(True), times**power * moved(False), rtol=1e-3, atol=1e-6)


def test_new_inputs_add_to_what_old_units_learn() -> None:
    """The hidden matrix with a = 0: r⟨δ|δ⟩ of old units times the mixture of ⟨x|x⟩ (docs/theory-fresh.md)."""
    inputs, targets = gaussian_batch(3, 3)
    net = Network(Limit(400, 1, 5, device="cpu"), MLPSetup(3, "tanh", trained=[False, True, False]), 3, 1)
    for _ in range(3):
        net.step((net.forward(inputs) - targets) / 3, 0.3)
    slope = (net.forward(inputs) - targets) / 3
    delta = net.readout * net.phi.derivative(net.h[-1])
    learned, old = net.program.inner(delta, delta), net.program.inner(net.x[0], net.x[0])
    net.grow(3, 0.0)
    before = net.forward(inputs)
    new = net.x[0][:, 400:].flatten(1)
    net.step(slope, 1e-6)
    moved = (net.forward(inputs) - before) / 1e-6
    wanted = -(3 * learned * (old / 3 + (1 - 1 / 3) * new @ new.T / 400)) @ slope
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("a", [1.0, 0.0])
def test_new_units_learn_features_at_the_scale_of_old_ones(a: float) -> None:
    """In the first hidden layer: from the first step with a = 1, from the second where readouts are learned first."""
    inputs, targets = gaussian_batch(3, 3)
    net = Network(Limit(400, 1, 5, device="cpu"), MLPSetup(3, "tanh"), 3, 1)
    net.grow(2, a)
    start, moved = None, []
    for _ in range(3):
        slope = (net.forward(inputs) - targets) / 3
        start = net.h[0] if start is None else start
        moved.append([float(units.square().mean()) for units in (net.h[0] - start).split(400, 1)])
        net.step(slope, 0.5)
    (old_at_first, new_at_first), (old, new) = moved[1:]
    assert min(old_at_first, old, 100 * new) > 1e-3
    assert new_at_first > 1e-3 if a else new_at_first == 0


def test_very_many_random_features_beside_the_old_function_are_a_network_from_scratch() -> None:
    """r → ∞ with the readout alone trained and a = 0: the old function, and what a new network learns beside it."""
    inputs, targets = gaussian_batch(3, 3)
    mlp = MLPSetup(3, "tanh", sigma=[1, 1, 0], trained=[False, False, True])
    found = run(Limit(4000, device="cpu"), mlp, inputs, targets, [Stage(3, 0.5), fresh(4, 0.5, 1e7, 0.0)]).outputs
    alone = run(Limit(4000, seed=1, device="cpu"), mlp, inputs, targets - found[3], [Stage(4, 0.5)]).outputs
    torch.testing.assert_close(found[3:] - found[3], alone, rtol=0, atol=0.01)
    assert float((found[-1] - found[3]).abs().max()) > 0.05


def test_an_rms_norm_with_smaller_gains_does_not_see_units_of_zero() -> None:
    """Lossless growth of an axis that a norm reads: new units start at 0, and gains are times √(n/N)."""
    for program in (Limit(300, device="cpu"), Finite(60, device="cpu")):
        h = torch.relu(program.vector())
        normed = h / program.avg(h.square()).sqrt()
        new = program.grow(2.5)
        grown = nn.functional.pad(h, (0, 0, 0, len(new)))
        again = math.sqrt(1 / 2.5) * grown / program.avg(grown.square()).sqrt()
        torch.testing.assert_close(again[: new.start], normed, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------ finite networks

MIXED = {
    "all of it": [Stage(2, 0.2), fresh(1, 0.4, 1.5, 0.5), Stage(1, 0.4, 2, 0.5), fresh(2, 0.3, 1.5)],
    "twice": [Stage(2, 0.2), fresh(1, 0.5, 1.5, 0.5), fresh(2, 0.5, 2)],
    "fresh, then noisy copies": [Stage(2, 0.2), fresh(1, 0.5, 1.5), Stage(2, 0.5, 2, 0.5)],
    "noisy copies, then fresh": [Stage(2, 0.2), Stage(1, 0.5, 2, 0.5), fresh(2, 0.5, 1.5)],
}


@pytest.mark.parametrize(
    "stages",
    [pytest.param(MIXED[name], marks=pytest.mark.slow if at else ()) for at, name in enumerate(MIXED)],
    ids=MIXED,
)
def test_wide_networks_are_at_the_limit(stages: list[Stage]) -> None:
    """And far from a network that has the same rates and never grows."""
    inputs, targets = gaussian_batch(3, 3)

    def program(p: Program, stages: Sequence[Stage] = stages) -> Tensor:
        return run(p, MLPSetup(3, "tanh"), inputs, 2 * targets, stages).outputs

    k, alone = count_copies(stages), [Stage(stage.steps, stage.lr) for stage in stages]
    found, wanted = finite(program, 200, k=k, seeds=8), limit(program, k=k, samples=700, seeds=2)
    error = float((found.standard_error**2 + wanted.standard_error**2).mean().sqrt())
    assert float((found.mean - wanted.mean).square().mean().sqrt()) < 3 * error < 0.07
    never = limit(lambda p: program(p, alone), samples=700, seeds=2)
    assert float((never.mean - wanted.mean)[-1].square().mean().sqrt()) > 5 * error


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({64: 30, 4096: 30}, 0.15),
        pytest.param({64: 200, 256: 200, 1024: 200, 4096: 200}, 0.06, marks=pytest.mark.slow),
    ],
)
def test_networks_come_closer_as_one_over_root_n(sizes: dict[int, int], allowed: float) -> None:
    """Widths 64 … 4096 of example 1, twice as wide in the end; allowed are about three standard errors of the slope."""
    stages = [Stage(1, 0.1), fresh(1, 0.07, 2)]
    wanted, errors = closed(3, stages), []
    for n, seeds in sizes.items():
        drawn = finite(lambda p: trained(3, p, stages), n, seeds=seeds, dense=False)
        errors.append(float((drawn.values - wanted).square().mean().sqrt()))
    assert fit_slope(list(sizes), errors) == pytest.approx(-0.5, abs=allowed)


# ------------------------------------------------------------------------ ways to grow, side by side


def test_ways_to_grow_are_the_runs_that_they_say() -> None:
    x, y = gaussian_batch(2, 3)
    base = Experiment(MLPSetup(3, "linear"), x, y, [Stage(2, 0.3)])
    stages = list_ways(2, 2, 0.3, [0.5], [0.0, 0.5], [0.0, 1.0])
    *ways, lost = compare_ways_to_grow(base, [*stages, fresh(1, 1e9)], width=40, samples=300, networks=2)
    assert [way.name for way in ways] == [
        "copies, no noise",
        "copies, noise 0.5",
        "fresh units, a = 0",
        "fresh units, a = 1",
    ]
    assert lost.limit is lost.networks is None
    for way in ways:
        whole = Experiment(base.mlp, x, y, [*base.stages, way.stage])
        assert way.limit is not None
        assert way.networks is not None
        assert way.limit.mean.shape == way.networks.mean.shape == (3,)
        again = whole(Limit(300, whole.times, 0)).losses[2:].cpu()
        torch.testing.assert_close(way.limit.values[0], again, rtol=0, atol=1e-12)
    silent, grown = ways[0].limit, ways[2].limit
    assert silent is not None
    assert grown is not None
    torch.testing.assert_close(silent.mean[0], grown.mean[0], rtol=0, atol=1e-12)  # a = 0 keeps the function
    for how in ("copies", "fresh"):
        best = best_way(ways, how)
        assert best is not None
        assert best.limit is not None
        ends = [float(way.limit.mean[-1]) for way in ways if way.limit is not None and way.stage.how == how]
        assert float(best.limit.mean[-1]) == min(ends)
    assert best_way([lost], "fresh") is None
    json.dumps([way.to_json() for way in ways])


def test_a_comparison_with_fresh_units_says_how_much_wider_it_is() -> None:
    x, y = gaussian_batch(2, 3)
    whole = Experiment(MLPSetup(3, "tanh"), x, y, [Stage(1, 0.3), fresh(1, 0.3, 1.5), Stage(1, 0.3, 2, 0.5)])
    found = compare_with_limit(whole, [20], samples=300, seeds=2, networks=2)
    assert (found.times, found.wider, found.upscaled) == (2, 3.0, (1, 2))
    step = found.edges[1] - found.edges[0]
    for measured in (found.limit, *found.finite):
        assert float(measured.density.sum() * step) == pytest.approx(
            1, abs=0.01
        )  # by share of the width, not by sample
    values = json.loads(json.dumps(found.to_json()))
    assert LimitComparison.from_json(values).wider == 3.0


# ------------------------------------------------------------------------ bad input


class Stubborn(Entrywise):
    def update(self, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        state["mine"] = gradient
        return gradient


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Stage(1, 0.1, 2, how="new"), "'copies' or by 'fresh' units, not by 'new'"),  # type: ignore[arg-type]
        (lambda: Stage(1, 0.1, 2, 0.5, how="fresh"), "noise is for copies"),
        (lambda: Stage(1, 0.1, 1.5), "in whole numbers, not 1 and 1.5"),
        (lambda: fresh(1, 0.1, 0.5), "not 1 and 0.5"),
        (lambda: fresh(1, 0.1, math.inf), "any finite number of times"),
        (lambda: fresh(1, 0.1, 2, 1.5), "outgoing is a number between 0 and 1, not 1.5"),
        (lambda: Finite(10).grow(1.26), "10 units cannot become 1.26 times as many"),
        (lambda: Limit(10).grow(1), "more than once as wide"),
        (lambda: outputs(MLPSetup(entrywise=Stubborn()), Stage(1, 0.1), fresh(1, 0.1)), "'mine' of Stubborn cannot be"),
        (lambda: list_ways(1, 2, 0.1, [1], [], [1]), "more than 1 time the width"),
        (lambda: linear_with_fresh_units(5, lambda y: y, []), "2, 3 and 4 layers without noise, not for 5"),
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
