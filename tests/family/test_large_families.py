"""Families of large models: roles learnt on small members with few blocks; buffers of the width beside fresh units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import GPT2
from mupscale.planning import comparing

TOKENS = torch.randint(0, 600, (2, 8), generator=torch.Generator().manual_seed(0))


class Heads(nn.Module):
    """Heads that no attribute tells, in a list of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(600, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.back = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block, back in zip(self.blocks, self.back, strict=True):
            gate, value = block(x).unflatten(-1, (-1, 2, 4)).unbind(-2)
            x = x + back((torch.tanh(gate) * value).flatten(-2))
        return self.last(x.mean(1))


def test_a_large_family_learns_from_few_blocks_what_a_small_one_learns_from_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mu.Family(Heads, base=64, inputs=TOKENS)
    built = list[int]()

    def build(width: int) -> nn.Module:
        model = Heads(width)
        built.extend([] if model.last.weight.is_meta else [width])
        return model

    monkeypatch.setattr(comparing, "LARGE", 0)
    family = mu.Family(build, base=64, inputs=TOKENS)
    assert max(built) == 32
    plans = [one.at(0).between(one.sketch(64), one.sketch(128), how="copies") for one in (whole, family)]
    assert plans[0] == plans[1]
    assert plans[1]["blocks.3.weight"].axes[0].block == 8
    family.check(TOKENS)


def test_a_base_of_large_models_is_not_built() -> None:
    """Members of 200M parameters, which no test has the time to build."""

    def build(width: int) -> nn.Module:
        model = GPT2(vocab=600, context=16, width=width, layers=4, head_dim=64)
        assert width < 2048 or next(model.parameters()).is_meta
        return model

    family = mu.Family(build, base=2048, inputs=TOKENS)
    assert (
        family.at(0)
        .between(family.sketch(2048), family.sketch(4096), how="copies")["h.3.attn.c_proj.weight"]
        .axes[1]
        .block
        == 64
    )


class Projected(nn.Module):
    """A fixed projection, which is saved and of the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.randn(3, width))
        self.last = nn.Linear(width, 2)
        self.fixed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.fixed))


def test_fresh_units_beside_a_buffer_of_the_width_have_the_values_that_their_author_draws() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    family = mu.Family(Projected, base=64, inputs=x)
    model = family.init(64)
    wide, _ = family.upscale(model, width=96)
    entry = family.widening(64, 96, grow=mu.Fresh()).buffers["fixed"]
    old = mu.index_of_old(entry.narrow, entry.axes)
    assert torch.equal(wide.fixed[old], model.fixed)
    new = torch.ones(96, dtype=torch.bool)
    new[old[-1].flatten()] = False
    assert 0.7 < float(wide.fixed[:, new].std()) < 1.3
