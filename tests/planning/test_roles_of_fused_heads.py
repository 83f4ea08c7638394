"""Grouped queries in one projection, in a model of which no module tells the rest: given roles lead the search."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from own_norms import OwnScale

HEAD, GROUP = 4, 2
TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
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
@pytest.mark.usefixtures("float64")
def test_given_roles_lead_the_search(times: int) -> None:
    narrow, wide = Fused(16), Fused(16 * times)
    plan = mu.plan(narrow, wide, inputs=TOKENS, roles={"mix.weight": fused(16)})
    assert plan["mix.weight"].axes[0].sections == fused(16).out_block
    assert plan["back.weight"].axes[1].block == HEAD * GROUP
    wide, _ = mu.upscale(narrow, wide, plan, inputs=TOKENS, exact=True)
    assert torch.allclose(wide(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)


def test_given_roles_that_mislead_the_search_are_named() -> None:
    """Here the search finds the whole without them."""
    role = mu.Role(out=0, in_=1, in_block=2)
    with pytest.raises(mu.MupscaleError, match=re.escape(f"given for 'back.weight', {role}, does not pass the check")):
        mu.plan(Fused(16), Fused(32), inputs=TOKENS, roles={"mix.weight": fused(16), "back.weight": role})


@pytest.mark.usefixtures("float64")
def test_a_family_takes_sections_as_parts_of_every_width() -> None:
    family = mu.Family(Fused, base=16, inputs=TOKENS, roles={"mix.weight": fused(16)})
    narrow = family.init(32)
    wide, _ = family.upscale(narrow, width=96, inputs=TOKENS, exact=True)
    assert family.widening(32, 96)["mix.weight"].axes[0].sections == fused(32).out_block
    assert torch.allclose(wide(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)


def test_sections_for_another_width_are_refused_where_nothing_is_tried() -> None:
    with pytest.raises(mu.MupscaleError, match=r"'mix.weight': dimension 0 has 64 units, but the sections .* up to 32"):
        mu.plan(
            Fused(32),
            Fused(64),
            roles={"mix.weight": fused(16)} | {"*norm.weight": mu.Role(out=0), "last.weight": mu.Role(out=0)},
        )
