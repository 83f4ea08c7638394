"""What is said where a pair of models cannot be planned: which sizes are wrong, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.system import asked_by_command
from resizing import without_resizing


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.alpha, self.beta = nn.Linear(width, width), *(nn.Parameter(torch.ones(width)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.alpha + self.linear(x) * self.beta
        return y


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
        y: Tensor = self.head(x)
        return y


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
        out: Tensor = self.head((states * scores[..., None]).sum(1))
        return out


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
        ((16, 2), (32, 2), r"Grow num_heads instead \(2 → 4\)"),
    ],
)
def test_heads_that_would_be_cut(narrow: tuple[int, int], wide: tuple[int, int], advice: str) -> None:
    with pytest.raises(mu.MupscaleError, match=advice):
        mu.plan(nn.MultiheadAttention(*narrow), nn.MultiheadAttention(*wide), grow=mu.Fresh())


class Largest(nn.Module):
    """The largest unit: whichever copy it is gets all of the gradient, so that no copies are exact."""

    def __init__(self, width: int, power: float = 0.0) -> None:
        super().__init__()
        self.power, self.a, self.b, self.c = power, nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        y: Tensor = self.c(torch.tanh(self.b(x * len(self.b.weight) ** self.power)) * x.max(-1, keepdim=True)[0])
        return y


@pytest.mark.slow
def test_what_has_no_copies_may_grow_by_fresh_units_and_the_refusal_says_so() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    narrow, wide = Largest(4), Largest(8)
    with pytest.raises(mu.MupscaleError, match=r"in any order that was tried: .*, or try fresh units"):
        mu.plan(narrow, wide, inputs=x)
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


class Sinusoids(nn.Module):
    """Positions as waves, whose lengths depend on the width; they may be projected before they meet data."""

    def __init__(self, width: int, projected: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.width, self.projected = width, projected

    def forward(self, x: Tensor) -> Tensor:
        lengths = 10_000 ** (torch.arange(self.width, dtype=x.dtype) / self.width)
        waves = torch.sin(torch.arange(x.shape[1], dtype=x.dtype)[:, None] / lengths)
        y: Tensor = self.c(torch.tanh(self.a(x) + (self.b(waves) if self.projected else waves)))
        return y


@pytest.mark.parametrize("projected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_constants_of_the_width_are_named_as_the_reason(projected: bool) -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    match = r"computes from its width, .*: register the table as a buffer that is saved .* or try fresh units"
    with pytest.raises(mu.MupscaleError, match=match):
        mu.plan(Sinusoids(2, projected), Sinusoids(4, projected), inputs=x)
    with pytest.raises(mu.MupscaleError, match=r"Either a constant depends on the width .*register_buffer"):
        mu.plan(Sinusoids(4, projected), Sinusoids(6, projected), inputs=x, grow=mu.Fresh())


class Picky(nn.Module):
    """A model that has a word to say on what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if len(x) < 3:
            raise KeyError("three rows\nor more")
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


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
        with pytest.raises(mu.MupscaleError, match=rf"the batch gives {given}, and {takes}: .* without labels"):
            CALLS[call](batch)


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
        y: Tensor = self.head(x + self.back(out))
        return y


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


class Words(nn.Module):
    """word2vec: two tables, whose products are summed over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(13, width), nn.Embedding(13, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) @ self.contexts(tokens).transpose(-1, -2)


def test_what_is_given_or_cannot_be_given_is_not_asked_for() -> None:
    with pytest.raises(mu.PlanError, match=r"pass a batch, inputs=.*, or pass roles="):
        mu.plan(Words(8), Words(12), grow=mu.Fresh())
    with without_resizing(), pytest.raises(mu.PlanError, match="pass roles=") as with_batch:
        mu.plan(Words(8), Words(12), grow=mu.Fresh(), inputs=TOKENS)
    assert "inputs=" not in str(with_batch.value)
    with asked_by_command(), pytest.raises(mu.MupscaleError, match="in any order that was tried") as by_command:
        mu.plan(Largest(4), Largest(8), inputs=X)
    assert "with mupscale.register_roles, or try fresh units, which need no copies (--how fresh)" in str(
        by_command.value
    )
    assert "roles=" not in str(by_command.value)
    with pytest.raises(mu.MupscaleError, match="pass roles=") as family:
        mu.Family(lambda width: Largest(width, power=1.0), 4).check(X)
    assert "inputs=" not in str(family.value)


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
        out: Tensor = self.head(x)
        return out


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
