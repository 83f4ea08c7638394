"""Parameters that start as a pattern over their units: new units have the values that the wide model is built with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import mupscale as mu
from mupscale.planning import initial_std, measure_laws
from mupscale.train import Growth, Spec, run_recipe, upscale_dcp
from small_runs import FEATURES, recipe
from weights import take_step


class Decays(nn.Module):
    """A state space in small: decays log 2, 3, 4 … for every unit (S4D), and a slope that falls from unit to unit."""

    def __init__(self, width: int, inputs: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, 7)
        self.decay = nn.Parameter(torch.arange(2.0, 6.0).log().repeat(width, 1))
        self.slope = nn.Parameter(-torch.linspace(0.5, 2.0, width))

    def forward(self, x: Tensor) -> Tensor:
        """Seven numbers for each row."""
        states = self.first(x).tanh()[..., None] * (-self.decay.exp()).exp()
        return self.last(states.sum(-1) * self.slope)


PATTERNED = ("decay", "slope")
BATCH = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))


def trained(width: int) -> tuple[Decays, torch.optim.Optimizer]:
    model = Decays(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(optimizer, model(BATCH).square().mean())
    return model, optimizer


def check_old_and_new(narrow: nn.Module, wide: nn.Module, built: nn.Module) -> None:
    before, after, own = (dict(model.named_parameters()) for model in (narrow, wide, built))
    plan = mu.plan(narrow, built, grow=mu.Fresh(), roles={name: mu.Role(out=0) for name in PATTERNED})
    for name in PATTERNED:
        old = mu.index_of_old(plan[name].narrow, plan[name].axes)
        assert torch.equal(after[name][old], before[name])
        expected = own[name].detach().clone()
        expected[old] = before[name].detach()
        assert torch.equal(after[name], expected), name


@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("door", ["pair", "family"])
def test_old_units_keep_their_values_and_new_ones_have_the_wide_models(width: int, door: str) -> None:
    """Both where nothing is said and where the outputs are to stay, which they do."""
    narrow, optimizer = trained(8)
    for grow in (None, mu.Fresh(lossless=True)):
        if door == "pair":
            wide, grown = mu.upscale(narrow, Decays(width), optimizer=optimizer, inputs=BATCH, grow=grow)
        else:
            family = mu.Family(Decays, base=8, inputs=BATCH)
            family.check_growth(8, width, grow)
            wide, grown = family.upscale(narrow, optimizer, width=width, grow=grow)
        check_old_and_new(narrow, wide, Decays(width))
        assert torch.allclose(narrow(BATCH), wide(BATCH), atol=1e-6) == (grow is not None)
        assert grown.state[dict(wide.named_parameters())["slope"]]["exp_avg"].count_nonzero() == 8


def test_in_a_recipe() -> None:
    """The rate is too small to change anything."""
    model, sgd = Spec(f"{__name__}.Decays", {"inputs": FEATURES}), Spec("torch.optim.SGD", {"lr": 1e-30})
    told = recipe(model=model, optimizer=sgd, base=8, steps=2, precision="fp32", grow=[Growth(at=1, width=16)])
    check_old_and_new(Decays(8, FEATURES), run_recipe(told).model, Decays(16, FEATURES))


def test_without_a_wide_model_in_memory_it_is_refused() -> None:
    with torch.device("meta"):
        wide = Decays(16)
    roles = {name: mu.Role(out=0) for name in PATTERNED}
    plan = mu.plan(Decays(8), wide, fresh=lambda: Decays(8), grow=mu.Fresh(), roles=roles)
    assert mu.Plan.from_json(plan.to_json()).patterned == plan.patterned == PATTERNED
    with pytest.raises(
        mu.MupscaleError, match=r"'decay' starts as a pattern, .* copies, .*: build the wide one on a real"
    ):
        mu.upscale(Decays(8), wide, plan)


@pytest.mark.filterwarnings("ignore:.*single process")
def test_a_folder_that_is_grown_tensor_by_tensor_is_refused_before_it_is_written(tmp_path: Path) -> None:
    family = mu.Family(Decays, base={"width": 8}, inputs=BATCH)
    dcp.save({"model": Decays(8).state_dict()}, checkpoint_id=str(tmp_path / "small"), no_dist=True)
    with pytest.raises(mu.MupscaleError, match="'decay' starts as a pattern"):
        upscale_dcp(tmp_path / "small", tmp_path / "wide", family, {"width": 8}, {"width": 16}, Growth(at=1, width=16))
    assert not (tmp_path / "wide").exists()


def test_what_is_a_pattern() -> None:
    """Of one draw: what repeats, is sorted or has neighbours alike; of several, what is the same in all of them."""
    angles = torch.arange(32.0)[:, None] / 100 ** (torch.arange(0, 16, 2) / 16)
    one = {
        "sorted": torch.linspace(1, 2, 8),
        "repeated": torch.randn(4).repeat(8, 1),
        "sinusoids": torch.cat([angles.sin(), angles.cos()], 1),
        "drawn": torch.randn(32, 16, generator=torch.Generator().manual_seed(0)),
        "gains": torch.ones(8),
    }
    draw = {name: nn.Parameter(values) for name, values in one.items()}
    laws = measure_laws([draw], initial_std([draw]), lambda name: {})
    assert [name for name, law in laws.items() if law.means == ()] == ["sorted", "repeated", "sinusoids"]
    few = {
        "heads": nn.Parameter(torch.arange(1.0, 5.0)),
        "gates": nn.Parameter(torch.tensor([0.0, 1, 0, 0]).repeat_interleave(2)),
    }
    laws = measure_laws([few, few], initial_std([few, few]), lambda name: {})
    assert {name: law.means for name, law in laws.items()} == {"heads": (), "gates": (0.0, 1.0, 0.0, 0.0)}
