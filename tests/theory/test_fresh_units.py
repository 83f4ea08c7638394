"""Fresh units in the limit: two populations, what each of them learns, and finite networks beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from mupscale.theory import Adam, Finite, Limit, MLPSetup, Network, Program, Stage, finite, gaussian_batch, limit, run
from mupscale.theory.mlp_training import count_copies

INPUTS, TARGETS = gaussian_batch(3, 3)


def fresh(steps: int, lr: float, times: float = 2, outgoing: float = 1.0) -> Stage:
    return Stage(steps, lr, times, how="fresh", outgoing=outgoing)


def network(mlp: MLPSetup, steps: int, lr: float) -> Network:
    """In the limit, after so many steps."""
    net = Network(Limit(300, 1, 5, device="cpu"), mlp, 3, 1)
    for _ in range(steps):
        net.step((net.forward(INPUTS) - TARGETS) / 3, lr)
    return net


KINDS = {
    "SGD": MLPSetup(3, "tanh"),
    "momentum": MLPSetup(4, "relu", momentum=0.7),
    "Adam": MLPSetup(3, "tanh", entrywise=Adam(0.7, 0.9, 0.2)),
}


@pytest.mark.parametrize("mlp", KINDS.values(), ids=KINDS)
def test_without_outgoing_weights_the_function_stays(mlp: MLPSetup) -> None:
    """And what is learned next is not what the base model would learn; with outgoing weights it moves at once."""
    moved = {}
    for a in (None, 0.0, 1.0):
        net = network(mlp, 3, 0.1)
        before = net.forward(INPUTS)
        if a is not None:
            net.grow(2, a)
        after = net.forward(INPUTS)
        net.step((after - TARGETS) / 3, 0.1)
        moved[a] = after - before, net.forward(INPUTS) - after
    assert float(moved[0.0][0].abs().max()) < 1e-12
    assert float(moved[1.0][0].abs().max()) > 1e-3
    assert float((moved[0.0][1] - moved[None][1]).abs().max()) > 1e-3


@pytest.mark.parametrize("mlp", KINDS.values(), ids=KINDS)
def test_hardly_any_new_units_are_hardly_a_growth(mlp: MLPSetup) -> None:
    """r → 1; r = 1 is none at all."""

    def outputs(last: Stage) -> Tensor:
        return run(Limit(250, 1, 5, device="cpu"), mlp, INPUTS, TARGETS, [Stage(3, 0.1), last]).outputs

    base = outputs(Stage(2, 0.1))
    torch.testing.assert_close(outputs(fresh(2, 0.1, 1.0001)), base, rtol=0, atol=5e-3)
    assert torch.equal(outputs(fresh(2, 0.1, 1)), base)


@pytest.mark.parametrize(("layer", "power"), [(0, 1.0), (1, 0.0), (2, -1.0)])
def test_what_old_units_learn_changes_by_layer(layer: int, power: float) -> None:
    """With a = 0: the part of the kernel from old to old units is r times what it was, the same, and 1/r of it.

    What one layer does to the output in a small step. Its part from new inputs is taken away: units whose activations
    are zero have none (a relu with biased preactivations would do the same; here the input weights of new units are 0).
    """
    times, mlp = 3.0, MLPSetup(3, "tanh", trained=[at == layer for at in range(3)])

    def moved(grown: bool) -> Tensor:
        net = network(mlp, 3, 0.3)
        slope = (net.forward(INPUTS) - TARGETS) / 3
        if grown:
            for each in (net.input, *net.hidden, net.readout):
                each.sigma = 0.0
            net.grow(times, 0.0)
        before = net.forward(INPUTS)
        net.step(slope, 1e-6)
        return (net.forward(INPUTS) - before) / 1e-6

    torch.testing.assert_close(moved(True), times**power * moved(False), rtol=1e-3, atol=1e-6)


def test_new_inputs_add_to_what_old_units_learn() -> None:
    """The hidden matrix with a = 0: r⟨δ|δ⟩ of old units times the mixture of ⟨x|x⟩ (docs/theory-fresh.md)."""
    net = network(MLPSetup(3, "tanh", trained=[False, True, False]), 3, 0.3)
    slope = (net.forward(INPUTS) - TARGETS) / 3
    delta = net.readout.values * net.mlp.slope(net.h[-1])
    learned, old = net.program.inner(delta, delta), net.program.inner(net.x[0], net.x[0])
    net.grow(3, 0.0)
    before = net.forward(INPUTS)
    new = net.x[0][:, 300:].flatten(1)
    net.step(slope, 1e-6)
    moved = (net.forward(INPUTS) - before) / 1e-6
    wanted = -(3 * learned * (old / 3 + (1 - 1 / 3) * new @ new.T / 300)) @ slope
    torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("a", [1.0, 0.0])
def test_new_units_learn_features_at_the_scale_of_old_ones(a: float) -> None:
    """In the first hidden layer: from the first step with a = 1, from the second where readouts are learned first."""
    net = network(MLPSetup(3, "tanh"), 0, 0.0)
    net.grow(2, a)
    start, moved = None, []
    for _ in range(3):
        slope = (net.forward(INPUTS) - TARGETS) / 3
        start = net.h[0] if start is None else start
        moved.append([float(units.square().mean()) for units in (net.h[0] - start).split(300, 1)])
        net.step(slope, 0.5)
    (old_at_first, new_at_first), (old, new) = moved[1:]
    assert min(old_at_first, old, 100 * new) > 1e-3
    assert new_at_first > 1e-3 if a else new_at_first == 0


def test_very_many_random_features_beside_the_old_function_are_a_network_from_scratch() -> None:
    """r → ∞ with the readout alone trained and a = 0: the old function, and what a new network learns beside it."""
    mlp = MLPSetup(3, "tanh", sigma=[1, 1, 0], trained=[False, False, True])
    stages = [Stage(3, 0.5), fresh(4, 0.5, 1e7, 0.0)]
    found = run(Limit(4000, device="cpu"), mlp, INPUTS, TARGETS, stages).outputs
    alone = run(Limit(4000, seed=1, device="cpu"), mlp, INPUTS, TARGETS - found[3], [Stage(4, 0.5)]).outputs
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


MIXED = {
    "all of it": [Stage(2, 0.2), fresh(1, 0.4, 1.5, 0.5), Stage(1, 0.4, 2, 0.5), fresh(2, 0.3, 1.5)],
    "twice": [Stage(2, 0.2), fresh(1, 0.5, 1.5, 0.5), fresh(2, 0.5, 2)],
    "fresh, then noisy copies": [Stage(2, 0.2), fresh(1, 0.5, 1.5), Stage(2, 0.5, 2, 0.5)],
    "noisy copies, then fresh": [Stage(2, 0.2), Stage(1, 0.5, 2, 0.5), fresh(2, 0.5, 1.5)],
}


@pytest.mark.quick("all of it")
@pytest.mark.parametrize("stages", MIXED.values(), ids=MIXED)
def test_wide_networks_are_at_the_limit(stages: list[Stage]) -> None:
    """And far from a network that has the same rates and never grows."""

    def program(p: Program, stages: Sequence[Stage] = stages) -> Tensor:
        return run(p, MLPSetup(3, "tanh"), INPUTS, 2 * TARGETS, stages).outputs

    k, alone = count_copies(stages), [Stage(stage.steps, stage.lr) for stage in stages]
    found, wanted = finite(program, 200, k=k, seeds=8), limit(program, k=k, samples=700, seeds=2)
    error = float((found.standard_error**2 + wanted.standard_error**2).mean().sqrt())
    assert float((found.mean - wanted.mean).square().mean().sqrt()) < 3 * error < 0.07
    never = limit(lambda p: program(p, alone), samples=700, seeds=2)
    assert float((never.mean - wanted.mean)[-1].square().mean().sqrt()) > 5 * error
