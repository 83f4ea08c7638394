"""Constants that follow from the number of heads, such as ALiBi's slopes: old heads lie where they keep theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.core import places
from mupscale.planning import KeepDouble, build_plan
from resizing import without_resizing
from toys import of, toy
from zoo import TiedByProduct

pytestmark = pytest.mark.usefixtures("float64")


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


# --- Fresh units where a run found the constants: what the weights of old units are multiplied by.


class Attention(nn.Module):
    """One head that is the whole width, by 1/√width, in names that say nothing: old units' queries make up for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, width) for _ in range(3))
        self.d = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(tokens % 5, 5).double()
        q, k, v = self.a(x), self.b(x), self.c(x)
        return self.d((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v)


@toy(lambda width: of(t=nn.Embedding(7, width), c=(width, width), d=(width, 2)))
def scaled(m: Any, tokens: Tensor) -> Tensor:
    """A table times √width, as transformers of 2017 have it."""
    x = m.t(tokens) * m.t.embedding_dim**0.5
    return m.d(torch.tanh(m.c(torch.tanh(x))))


MODELS: dict[str, Callable[[int], nn.Module]] = {"tied": TiedByProduct, "attention": Attention, "scaled": scaled}
KEEPS = {"tied": {1.0}, "attention": {1.0, 2.0**0.5}, "scaled": {1.0, 2.0**-0.5}}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))


def silenced(narrow: nn.Module, wide: nn.Module, plan: mu.Plan) -> nn.Module:
    """The wide model without its new units: they are zero, and norms look at old ones alone."""
    grow = mu.Fresh(outgoing=0.0)
    silent, _ = mu.upscale(narrow, copy.deepcopy(wide), plan, grow=grow)
    for name, p in silent.named_parameters():
        entry = plan.parameters[name]
        old = torch.zeros(p.shape, dtype=torch.bool)
        old[mu.index_of_old(entry.narrow, entry.axes)] = True
        p.data.masked_fill_(~old, 0.0)
    for module in silent.modules():
        if isinstance(module, nn.LayerNorm):
            width = module.normalized_shape[0]
            places = mu.index_of_old((8,), {0: mu.Axis(width // 8)})[0]
            module.register_forward_hook(lambda m, args, out, places=places: _normed(m, args[0], out, places))
    return silent


def _normed(norm: nn.LayerNorm, x: Tensor, out: Tensor, places: slice) -> Tensor:
    alone = torch.zeros_like(out)
    old = torch.nn.functional.layer_norm(x[..., places], (8,), norm.weight[places], norm.bias[places], norm.eps)
    alone[..., places] = old
    return alone


@pytest.mark.quick("attention", "tied")
@pytest.mark.parametrize("name", MODELS)
def test_the_old_units_alone_compute_what_they_did(name: str, tokens: Tensor) -> None:
    torch.manual_seed(0)
    build = MODELS[name]
    narrow, wide = build(8), build(16)
    plan = mu.plan(narrow, wide, inputs=tokens, fresh=lambda: build(8), grow=mu.Fresh())
    assert {round(float(entry.keep), 9) for entry in plan.parameters.values()} == {round(k, 9) for k in KEEPS[name]}
    out = silenced(narrow, wide, plan)(tokens)
    assert torch.allclose(out, narrow(tokens), rtol=1e-10, atol=1e-12)


@pytest.mark.quick("attention", "scaled")
@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_constant_shows(name: str, tokens: Tensor) -> None:
    """Copies' fold in place of what was found, or nothing at all."""
    torch.manual_seed(0)
    build = MODELS[name]
    narrow, wide = build(8), build(16)
    plan = mu.plan(narrow, wide, inputs=tokens, fresh=lambda: build(8), grow=mu.Fresh())
    folded = {n for n, e in plan.parameters.items() if e.fold != 1}
    assert folded
    wrong = {n: e.with_constants(keep=float(e.keep) * 2**0.5) if n in folded else e for n, e in plan.parameters.items()}
    out = silenced(narrow, wide, replace(plan, parameters=wrong))(tokens)
    assert not torch.allclose(out, narrow(tokens), rtol=1e-3)


@pytest.mark.quick("attention", "scaled")
@pytest.mark.parametrize("name", MODELS)
def test_a_family_knows_it_at_every_width(name: str, tokens: Tensor) -> None:
    """Also where the width is no multiple."""
    family = mu.Family(MODELS[name], base=8, inputs=tokens)
    plan = family.widening(16, 24, grow=mu.Fresh())
    expected = {round(k ** (1.0 if k == 1 else 0.5849625007), 6) for k in KEEPS[name]}  # √1.5 for √2
    assert {round(float(e.keep), 6) for e in plan.parameters.values()} == expected
    model = family.init(16)
    wide, _ = family.upscale(model, width=24, grow=mu.Fresh())
    for key, p in wide.named_parameters():
        entry, old = plan.parameters[key], model.get_parameter(key)
        assert torch.allclose(p[mu.index_of_old(entry.narrow, entry.axes)], old * float(entry.keep), rtol=1e-12)


def test_between_multiples_the_plan_is_from_modules_and_tried(tokens: Tensor) -> None:
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 2))

    plan = mu.plan(mlp(8), mlp(12), inputs=torch.randn(4, 5), grow=mu.Fresh())
    assert plan.checked
    assert plan == build_plan(mlp(8), mlp(12), how="fresh").with_initial("past_norms", {})
    assert str(plan).endswith("tried with the new units switched off: the outputs stay the same")
    with without_resizing(), pytest.raises(mu.MupscaleError, match="a constant depends on the width"):
        mu.plan(scaled(8), scaled(12), inputs=tokens, grow=mu.Fresh())
