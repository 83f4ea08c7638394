"""Fresh units in the limit: two populations, as the library grows them, in closed form, and as finite networks tend to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import index_of_old, places
from mupscale.models import MLP as TorchMLP
from mupscale.system.errors import MupscaleError
from mupscale.theory import Adam, Entrywise, Finite, Limit, MLPSetup, Network, Program, Sign, Stage, gaussian_batch, run
from mupscale.theory.mlp_training import count_copies, squared_error

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
        model, opt = line.upscale(model, opt, width=width, grow=how, lr=lr)  # type: ignore[assignment]
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
