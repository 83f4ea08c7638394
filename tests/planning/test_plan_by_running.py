"""The plan read off the computation: a zoo of awkward models, each exact over training steps, or refused."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from exactness import assert_exact, distance_to_a_line
from mupscale.planning import in_double, learn_roles
from patterns import PATTERNS, Pattern
from refusals import refuses
from resizing import without_resizing
from toys import of, toy
from zoo import TiedByProduct

LIMITS = {
    "fused heads, dim and number grow, 1/d",
    "heads split and stacked along the batch",
    "experts, dense gate, their number grows",
    "outer product of units with themselves, flattened",
    "image, products of channels, flattened",
    "image, half of the channels pass, shuffled",
    "image, kernels mixed for each example, groups of the batch",
    "across units, a drawn order",
    "image, channels excited by neighbours on a ring",
    "tied readout behind a norm, table times sqrt(width)",
    "matrix, small blocks on the diagonal, their number grows",
    "tied readout behind a norm, both scaled",
    "complex weights for low frequencies",
}
"""Models that could be widened exactly, and that the plan by running refuses: two sizes grow in one flattened axis,
halves that are copied in different orders, more operations in the wide model, units in an order that is drawn, padding
beside units, complex weights, or two constants at once."""


DEAR = (
    "long filters",
    "tied readout behind a norm, table times",
    "linear attention, dim grows, with a number added",
    "image, nn.ChannelShuffle, number of groups",
    "experts, dense gate, their number",
    "norm by hand, length",
    "across units, cumulative mean",
    "grouped heads, enable_gqa",
    "grouped heads, groups",
    "heads and their size both grow",
    "heads grow, the difference",
    "heads grow, a learned slope",
    "tied readout behind a layer",
)
"""How the names of those begin that take half a second and more, and have a sibling that does not."""


ALONE = {
    "attention and feed-forward side by side, joined and read by one layer",
    *("positions divided by sqrt(width), norm by length", "table and waves, a buffer that is not saved"),
    "across units, softmax with a threshold",
}
"""They reach lines that no other test of `make test` reaches."""


def cases() -> list[ParameterSet]:
    """Some of the zoo for every change, the rest (and most refusals, which take longest) among the slow tests."""
    found = []
    for number, pattern in enumerate(PATTERNS):
        refused = pattern.expected == "refused" or pattern.name in LIMITS
        sampled = number % (20 if refused else 12) == 0 and not pattern.name.startswith(DEAR)
        slow = not sampled and pattern.name not in ALONE
        found.append(pytest.param(pattern, id=pattern.name, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize("pattern", cases())
def test_exact_over_training_steps_or_refused(pattern: Pattern) -> None:
    torch.manual_seed(0)
    narrow, wide, inputs = pattern.build(1).double(), pattern.build(2).double(), in_double(pattern.inputs())
    if pattern.expected == "refused" or pattern.name in LIMITS:
        with pytest.raises(
            mu.MupscaleError, match=r"no copies|times|same operations|random|orders|grows along|wrong|whole multiple"
        ):
            mu.plan(narrow, wide, inputs=inputs)
        return
    if pattern.expected == "warned":
        with pytest.warns(UserWarning, match="reads inputs that grow and inputs that do not"):
            plan = mu.plan(narrow, wide, inputs=inputs)
        expected = narrow(*inputs)
        torch.testing.assert_close(mu.widen(narrow, wide, plan)(*inputs), expected, rtol=0, atol=1e-10)
        return
    try:
        plan = mu.plan(narrow, wide, inputs=inputs)
    except mu.MupscaleError:
        if pattern.expected == "either":
            return
        raise
    assert_exact(narrow, wide, plan, inputs)


def test_the_zoo_is_large() -> None:
    assert len(PATTERNS) >= 400
    assert sum(not case.marks for case in cases()) >= 25
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert {pattern.name for pattern in PATTERNS} >= LIMITS


def test_a_wrong_order_of_copies_is_not_let_through() -> None:
    """What the check at the end is for: heads copied unit by unit give other outputs."""
    from mupscale.planning.making_plans import check_plan_by_running

    pattern = next(p for p in PATTERNS if p.name == "separate heads grow")
    narrow, wide, inputs = pattern.build(1), pattern.build(2), pattern.inputs()
    plan = mu.plan(narrow, wide, inputs=inputs)
    check_plan_by_running(narrow, wide, plan, inputs)
    name = next(name for name, entry in plan.parameters.items() if any(a.block > 1 for a in entry.axes.values()))
    entry = plan.parameters[name]

    broken = replace(entry, axes={d: mu.Axis(axis.times, side=axis.side) for d, axis in entry.axes.items()})
    wrong = replace(plan, parameters={**plan.parameters, name: broken})
    refuses(r"the plan is wrong: .* is the first module that does", check_plan_by_running, narrow, wide, wrong, inputs)


def test_numbers_are_needed_to_compare() -> None:
    """What is nan on both sides is equal, whatever the plan."""
    narrow, wide = (nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)) for width in (3, 6))
    refuses("computes nan on the batch", mu.plan, narrow, wide, inputs=torch.full((4, 2), torch.nan))


def test_the_models_are_not_changed() -> None:
    pattern = PATTERNS[0]
    narrow, wide = pattern.build(1), pattern.build(2)
    before = copy.deepcopy((narrow.state_dict(), wide.state_dict()))
    mu.plan(narrow, wide, inputs=pattern.inputs())
    for state, old in zip((narrow.state_dict(), wide.state_dict()), before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in state.items())


@toy(lambda width: of(a=(5, width), b=(width, 3 * width), c=(width, width), d=(width, 2)))
def hidden(m: Any, x: Tensor) -> Tensor:
    """Attention whose names say nothing, its fused weight as (heads, 3, 4)."""
    x = m.a(x)
    parts = m.b(x).view(*x.shape[:2], -1, 3, 4).permute(3, 0, 2, 1, 4)
    mixed = (parts[0] @ parts[1].transpose(-1, -2) / 2).softmax(-1) @ parts[2]
    return m.d(x + m.c(mixed.transpose(1, 2).flatten(2))).mean(1)


@pytest.mark.usefixtures("float64")
def test_a_family_learns_from_a_batch_what_names_do_not_say() -> None:
    x = torch.randn(3, 5, 5)
    misled = mu.Family(hidden, base=8)
    refuses("differs from the narrow one's", misled.check, x)
    family = mu.Family(hidden, base=8, inputs=x)
    family.check(x)
    model = family.init(16)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        distance_to_a_line(model, x).backward()
        optimizer.step()
    wide, wide_optimizer = family.upscale(model, optimizer, width=48, inputs=x, exact=True)
    assert wide_optimizer is not None
    for _ in range(10):
        assert torch.allclose(model(x), wide(x), rtol=1e-10, atol=1e-12)
        for each, its in ((model, optimizer), (wide, wide_optimizer)):
            its.zero_grad()
            distance_to_a_line(each, x).backward()
            its.step()


@pytest.mark.usefixtures("float64")
def test_constants_that_depend_on_the_width_are_learnt_for_every_width() -> None:
    """A readout tied to its embedding behind a norm, by a functional product: the norm takes the 1/k."""

    tokens = torch.randint(0, 7, (3, 4))
    family = mu.Family(TiedByProduct, base=8, inputs=tokens)
    assert {name: float(rule.fold) for name, rule in family.plan(32).rules.items() if rule.fold != 1} == {
        "n.weight": 0.25,
        "n.bias": 0.25,
    }
    model = family.init(16)
    wide, _ = family.upscale(model, width=80, inputs=tokens, exact=True)
    assert torch.allclose(model(tokens), wide(tokens), rtol=1e-10)


def test_growth_by_a_wrong_plan_is_refused_and_changes_nothing() -> None:
    narrow, wide, x = hidden(8), hidden(16), torch.randn(2, 3, 5)
    plan, before = mu.plan(narrow, wide), copy.deepcopy(wide.state_dict())
    refuses("differs from the narrow one's", mu.upscale, narrow, wide, plan, inputs=x, exact=True)
    assert all(torch.equal(value, before[name]) for name, value in wide.state_dict().items())
    mu.upscale(narrow, wide, mu.plan(narrow, wide, inputs=x), inputs=x, exact=True)


def test_keywords_and_roles_of_the_user() -> None:
    narrow, wide, x = hidden(8), hidden(16), torch.randn(2, 3, 5)
    plan = mu.plan(narrow, wide, inputs={"x": x})
    assert plan == mu.plan(narrow, wide, inputs=(x,))
    assert plan["b.weight"].axes[0].block == 12
    refuses("differs from the narrow one's", mu.plan, narrow, wide, inputs=x, roles={"b.weight": mu.Role(out=0, in_=1)})


class Noisy(nn.Module):
    """Noise on the units that grow, or on a latent that does not."""

    def __init__(self, width: int, latent: int | None = None) -> None:
        super().__init__()
        bare = nn.Parameter(torch.randn(width, width))
        self.a, self.bare = nn.Linear(5, width), bare if latent is not None else None
        self.b, self.c = nn.Linear(width, latent or width), nn.Linear(latent or width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x if self.bare is None else torch.tanh(x @ self.bare))
        return self.c(x + torch.randn_like(x))


def test_random_numbers_for_units_that_grow_are_the_reason() -> None:
    x, said = torch.randn(2, 5), "draws random numbers"
    refuses("draws random numbers for units that grow", mu.plan, Noisy(8), Noisy(16), inputs=x)
    refuses(said, mu.plan, Noisy(8), Noisy(12), inputs=x, grow=mu.Fresh())
    refuses(said, mu.upscale, Noisy(8), Noisy(16), mu.plan(Noisy(8), Noisy(16)), inputs=x, exact=True)


def test_random_numbers_for_a_latent_that_stays_are_the_same_at_both_widths() -> None:
    """As in a VAE: also where the modules do not tell, and every operation is followed."""
    x = torch.randn(2, 5)
    assert mu.plan(Noisy(8, 3), Noisy(16, 3), inputs=x).checked
    assert mu.Family(lambda width: Noisy(width, 3), base=8, inputs=x).plan(16).checked
    given = {"inputs": x, "roles": {"bare": mu.Role(out=1, in_=0)}}
    assert mu.plan(Noisy(8, 3), Noisy(12, 3), **given, grow=mu.Fresh()).tried_by == "silent units"


@toy(lambda width: of(a=(5, width), b=(width, 2), mask=nn.Parameter(torch.randn(width))))
def masked(m: Any, x: Tensor) -> Tensor:
    """As wav2vec2 in training: a learned vector in place of positions that Python's own generator or NumPy's draws."""
    places = numpy.random.rand(*x.shape[:2]) < 0.5
    places[0, 0] = random.random() < 0.5
    h = m.a(x)
    h[torch.tensor(places)] = m.mask
    return m.b(torch.tanh(h))


def test_random_numbers_of_other_generators_are_the_same_at_both_widths() -> None:
    state = numpy.random.get_state()[1].tolist(), random.getstate()
    narrow, wide, x = masked(8), masked(16), torch.randn(2, 6, 5)
    assert mu.plan(narrow, wide, inputs=x).checked
    assert learn_roles(narrow, wide, x, {})["mask"] == mu.Role(out=0)
    assert state == (numpy.random.get_state()[1].tolist(), random.getstate())


def test_what_cannot_be_run() -> None:
    x = torch.randn(2, 5)
    with torch.device("meta"):
        wide = hidden(16)
    refuses("meta device", mu.plan, hidden(8), wide, inputs=x)


def test_models_that_differ_in_more_than_widths() -> None:
    narrow, wide = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(5, 16, bias=False))
    refuses("lacks the parameter or buffer", mu.plan, narrow, wide.append(nn.Linear(16, 2)), inputs=torch.randn(2, 5))


def test_a_model_that_asks_for_float32() -> None:
    """What it casts down stays in float64, where rounding does not hide a wrong plan; its own tensors are its own."""

    class Norm(nn.Module):
        def __init__(self, width: int, *, mixes: bool) -> None:
            super().__init__()
            self.mixes, self.a, self.b = mixes, nn.Linear(5, width), nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).to(torch.float32)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            if self.mixes:
                return torch.addmm(self.b.bias, torch.ones(3, len(self.b.weight[0])), self.b.weight.T)
            return self.b(x.type_as(self.a.weight))

    x = torch.randn(3, 5)
    mu.plan(Norm(8, mixes=False), Norm(16, mixes=False), inputs=x)
    refuses("Norm does not run on the batch in float64", mu.plan, Norm(8, mixes=True), Norm(16, mixes=True), inputs=x)


def test_a_model_whose_copies_use_its_own_weights() -> None:
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.e = nn.Embedding(7, width)
            self.read = lambda x: x @ self.e.weight.t()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.read(torch.tanh(self.e(tokens)))

    with pytest.raises(mu.MupscaleError, match=r"a copy of the model still uses 'e\.weight' of the original"):
        mu.plan(Tied(8).double(), Tied(16).double(), inputs=torch.randint(0, 7, (3, 4)))


def test_a_wide_model_that_is_half_as_wide_again() -> None:
    with pytest.raises(mu.MupscaleError, match=r"does not grow by a whole multiple. Sizes that fit: 16"):
        mu.plan(hidden(8), hidden(12), inputs=torch.randn(2, 3, 5))


def test_growth_that_nobody_has_tried_warns() -> None:
    narrow, x = hidden(8), torch.randn(2, 3, 5)
    with pytest.warns(mu.UncheckedPlan, match="Pass inputs="):
        mu.upscale(narrow, hidden(16), mu.plan(narrow, hidden(16)), exact=True)
    with pytest.warns(mu.UncheckedPlan, match="Pass inputs="):
        mu.Family(hidden, base=8).upscale(narrow, width=16, exact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = mu.plan(narrow, hidden(16), inputs=x)
        mu.upscale(narrow, hidden(16), mu.Plan.from_json(plan.to_json()), exact=True)
        mu.Family(hidden, base=8, inputs=x).upscale(narrow, width=16, exact=True)
        mu.upscale(narrow, hidden(16), plan, inputs=x, exact=True)


def test_what_is_frozen_stays_so() -> None:
    narrow, x = hidden(8), torch.randn(2, 3, 5)
    narrow.b.requires_grad_(requires_grad=False)
    wide, _ = mu.upscale(narrow, hidden(16), mu.plan(narrow, hidden(16), inputs=x), exact=True)
    assert [name for name, p in wide.named_parameters() if not p.requires_grad] == ["b.weight", "b.bias"]


def test_word2vec_is_seen_to_grow_and_learns_its_constant_from_a_batch() -> None:
    """Products of two tables: no layer computes the output, and no name says that one of them is summed over."""

    class Word2Vec(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(20, width), nn.Embedding(20, width)

        def forward(self, pairs: Tensor) -> Tensor:
            return (self.a(pairs[:, 0]) * self.b(pairs[:, 1])).sum(-1)

    torch.manual_seed(0)
    pairs, y = torch.randint(0, 20, (32, 2)), torch.randn(32)

    def check(family: mu.Family) -> Any:
        def error(model: nn.Module, batch: Tensor) -> Tensor:
            return (model(batch) - y).square().mean()

        return mu.coord_check(family, [64, 128, 256], [pairs], error, torch.optim.Adam, lr=0.01)

    with pytest.raises(mu.PlanError, match=r"no weight of the model reads .*'a\.weight' and 'b\.weight'"):
        mu.Family(Word2Vec, base=64).init(128)
    misled = check(mu.Family(Word2Vec, base=64, roles={"*.weight": mu.Role(out=1)}))
    assert misled.outcome == "not flat"
    assert {layer.module: layer.guilty is None for layer in misled.layers} == {"a": True, "b": True, "(output)": False}
    assert check(mu.Family(Word2Vec, base=64, inputs=pairs)).ok


class RelativePositions(nn.Module):
    """Attention as in Transformer-XL: a layer reads a table of sinusoids, whose sines are zero at one position."""

    def __init__(self, width: int, *, saved: bool = True) -> None:
        super().__init__()
        self.a, self.q, self.k, self.v, self.pos, self.b = (nn.Linear(5 if n == 0 else width, width) for n in range(6))
        angles = torch.arange(5.0, -6, -1)[:, None] * 0.01 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        q, k, v = (w(h).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        far = q @ self.pos(self.table).unflatten(-1, (-1, 4)).permute(1, 2, 0)
        t = x.shape[1]
        near = torch.stack([far[:, :, i, 5 - i : 5 - i + t] for i in range(t)], 2)
        return self.b(((q @ k.mT + near).softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(-1)


def test_a_layer_that_reads_a_table_has_inputs() -> None:
    """Not the table: its values stay as they are, and the layer's rates fall as those of other layers do."""
    x = torch.randn(3, 6, 5)
    plan = mu.plan(RelativePositions(8), RelativePositions(32), inputs=x)
    assert [axis.side for axis in plan["pos.weight"].axes.values()] == ["out", "in"]
    assert [axis.side for axis in plan["table"].axes.values()] == ["out"]
    with pytest.raises(mu.MupscaleError, match=r"register the table as a buffer that is saved \(persistent\)"):
        mu.plan(RelativePositions(8, saved=False), RelativePositions(32, saved=False), inputs=x)


class Recurrent(nn.Module):
    """A state that is written in place in eval mode, so that gradients can be had in training mode alone."""

    def __init__(self, width: int, *, always: bool = False) -> None:
        super().__init__()
        self.always, self.a, self.norm, self.b = always, nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.tanh(self.a(x)), []
        state = torch.zeros_like(h[:, 0])
        for token in h.unbind(1):
            out.append(token + token.exp() * state)
            state = state + token if self.training and not self.always else state.add_(token)
        return self.b(self.norm(torch.stack(out, 1)))


@pytest.mark.parametrize("grow", [mu.Copies(), mu.Fresh()])
def test_a_state_that_is_written_in_place_in_eval_mode(grow: mu.Operator) -> None:
    x = torch.randn(2, 3, 5)
    plan = mu.plan(Recurrent(4).eval(), Recurrent(8).eval(), inputs=x, grow=grow)
    assert plan.checked


def test_a_model_without_gradients_is_refused_in_words() -> None:
    with pytest.raises(mu.MupscaleError, match=r"gives no gradients .*inplace.* without a cache") as refused:
        mu.plan(Recurrent(4, always=True), Recurrent(8, always=True), inputs=torch.randn(2, 3, 5))
    assert isinstance(refused.value.__cause__, RuntimeError)


class Rotated(nn.Module):
    """A factor for every unit that is complex, as a parameter or, as it is fine, as a buffer."""

    def __init__(self, width: int, *, trained: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, width), nn.Linear(width, 2)
        factor = torch.polar(torch.ones(width), torch.ones(width))
        if trained:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((torch.tanh(self.a(x)) * self.factor).real)


@toy(lambda width: of(hidden=(5, width), mixing=nn.Parameter(torch.randn(width, width)), readout=(width, 3)))
def routed(m: Any, x: Tensor) -> Tensor:
    """Weighted by how often each output is the largest, as a mixture counts the tokens of its experts."""
    outputs = m.readout(m.hidden(x).relu() @ m.mixing)
    largest = outputs.detach().argmax(-1)
    counts = torch.histc(largest.double(), bins=3, min=0, max=2)
    return outputs * counts.cumsum(0, dtype=torch.int32)


def test_what_is_counted_by_a_dtype_of_whole_numbers_is_followed() -> None:
    """Such an operation has no gradient, and torch raises an error where one is asked for."""
    narrow, wide, x = routed(8), routed(16), torch.randn(4, 5)
    assert_exact(narrow, wide, mu.plan(narrow, wide, inputs=x, grow=mu.Copies()), x)


def test_complex_parameters_are_refused_in_words_with_a_batch_too() -> None:
    x = torch.randn(3, 5)
    for inputs in (None, x):
        with pytest.raises(mu.MupscaleError, match=r"'factor' has dtype torch.complex64.*real and imaginary parts"):
            mu.plan(Rotated(4, trained=True), Rotated(8, trained=True), inputs=inputs)
    assert mu.plan(Rotated(4, trained=False), Rotated(8, trained=False), inputs=x).checked


class ParallelBlock(nn.Module):
    """As timm's ParallelScalingBlock: feed-forward, q, k and v in one projection, whose bias is joined of two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_split = [2 * width, width, width, width]
        self.norm, self.in_proj = nn.LayerNorm(width), nn.Linear(width, 5 * width, bias=False)
        self.register_buffer("qkv_bias", torch.zeros(3 * width), persistent=False)
        self.mlp_bias = nn.Parameter(torch.zeros(2 * width))
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attn_out_proj, self.mlp_out_proj = nn.Linear(width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.mlp_bias, self.qkv_bias))
        hidden, *parts = F.linear(self.norm(x), self.in_proj.weight, bias).split(self.in_split, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)
        return x + self.attn_out_proj(attended) + self.mlp_out_proj(F.gelu(hidden))


def parallel(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), ParallelBlock(width), nn.Linear(width, 2))


@pytest.mark.slow
def test_parts_of_outputs_are_no_parts_of_inputs() -> None:
    """Those of the fused projection were tried on its inputs, which ended the search with an error."""
    x = torch.randn(2, 3, 5)
    plan = mu.plan(parallel(8), parallel(16), inputs=x)
    assert plan["1.in_proj.weight"].axes[0].sections[0] == (16, 1)
    assert mu.Family(parallel, base=8, inputs=x).plan(16).checked
    given: dict[str, Any] = {"inputs": x, "grow": mu.Fresh()}
    with without_resizing(), pytest.raises(mu.MupscaleError, match="units lie in blocks that the modules do not show"):
        mu.plan(parallel(8), parallel(12), **given)  # and no odd norm


class Odd(nn.Linear):
    """A layer whose roles somebody registered with a function that does not work."""


def test_an_error_of_the_first_guess_leads_to_the_run() -> None:
    def wrong(narrow: Odd, wide: Odd) -> dict[str, mu.Role]:
        raise KeyError("no such thing")

    def odd(width: int) -> nn.Module:
        return nn.Sequential(Odd(5, width), nn.Tanh(), nn.Linear(width, 2))

    mu.register_roles(Odd, wrong)
    refuses(r"roles of '0' \(Odd\) fails: KeyError: 'no such thing'", mu.plan, odd(4), odd(8))
    assert mu.plan(odd(4), odd(8), inputs=torch.randn(2, 5)).checked


class OwnScale(nn.Module):
    """A table times √width, a number that no state dict holds, tied to the readout as in Gemma."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.table, self.hidden, self.norm = nn.Embedding(9, 8 * k), nn.Linear(8 * k, 8 * k), nn.RMSNorm(8 * k, 1e-6)
        self.register_buffer("scale", torch.tensor((8.0 * k) ** 0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        return F.linear(
            self.norm(x + torch.tanh(self.hidden(F.rms_norm(x, x.shape[-1:], eps=1e-6)))), self.table.weight
        )


@toy(lambda heads, keys: of(heads=heads, keys=keys, q=(5, 3 * heads), k=(5, 3 * keys), o=(3 * heads, 2)))
def fewer_keys(m: Any, x: Tensor) -> Tensor:
    """Keys that serve groups of heads, and that grow half as much as these."""
    b, t, _ = x.shape
    q = m.q(x).view(b, t, m.heads, 3).transpose(1, 2)
    k = m.k(x).view(b, t, m.keys, 1, 3).permute(0, 2, 3, 1, 4)
    k = k.expand(b, m.keys, m.heads // m.keys, t, 3).reshape(b, m.heads, t, 3)
    return m.o(((q @ k.mT).softmax(-1) @ k).transpose(1, 2).reshape(b, t, -1))


class JoinedParts(nn.Module):
    """Heads of 3 and of 2 units, joined for a convolution of each unit and parted again, as in Qwen3-Next."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.heads, self.u, self.v, self.o = 4 * k, nn.Linear(5, 12 * k), nn.Linear(5, 8 * k), nn.Linear(6, 2)
        self.each, self.filter = nn.Parameter(torch.randn(4 * k)), nn.Conv1d(20 * k, 20 * k, 2, groups=20 * k)

    def forward(self, x: Tensor) -> Tensor:
        parts = [y.unflatten(-1, (self.heads, -1)) * self.each[:, None] for y in (self.u(x), self.v(x))]
        joined = self.filter(torch.cat([y.flatten(-2) for y in parts], -1).mT).mT
        u, v = (y.unflatten(-1, (self.heads, -1)) for y in joined.split([3 * self.heads, 2 * self.heads], -1))
        return self.o((u[..., None] * v[..., None, :]).flatten(-2).mean(2))


@toy(lambda k: of(table=nn.Embedding(9, 8 * k), norm=nn.LayerNorm(8 * k), second=(8 * k, 3)))
def two_readouts(m: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Behind the norm that takes the 1/k of the tied readout, a second one with a bias."""
    x = m.norm(torch.tanh(m.table(tokens)))
    return x @ m.table.weight.T, m.second(x)


PAIRS: dict[str, tuple[nn.Module, nn.Module]] = {
    "a scale of the model's own": (OwnScale(1), OwnScale(2)),
    "keys grow less than heads": (fewer_keys(4, 2), fewer_keys(16, 4)),
    "parts joined, each in blocks of its own": (JoinedParts(1), JoinedParts(2)),
    "a second readout behind a fold": (two_readouts(1), two_readouts(2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_checkpoints_of_transformers_do(name: str) -> None:
    narrow, wide = (copy.deepcopy(model).double() for model in PAIRS[name])
    has_tokens = hasattr(narrow, "table")
    x = torch.randint(0, 9, (2, 6)) if has_tokens else torch.randn(2, 6, 5, dtype=torch.float64)
    plan = mu.plan(narrow, wide, inputs=x)
    assert_exact(narrow, wide, plan, x)


class ManyFactors(nn.Module):
    """One matrix that is the product of eight: their orders together are more than any list of them could hold."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4 * k), nn.Linear(4 * k, 2)
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(4 * k, 4 * k) / 2) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) @ reduce(torch.matmul, self.factors)))


@pytest.mark.slow
def test_orders_of_many_weights_in_one_operation_are_not_all_listed() -> None:
    assert mu.plan(ManyFactors(1), ManyFactors(2), inputs=torch.randn(6, 5)).checked


def test_a_scale_of_the_models_own_is_left_to_the_wide_model() -> None:
    narrow, wide = OwnScale(1), OwnScale(2)
    plan = mu.plan(narrow, wide, inputs=torch.randint(0, 9, (2, 6)))
    assert "scale" not in plan.buffers
    assert float(plan["table.weight"].fold) == pytest.approx(0.5**0.5)
    assert float(mu.widen(narrow, wide, plan).scale) == 4.0  # type: ignore[arg-type]
    with pytest.raises(mu.MupscaleError, match=r"'scale' .* depends on the width and is not saved"):
        mu.plan(narrow, wide)  # nothing shows what makes up for it


class NormedTable(nn.Module):
    """As DeBERTa v3: a table of positions goes through a norm, and then through the projections of queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, width), nn.Linear(width, 2)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.table, self.norm = nn.Embedding(6, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h, table = torch.tanh(self.a(x)), self.norm(self.table.weight)
        scores = self.query(h) @ (self.key(h) + self.key(table)).T + (self.key(h) @ self.query(table).T).T
        return self.c(torch.softmax(scores / table.shape[1], -1) @ h)


def test_a_norm_of_a_table_divides_nothing() -> None:
    """The table was divided as what a sum reads, although its norm undoes that, and every guess was refused."""
    assert learn_roles(NormedTable(4), NormedTable(8), torch.randn(6, 5), {})["table.weight"] == mu.Role(out=1)


# --- Models that hypothesis makes up: random parts in random order, each exact over training steps, or refused.
UNUSED = pytest.mark.filterwarnings("ignore:the batch does not show")  # a weight that its part does not use

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
    assert_exact(narrow, wide, plan, x)


parts_of_a_model = st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 11)), min_size=1, max_size=4)


@UNUSED
@settings(max_examples=6)
@given(parts_of_a_model)
def test_models_made_up_are_exact_or_refused(parts: list[Part]) -> None:
    check_made(parts)


@UNUSED
@pytest.mark.slow
@settings(max_examples=500)
@given(parts_of_a_model)
def test_five_hundred_models_made_up_are_exact_or_refused(parts: list[Part]) -> None:
    check_made(parts)


@UNUSED
@pytest.mark.parametrize(
    "part", [(kind, number) for kind in PARTS for number in ((0, 2) if kind != "attention" else range(0, 12, 2))]
)
def test_every_part_alone_is_exact(part: Part) -> None:
    narrow, wide, x = Made([part], 1), Made([part], 2), torch.randn(3, 5, 3)
    assert mu.plan(narrow, wide, inputs=x).checked


@UNUSED
def test_a_factor_before_a_norm_with_eps_is_folded_and_not_taken_for_nothing() -> None:
    """A norm forgets a factor but for its eps, which 1e-8 would not see."""
    check_made([("scale", 2), ("norm", 0), ("norm", 0)])
