"""Attention whose modules tell head_dim and no number of heads, and sizes that would cut a head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import mupscale as mu

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
        mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return out


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
        out: Tensor = self.last(self.attention(self.first(x)))
        return out


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("attention", [Packed, Apart, Two])
def test_heads_are_told_without_a_batch(attention: type[Packed], group: int) -> None:
    torch.manual_seed(0)
    narrow = Net(attention, 16, group).double()
    copies = mu.widen(narrow, Net(attention, 32, group).double(), mu.plan(narrow, Net(attention, 32, group)))
    assert torch.allclose(copies(X), narrow(X), rtol=1e-9, atol=1e-12)
    fresh, _ = mu.upscale(
        narrow, Net(attention, 24, group).double(), fresh=lambda: Net(attention, 16, group).double(), grow=mu.Fresh(0.0)
    )
    assert torch.allclose(fresh(X), narrow(X), rtol=1e-9, atol=1e-12)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    report = mu.verify(
        narrow, copies, mu.plan(narrow, copies), [X], loss, optimizer=torch.optim.AdamW, lr=0.01, steps=3
    )
    assert report.ok


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
    with pytest.raises(mu.MupscaleError, match=said):
        family.upscale(model, width=14, grow=mu.Fresh())
    for width in (12, 16):
        wide, _ = family.upscale(model, width=width, grow=mu.Fresh(outgoing=0))
        assert torch.allclose(wide(X.float()), model(X.float()), atol=1e-5)
