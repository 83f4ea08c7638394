"""Modules that change weights in place, that torch.jit compiled, or that keep whole or complex numbers in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import mupscale as mu
from exactness import assert_exact

BATCH = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SPECTRAL_NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": parametrizations.spectral_norm,
    "hook": nn.utils.spectral_norm,
}


class Hidden(nn.Module):
    """Three layers, of which a function makes the one in the middle."""

    def __init__(self, width: int, make: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.middle = make(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("norm", SPECTRAL_NORMS)
def test_a_spectral_norm_between_widths_is_copied_in_training_and_evaluation(norm: str, mode: str) -> None:
    """In training it writes its singular vectors with out=, which torch does not differentiate."""
    narrow, wide = (Hidden(width, SPECTRAL_NORMS[norm]).double() for width in (4, 8))
    narrow(BATCH)
    for model in (narrow, wide):
        model.train(mode == "train")
    plan = mu.plan(narrow, wide, inputs=BATCH)
    mu.widen(narrow, wide, plan)
    outputs = [model.eval()(BATCH) for model in (narrow, wide)]  # before training computes the singular vectors anew
    assert torch.allclose(*outputs, rtol=1e-10, atol=1e-12)
    assert_exact(narrow.train(), wide.train(), plan, BATCH)


def traced(module: nn.Linear) -> torch.jit.ScriptModule:
    return torch.jit.trace(module, module.weight[:1].detach())


@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()])
@pytest.mark.parametrize("compile_module", [torch.jit.script, traced])
@pytest.mark.filterwarnings("ignore")  # of torch, that torch.jit is deprecated
def test_a_module_that_torch_jit_compiled_is_named(compile_module: Any, grow: Any) -> None:
    narrow, wide = (Hidden(width, compile_module) for width in (4, 8))
    with pytest.raises(mu.MupscaleError, match=r"'middle' is compiled by torch\.jit .*: build both models without"):
        mu.plan(narrow, wide, inputs=BATCH.float(), grow=grow)


class Numbered(nn.Module):
    """Units are multiplied by a number that is read off a buffer, of which every model has its own."""

    def __init__(self, width: int, kind: str, grows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        size = width if grows else 6
        drawn = {
            "permutation": lambda: torch.randperm(size),
            "flags": lambda: torch.rand(size) < 0.5,
            "complex": lambda: torch.randn(size, dtype=torch.complex128),
        }
        self.register_buffer("numbers", drawn[kind]())
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        numbers: Any = self.numbers
        if self.grows:
            return self.last((hidden * numbers).real)
        weights = torch.arange(6, dtype=x.dtype)
        return self.last(hidden * (1 + (numbers * weights).real.sum()))


@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()])
@pytest.mark.parametrize("kind", ["permutation", "flags", "complex"])
def test_a_buffer_that_every_model_draws_for_itself_is_taken_for_no_constant_of_the_width(kind: str, grow: Any) -> None:
    """Growth copies it. The ratio of two drawn numbers was folded into a weight."""
    narrow, wide = (Numbered(width, kind, grows=False).double() for width in (4, 8))
    plan = mu.plan(narrow, wide, inputs=BATCH, grow=grow)
    assert all(entry.fold == entry.keep == 1 for entry in plan.parameters.values())
    if not plan.mup:
        assert_exact(narrow, wide, plan, BATCH)


def test_complex_numbers_over_units_are_copied_with_them() -> None:
    narrow, wide = (Numbered(width, "complex", grows=True).double() for width in (4, 8))
    plan = mu.plan(narrow, wide, inputs=BATCH)
    assert_exact(narrow, wide, plan, BATCH)


class Looked(nn.Module):
    """Tokens are looked up in a table, and what was found goes through a bare matrix, which only a run can tell of."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(11, width) if kind == "bag" else nn.Embedding(11, width, sparse=kind == "sparse")
        self.matrix = nn.Parameter(torch.randn(width, width))
        self.last = nn.Linear(width, 3)
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        if self.kind == "attention":
            heads = hidden.unflatten(-1, (-1, 2)).transpose(1, 2)
            hidden = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return self.last((hidden @ self.matrix).relu())


@pytest.mark.parametrize("frozen", [(True, False), (True, True)], ids=["the narrow one", "both"])
@pytest.mark.parametrize("kind", ["bag", "sparse", "attention"])
def test_a_frozen_table_is_followed_whether_or_not_the_wide_one_is_frozen(kind: str, frozen: tuple[bool, bool]) -> None:
    """Torch runs other operations for what is frozen, and gives sparse gradients of sparse tables."""
    narrow, wide = (Looked(width, kind).double() for width in (4, 8))
    for model, is_frozen in zip((narrow, wide), frozen, strict=True):
        model.table.requires_grad_(not is_frozen)
    tokens = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(0))
    plan = mu.plan(narrow, wide, inputs=tokens)
    assert plan["matrix"].rule == mu.Rule(out=2, in_=2)
    assert torch.allclose(narrow(tokens), mu.widen(narrow, wide, plan)(tokens), rtol=1e-10)


class Divided(nn.Module):
    """Units, or weights that read them, are divided by a length or a sum over units."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        middle = nn.Linear(width, width)
        self.middle = parametrizations.weight_norm(middle) if kind == "weight_norm" else middle
        if kind == "DoRA":
            self.lengths = nn.Parameter(torch.rand(width) + 0.5)
            self.down, self.up = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(width, 2))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.kind == "normalize":
            hidden = nn.functional.normalize(hidden, dim=-1)
        if self.kind == "softmax":
            hidden = hidden.softmax(-1)
        if self.kind == "DoRA":
            weight = self.middle.weight + self.up @ self.down
            weight = weight / weight.norm(dim=1, keepdim=True) * self.lengths[:, None]
            return self.last(nn.functional.linear(hidden, weight, self.middle.bias).relu())
        return self.last(self.middle(hidden).relu())


@pytest.mark.parametrize("width", [6, 8])
@pytest.mark.parametrize("kind", ["normalize", "weight_norm", pytest.param("DoRA", marks=pytest.mark.slow)])
def test_lengths_over_units_let_fresh_units_in_and_old_constants_stay(kind: str, width: int) -> None:
    """At twice the width a constant for copies is found, which was asked for of the user."""
    narrow, wide = (Divided(width, kind).double() for width in (4, width))
    plan = mu.plan(narrow, wide, inputs=BATCH, grow=mu.Fresh())
    assert all(entry.keep == 1 for entry in plan.parameters.values())
    grown, _ = mu.upscale(narrow, wide, plan, grow=mu.Fresh())
    assert bool(grown(BATCH).isfinite().all())


@pytest.mark.parametrize("width", [6, 8])
def test_a_softmax_over_units_keeps_fresh_units_out_and_the_refusal_says_that_copies_work(width: int) -> None:
    narrow, wide = (Divided(width, "softmax").double() for width in (4, width))
    with pytest.raises(mu.MupscaleError, match=r"'middle.weight' has a constant .* Copies work, at whole multiples"):
        mu.plan(narrow, wide, inputs=BATCH, grow=mu.Fresh())
    twice = Divided(8, "softmax").double()
    assert_exact(narrow, twice, mu.plan(narrow, twice, inputs=BATCH), BATCH)
