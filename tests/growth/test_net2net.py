"""Net2WiderNet: random copies keep the function where they can, and are refused where they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import Axis
from mupscale.growth.copies import Net2Net, random_copies
from mupscale.models import GPT2, MLP
from mupscale.system import MupscaleError


@pytest.mark.usefixtures("float64")
def test_net2net_keeps_the_function_of_an_mlp() -> None:
    """Random copies, what reads them divided by how many there are of each."""
    narrow, wide = MLP(6, 8, 3), MLP(6, 24, 3)
    mu.upscale(narrow, wide, mu.plan(narrow, wide), grow=Net2Net(), seed=3)
    x = torch.randn(32, 6)
    assert (wide(x) - narrow(x)).abs().max() < 1e-10
    counts = [int((wide.state_dict()[name] == row).all(1).sum()) for name, row in _rows(narrow)]
    assert len(set(counts)) > 1  # copied at random, not each as often as the others


def _rows(model: nn.Module) -> list[tuple[str, Tensor]]:
    name, weight = next(iter(model.state_dict().items()))
    return [(name, row) for row in weight]


def test_net2net_refuses_a_norm_over_the_width() -> None:
    narrow, wide = (GPT2(11, 6, layers=1, heads=heads, head_dim=4) for heads in (1, 2))
    with pytest.raises(MupscaleError, match=r"a norm over the width computes \('.*'\).* without changing its"):
        mu.upscale(narrow, wide, mu.plan(narrow, wide), grow=Net2Net())


def test_copies_are_whole_blocks_and_none_is_left_out() -> None:
    sources = random_copies(6, Axis(3, block=2), seed=0)
    assert sources.tolist()[:6] == list(range(6))
    assert all(a % 2 == 0 and b == a + 1 for a, b in sources.view(-1, 2).tolist())
    assert len(sources) == 18
