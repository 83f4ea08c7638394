"""Models that hypothesis makes up: random parts in random order, each exact over training steps, or refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mupscale as mu

pytestmark = pytest.mark.filterwarnings("ignore:the batch does not show")  # a weight that its part does not use

HEAD = 4
LAYOUTS = list(itertools.permutations(("part", "head", "unit")))
PARTS = ["linear", "bare", "norm", "rms", "gate", "interleaved", "concat", "attention", "depthwise", "average", "scale"]
Part = tuple[str, int]


class Made(nn.Module):
    """A stream (batch, positions, width) that the parts are applied to, some of them beside a residual connection."""

    def __init__(self, parts: list[Part], k: int) -> None:
        super().__init__()
        self.parts, d = parts, 8 * k
        self.first, self.last = nn.Linear(3, d), nn.Linear(d, 2)
        self.weights = nn.ParameterList()
        for kind, _ in parts:
            shape = {"gate": (d, 2 * d), "interleaved": (d, 2 * d), "concat": (2 * d, d), "attention": (d, 3 * d)}
            shape |= {"linear": (d, d), "bare": (d, d), "depthwise": (3, d)}
            size = shape.get(kind, (d,))
            self.weights.append(nn.Parameter(torch.randn(size) / size[0] ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for (kind, number), weight in zip(self.parts, self.weights, strict=True):
            y = getattr(self, kind)(x, weight, number)
            x = x + y if number % 2 else y
        return self.last(torch.tanh(x)).mean(1)

    def linear(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.tanh(nn.functional.linear(x, w.t()))

    def bare(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return torch.einsum(("btd,de->bte", "btd,ed->bte")[number // 2 % 2], x, w)

    def norm(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], w)

    def rms(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return x * (1 + w) / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    def gate(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        a, b = (x @ w).chunk(2, -1)
        return a * b.sigmoid()

    def interleaved(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        y = x @ w
        return y[..., ::2] * y[..., 1::2].sigmoid()

    def concat(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        pieces = [x, x.roll(1, 1)]
        return torch.cat(pieces[:: 1 if number // 2 % 2 else -1], -1) @ w

    def attention(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        layout = LAYOUTS[number // 2 % len(LAYOUTS)]
        sizes = {"part": 3, "head": -1, "unit": HEAD}
        y = (x @ w).view(*x.shape[:2], *(sizes[name] for name in layout))
        y = y.permute(2 + layout.index("part"), 0, 2 + layout.index("head"), 1, 2 + layout.index("unit"))
        scores = (y[0] @ y[1].transpose(-1, -2) / HEAD**0.5).softmax(-1)
        return (scores @ y[2]).transpose(1, 2).flatten(2)

    def depthwise(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return sum((x.roll(shift, 1) * w[shift] for shift in range(3)), torch.zeros_like(x))

    def average(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x) * w

    def scale(self, x: Tensor, w: Tensor, number: int) -> Tensor:
        return x / x.shape[-1] ** 0.5 if number // 2 % 2 else x * w


def check_made(parts: list[Part]) -> None:
    torch.manual_seed(0)
    narrow, wide = Made(parts, 1).double(), Made(parts, 2).double()
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    try:
        plan = mu.plan(narrow, wide, inputs=x)
    except mu.MupscaleError:
        return

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch) - 1).square().mean()

    adamw: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
    wide = mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [x], loss, steps=4, clip=0.5, tolerance=1e-8, **adamw)
    assert report.ok, f"{parts}: {report}"


parts_of_a_model = st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 11)), min_size=1, max_size=4)


@settings(max_examples=6)
@given(parts_of_a_model)
def test_models_made_up_are_exact_or_refused(parts: list[Part]) -> None:
    check_made(parts)


@pytest.mark.slow
@settings(max_examples=500)
@given(parts_of_a_model)
def test_five_hundred_models_made_up_are_exact_or_refused(parts: list[Part]) -> None:
    check_made(parts)


@pytest.mark.parametrize(
    "part", [(kind, number) for kind in PARTS for number in ((0, 2) if kind != "attention" else range(0, 12, 2))]
)
def test_every_part_alone_is_exact(part: Part) -> None:
    narrow, wide, x = Made([part], 1), Made([part], 2), torch.randn(3, 5, 3)
    assert mu.plan(narrow, wide, inputs=x).checked


def test_a_factor_before_a_norm_with_eps_is_folded_and_not_taken_for_nothing() -> None:
    """A norm forgets a factor but for its eps, which 1e-8 would not see."""
    check_made([("scale", 2), ("norm", 0), ("norm", 0)])
