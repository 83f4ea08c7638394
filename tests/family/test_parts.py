"""Models made part by part, for what no process can hold: the values of the whole, and memory for a part alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import naming
from mupscale.family.members import DepthMembers
from mupscale.models import GPT2


@pytest.fixture(scope="module")
def family() -> mu.Family:
    def build(width: int, layers: int) -> nn.Module:
        return GPT2(11, 8, width=width, head_dim=4, layers=layers)

    return mu.Family(build, {"width": 8, "layers": 2})


def test_parts_are_those_of_the_whole_and_the_rest_has_no_memory(family: mu.Family) -> None:
    assert family.can_draw_parts
    size = {"width": 16, "layers": 3}
    whole = naming.parameters(family.init_untried(size, seed=5))
    names = list(whole)
    for part in (names[::3], names[1::3], names[2::3]):
        made = naming.parameters(family.init_part(size, 5, part))
        assert made.keys() == whole.keys()
        assert all(torch.equal(made[name], whole[name]) for name in part)
        places = {name: p.untyped_storage().data_ptr() for name, p in made.items()}
        assert len({places[name] for name in part}) == len(part)
        assert len({places[name] for name in names if name not in part}) == 1
    assert naming.parameters(family.init_untried(size, seed=5))[names[0]].numel()  # and all is as it was


class CopiesItself(nn.Module):
    """One parameter starts as another's values, which are lost where the other is in a different part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two, self.other = (nn.Linear(width, width, bias=False) for _ in range(3))
        with torch.no_grad():
            self.other.weight.copy_(self.one.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.two(self.one(x)))


class Cloned(nn.Module):
    """Layers that are deep copies, which no module has registered one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("model", [CopiesItself, Cloned])
def test_what_cannot_be_made_in_parts_is_noticed(model: type[nn.Module]) -> None:
    assert not mu.Family(model, 8).can_draw_parts


def test_initial_values_of_a_large_model_are_measured_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more memory at once than the largest parameter's; what cannot be made so is made as a whole."""
    module = sys.modules[DepthMembers.__module__]
    held: list[int] = []
    drawn = DepthMembers.drawn_alone

    def watched(family: DepthMembers, width: int, seed: int, part: list[str]) -> nn.Module:
        model = drawn(family, width, seed, part)
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return model

    def build(width: int) -> nn.Module:
        return GPT2(50, 8, width=width, head_dim=32, layers=2).double()

    whole = mu.Family(build, 64).at(0).initial_std()
    monkeypatch.setattr(DepthMembers, "drawn_alone", watched)
    monkeypatch.setattr(module, "_MOST_NUMBERS", 1000)
    parts = mu.Family(build, 64).at(0).initial_std()
    assert max(held) <= max(p.numel() for p in build(64).parameters())
    assert parts == pytest.approx(whole, rel=0.15, abs=1e-12)
    held.clear()
    copied = mu.Family(CopiesItself, 64).at(0).initial_std()
    assert max(held) == 3 * 64 * 64
    assert min(copied.values()) > 0
