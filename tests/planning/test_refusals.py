"""What is said where a pair of models cannot be planned: which sizes are wrong, and what to do."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import TransformerEncoderLayer as Encoder

import mupscale as mu
from exactness import assert_exact
from mupscale.models import MLP
from mupscale.planning import keeps_outputs
from mupscale.system import asked_by_command
from own_norms import OwnScale
from refusals import refuses
from resizing import without_resizing
from toys import of, toy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.alpha, self.beta = nn.Linear(width, width), *(nn.Parameter(torch.ones(width)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha + self.linear(x) * self.beta


class Tokens(nn.Module):
    def __init__(self, width: int, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(12).reshape(3, 4)


def refusal(wide: Any, **given: Any) -> str:
    with pytest.raises(mu.MupscaleError) as refused:
        mu.upscale(Tokens(8), wide, **given)
    return str(refused.value)


def test_a_batch_does_not_hide_which_size_is_wrong() -> None:
    not_a_multiple, narrower, vocabulary = (
        refusal(wide, inputs=TOKENS, exact=True) for wide in (Tokens(12), Tokens(4), Tokens(16, vocabulary=14))
    )
    assert "does not grow by a whole multiple. Sizes that fit: 16, 24, 32" in not_a_multiple
    assert "grow=mupscale.Fresh()" in not_a_multiple
    assert "becomes narrower" in narrower
    assert "multiple" not in narrower
    assert "dimension 0, from 13 to 14, but that dimension is not a width: is it the vocabulary" in vocabulary
    assert "Keep that size" in vocabulary


@pytest.mark.parametrize("given", [{}, {"inputs": TOKENS}, {"grow": mu.Fresh()}])
def test_a_number_is_no_wide_model(given: dict[str, Any]) -> None:
    said = refusal(32, **given)
    assert "wide= is 32, but must be a model" in said
    assert "width=32" in said
    with pytest.raises(mu.MupscaleError, match="wide= is 32, but must be a model"):
        mu.upscale(Tokens(8), 32, mu.plan(Tokens(8), Tokens(16), inputs=TOKENS), exact=True)  # type: ignore[call-overload]


def test_bare_vectors_are_named_all_at_once_with_what_helps() -> None:
    """A batch, unless one was given, and roles that mu.plan takes."""
    without = refusal(Tokens(16))
    with without_resizing():
        between = refusal(Tokens(12), inputs=TOKENS, fresh=lambda: Tokens(8), grow=mu.Fresh())
    for said in (without, between):
        assert "'blocks.0–1.alpha' (in Block, 8 → " in said
        assert "'blocks.0–1.beta'" in said
        assert "roles={'*.alpha': mupscale.Role(out=0)}" in said
    assert "pass a small batch, inputs=" in without
    assert "pass a small batch" not in between


def test_each_thing_that_the_message_names_helps() -> None:
    narrow, grow = Tokens(8), mu.Fresh()
    mu.upscale(narrow, Tokens(16), inputs=TOKENS, exact=True)
    given: dict[str, Any] = {"fresh": lambda: Tokens(8), "grow": grow, "inputs": TOKENS}
    plan = mu.plan(narrow, Tokens(12), roles={"*.alpha": mu.Role(out=0), "*.beta": mu.Role(out=0)}, **given)
    mu.upscale(narrow, Tokens(12), plan=plan, grow=grow)
    mu.Family(Tokens, base=8, inputs=TOKENS).upscale(narrow, width=12, grow=grow)


class Pooled(nn.Module):
    """A recurrent layer whose states are averaged by scores, which a bare vector gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, width, batch_first=True), nn.Linear(width, 2)
        self.score = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each sequence."""
        states, _ = self.rnn(x)
        scores = (states @ self.score).softmax(1)
        return self.head((states * scores[..., None]).sum(1))


def test_beside_a_recurrent_layer_a_run_shows_what_a_bare_vector_is() -> None:
    """Gates are copied in several orders at once, which their module knows; a run says nothing of them."""
    narrow, batch = Pooled(8), torch.randn(2, 3, 5)
    plan = mu.plan(narrow, Pooled(12), inputs=batch, grow=mu.Fresh())
    assert (plan["score"].in_, plan.checked) == ((0,), True)
    assert mu.Family(Pooled, 8, inputs=batch).plan(12)["score"].in_ == (0,)
    with pytest.raises(
        mu.PlanError, match=r"whether 'score' \(in Pooled, 8 → 12\) is .* or summed over them\. To show"
    ):
        mu.plan(narrow, Pooled(12), grow=mu.Fresh())


@pytest.mark.parametrize(
    ("narrow", "wide", "advice"),
    [
        ((16, 2), (20, 2), "Choose a multiple of 8 for the width, such as 24 or 32, with num_heads of 3 or 4"),
        ((16, 2), (28, 2), "Choose a multiple of 8 for the width, such as 24 or 32, with num_heads of 3 or 4"),
        ((64, 8), (12, 1), "Choose a multiple of 8 for the width, such as 8 or 16, with num_heads of 1 or 2"),
        ((16, 2), (32, 2), r"head_dim 8 → 16.*1/√head_dim.*Grow num_heads instead \(2 → 4\)"),
    ],
)
def test_heads_that_would_be_cut(narrow: tuple[int, int], wide: tuple[int, int], advice: str) -> None:
    refuses(advice, mu.plan, nn.MultiheadAttention(*narrow), nn.MultiheadAttention(*wide), grow=mu.Fresh())


class Largest(nn.Module):
    """The largest unit: whichever copy it is gets all of the gradient, so that no copies are exact."""

    def __init__(self, width: int, power: float = 0.0) -> None:
        super().__init__()
        self.power, self.a, self.b, self.c = power, nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        return self.c(torch.tanh(self.b(x * len(self.b.weight) ** self.power)) * x.max(-1, keepdim=True)[0])


@pytest.mark.slow
def test_what_has_no_copies_may_grow_by_fresh_units_and_the_refusal_says_so() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    narrow, wide = Largest(4), Largest(8)
    refuses(r"in any order that was tried: .*, or try fresh units", mu.plan, narrow, wide, inputs=x)
    plan = mu.plan(narrow, wide, inputs=x, grow=mu.Fresh(), fresh=lambda: Largest(4))
    assert plan.tried_by == "silent units"
    grown, _ = mu.upscale(narrow, wide, plan, inputs=x, grow=mu.Fresh())
    assert torch.equal(grown.a.weight[::2], narrow.a.weight)


@pytest.mark.slow
def test_fresh_units_are_no_advice_to_those_who_asked_for_them() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(mu.MupscaleError, match="in any order that was tried") as refused:
        mu.plan(Largest(4, power=1.0), Largest(8, power=1.0), inputs=x, grow=mu.Fresh())
    with pytest.raises(mu.MupscaleError, match="in any order that was tried") as unlearnt:
        mu.Family(Largest, base=4, inputs=x)
    for said in (refused, unlearnt):
        assert "fresh units" not in str(said.value)
        assert "pass roles=" in str(said.value)


@toy(lambda width, projected: of(a=(3, width), b=(width, width), c=(width, 2), width=width, projected=projected))
def sinusoids(m: Any, x: Tensor) -> Tensor:
    """Positions as waves, whose lengths depend on the width; they may be projected before they meet data."""
    lengths = 10_000 ** (torch.arange(m.width, dtype=x.dtype) / m.width)
    waves = torch.sin(torch.arange(x.shape[1], dtype=x.dtype)[:, None] / lengths)
    return m.c(torch.tanh(m.a(x) + (m.b(waves) if m.projected else waves)))


@pytest.mark.parametrize("projected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_constants_of_the_width_are_named_as_the_reason(projected: bool) -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    match = r"computes from its width, .*: register the table as a buffer that is saved .* or try fresh units"
    refuses(match, mu.plan, sinusoids(2, projected), sinusoids(4, projected), inputs=x)
    with pytest.raises(mu.MupscaleError, match=r"Either a constant depends on the width .*register_buffer"):
        mu.plan(sinusoids(4, projected), sinusoids(6, projected), inputs=x, grow=mu.Fresh())


class Picky(nn.Module):
    """A model that has a word to say on what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if len(x) < 3:
            raise KeyError("three rows\nor more")
        return self.b(torch.tanh(self.a(x)))


X = torch.randn(4, 3)
LOSSLESS = mu.Fresh(lossless=True)
CALLS: dict[str, Any] = {
    "copies": lambda x: mu.plan(Picky(4), Picky(8), inputs=x),
    "fresh units": lambda x: mu.plan(Picky(4), Picky(6), inputs=x, grow=mu.Fresh()),
    "lossless": lambda x: mu.upscale(
        Picky(4), Picky(6), mu.plan(Picky(4), Picky(6), grow=mu.Fresh(), fresh=Picky(4)), grow=LOSSLESS, inputs=x
    ),
    "family": lambda x: mu.Family(Picky, 4, inputs=x),
    "statistics": lambda x: mu.measure_statistics(nn.Sequential(Picky(4), nn.BatchNorm1d(2)), [x]),
}


@pytest.mark.parametrize("call", CALLS)
def test_labels_are_no_arguments_of_the_model(call: str) -> None:
    takes = r"Sequential.forward takes \(input\)" if call == "statistics" else r"Picky.forward takes \(x, mask\)"
    for batch, given in (((X, X, X), "3 arguments"), ({"x": X, "labels": X}, "x=, labels=")):
        refuses(rf"the batch gives {given}, and {takes}: .* without labels", CALLS[call], batch)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "lossless"])
def test_what_a_model_raises_on_the_batch_is_passed_on_and_not_blamed_on_float64(call: str) -> None:
    with pytest.raises(
        mu.MupscaleError, match=r"does not run on the batch \(KeyError: 'three rows.*or more'\)"
    ) as said:
        CALLS[call](X[:2])
    assert isinstance(said.value.__cause__, KeyError)
    assert "float" not in str(said.value)


class InHeads(Tokens):
    """Tokens in heads of 4, which come in pairs."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens + 0 * self.embed(tokens).unflatten(-1, (-1, 2, 4)).sum((-1, -2, -3)).long())


@pytest.mark.parametrize("grow", [mu.Fresh(), mu.Copies(noise=1.0)])
def test_a_wide_model_that_does_not_run_is_not_blamed_on_the_plan(grow: Any) -> None:
    with pytest.raises(
        mu.MupscaleError, match=r"^the wide model itself does not run on the batch \(RuntimeError: unfl"
    ):
        mu.upscale(InHeads(8), InHeads(12), grow=grow, inputs=TOKENS)


class Rotated(nn.Module):
    """Attention of two heads, with rotary positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.pack, self.back = nn.Embedding(13, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head, size = nn.Linear(width, 3), width // 2
        angles = torch.outer(torch.arange(4.0), 100 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.pack(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = (
            torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)
            for a, b in (each.chunk(2, -1) for each in (q, k))
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.back(out))


@pytest.mark.parametrize("grow", [mu.Fresh(), mu.Copies(noise=1.0)])
def test_a_head_dim_that_grows_beside_rotary_positions_is_named(grow: Any) -> None:
    with pytest.raises(mu.MupscaleError, match=r"of rotary embeddings.* head_dim: grow the number of heads") as said:
        mu.upscale(Rotated(8), Rotated(16), grow=grow, inputs=TOKENS)
    assert "roles=" not in str(said.value)


def test_a_batch_that_was_given_is_not_asked_for() -> None:
    """The models have grown then, and need not run here."""
    plan = mu.plan(Picky(4), Picky(6), grow=mu.Fresh(), fresh=Picky(4))
    for grow in (mu.Fresh(), LOSSLESS):
        with pytest.warns(mu.UncheckedPlan, match=r"tried: Picky does not run on the batch \(KeyError") as said:
            mu.upscale(Picky(4), Picky(6), plan, grow=grow, inputs=X[:2])
        assert not any("Pass inputs=" in str(each.message) for each in said)


@toy(lambda width: of(words=nn.Embedding(13, width), contexts=nn.Embedding(13, width)))
def words(m: Any, tokens: Tensor) -> Tensor:
    """word2vec: two tables, whose products are summed over the width."""
    return m.words(tokens) @ m.contexts(tokens).transpose(-1, -2)


def test_what_is_given_or_cannot_be_given_is_not_asked_for() -> None:
    with pytest.raises(mu.PlanError, match=r"pass a batch, inputs=.*, or pass roles="):
        mu.plan(words(8), words(12), grow=mu.Fresh())
    with without_resizing(), pytest.raises(mu.PlanError, match="pass roles=") as with_batch:
        mu.plan(words(8), words(12), grow=mu.Fresh(), inputs=TOKENS)
    assert "inputs=" not in str(with_batch.value)
    with asked_by_command(), pytest.raises(mu.MupscaleError, match="in any order that was tried") as by_command:
        mu.plan(Largest(4), Largest(8), inputs=X)
    assert "with mupscale.register_roles, or try fresh units, which need no copies (--how fresh)" in str(
        by_command.value
    )
    assert "roles=" not in str(by_command.value)
    family = refuses("pass roles=", mu.Family(lambda width: Largest(width, power=1.0), 4).check, X)
    assert "inputs=" not in family


class Text(nn.Module):
    """A table, some blocks and a readout."""

    def __init__(self, vocabulary: int, width: int, layers: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Residual blocks."""
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("inputs", [None, torch.tensor([[1, 2, 3]])])
@pytest.mark.parametrize("rows", [12, 20])
def test_another_vocabulary_is_called_so(inputs: Tensor | None, rows: int) -> None:
    with pytest.raises(
        mu.MupscaleError, match=r"10.* (and of|to|→) \(?(12|20).*the vocabulary,? or a number of positions"
    ):
        mu.upscale(Text(10, 4), Text(rows, 8), inputs=inputs)


def test_more_blocks_need_a_batch() -> None:
    with pytest.raises(mu.MupscaleError, match=r"runs the model to find what a block writes .* Pass inputs="):
        mu.upscale(Text(10, 4), Text(10, 8, layers=2))
    deep, _ = mu.upscale(Text(10, 4), Text(10, 8, layers=2), inputs=torch.tensor([[1, 2, 3]]))
    assert len(deep.get_submodule("blocks")._modules) == 2


# --- Roles that the user gave, where the modules do not tell and a run has to: they hold, or are named as the cause.
@toy(lambda width: of(inp=(7, width), hid=(width, width), out=(width, 3)))
def net(m: Any, x: Tensor) -> Tensor:
    """Three layers, of which the modules tell everything."""
    return m.out(m.hid(m.inp(x).relu()).relu())


class Tied(nn.Module):
    """A residual block between an embedding and the readout tied to it; the embedding may be multiplied by √width."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module] = OwnScale, scaled: bool = False) -> None:
        super().__init__()
        self.factor = math.sqrt(width) if scaled else 1.0
        self.tok, self.first = nn.Embedding(11, width), norm(width)
        self.up, self.down, self.last = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), norm(width)
        self.head = nn.Linear(width, 11, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) * self.factor
        x = x + self.down(torch.relu(self.up(self.first(x))))
        return self.head(self.last(x))


VECTORS = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
TIED: dict[str, Callable[[int], nn.Module]] = {
    "own norm": Tied,
    "own norm, scaled": lambda width: Tied(width, scaled=True),
    "LayerNorm, scaled": lambda width: Tied(width, nn.LayerNorm, scaled=True),
    "RMSNorm, scaled": lambda width: Tied(width, nn.RMSNorm, scaled=True),
}
# --- a role that does not hold
WRONG = {
    "an input called an output": ({"out.weight": mu.Role(out=1)}, "given for 'out.weight', Role(out=1), does not"),
    "by a pattern": ({"out.w*": mu.Role(out=1)}, ", Role(out=1), does not pass the check"),
    "beside a right one": (
        {"hid.weight": mu.Role(out=0, in_=1), "out.weight": mu.Role(out=1)},
        "the role given for 'out.weight', Role(out=1), does not pass the check",
    ),
    "a constant": ({"out.weight": mu.Role(in_=1, fold=0.5)}, "'out.weight', Role(in_=1, fold=0.5), does not pass"),
    "two": (
        {"hid.bias": mu.Role(out=0, out_block=2), "out.weight": mu.Role(out=1)},
        "the roles given for 'hid.bias', Role(out=0, out_block=2); for 'out.weight', Role(out=1), do not pass",
    ),
    "a dimension left out": ({"hid.weight": mu.Role(out=0)}, "given for 'hid.weight', Role(out=0), leaves out dimen"),
}


@pytest.mark.quick("two", "a constant", "beside a right one", "a dimension left out")
@pytest.mark.parametrize("case", WRONG)
def test_a_given_role_that_does_not_hold_is_named(case: str) -> None:
    """By a plan and by a family alike."""
    roles, message = WRONG[case]
    refuses(re.escape(message), mu.plan, net(8), net(32), inputs=VECTORS, roles=roles)
    refuses(re.escape(message), mu.Family, net, base=8, inputs=VECTORS, roles=roles)


def test_the_refusal_tells_what_the_run_shows_instead() -> None:
    with pytest.raises(mu.MupscaleError, match=re.escape("A run of the models shows Role(in_=1) for 'out.weight'")):
        mu.plan(net(8), net(32), inputs=VECTORS, roles={"out.weight": mu.Role(out=1)})


def test_a_given_role_that_holds_is_taken_beside_learnt_ones() -> None:
    """A given order of copies that is not the learnt one, but right."""
    roles = {
        "up.bias": mu.Role(out=0, out_block=2),
        "up.*": mu.Role(out=0, in_=1, out_block=2),
        "down.weight": mu.Role(out=0, in_=1, in_block=2),
    }
    plan = mu.plan(Tied(8), Tied(16), inputs=IDS, roles=roles)
    assert plan["up.weight"].axes[0].block == plan["up.bias"].axes[0].block == 2
    family = mu.Family(Tied, base=8, inputs=IDS, roles=roles)
    assert family.widening(8, 16)["down.weight"].axes[1].block == 2


# --- a tied readout, where roles are learnt
@pytest.mark.quick("RMSNorm, scaled", "own norm")
@pytest.mark.parametrize("name", TIED)
@pytest.mark.usefixtures("float64")
def test_a_family_learns_the_roles_of_a_tied_readout(name: str) -> None:
    """For all widths; with the optimizer's state, and over steps of training."""
    family = mu.Family(TIED[name], base=8, inputs=IDS)
    family.check(IDS)
    narrow = family.init(16, seed=1)
    optimizer = family.optimizer(narrow, torch.optim.AdamW, lr=1e-2)
    narrow(IDS).square().mean().backward()
    optimizer.step()
    wide, _ = family.upscale(narrow, optimizer, width=48, inputs=IDS, exact=True)
    assert wide.head.weight is wide.tok.weight
    assert_exact(narrow, wide, family.widening(16, 48), IDS)


def root(out: mu.Number, in_: mu.Number) -> float:
    return float(out) ** -0.5


SCALED = {"tok.weight": mu.Role(out=1, fold=root), "last.weight": mu.Role(out=0, fold=root)}


def test_a_role_given_for_one_name_of_a_tied_tensor_serves_for_the_others() -> None:
    """With a batch and without one; and it is the embedding's constant that the last norm has to make up for."""
    narrow, wide = Tied(8, scaled=True), Tied(32, scaled=True)
    by_run = mu.plan(narrow, wide, inputs=IDS, roles=SCALED)
    by_modules = mu.plan(narrow, wide, roles=SCALED | {"first.weight": mu.Role(out=0)})
    normed = Tied(8, nn.LayerNorm, scaled=True), Tied(32, nn.LayerNorm, scaled=True)
    by_norm = mu.plan(*normed, roles={"tok.weight": SCALED["tok.weight"]})
    for plan in (by_run, by_modules, by_norm):
        assert [float(plan[name].fold) for name in ("tok.weight", "last.weight")] == pytest.approx([0.5, 0.5])
    mu.upscale(narrow, wide, by_modules, inputs=IDS, exact=True)  # which checks it
    mu.upscale(*normed, by_norm, inputs=IDS, exact=True)


def test_roles_of_tied_names_that_differ_are_shown_with_what_differs() -> None:
    roles = SCALED | {"head.weight": mu.Role(out=1)}
    shown = re.escape("tok.weight: Role(out=1, fold=…); head.weight: Role(out=1))")
    refuses(shown, mu.plan, Tied(8, scaled=True), Tied(16, scaled=True), inputs=IDS, roles=roles)


@pytest.mark.quick("RMSNorm", "OwnScale")
@pytest.mark.parametrize("norm", [OwnScale, nn.LayerNorm, nn.RMSNorm])
def test_a_scaled_and_tied_embedding_is_planned_whatever_the_norms_class(norm: Callable[[int], nn.Module]) -> None:
    """An RMSNorm without eps does not see the factor, which shows only where the stream is added to."""
    plan = mu.plan(Tied(8, norm, scaled=True), Tied(32, norm, scaled=True), inputs=IDS)
    folds = {name: float(entry.fold) for name, entry in plan.parameters.items() if entry.fold != 1}
    assert folds == pytest.approx({"tok.weight": 0.5} | {n: 0.5 for n in plan.parameters if n.startswith("last.")})


# --- what the old units' weights are multiplied by beside fresh ones
@pytest.mark.quick("LayerNorm-found", "OwnScale-given")
@pytest.mark.parametrize("roles", [{}, SCALED], ids=["found", "given"])
@pytest.mark.parametrize("norm", [OwnScale, nn.LayerNorm])
@pytest.mark.usefixtures("float64")
def test_fresh_units_beside_an_embedding_that_is_scaled_and_tied(
    norm: Callable[[int], nn.Module], roles: dict[str, mu.Role]
) -> None:
    """Two equal constants of which old weights keep unequal parts."""

    def build(width: int) -> nn.Module:
        return Tied(width, norm, scaled=True)

    plan = mu.plan(build(8), build(32), inputs=IDS, grow=mu.Fresh(), roles=roles, fresh=lambda: build(8))
    kept = {name: float(entry.keep) for name, entry in plan.parameters.items() if entry.keep != 1}
    gains = {name: 2.0 for name in plan.parameters if name.startswith("last.")}
    assert kept == pytest.approx({"tok.weight": 0.5, **gains})
    assert keeps_outputs(build(8), build(32), plan, IDS)


def test_a_family_finds_what_old_weights_keep_for_every_width() -> None:
    family = mu.Family(TIED["own norm, scaled"], base=8, inputs=IDS)
    plan = family.widening(8, 12, grow=mu.Fresh())
    assert float(plan["tok.weight"].keep) == pytest.approx(1.5**-0.5)
    assert float(plan["last.weight"].keep) == pytest.approx(1.5**0.5)


def test_a_constant_given_without_its_part_for_old_units_is_asked_for_where_no_run_looks() -> None:
    with pytest.raises(mu.MupscaleError, match=re.escape("keep=…). With a batch (inputs=)")):
        mu.plan(net(8), net(16), grow=mu.Fresh(), roles={"out.weight": mu.Role(in_=1, fold=2.0)})


@pytest.mark.parametrize("wrong", [None, "0", 1.0, True, (0, None), torch.tensor(0.5)], ids=str)
def test_dimensions_that_are_none_are_refused_with_what_to_write(wrong: object) -> None:
    said = "a role's in_ is the number of the input dimension that grows, such as in_=0, or several as a tuple, not "
    remedy = "; leave in_ out if no input dimension grows"
    with pytest.raises(mu.MupscaleError, match=re.escape(f"{said}{wrong!r}{remedy}")):
        mu.Role(out=0, in_=wrong)  # type: ignore[arg-type]
    with pytest.raises(mu.MupscaleError, match="a role's out is the number of the output dimension"):
        mu.Role(out=wrong, in_=None)  # type: ignore[arg-type]


def test_dimensions_may_be_any_whole_numbers() -> None:
    assert mu.Role(out=np.int64(0), in_=[1, -1]) == mu.Role(out=0, in_=(1, -1))  # type: ignore[arg-type]


# --- What changes although a plan stands its check is said: outputs that grow, and losses that modules keep.
ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def classes(scale: int) -> nn.Module:
    """Twice as many classes where the width is twice as large, which nobody wanted."""
    return MLP(3, 8 * scale, 5 * scale)


GROWTHS: dict[str, Callable[..., Any]] = {
    "copies": lambda **given: mu.upscale(classes(1), classes(2), inputs=ROWS, **given),
    "fresh units": lambda **given: mu.upscale(
        classes(1), classes(2), inputs=ROWS, grow=mu.Fresh(), fresh=lambda: classes(1), **given
    ),
    "between multiples": lambda **given: mu.upscale(
        classes(2), classes(3), inputs=ROWS, grow=mu.Fresh(), fresh=lambda: classes(2), **given
    ),
    "a family": lambda: mu.Family(classes, base=1, inputs=ROWS),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_an_output_that_grows_is_said(growth: str) -> None:
    with pytest.warns(UserWarning, match=r"output 0 of the model grows from \d+ to \d+, written by 'layers.3.weight'"):
        GROWTHS[growth]()


def test_one_who_wants_it_says_so() -> None:
    roles = {"layers.3.weight": mu.Role(out=0, in_=1)}  # as the warning writes it
    with pytest.warns(UserWarning, match=r"roles=\{'layers.3.weight': mupscale.Role\(out=0, in_=1\)\}"):
        mu.plan(classes(1), classes(2), inputs=ROWS)
    assert mu.plan(classes(1), classes(2), inputs=ROWS, roles=roles).checked
    assert mu.Family(classes, base=8, inputs=ROWS, roles=roles).plan(16).checked


@toy(lambda width: of(conv=nn.Conv2d(3, width, 1), head=(4 * width, 2)))
def flat(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Channels that a flatten hides from the layer that reads them, handed out beside the scores."""
    h = torch.tanh(m.conv(x))
    return m.head(h.flatten(1)), h


@pytest.mark.quick("channels", "lstm")
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (flat, torch.randn(2, 3, 2, 2)),
        (lambda width: nn.LSTM(3, width, batch_first=True), torch.randn(2, 5, 3)),
        (lambda width: nn.Sequential(nn.Linear(3, width), Encoder(width, 2, 2 * width, batch_first=True)), ROWS[None]),
    ],
    ids=["channels", "lstm", "encoder"],
)
def test_hidden_units_that_are_handed_out_are_no_such_outputs(build: Callable[[int], nn.Module], x: Tensor) -> None:
    assert mu.plan(build(8), build(16), inputs=x).checked


class Regularised(nn.Module):
    """A loss on activations, which is kept on a module for whoever trains the model."""

    def __init__(self, width: int, how: str = "sum", where: str = "attribute") -> None:
        super().__init__()
        self.how, self.where, self.a, self.b = how, where, nn.Linear(3, width), nn.Linear(width, 2)
        self.a.losses = []

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        loss = getattr(h.square(), self.how)()
        y: Tensor = self.b(h)
        if self.where == "attribute":
            self.loss = loss
        elif self.where == "list":
            self.a.losses = [loss]
        elif self.where == "detached":
            self.loss = loss.detach()
        return Output(y, loss) if self.where == "outputs" else y


@dataclass
class Output:
    scores: Tensor
    loss: Tensor


@pytest.mark.parametrize(("where", "name"), [("attribute", "'loss'"), ("list", r"'a.losses\[0\]'")])
def test_a_loss_that_is_kept_on_a_module_and_grows_is_said(where: str, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"{name}, which .* in the narrow model and .* in the wide one. .*a mean"):
        mu.plan(Regularised(4, where=where), Regularised(8, where=where), inputs=ROWS)
    with pytest.warns(UserWarning, match=name):
        mu.Family(lambda width: Regularised(width, where=where), base=4, inputs=ROWS)


def test_a_mean_is_none_and_so_is_what_has_no_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in (("mean",), ("sum", "detached")):
            assert mu.plan(Regularised(4, *arguments), Regularised(8, *arguments), inputs=ROWS).checked


def test_a_loss_in_the_outputs_is_compared_as_they_are() -> None:
    """A dataclass is looked into, too."""
    with pytest.raises(mu.MupscaleError, match=r"in any order that was tried|times the narrow one's"):
        mu.plan(Regularised(4, where="outputs"), Regularised(8, where="outputs"), inputs=ROWS)
    assert mu.plan(Regularised(4, "mean", "outputs"), Regularised(8, "mean", "outputs"), inputs=ROWS).checked


@pytest.mark.parametrize("build", [lambda n: nn.LSTM(3, n), lambda n: MLP(3, n, n)], ids=["lstm", "mlp"])
def test_the_old_units_of_an_output_that_grows_show_whether_fresh_ones_leave_them(build: Any) -> None:
    """Between multiples, where there are no copies; nothing else was compared, and a wrong reason was given."""
    assert mu.plan(build(8), build(12), inputs=ROWS, grow=mu.Fresh()).tried_by == "silent units"


@toy(lambda width: of(a=(3, width)))
def doubled(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.a(x)] * 2, -1)


def test_outputs_that_tell_nothing_are_the_reason() -> None:
    said = "every output of the model grows, to a size that no layer has"
    with without_resizing(), pytest.raises(mu.MupscaleError, match=said):
        mu.plan(doubled(8), doubled(12), inputs=ROWS, grow=mu.Fresh())
