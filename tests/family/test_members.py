"""Members of a family: which batches they were tried on; made part by part, for what no process can hold; large."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from deep_models import ResidualTable
from mupscale.core import naming
from mupscale.family import members
from mupscale.family.members import DepthMembers
from mupscale.models import GPT2, MLP
from mupscale.planning import comparing
from poor_batches import Branch
from refusals import refuses
from toys import Toy

TOKENS = torch.randint(0, 600, (2, 8), generator=torch.Generator().manual_seed(0))


def test_a_family_checks_every_batch() -> None:
    family = mu.Family(lambda width: Branch(width // 8, "with an argument", "heads"), base=8)
    x = torch.randn(2, 4, 5)
    with pytest.warns(mu.UncheckedPlan, match="right for 'm.weight', 'o.weight'"):
        family.check(x)
    refuses("the plan is wrong", family.check, (x, torch.ones(1)))
    refuses("the batch is empty", family.check, x[:0])


@pytest.mark.parametrize("deep", [False, True])
def test_a_family_without_a_batch_warns_where_its_plan_matters(deep: bool) -> None:
    """Until it is checked, or if it is given a batch."""

    def build(width: int, depth: int = 2) -> nn.Module:
        return ResidualTable(3, 2, width, depth) if deep else MLP(3, width, 2)

    base, member = ({"width": 64, "depth": 2}, {"width": 128, "depth": 3}) if deep else (64, 128)
    family, x = mu.Family(build, base), torch.randn(8, 3)
    with pytest.warns(mu.UncheckedPlan, match="this family has not been tried: its initial values follow"):
        model = family.init(member)
    for make in (family.optimizer, family.param_groups):
        with pytest.warns(mu.UncheckedPlan, match="this family has not been tried: its learning rates follow"):
            make(model, torch.optim.AdamW, lr=1e-3)
    assert not family.has_tried(base, member)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.optimizer(family.init(base), torch.optim.AdamW, lr=1e-3)  # nothing is scaled at the base
        family.check(x)
        for tried in (family, mu.Family(build, base, inputs=x)):
            assert tried.has_tried(base, member)
            tried.optimizer(tried.init(member), torch.optim.AdamW, lr=1e-3)


# ---------------------------------------------------------------------------------------------- parts


@pytest.fixture(scope="module")
def family() -> mu.Family:
    def build(width: int, layers: int) -> nn.Module:
        return GPT2(11, 8, width=width, head_dim=4, layers=layers)

    return mu.Family(build, {"width": 8, "layers": 2})


def test_parts_are_those_of_the_whole_and_the_rest_has_no_memory(family: mu.Family) -> None:
    assert family.can_draw_parts
    size = {"width": 16, "layers": 3}
    whole = naming.parameters(family.init_untried(size, seed=5))
    names = list(whole)
    for part in (names[::3], names[1::3], names[2::3]):
        made = naming.parameters(family.init_part(size, 5, part))
        assert made.keys() == whole.keys()
        assert all(torch.equal(made[name], whole[name]) for name in part)
        places = {name: p.untyped_storage().data_ptr() for name, p in made.items()}
        assert len({places[name] for name in part}) == len(part)
        assert len({places[name] for name in names if name not in part}) == 1
    assert naming.parameters(family.init_untried(size, seed=5))[names[0]].numel()  # and all is as it was


def copies_itself(width: int) -> nn.Module:
    """One parameter starts as another's values, which are lost where the other is in a different part."""
    model = Toy(None, **{name: nn.Linear(width, width, bias=False) for name in ("one", "two", "other")})
    with torch.no_grad():
        model.other.weight.copy_(model.one.weight)
    return model


def cloned(width: int) -> nn.Module:
    """Layers that are deep copies, which no module has registered one by one."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("model", [copies_itself, cloned])
def test_what_cannot_be_made_in_parts_is_noticed(model: Callable[[int], nn.Module]) -> None:
    assert not mu.Family(model, 8).can_draw_parts


def test_initial_values_of_a_large_model_are_measured_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more memory at once than the largest parameter's; what cannot be made so is made as a whole."""
    held: list[int] = []
    drawn = DepthMembers.drawn_alone

    def watched(family: DepthMembers, width: int, seed: int, part: list[str]) -> nn.Module:
        model = drawn(family, width, seed, part)
        held.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return model

    def build(width: int) -> nn.Module:
        return GPT2(50, 8, width=width, head_dim=32, layers=2).double()

    whole = mu.Family(build, 64).at(0).initial_std()
    monkeypatch.setattr(DepthMembers, "drawn_alone", watched)
    monkeypatch.setattr(members, "_MOST_NUMBERS", 1000)
    parts = mu.Family(build, 64).at(0).initial_std()
    assert max(held) <= max(p.numel() for p in build(64).parameters())
    assert parts == pytest.approx(whole, rel=0.15, abs=1e-12)
    held.clear()
    copied = mu.Family(copies_itself, 64).at(0).initial_std()
    assert max(held) == 3 * 64 * 64
    assert min(copied.values()) > 0


# ---------------------------------------------------------------------------------------------- large ones


def heads(width: int) -> nn.Module:
    """Heads that no attribute tells, in a list of blocks."""

    def forward(model: Any, tokens: Tensor) -> Tensor:
        x = model.table(tokens)
        for block, back in zip(model.blocks, model.back, strict=True):
            gate, value = block(x).unflatten(-1, (-1, 2, 4)).unbind(-2)
            x = x + back((torch.tanh(gate) * value).flatten(-2))
        return model.last(x.mean(1))

    blocks, back = (nn.ModuleList(nn.Linear(width, n * width) for _ in range(4)) for n in (2, 1))
    return Toy(forward, table=nn.Embedding(600, width), blocks=blocks, back=back, last=nn.Linear(width, 2))


def test_a_large_family_learns_from_few_blocks_what_a_small_one_learns_from_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mu.Family(heads, base=64, inputs=TOKENS)
    built = list[int]()

    def build(width: int) -> nn.Module:
        model = heads(width)
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
    plan = family.at(0).between(family.sketch(2048), family.sketch(4096), how="copies")
    assert plan["h.3.attn.c_proj.weight"].axes[1].block == 64


def projected(width: int) -> nn.Module:
    """A fixed projection, which is saved and of the width."""
    return Toy(lambda m, x: m.last(torch.tanh(x @ m.fixed)), fixed=torch.randn(3, width), last=nn.Linear(width, 2))


def test_fresh_units_beside_a_buffer_of_the_width_have_the_values_that_their_author_draws() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    family = mu.Family(projected, base=64, inputs=x)
    model = family.init(64)
    wide, _ = family.upscale(model, width=96)
    entry = family.widening(64, 96, grow=mu.Fresh()).buffers["fixed"]
    old = mu.index_of_old(entry.narrow, entry.axes)
    assert torch.equal(wide.fixed[old], model.fixed)
    new = torch.ones(96, dtype=torch.bool)
    new[old[-1].flatten()] = False
    assert 0.7 < float(wide.fixed[:, new].std()) < 1.3
