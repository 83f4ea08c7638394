"""Attention whose modules tell head_dim and no number of heads, and sizes that would cut a head."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from exactness import assert_exact
from own_norms import OwnScale
from refusals import refuses

pytestmark = pytest.mark.usefixtures("float64")

X = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Packed(nn.Module):
    """Queries, keys and values in one tensor; of the heads, every second may share its keys and values."""

    def __init__(self, width: int, group: int = 1) -> None:
        super().__init__()
        self.head_dim, self.kv = 4, width // group
        self.qkv, self.proj = nn.Linear(width, width + 2 * self.kv), nn.Linear(width, width)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).split([x.shape[-1], self.kv, self.kv], -1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], -1, 4).transpose(1, 2) for part in self.parts(x))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


class Apart(Packed):
    """The same in three tensors."""

    def __init__(self, width: int, group: int = 1) -> None:
        super().__init__(width, group)
        del self.qkv
        self.wq, self.wk, self.wv = (nn.Linear(width, n) for n in (width, self.kv, self.kv))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wq(x), self.wk(x), self.wv(x)


class Two(Packed):
    """Keys and values in one tensor."""

    def __init__(self, width: int, group: int = 1) -> None:
        super().__init__(width, group)
        del self.qkv
        self.to_q, self.to_kv = nn.Linear(width, width), nn.Linear(width, 2 * self.kv)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.to_q(x), *self.to_kv(x).chunk(2, -1)


class Net(nn.Module):
    def __init__(self, attention: type[Packed], width: int, group: int = 1) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(3, width), attention(width, group)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(self.first(x)))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("attention", [Packed, Apart, Two])
def test_heads_are_told_without_a_batch(attention: type[Packed], group: int) -> None:
    torch.manual_seed(0)
    narrow = Net(attention, 16, group).double()
    copies = Net(attention, 32, group).double()
    assert_exact(narrow, copies, mu.plan(narrow, copies), X)
    fresh, _ = mu.upscale(
        narrow, Net(attention, 24, group).double(), fresh=lambda: Net(attention, 16, group).double(), grow=mu.Fresh(0.0)
    )
    assert torch.allclose(fresh(X), narrow(X), rtol=1e-9, atol=1e-12)


def test_head_dim_beside_layers_of_other_names_tells_nothing() -> None:
    class Other(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.head_dim = 4
            self.up, self.down = nn.Linear(3, width), nn.Linear(width, 2)

    plan = mu.plan(Other(8), Other(16))
    assert {axis.block for entry in plan.parameters.values() for axis in entry.axes.values()} == {1}


def test_sizes_that_fit_are_sizes_that_the_model_can_have() -> None:
    """24 rows of queries, keys and values in heads of 4 are three times the width, whatever it is."""
    family = mu.Family(lambda width: Net(Packed, width), base=8, inputs=X)
    model = family.init(8)
    said = r"'attention\.qkv\.weight'.* blocks of 4 cannot become 42: .* take 36 or 48, that is 12 or 16 instead of 14"
    refuses(said, family.upscale, model, width=14, grow=mu.Fresh())
    for width in (12, 16):
        wide, _ = family.upscale(model, width=width, grow=mu.Fresh(outgoing=0))
        assert torch.allclose(wide(X), model(X), rtol=1e-9, atol=1e-12)


# --- Grouped queries, keys and values in one weight: each part is copied in blocks of its own, which a run finds.


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


SEQUENCES = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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
    assert_exact(narrow, wide, mu.plan(narrow, wide, inputs=SEQUENCES), SEQUENCES)


def test_the_parts_are_told_apart_and_blocks_are_no_longer_than_they_must_be() -> None:
    plan = mu.plan(Fused(16), Fused(32), inputs=SEQUENCES)
    assert plan["b.weight"].axes[0] == mu.Axis(2, sections=((16, 8), (8, 4), (8, 4)), side="out")
    assert plan["c.weight"].axes[1] == mu.Axis(2, block=8, side="in")


def test_with_biases_norms_and_a_number_of_each_head() -> None:
    torch.manual_seed(0)
    narrow, wide = WithTemperatures(16), WithTemperatures(32)
    plan = mu.plan(narrow, wide, inputs=SEQUENCES)
    assert plan["b.bias"].axes[0] == mu.Axis(2, sections=((8, 4), (8, 4), (16, 8)), side="out")
    assert plan["f"].axes[0] == mu.Axis(2, block=2, side="out")
    assert_exact(narrow, wide, plan, SEQUENCES)


def test_heads_become_longer() -> None:
    torch.manual_seed(0)
    narrow, wide = Fused(16), Fused(32, size=8)
    assert_exact(narrow, wide, mu.plan(narrow, wide, inputs=SEQUENCES), SEQUENCES)


def test_fresh_units_beside_the_old_ones() -> None:
    torch.manual_seed(0)
    narrow, wide = Fused(16), Fused(32)
    plan = mu.plan(narrow, wide, inputs=SEQUENCES, fresh=lambda: Fused(16), grow=mu.Fresh())
    grown, _ = mu.upscale(narrow, wide, plan, inputs=SEQUENCES, grow=mu.Fresh(lossless=True))
    assert torch.allclose(grown(SEQUENCES), narrow(SEQUENCES), rtol=1e-9, atol=1e-12)


def test_a_family_learns_the_parts_for_every_width() -> None:
    family = mu.Family(Fused, base=16, inputs=SEQUENCES)
    model = family.init(32)
    for width, grow in ((96, None), (48, mu.Fresh(lossless=True))):
        wide, _ = family.upscale(model, width=width, grow=grow, exact=grow is None, inputs=SEQUENCES)
        assert torch.allclose(wide(SEQUENCES), model(SEQUENCES), rtol=1e-9, atol=1e-12)


# --- Grouped queries in one projection, in a model of which no module tells the rest: given roles lead the search.
HEAD, GROUP = 4, 2
TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))


class FusedAndTied(nn.Module):
    """Two query heads for each key, all in one projection; the readout is tied to the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = width, width // GROUP, width // GROUP
        self.tok, self.norm, self.last = nn.Embedding(11, width), OwnScale(width), OwnScale(width)
        self.mix, self.back = nn.Linear(width, sum(self.sizes), bias=False), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.mix(self.norm(x)).split(self.sizes, -1)
        )
        k, v = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.last(x + self.back(mixed.transpose(1, 2).flatten(2))))


def fused(width: int) -> mu.Role:
    sections = ((width, HEAD * GROUP), (width // GROUP, HEAD), (width // GROUP, HEAD))
    return mu.Role(out=0, in_=1, out_block=sections)


@pytest.mark.quick("2")
@pytest.mark.parametrize("times", [2, 4])
def test_given_roles_lead_the_search(times: int) -> None:
    narrow, wide = FusedAndTied(16), FusedAndTied(16 * times)
    plan = mu.plan(narrow, wide, inputs=TOKENS, roles={"mix.weight": fused(16)})
    assert plan["mix.weight"].axes[0].sections == fused(16).out_block
    assert plan["back.weight"].axes[1].block == HEAD * GROUP
    wide, _ = mu.upscale(narrow, wide, plan, inputs=TOKENS, exact=True)
    assert torch.allclose(wide(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)


def test_given_roles_that_mislead_the_search_are_named() -> None:
    """Here the search finds the whole without them."""
    role = mu.Role(out=0, in_=1, in_block=2)
    with pytest.raises(mu.MupscaleError, match=re.escape(f"given for 'back.weight', {role}, does not pass the check")):
        mu.plan(FusedAndTied(16), FusedAndTied(32), inputs=TOKENS, roles={"mix.weight": fused(16), "back.weight": role})


def test_a_family_takes_sections_as_parts_of_every_width() -> None:
    family = mu.Family(FusedAndTied, base=16, inputs=TOKENS, roles={"mix.weight": fused(16)})
    narrow = family.init(32)
    wide, _ = family.upscale(narrow, width=96, inputs=TOKENS, exact=True)
    assert family.widening(32, 96)["mix.weight"].axes[0].sections == fused(32).out_block
    assert torch.allclose(wide(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)


def test_sections_for_another_width_are_refused_where_nothing_is_tried() -> None:
    with pytest.raises(mu.MupscaleError, match=r"'mix.weight': dimension 0 has 64 units, but the sections .* up to 32"):
        mu.plan(
            FusedAndTied(32),
            FusedAndTied(64),
            roles={"mix.weight": fused(16)} | {"*norm.weight": mu.Role(out=0), "last.weight": mu.Role(out=0)},
        )
