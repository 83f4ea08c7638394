"""Grouped queries, keys and values in one weight: each part is copied in blocks of its own, which a run finds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from exactness import assert_exact

pytestmark = pytest.mark.usefixtures("float64")


class Fused(nn.Module):
    """Attention in which two query heads share a key and a value; no name and no attribute says so."""

    def __init__(
        self, width: int, how: str = "repeat_interleave", *, size: int = 4, layout: str = "qkv", bias: bool = False
    ) -> None:
        super().__init__()
        self.how, self.size, self.layout = how, size, layout
        self.a, self.b = nn.Linear(5, width), nn.Linear(width, 2 * width, bias=bias)
        self.c, self.d = nn.Linear(width, width, bias=bias), nn.Linear(width, 3)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values: one behind the other, those of each group together, or one by one."""
        width = x.shape[2]
        if self.layout == "groups":
            groups = self.b(x).unflatten(2, (-1, 4, self.size))
            return [groups[:, :, :, :2].flatten(2, 3), groups[:, :, :, 2], groups[:, :, :, 3]]
        lengths = [width if part == "q" else width // 2 for part in self.layout[:3]]
        if self.layout == "qkv, slices":
            parts = [F.linear(x, rows) for rows in self.b.weight.split(lengths)]
        else:
            parts = list(self.b(x).split(lengths, -1))
        return [parts[self.layout.index(part)].unflatten(2, (-1, self.size)) for part in "qkv"]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        q, k, v = (part.transpose(1, 2) for part in self.parts(x))
        shares = {"enable_gqa": self.how == "enable_gqa", "scale": 1 / self.size}
        if self.how == "repeat_interleave":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        elif self.how == "repeat":
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **shares)
        return self.d(x + self.c(y.transpose(1, 2).flatten(2)))


class WithTemperatures(Fused):
    """Queries are normalised in each head and multiplied by a number of each head; k before v before q."""

    def __init__(self, width: int) -> None:
        super().__init__(width, layout="kvq", bias=True)
        self.e, self.f = nn.RMSNorm(4), nn.Parameter(torch.randn(width // 4))

    def parts(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().parts(x)
        return [self.e(q) * self.f.exp()[:, None], k, v]


X = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.quick("repeat_interleave-qkv-2", "enable_gqa-groups-2", "repeat-vqk-2")
@pytest.mark.parametrize(
    ("how", "layout", "times"),
    [
        ("repeat_interleave", "qkv", 2),
        ("repeat_interleave", "qkv, slices", 2),
        ("enable_gqa", "qkv", 3),
        ("enable_gqa", "groups", 2),
        ("repeat", "vqk", 2),
    ],
)
def test_heads_grow(how: str, layout: str, times: int) -> None:
    torch.manual_seed(0)
    narrow, wide = (Fused(width, how, layout=layout) for width in (16, 16 * times))
    assert_exact(narrow, wide, mu.plan(narrow, wide, inputs=X), X)


def test_the_parts_are_told_apart_and_blocks_are_no_longer_than_they_must_be() -> None:
    plan = mu.plan(Fused(16), Fused(32), inputs=X)
    assert plan["b.weight"].axes[0] == mu.Axis(2, sections=((16, 8), (8, 4), (8, 4)), side="out")
    assert plan["c.weight"].axes[1] == mu.Axis(2, block=8, side="in")


def test_with_biases_norms_and_a_number_of_each_head() -> None:
    torch.manual_seed(0)
    narrow, wide = WithTemperatures(16), WithTemperatures(32)
    plan = mu.plan(narrow, wide, inputs=X)
    assert plan["b.bias"].axes[0] == mu.Axis(2, sections=((8, 4), (8, 4), (16, 8)), side="out")
    assert plan["f"].axes[0] == mu.Axis(2, block=2, side="out")
    assert_exact(narrow, wide, plan, X)


def test_heads_become_longer() -> None:
    torch.manual_seed(0)
    narrow, wide = Fused(16), Fused(32, size=8)
    assert_exact(narrow, wide, mu.plan(narrow, wide, inputs=X), X)


def test_fresh_units_beside_the_old_ones() -> None:
    torch.manual_seed(0)
    narrow, wide = Fused(16), Fused(32)
    plan = mu.plan(narrow, wide, inputs=X, fresh=lambda: Fused(16), grow=mu.Fresh())
    grown, _ = mu.upscale(narrow, wide, plan, inputs=X, grow=mu.Fresh(lossless=True))
    assert torch.allclose(grown(X), narrow(X), rtol=1e-9, atol=1e-12)


def test_a_family_learns_the_parts_for_every_width() -> None:
    family = mu.Family(Fused, base=16, inputs=X)
    model = family.init(32)
    for width, grow in ((96, None), (48, mu.Fresh(lossless=True))):
        wide, _ = family.upscale(model, width=width, grow=grow, exact=grow is None, inputs=X)
        assert torch.allclose(wide(X), model(X), rtol=1e-9, atol=1e-12)
