"""Fresh units: the old network stays as it is, new units have μP's scale, and the rules are those of the width."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.core import is_new, places
from mupscale.growth import initial_state
from mupscale.models import GPT2, MLP, ResNet18
from mupscale.optim import traits_of
from refusals import refuses
from toys import Toy
from weights import identical, take_step, unchanged
from zoo import ARCHITECTURES, TRAININGS, Architecture, GroupedQueries, loss_of

pytestmark = pytest.mark.usefixtures("float64")
quick = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
GROWABLE = {name: a for name, a in ARCHITECTURES.items() if name != "gpt2-head-dim"}


def grown(
    architecture: Architecture, operator: mu.Operator, seed: int = 0
) -> tuple[nn.Module, nn.Module, mu.Plan, dict[str, Any]]:
    """A narrow model, the wide one that it grew to, the plan, and the narrow one's weights as they were."""
    torch.manual_seed(0)
    narrow, wide = architecture.narrow(), architecture.wide()
    plan = mu.plan(narrow, wide, roles=architecture.roles, fresh=architecture.narrow, grow=operator)
    before = {name: p.detach().clone() for name, p in narrow.named_parameters()}
    mu.upscale(narrow, wide, plan, grow=operator, seed=seed)
    return narrow, wide, plan, before


# ---------------------------------------------------------------------------------------------- where old units lie


@given(n=st.integers(1, 30), more=st.integers(0, 40), block=st.integers(1, 4))
@quick
def test_old_units_keep_their_order_and_their_blocks(n: int, more: int, block: int) -> None:
    axis = mu.Axis(Fraction(n + more, n), block)
    place = places(axis, n * block)
    assert len(place) == n * block == len(set(place.tolist()))
    assert bool((place.diff() > 0).all())
    assert int(place[-1]) < (n + more) * block
    whole = place.reshape(n, block)
    assert bool((whole - whole[:, :1] == torch.arange(block)).all())  # a block stays together
    assert bool((whole[:, 0] % block == 0).all())  # and is a block of the wide axis
    assert int(is_new(axis, n * block).sum()) == more * block


@given(n=st.integers(1, 12), times=st.integers(1, 4), block=st.integers(1, 3))
@quick
def test_at_multiples_they_take_the_places_of_their_first_copies(n: int, times: int, block: int) -> None:
    axis = mu.Axis(times, block)
    first = [axis.source(n * block).tolist().index(unit) for unit in range(n * block)]
    assert places(axis, n * block).tolist() == first


@given(parts=st.integers(1, 6), n=st.integers(1, 8), more=st.integers(0, 8))
@quick
def test_equal_parts_of_a_packed_axis_stay_where_the_wide_module_looks_for_them(parts: int, n: int, more: int) -> None:
    """gates, q|k|v, gate|up, heads that grow inside: part p of the wide axis holds part p of the narrow one."""
    place = places(mu.Axis(Fraction(n + more, n)), parts * n)
    assert (place // (n + more)).tolist() == [unit // n for unit in range(parts * n)]
    assert torch.equal(place[:n], place[-n:] - (parts - 1) * (n + more))  # and every part is laid out alike


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", GROWABLE)
def test_the_old_block_is_the_narrow_model(name: str) -> None:
    narrow, wide, plan, before = grown(GROWABLE[name], mu.Fresh())
    for key, p in wide.named_parameters():
        entry = plan.parameters[key]
        old = p[mu.index_of_old(entry.narrow, entry.axes)]
        assert torch.equal(old, before[key] * float(entry.keep)), key
        assert torch.equal(narrow.get_parameter(key), before[key]), key


@pytest.mark.quick("mlp", "conv-flatten", "depthwise", "gpt2-heads", "grouped-queries", "sqrt-attention", "lstm")
@pytest.mark.parametrize("name", GROWABLE)
def test_new_units_have_the_spread_of_the_wide_width(name: str) -> None:
    """Averaged over draws and entries, in units of the std that μP has there."""
    architecture = GROWABLE[name]
    scores: dict[str, list[Tensor]] = {}
    for seed in range(3):
        _, wide, plan, _ = grown(architecture, mu.Fresh(), seed)
        for key, p in wide.named_parameters():
            entry, std = plan.parameters[key], plan.fresh[key]
            new = torch.ones(entry.wide, dtype=torch.bool)
            new[mu.index_of_old(entry.narrow, entry.axes)] = False
            if std and bool(new.any()):
                scores.setdefault(key, []).append(p.detach()[new] / std)
    assert scores
    for key, values in scores.items():
        all_of_them = torch.cat(values)
        error = 5 / math.sqrt(2 * len(all_of_them))
        assert abs(float(all_of_them.std()) - 1) < error, key


def test_constants_start_as_the_author_starts_them() -> None:
    """Gains at 1, biases at 0, an LSTM's forget gate at 1, and the gain of a tied readout's norm at its fold."""

    def gates(width: int) -> nn.Module:
        model = Toy(None, lstm=nn.LSTM(3, width), norm=nn.LayerNorm(width))
        with torch.no_grad():
            model.lstm.bias_ih_l0.zero_()[width : 2 * width].fill_(1.0)
        return model

    narrow, wide = gates(4), gates(6)
    plan = mu.plan(narrow, wide, fresh=lambda: gates(4), grow=mu.Fresh())
    with torch.no_grad():
        for p in narrow.parameters():
            p.add_(3.0)
    mu.upscale(narrow, wide, plan, grow=mu.Fresh())
    new = is_new(mu.Axis(Fraction(3, 2)), 4)
    assert wide.norm.weight[new].tolist() == [1, 1]
    assert wide.norm.bias[new].tolist() == [0, 0]
    assert wide.lstm.bias_ih_l0.view(4, 6)[:, new].tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    family = mu.Family(lambda width: GPT2(11, 8, layers=1, head_dim=4, width=width), base=8, init_at=8)
    tied, _ = family.upscale(family.init(8), width=16, grow=mu.Fresh())
    new = is_new(mu.Axis(2), 8)
    assert tied.ln_f.weight[new].unique().tolist() == [0.5]
    assert tied.ln_f.weight[~new].unique().tolist() == [1.0]


def test_a_padding_row_stays_zero() -> None:
    narrow, wide = (nn.Sequential(nn.Embedding(5, n, padding_idx=0), nn.Linear(n, 2)) for n in (4, 6))
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    mu.upscale(narrow, wide, plan, grow=mu.Fresh())
    assert not wide[0].weight[0].any()
    assert bool(wide[0].weight[1:].all())


def test_outgoing_weights() -> None:
    """outgoing scales what leads from new units to old ones, and nothing else."""
    architecture = ARCHITECTURES["mlp"]
    full, half = (grown(architecture, mu.Fresh(outgoing=a))[1:3] for a in (1.0, 0.5))
    for key, p in full[0].named_parameters():
        entry = full[1].parameters[key]
        q = half[0].get_parameter(key)
        scaled = torch.ones(entry.wide)
        if entry.in_:
            old_outputs = ~is_new(entry.axes[0], entry.narrow[0]) if 0 in entry.axes else torch.ones(entry.wide[0]) > 0
            new_inputs = is_new(entry.axes[1], entry.narrow[1])
            scaled[old_outputs[:, None] & new_inputs[None, :]] = 0.5
        assert torch.equal(p * scaled, q), key


def test_two_seeds_and_two_growths_draw_other_numbers_and_one_seed_repeats() -> None:
    """The second growth of a run draws other numbers than the first, though the seed is one."""
    one, again, other = (grown(ARCHITECTURES["mlp"], mu.Fresh(), seed)[1] for seed in (0, 0, 1))
    assert identical(one, again)
    assert not torch.equal(one.layers[1].weight, other.layers[1].weight)
    family = mu.Family(lambda width: MLP(3, width, 2), base=64)
    once, _ = family.upscale(family.init(64), width=96, grow=mu.Fresh())
    twice, _ = family.upscale(once, width=160, grow=mu.Fresh())
    first, second = once.layers[1].weight.flatten(), twice.layers[1].weight.flatten() * math.sqrt(160 / 96)
    assert not neighbours(first) & neighbours(second)


def neighbours(values: torch.Tensor) -> set[tuple[str, ...]]:
    """Every six numbers in a row, to six digits: one alone may be drawn twice."""
    digits = [f"{value:.6g}" for value in values.tolist()]
    return set(zip(*(digits[i:] for i in range(6)), strict=False))


def test_growing_in_two_steps_is_growing_in_one() -> None:
    """64 → 96 → 160 keeps the old units and has the groups of 64 → 160."""
    family = mu.Family(lambda width: MLP(3, width, 2), base=64)
    model = family.init(64)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)
    step, step_optimizer = family.upscale(model, optimizer, width=96, grow=mu.Fresh())
    twice, two = family.upscale(step, step_optimizer, width=160, grow=mu.Fresh())
    _, one = family.upscale(model, optimizer, width=160, grow=mu.Fresh())
    for ours, theirs in zip(groups_by_name(two).items(), groups_by_name(one).items(), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=1e-14)
    weight = twice.layers[1].weight
    where = places(mu.Axis(Fraction(160, 96)), 96)[places(mu.Axis(Fraction(96, 64)), 64)]
    assert torch.equal(weight[where][:, where], model.layers[1].weight)


# ---------------------------------------------------------------------------------------------- rules


def groups_by_name(optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Learning rate, decay and eps of every parameter."""
    numbers = ("lr", "weight_decay", "eps")
    return {
        name: [value for key in numbers if key in group for value in _flat(group[key])]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def _flat(value: Any) -> list[float]:
    return [float(v) for v in value] if isinstance(value, tuple) else [float(value)]


FAMILIES = {
    "mlp": (mu.Family(lambda width: MLP(5, width, 3), base=32, init_at=32), 48, 80),
    "gpt2": (mu.Family(lambda width: GPT2(11, 8, layers=1, head_dim=4, width=width), base=16), 32, 44),
    "resnet": (mu.Family(lambda width: ResNet18(width, 3, 1), base=2, init_at=3), 4, 5),
    "grouped queries": (mu.Family(GroupedQueries, base=1, init_at=2), 2, 3),
}


KINDS = ["SGD-momentum", "AdamW", "Adagrad", "Adafactor", "Rprop", "ASGD", "Adadelta"]


def _grown_and_trained() -> list[ParameterSet]:
    """Every family with every optimizer; for every change each optimizer once, and two that differ most with all."""
    often = ("AdamW", "Adafactor")
    return [
        pytest.param(name, kind, marks=() if name == "mlp" or kind in often else pytest.mark.slow)
        for name, kind in product(FAMILIES, KINDS)
    ]


@pytest.mark.quick("mlp-*", "gpt2-AdamW", "grouped queries-Adafactor")
@pytest.mark.parametrize(("name", "training"), _grown_and_trained())
def test_groups_are_those_of_a_fresh_model_of_that_width(name: str, training: str) -> None:
    family, n, wide_width = FAMILIES[name]
    cls, hyper = TRAININGS[training].optimizer, TRAININGS[training].hyper
    model = family.init(n)
    optimizer = family.optimizer(model, cls, **hyper)
    _, wide_optimizer = family.upscale(model, optimizer, width=wide_width, grow=mu.Fresh())
    expected = groups_by_name(family.optimizer(family.init(wide_width), cls, **hyper))
    got = groups_by_name(wide_optimizer)
    assert got.keys() == expected.keys()
    for key, values in got.items():
        assert values == pytest.approx(expected[key], rel=4e-15), key  # two factors rounded one after the other


@pytest.mark.parametrize("training", [name for name in TRAININGS if not name.startswith("Muon")])
def test_state_of_every_optimizer(training: str) -> None:
    """The old part is carried over, the new one is as a fresh optimizer has it, and training goes on."""
    architecture, (cls, hyper) = ARCHITECTURES["mlp"], (TRAININGS[training].optimizer, TRAININGS[training].hyper)
    torch.manual_seed(0)
    narrow, wide, batches = architecture.narrow(), architecture.wide(), architecture.batches()
    optimizer = cls(narrow.parameters(), **hyper)
    train(narrow, optimizer, batches, 4)
    plan = mu.plan(narrow, wide, fresh=architecture.narrow, grow=mu.Fresh())
    _, grown_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=mu.Fresh())
    rates = {"step_size"}
    for (key, p), q in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        entry, state, before = plan.parameters[key], grown_optimizer.state[p], optimizer.state[q]
        assert state.keys() == before.keys()
        group = next(g for g in grown_optimizer.param_groups if any(p is other for other in g["params"]))
        start = initial_state(grown_optimizer, group, p.dim())
        for what, value in state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            axes = {d: axis for d, axis in entry.axes.items() if value.shape[d] == entry.wide[d]}
            index = mu.index_of_old(tuple(before[what].shape), axes)
            if what not in rates:
                assert torch.equal(value[index], before[what]), (key, what)
            new = torch.ones(value.shape, dtype=torch.bool)
            new[index] = False
            if what in traits_of(cls).begins_at_mean:
                assert math.isclose(value.mean(), before[what].mean(), rel_tol=1e-12), (key, what)
            else:
                assert value[new].unique().tolist() in ([], [start[what]]), (key, what)
    losses = train(wide, grown_optimizer, batches, 8)
    assert all(math.isfinite(loss) for loss in losses)
    assert min(losses) < losses[0]


def test_adafactors_steps_of_old_units_stay() -> None:
    """Its second moments are means over all units and its steps are clipped by their common size, so new units count.

    Where gradients of new units are as large as the mean of old ones, the steps of old ones are what they were.
    """

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(2, width, 3), nn.Conv1d(width, width, 3), nn.Flatten(), nn.Linear(width, 3))

    hyper = {"lr": 1e-4, "eps": (1e-12, 1.0)}  # weights stay below 1, which steps are then relative to
    narrow, wide = build(4), build(6)
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    optimizer = torch.optim.Adafactor(narrow.named_parameters(), **hyper)
    along = {p: [torch.rand(size) + 0.1 for size in p.shape] for p in narrow.parameters()}

    def outer(vectors: list[Tensor]) -> Tensor:
        product = vectors[0]
        for vector in vectors[1:]:
            product = product[..., None] * vector
        return product

    def take_steps(optimizer: torch.optim.Optimizer, sizes: dict[nn.Parameter, list[Tensor]], t: int) -> list[Tensor]:
        steps = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad, steps[p] = outer(sizes[p]) * (1 + t % 3), p.detach().clone()
        optimizer.step()
        for group in optimizer.param_groups:
            relative_to = group["eps"][1] * min(group["lr"], 1 / math.sqrt(t + 1))
            for p in group["params"]:
                steps[p] = (p.detach() - steps[p]) / relative_to
        return [steps[p] for p in sizes]

    for t in range(30):
        take_steps(optimizer, along, t)
    _, wide_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=mu.Fresh())
    wide_along, old = {}, []
    for (name, p), vectors in zip(wide.named_parameters(), along.values(), strict=True):
        entry, wide_along[p] = plan.parameters[name], []
        for d, vector in enumerate(vectors):
            extended = vector.square().mean().sqrt().repeat(entry.wide[d])
            extended[mu.index_of_old(vector.shape, {0: entry.axes.get(d, mu.Axis())})] = vector
            wide_along[p].append(extended)
        old.append(mu.index_of_old(entry.narrow, entry.axes))
    for t in range(30, 80):
        before, now = take_steps(optimizer, along, t), take_steps(wide_optimizer, wide_along, t)
        for step, wide_step, index in zip(before, now, old, strict=True):
            torch.testing.assert_close(wide_step[index], step, rtol=1e-10, atol=0)


def test_muon_grows_by_fresh_units() -> None:
    narrow, wide = nn.Linear(6, 6, bias=False), nn.Linear(9, 9, bias=False)
    optimizer = torch.optim.Muon(narrow.parameters(), lr=0.1)
    narrow.weight.grad = torch.randn(6, 6)
    optimizer.step()
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    _, grown_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=mu.Fresh())
    state = grown_optimizer.state[wide.weight]["momentum_buffer"]
    assert int((state != 0).sum()) == 36


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], steps: int) -> list[float]:
    losses = []
    for t in range(steps):
        losses.append(take_step(optimizer, loss_of(model, batches[t % len(batches)])[1]))
    return losses


# ---------------------------------------------------------------------------------------------- what a model divides by


def divided(width: int) -> nn.Module:
    """A readout divided by the width in forward, as the mup package has it."""
    first, readout = nn.Linear(3, width), nn.Linear(width, 2, bias=False)
    return Toy(lambda m, x: m.readout(torch.tanh(m.first(x))) * 8 / m.width, width=width, first=first, readout=readout)


def test_what_the_model_divides_by_is_undone_for_old_units() -> None:
    role = mu.Role(out=0, in_=1, fold=lambda out, in_: in_, keep=lambda out, in_: in_)
    narrow, wide = divided(8), divided(12)
    plan = mu.plan(narrow, wide, fresh=narrow, roles={"readout.weight": role}, grow=mu.Fresh())
    optimizer = torch.optim.Adam(narrow.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    take_step(optimizer, narrow(x).square().sum())
    _, grown_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=mu.Fresh(outgoing=0.0))
    assert torch.allclose(narrow(x), wide(x), atol=1e-14)
    old = places(mu.Axis(Fraction(3, 2)), 8)
    moments = [o.state[m.readout.weight]["exp_avg_sq"] for o, m in ((optimizer, narrow), (grown_optimizer, wide))]
    assert torch.allclose(moments[1][:, old], moments[0] / 1.5**2, rtol=1e-12)  # as the gradient of a larger weight


def test_a_fold_without_its_keep_is_refused() -> None:
    role = mu.Role(out=0, in_=1, fold=lambda out, in_: in_)
    with pytest.raises(mu.MupscaleError, match=r"'readout.weight' has fold=1.5 for copies; say .* keep="):
        mu.plan(divided(8), divided(12), roles={"readout.weight": role}, grow=mu.Fresh())


def test_head_dim_that_grows_keeps_the_logits_of_old_units() -> None:
    architecture = ARCHITECTURES["sqrt-attention"]
    narrow, wide, plan, _ = grown(architecture, mu.Fresh(outgoing=0.0))
    assert plan["attention.query.weight"].keep == pytest.approx(math.sqrt(3))
    with torch.no_grad():  # old units alone: what new ones add to queries and keys is taken out
        for name in ("query", "key"):
            part = wide.attention.get_submodule(name)
            part.weight[is_new(mu.Axis(3), 8)] = 0
            part.bias[is_new(mu.Axis(3), 8)] = 0
        wide.embed.weight[:, is_new(mu.Axis(3), 8)] = 0
    tokens = architecture.inputs()
    ours, theirs = (model.attention(model.embed(tokens)) for model in (narrow, wide))
    assert torch.allclose(ours, theirs[..., places(mu.Axis(3), 8)], atol=1e-12)


# ---------------------------------------------------------------------------------------------- lossless


def with_tiny_eps(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-18
    return model


LOSSLESS = ["mlp", "conv-flatten", "resnet18", "gpt2-heads", "gpt2-untied", "grouped-queries", "lstm"]


@pytest.mark.quick("mlp", "conv-flatten", "gpt2-heads", "lstm", "grouped-queries")
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless(name: str) -> None:
    """The function stays to 1e-10 through LayerNorm, RMSNorm and BatchNorm, tied or not, and training goes on."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    narrow, wide = with_tiny_eps(architecture.narrow()), with_tiny_eps(architecture.wide())
    batches = architecture.batches()
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=3e-3)
    train(narrow, optimizer, batches, 5)
    operator = mu.Fresh(lossless=True)
    plan = mu.plan(narrow, wide, roles=architecture.roles, fresh=architecture.narrow, grow=operator)
    _, grown_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=operator, inputs=batches[0][0])
    before, after = (model.eval()(batches[0][0]).detach() for model in (narrow, wide))
    assert float((before - after).abs().max()) < 1e-10 * float(before.abs().max())
    losses = train(wide.train(), grown_optimizer, batches[:1], 6)
    assert max(losses) < losses[0] * 1.05  # no spike
    changed = [name for name, p in wide.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert len(changed) == len(list(wide.parameters()))


@pytest.mark.parametrize(("name", "why"), [("encoder", "inside the residual stream"), ("depthwise", "GroupNorm")])
def test_what_cannot_be_lossless_says_so_and_by_how_much(name: str, why: str) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    narrow, wide = architecture.narrow(), architecture.wide()
    with torch.no_grad():  # a norm after a norm keeps the function as long as the first one's gains are alike
        for p in (p for p in narrow.parameters() if p.dim() == 1):
            p.add_(0.3 * torch.randn_like(p))
    operator = mu.Fresh(lossless=True)
    plan = mu.plan(narrow, wide, fresh=architecture.narrow, grow=operator)
    with pytest.warns(UserWarning, match=rf"not lossless: outputs differ by [\d.]+ % on the batch.*{why}"):
        mu.upscale(narrow, wide, plan, grow=operator, inputs=architecture.inputs())


def test_growing_heads_cannot_be_lossless() -> None:
    architecture = ARCHITECTURES["sqrt-attention"]
    refuses("head_dim grows, which cannot be lossless", grown, architecture, mu.Fresh(lossless=True))


# ---------------------------------------------------------------------------------------------- places and devices


@pytest.mark.parametrize("name", ["mlp", "resnet18", "gpt2-heads"])
def test_a_wide_model_without_memory_is_given_it(name: str) -> None:
    architecture = ARCHITECTURES[name]
    _, wide, plan, _ = grown(architecture, mu.Fresh())
    torch.manual_seed(0)
    narrow = architecture.narrow()
    with torch.device("meta"):
        sketch = architecture.wide()
    mu.upscale(narrow, sketch, plan, grow=mu.Fresh())
    assert identical(wide, sketch)


def test_half_precision_gets_the_same_draws_rounded() -> None:
    narrow, wide = MLP(3, 8, 2).float(), MLP(3, 12, 2).float()
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    mu.upscale(narrow, wide, plan, grow=mu.Fresh())
    small, large = copy.deepcopy(narrow).bfloat16(), copy.deepcopy(wide).bfloat16()
    mu.upscale(small, large, plan, grow=mu.Fresh())
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(large.parameters(), wide.parameters(), strict=True))


def test_statistics_of_new_channels() -> None:
    """Old channels keep theirs; new ones are as drawn until they are measured."""
    build = lambda width: nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.LazyLinear(2))  # noqa: E731
    narrow, wide = build(4)[:2], build(6)[:2]
    x = [2 + 3 * torch.randn(16, 1, 8, 8) for _ in range(3)]
    for batch in x:
        narrow(batch)
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    mu.upscale(narrow, wide, plan, grow=mu.Fresh())
    new = is_new(mu.Axis(Fraction(3, 2)), 4)
    norm = wide[1]
    assert torch.equal(norm.running_mean[~new], narrow[1].running_mean)
    assert norm.running_mean[new].tolist() == [0, 0]
    assert norm.running_var[new].tolist() == [1, 1]
    mu.measure_statistics(wide, x, plan)
    channels = torch.cat([wide[0](batch) for batch in x]).transpose(0, 1).flatten(1).detach()
    assert torch.allclose(norm.running_mean[new], channels.mean(1)[new], rtol=1e-6)
    assert torch.allclose(norm.running_var[new], channels.var(1)[new], rtol=0.05)
    assert torch.equal(norm.running_mean[~new], narrow[1].running_mean)
    assert norm.momentum == 0.1
    assert wide.training
    assert int(norm.num_batches_tracked) == 3


# ---------------------------------------------------------------------------------------------- bad input


def halves(width: int) -> nn.Module:
    """A width joined with inputs that do not grow."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.second(torch.cat([torch.tanh(model.first(x)), x], -1))

    return Toy(forward, first=nn.Linear(3, width), second=nn.Linear(width + 3, 2))


def test_what_cannot_be_grown_is_refused() -> None:
    def refused(narrow: nn.Module, wide: nn.Module, match: str, **more: Any) -> None:
        refuses(match, mu.plan, narrow, wide, grow=mu.Fresh(), **more)

    refused(MLP(3, 8, 2), MLP(3, 6, 2), "becomes narrower")
    refused(halves(8), halves(12), "a concatenation of 8 → 12 that grow with the model and 3 that stay")
    groups = [nn.Conv2d(8, 8, 1, groups=4), nn.Conv2d(12, 12, 1, groups=6)]
    refused(*groups, "from 4 to 6 groups of more than one channel")
    block = mu.Role(out=0, in_=1, in_block=16)
    narrow, wide = nn.Linear(48, 2), nn.Linear(56, 2)
    with pytest.raises(mu.MupscaleError, match="48 units in blocks of 16 cannot become 56: that cuts a block; take 64"):
        mu.plan(narrow, wide, grow=mu.Fresh(), roles={"weight": block})


@pytest.mark.parametrize(
    ("scale", "why"),
    [
        ({"attention_multiplier": 2.0}, "old units cannot make up for the new scale: the queries are not separate"),
        ({}, "belongs in the queries, which are not separate"),
    ],
)
def test_heads_that_grow_inside_one_fused_tensor_are_refused(scale: dict[str, float], why: str) -> None:
    """By 1/head_dim the queries of old units alone would have to be larger; by 1/√head_dim their rate, too."""
    narrow, wide = (GPT2(11, 6, layers=1, heads=2, head_dim=head_dim, **scale) for head_dim in (4, 6))
    refuses(rf"{why}.*row the number of heads", mu.plan, narrow, wide, grow=mu.Fresh())


def test_operators_are_checked_before_anything_is_written() -> None:
    narrow, wide = MLP(3, 8, 2), MLP(3, 12, 2)
    plan = mu.plan(narrow, wide, grow=mu.Fresh())
    with torch.device("meta"):
        without_values = MLP(3, 12, 2)
    with pytest.raises(mu.MupscaleError, match=r"need an initialisation to be drawn from. Build .*fresh=.*Copies"):
        mu.upscale(narrow, without_values, plan)
    for operator, match in [
        (
            mu.Copies(),
            r"this plan is for fresh units .* needs one for copies. Make it with mupscale\.plan\(narrow, wide\)",
        ),
        ("fresh", "grow= is 'fresh', but must be an operator of width"),
    ]:
        with unchanged(wide):
            refuses(match, mu.upscale, narrow, wide, plan, grow=operator)
    refuses("noise= and grow= exclude each other", mu.upscale, narrow, wide, plan, grow=mu.Fresh(), noise=0.5)
    copies = mu.plan(narrow, MLP(3, 16, 2), fresh=narrow)
    refuses("this plan is for copies: make it with", mu.upscale, narrow, MLP(3, 16, 2), copies, grow=mu.Fresh())
    refuses("Fresh units fit any larger width", mu.plan, narrow, wide)


@pytest.mark.parametrize("value", [-0.1, 1.1, True, "much", None, math.nan])
def test_outgoing_is_between_0_and_1(value: Any) -> None:
    refuses(r"outgoing= is .* but must be a number between 0 and 1", mu.Fresh, outgoing=value)


class Forgetful(mu.Operator):
    """Writes the old block alone."""

    needs_multiples = False

    def parameter(self, out: Tensor, narrow: Tensor, part: Any) -> None:
        out[mu.index_of_old(part.entry.narrow, part.entry.axes)] = narrow


class Zeros(Forgetful):
    """New units start at zero."""

    def parameter(self, out: Tensor, narrow: Tensor, part: Any) -> None:
        out.zero_()
        super().parameter(out, narrow, part)


def test_an_operator_of_ones_own_and_one_that_leaves_a_parameter_unwritten() -> None:
    family = mu.Family(lambda width: MLP(3, width, 2), base=8)
    model, wide = family.init(8), MLP(3, 12, 2)
    optimizer = family.optimizer(model, torch.optim.Adam, lr=0.1)
    take_step(optimizer, F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2)))
    plan, left = mu.plan(model, wide, grow=Forgetful()), "Forgetful left entries of 'layers.0.weight' unwritten"
    with unchanged(wide):
        refuses(left, mu.upscale, model, wide, plan, grow=Forgetful())
    wide, grown_optimizer = family.upscale(model, optimizer, width=12, grow=Zeros())
    x = torch.randn(5, 3)
    assert torch.allclose(model(x), wide(x))
    assert not any(bool(state["exp_avg"].any()) for state in grown_optimizer.state.values())  # a fresh optimizer's


# ---------------------------------------------------------------------------------------------- paired noise


@pytest.mark.parametrize("times", [2, 3])
def test_paired_noise_keeps_the_function(times: int) -> None:
    family = mu.Family(lambda width: MLP(5, width, 3), base=16)
    model = family.init(16)
    x = torch.randn(7, 5)
    paired, _ = family.upscale(model, width=16 * times, grow=mu.Copies(noise=2.0, paired=True))
    plain, _ = family.upscale(model, width=16 * times, grow=mu.Copies(noise=2.0))
    assert torch.allclose(model(x), paired(x), atol=1e-12)
    assert not torch.allclose(model(x), plain(x), atol=1e-2)
    exact, _ = family.upscale(model, width=16 * times, exact=True)
    plan = family.widening(model, paired)
    delta = (paired.layers[1].weight - exact.layers[1].weight) / plan.fresh["layers.1.weight"]
    assert float(delta.detach().std()) == pytest.approx(2.0, rel=0.15)
    assert torch.equal(paired.layers[0].weight, exact.layers[0].weight)  # fed by no copies


# ---------------------------------------------------------------------------------------------- it transfers


class GrownMembers:
    """Members of a family that were trained at a smaller width for some steps and then grown by fresh units."""

    def __init__(self, family: mu.Family, times: Fraction) -> None:
        self.family, self.times = family, times
        self.build, self.plan, self.optimizer = family.build, family.plan, family.optimizer

    def init(self, width: Any, seed: int = 0) -> nn.Module:
        narrow = self.family.init(int(width.plain / self.times), seed)
        optimizer = self.family.optimizer(narrow, torch.optim.AdamW, lr=1e-2)
        train(narrow, optimizer, DATA, 3)
        return self.family.upscale(narrow, optimizer, width=width.plain, grow=mu.Fresh(), seed=seed)[0]


DATA = [(x.double(), torch.arange(32) % 5) for x in torch.randn(4, 32, 20, generator=torch.Generator().manual_seed(0))]


@pytest.mark.quick("5/4")
@pytest.mark.parametrize("times", [Fraction(5, 4), Fraction(2)], ids=str)
def test_coordinates_are_flat_after_growth_in_the_middle_of_training(times: Fraction) -> None:
    members = GrownMembers(mu.Family(lambda width: MLP(20, width, 5), base=64), times)
    check = mu.coord_check(
        members, [80, 160, 320], DATA, lambda m, batch: loss_of(m, batch)[1], torch.optim.AdamW, lr=1e-2, seeds=2
    )
    assert check.ok, str(check)
