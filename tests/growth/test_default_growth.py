"""What a growth does if nothing is said: fresh units, in every door; copies are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.growth import choose_operator
from mupscale.train import Growth


class Net(nn.Module):
    """An MLP with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each row."""
        return self.layers(x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 3)


def rows_that_differ(model: Net) -> int:
    return len({tuple(row) for row in model.layers[0].weight.tolist()})


def test_new_units_of_a_bare_pair_are_drawn_as_the_wide_model_was(x: Tensor) -> None:
    narrow, wide = Net(32), Net(64)
    spread = float(wide.layers[2].weight.detach().std())
    optimizer = torch.optim.AdamW(narrow.parameters())
    grown, _ = mu.upscale(narrow, wide, optimizer=optimizer, inputs=x)
    assert rows_that_differ(grown) == 64
    plan = mu.plan(narrow, Net(64), inputs=x, grow=mu.Fresh())
    old = mu.index_of_old((2, 32), plan["layers.2.weight"].axes)
    assert torch.equal(grown.layers[2].weight[old], narrow.layers[2].weight)
    new = grown.layers[2].weight.detach().clone()
    new[old] = torch.nan
    assert float(new[~new.isnan()].std()) == pytest.approx(spread, rel=0.5)


def test_a_family_grows_by_fresh_units(x: Tensor) -> None:
    family = mu.Family(Net, base=8, inputs=x)
    wide, _ = family.upscale(family.init(8), width=12)
    assert rows_that_differ(wide) == 12


def test_copies_without_noise_say_that_they_stay_a_replica(x: Tensor) -> None:
    narrow, family = Net(8), mu.Family(Net, base=8, inputs=x)
    for grow in (mu.Copies(), mu.Copies(mu.GaussianNoise({"layers.0.weight": 0.0}))):
        with pytest.warns(mu.ReplicaWarning, match=r"stays a replica .*Copies\(noise=1.0\).* exact=True"):
            mu.upscale(narrow, Net(16), inputs=x, grow=grow)
    with pytest.warns(mu.ReplicaWarning):
        mu.upscale(narrow, Net(16), mu.plan(narrow, Net(16), inputs=x), inputs=x)  # a plan for copies
    with pytest.warns(mu.ReplicaWarning):
        family.upscale(narrow, width=16, noise=0.0)
    exact = [mu.upscale(narrow, Net(16), inputs=x, exact=True)[0], family.upscale(narrow, width=16, exact=True)[0]]
    for wide in exact:
        assert torch.allclose(wide(x), narrow(x), atol=1e-6)
    noisy, _ = mu.upscale(narrow, Net(16), inputs=x, grow=mu.Copies(noise=1.0))  # measured on the wide model
    assert rows_that_differ(noisy) == 16


def test_a_plan_says_what_it_was_made_for(x: Tensor) -> None:
    narrow = Net(8)
    plan = mu.plan(narrow, Net(12), inputs=x, grow=mu.Fresh())
    wide, _ = mu.upscale(narrow, Net(12), plan)
    assert rows_that_differ(wide) == 12


def test_exact_goes_alone(x: Tensor) -> None:
    for given in ({"noise": 0.5}, {"grow": mu.Fresh()}, {"grow": mu.Copies(0.5)}):
        with pytest.raises(mu.MupscaleError, match="exact=True copies every unit without noise: leave out grow="):
            mu.upscale(Net(8), Net(16), inputs=x, exact=True, **given)


def test_where_fresh_units_cannot_be_drawn_copies_are_named() -> None:
    """Where they could not be copied either, or were not the default, nothing is said of them."""
    with torch.device("meta"):  # where a model has no initial values
        wide, wider = Net(12), Net(16)
    with pytest.raises(mu.MupscaleError, match=r"need an initialisation .*can be copied here: grow=.*Copies\("):
        mu.upscale(Net(8), wider)
    refusals = (
        (wide, {}, "need an initialisation"),
        (wider, {"grow": mu.Fresh()}, "need an initialisation"),
        (Net(16), {"fresh": lambda: Net(4)}, "fresh= builds another model"),
    )
    for other, said, why in refusals:
        with pytest.raises(mu.MupscaleError, match=why) as refused:
            mu.upscale(Net(8), other, **said)
        assert "can be copied here" not in str(refused.value)


def test_recipes_follow_the_one_place_that_decides() -> None:
    assert not choose_operator(None).needs_multiples
    assert not Growth(at=1, width=8).build_operator().needs_multiples
    assert Growth(at=1, width=8, noise=0.5).build_operator() == mu.Copies(mu.GaussianNoise(0.5))
    replica = Growth(at=1, width=8, how="copies")
    assert "the wide model remains a replica" in replica.words


class Gated(nn.Module):
    """Units that share a softmax: each new one takes from the old ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each row."""
        return self.last(self.gate(x).softmax(-1))


def test_a_refused_softmax_over_units_names_no_remedy_that_was_taken(x: Tensor) -> None:
    """A batch, and a wide model at a multiple of the width, are there."""
    with pytest.raises(mu.MupscaleError, match=r"no such factor: .* softmax over units .*Copies fit") as refused:
        mu.upscale(Gated(8), Gated(16), inputs=x)
    assert "inputs=" not in str(refused.value)
    with pytest.raises(mu.MupscaleError, match="no such factor") as refused:
        mu.Family(Gated, base=8, inputs=x).check_growth(8, 16)
    assert "inputs=" not in str(refused.value)
