"""Constants that follow from the number of heads, such as ALiBi's slopes: old heads lie where they keep theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import places
from mupscale.planning import KeepDouble


class Slopes(nn.Module):
    """Attention in heads of two units, each with a slope of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(3, 6 * heads), nn.Linear(2 * heads, 2)

    def slopes(self) -> Tensor:
        base = torch.full((), 2 ** (-8 / self.heads), dtype=torch.float32)
        return base ** torch.arange(1, self.heads + 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, 2)).permute(3, 2, 0, 1, 4)
        scores = q @ k.mT + self.slopes()[:, None, None, None] * torch.arange(x.shape[1])
        return self.out((scores.softmax(-1) @ v).permute(1, 2, 0, 3).flatten(-2))


def test_fresh_heads_lie_between_the_old_ones_whose_slopes_stay_theirs() -> None:
    narrow, wide = Slopes(2), Slopes(4)
    planned = mu.plan(narrow, wide, inputs=torch.randn(2, 4, 3), grow=mu.Fresh())
    axis = planned["out.weight"].axes[1]
    assert (axis.block, planned.checked) == (2, True)
    with KeepDouble():  # in float32 the slopes of more heads are rounded otherwise
        assert torch.allclose(wide.slopes()[places(axis, 4)[::2] // 2], narrow.slopes())
