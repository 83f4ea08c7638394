"""What other code for μP and for widening gets wrong, each mistake a test; factors are in test_dynamic_equivalence."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import mupscale as mu
from mupscale.models import GPT2, MLP
from toys import Toy
from weights import identical, take_step

K = 4
TOKENS = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(3))
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def gpt2(head_dim: int) -> GPT2:
    return GPT2(11, 6, layers=1, heads=2, head_dim=head_dim, attention_multiplier=1.0)


def mlp(width: int) -> MLP:
    return MLP(5, width, 3, activation="tanh")


def factors(model: nn.Module, plan: mu.Plan) -> dict[str, float]:
    groups = mu.param_groups(model, plan, optim.AdamW, lr=1.0)
    return {name: group["lr"] for group in groups for name, _ in group["params"]}


def test_metadata_lost_by_deepcopy_and_to_empty(float64: None) -> None:
    """Also of a model that was sketched on the meta device, given memory by torch or by widen itself."""
    narrow, wide = gpt2(2), gpt2(2 * K)
    plan = mu.plan(narrow, wide)
    copied, copied_plan = copy.deepcopy(wide), copy.deepcopy(plan)
    with torch.device("meta"):
        sketches = [gpt2(2 * K), gpt2(2 * K)]
    assert factors(copied, copied_plan) == factors(wide, plan) == factors(sketches[0], plan)
    assert len(set(factors(copied, plan).values())) > 1
    mu.widen(copy.deepcopy(narrow), copied, plan)
    torch.testing.assert_close(copied(TOKENS), narrow(TOKENS), rtol=1e-12, atol=1e-12)
    emptied = sketches[0].to_empty(device="cpu")
    emptied.lm_head.weight = emptied.wte.weight  # to_empty unties
    assert identical(mu.widen(narrow, emptied, plan), copied)
    assert identical(mu.widen(narrow, sketches[1], plan), copied)
    assert sketches[1].lm_head.weight is sketches[1].wte.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("source", ["optimizer", "state dict"])
def test_the_step_tensor_shared_with_the_wide_optimizer_or_cast_to_bf16_where_it_sticks(
    source: str, dtype: torch.dtype
) -> None:
    """In bf16, 256 + 1 is 256."""
    narrow, wide, x = mlp(4).to(dtype), mlp(4 * K).to(dtype), X.to(dtype)
    optimizer = optim.AdamW(narrow.named_parameters(), lr=1e-3)
    take_step(optimizer, narrow(x).square().mean())
    for state in optimizer.state.values():
        state["step"].fill_(300.0)
    plan = mu.plan(narrow, wide)
    given: Any = optimizer if source == "optimizer" else optimizer.state_dict()
    grown = mu.widen_optimizer(given, mu.make_optimizer(wide, plan, optim.AdamW, lr=0.01), plan)
    memory = {v.data_ptr() for state in optimizer.state.values() for v in state.values()}
    assert not memory & {v.data_ptr() for state in grown.state.values() for v in state.values()}
    take_step(grown, wide(x).square().mean())
    assert {(float(s["step"]), s["step"].dtype) for s in grown.state.values()} == {(301.0, torch.float32)}
    assert {s["exp_avg"].dtype for s in grown.state.values()} == {dtype}
    assert {float(s["step"]) for s in optimizer.state.values()} == {300.0}


def fixed_readout(width: int) -> nn.Module:
    """A projection that is no parameter reads the hidden units."""
    return Toy(lambda m, x: torch.tanh(m.a(x)) @ m.fixed, a=nn.Linear(5, width), fixed=torch.randn(width, 3)).double()


def test_a_fixed_projection_is_divided_as_a_trained_one_is() -> None:
    narrow, wide = fixed_readout(4), fixed_readout(8)
    grown = mu.widen(narrow, wide, mu.plan(narrow, wide, inputs=X))
    assert torch.allclose(grown(X), narrow(X), rtol=1e-12)


def tied(width: int) -> nn.Module:
    readout = nn.Linear(width, 11, bias=False)
    model = Toy(None, embed=nn.Embedding(11, width), norm=nn.LayerNorm(width), readout=readout)
    model.readout.weight = model.embed.weight
    return model


def test_beside_fresh_units_the_norm_makes_up_for_what_the_tied_embedding_keeps() -> None:
    root = mu.Role(out=1, fold=lambda out, in_: out**-0.5, keep=lambda out, in_: out**-0.5)  # a model times √width
    plan = mu.plan(tied(8), tied(32), roles={"embed.weight": root}, grow=mu.Fresh())
    kept = {name: float(entry.keep) for name, entry in plan.parameters.items()}
    assert kept == {"embed.weight": 0.5, "norm.weight": 2.0, "norm.bias": 2.0}
