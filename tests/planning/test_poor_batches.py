"""Batches that show less than real data do: strengthened where that is possible, and else what they leave is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from exactness import assert_exact
from mupscale.growth import find_writers
from mupscale.models import MLP
from mupscale.planning import Trials, in_double
from patterns import PATTERNS
from poor_batches import CASES, GPT, VOCAB, Branch, Case, TurnedDim, poor_batches
from refusals import refuses
from toys import of, toy

ZEROS = torch.zeros(1, 8, dtype=torch.long)
UNSEEN = "the batch does not show whether the plan is right for"


def plan_case(case: Case) -> tuple[nn.Module, nn.Module, mu.Plan]:
    torch.manual_seed(0)
    narrow, wide = (case.build(k).double().train(case.training) for k in (1, 2))
    return narrow, wide, mu.plan(narrow, wide, inputs=in_double(case.poor))


FAST = (
    *("vector in training", "vector from length 13 on", "layer from length 200 on", "heads in evaluation"),
    *("a state of zeros, one token", "attention, length one", "fields, one", "rows, zeros"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in FAST else [pytest.mark.slow]) for c in CASES]
)
def test_a_poor_batch_ends_as_real_data_would_or_in_names(case: Case) -> None:
    if case.expected == "refused":
        refuses("no copies", plan_case, case)
    elif case.expected == "warned":
        with pytest.warns(mu.UncheckedPlan, match=f"{UNSEEN} (a part of )?'[a-z.]+'"):
            plan_case(case)
    else:
        narrow, wide, plan = plan_case(case)
        assert_exact(narrow, wide, plan, in_double(case.real))


def test_a_rotary_gpt_keeps_its_heads_on_a_dummy_batch() -> None:
    plan = mu.plan(GPT(1, "turned"), GPT(2, "turned"), inputs=ZEROS)
    assert plan["m.weight"].axes[0] == mu.Axis(2, 4, side="out")


@pytest.mark.parametrize("grown", [lambda k: GPT(k, "slopes"), TurnedDim], ids=["slopes by head", "turned dim"])
def test_what_no_copies_widen_does_not_stand_the_check_on_a_dummy_batch(grown: Any) -> None:
    narrow, wide = grown(1), grown(2)
    with pytest.raises(mu.MupscaleError, match=r"on the batch.* \(a stronger batch of the same kind"):
        mu.upscale(narrow, wide, mu.plan(narrow, wide), inputs=ZEROS, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "pair, squared distance",
        pytest.param("separate heads grow", marks=pytest.mark.slow),
        pytest.param("cosine attention, heads grow", marks=pytest.mark.slow),
    ],
)
def test_models_of_the_zoo_are_exact_on_any_poor_batch(name: str) -> None:
    pattern = next(p for p in PATTERNS if p.name == name)
    real = in_double(pattern.inputs())
    for poor in poor_batches(real).values():
        narrow, wide = pattern.build(1).double(), pattern.build(2).double()
        try:
            plan = mu.plan(narrow, wide, inputs=poor)
        except mu.MupscaleError:  # the model does not run on it
            assert poor[0].shape != real[0].shape
            continue
        assert_exact(narrow, wide, plan, real)


@pytest.mark.parametrize(
    "empty", [torch.zeros(0, 3), torch.zeros(4, 0), (torch.zeros(0, 3),), {"x": torch.zeros(0, 3)}]
)
def test_an_empty_batch_is_refused(empty: Any) -> None:
    narrow, wide = MLP(3, 8, 2), MLP(3, 16, 2)
    plan, fresh = mu.plan(narrow, wide), mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    family, tried = (mu.Family(lambda width: MLP(3, width, 2), base=8, inputs=x) for x in (None, torch.randn(4, 3)))
    for use in (
        lambda: mu.plan(narrow, wide, inputs=empty),
        lambda: mu.plan(narrow, MLP(3, 12, 2), inputs=empty, grow=mu.Fresh()),
        lambda: mu.upscale(narrow, wide, plan, inputs=empty, exact=True),
        lambda: mu.upscale(narrow, wide, fresh, inputs=empty, grow=mu.Fresh(outgoing=0)),
        lambda: mu.Family(lambda width: MLP(3, width, 2), base=8, inputs=empty),
        lambda: family.check(empty),
        lambda: family.upscale(narrow, width=16, inputs=empty, exact=True),
        lambda: tried.upscale(narrow, width=16, inputs=empty, grow=mu.Fresh()),
        lambda: find_writers(narrow, ["layers.0"], empty),
        lambda: mu.upscale(narrow, MLP(3, [8] * 4, 2), inputs=empty)[0],
    ):
        refuses("the batch is empty", use)


@toy(lambda k: of(a=(3, 4 * k), c=(4 * k, 2)))
def rows(m: Any, x: Tensor, table: Tensor) -> Tensor:
    """Rows of numbers beside a table that is given, too."""
    out: Tensor = m.c(torch.tanh(m.a(x)))
    return out @ table


def test_a_batch_that_gives_no_outputs_is_refused() -> None:
    refuses("the batch is empty", mu.plan, rows(1), rows(2), inputs=(torch.zeros(0, 3), torch.randn(2, 2)))


def test_a_good_batch_is_taken_as_it_is() -> None:
    x, (narrow, wide) = torch.randn(4, 3), (MLP(3, width, 2, activation="gelu") for width in (8, 16))
    assert Trials(x).look(narrow, wide).strong is None
    tokens = torch.randint(0, VOCAB, (1, 8))
    trials = Trials(tokens).look(GPT(1, "turned"), GPT(2, "turned"))  # with biases of keys, which never matter
    assert trials.strong is None
    assert trials.unseen == []


def test_only_what_looks_up_rows_of_a_table_is_drawn_anew() -> None:
    """Masks, classes and lengths are repeated; tokens are drawn below the table's size, wherever they are."""

    class Net(GPT):
        def forward(self, *, mask: Tensor, classes: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
            assert set(classes.tolist()) <= {7}
            assert bool(mask.all())
            return super().forward(tokens, mask)

    batch = {"mask": ZEROS == 0, "classes": torch.full((1,), 7), "tokens": ZEROS}
    strong = Trials(batch).look(Net(1, "turned"), Net(2, "turned")).strong
    assert strong["tokens"].unique().numel() > 2
    assert int(strong["tokens"].max()) < VOCAB


@toy(lambda k: of(a=(5, 8 * k), m=(8 * k, 24 * k), c=(8 * k, 2)))
def picky(m: Any, x: Tensor) -> Tensor:
    """Heads behind numbers that have to be positive, whole rows of five, and no more than three of them."""
    if len(x) > 3 or x.shape[1:] != (4, 5):
        raise KeyError("rows")
    h = m.a(x.sqrt())
    q, k, v = (part.view(len(x), 4, -1, 4).transpose(1, 2) for part in m.m(h).chunk(3, -1))
    return m.c(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_model_that_takes_little_is_given_what_it_takes(value: float) -> None:
    plan = mu.plan(picky(1), picky(2), inputs=torch.full((2, 4, 5), value))
    assert plan["m.weight"].axes[0] == mu.Axis(2, 4, side="out")


def test_roles_that_are_given_for_what_is_not_seen_end_the_warning() -> None:
    narrow, wide = (Branch(k, "in training", "vector").eval() for k in (1, 2))
    x, role = torch.randn(2, 4, 5), {"q": mu.Role(in_=0)}
    with pytest.warns(mu.UncheckedPlan, match=f"{UNSEEN} 'q': it changes no output on the batch"):
        mu.plan(narrow, wide, inputs=x)
    assert mu.plan(narrow, wide, inputs=x, roles=role)["q"].in_ == (0,)
    assert mu.plan(narrow.train(), wide.train(), inputs=x)["q"].in_ == (0,)
    with pytest.warns(mu.UncheckedPlan, match=f"{UNSEEN} 'q'"):
        mu.Family(lambda width: Branch(width // 8, "of large numbers", "vector"), base=8, inputs=x / 9)


def test_a_part_that_is_detached_is_seen_all_the_same() -> None:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.q, self.c = nn.Linear(3, width), nn.Parameter(torch.randn(width)), nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.c(h * torch.sigmoid(h @ self.q).detach()[:, None])

    assert mu.plan(Net(4), Net(8), inputs=torch.randn(5, 3))["q"].in_ == (0,)


def test_fresh_units_between_multiples_are_tried_on_the_stronger_batch() -> None:
    class Heads(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.m, self.c = nn.Linear(3, width), nn.Linear(width, 3 * width), nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p.view(*x.shape[:2], -1, 4).transpose(1, 2) for p in self.m(self.a(x)).chunk(3, -1))
            return self.c(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    narrow, wide, x = Heads(8), Heads(12), torch.zeros(2, 5, 3)
    assert mu.plan(narrow, wide, inputs=x, grow=mu.Fresh())["m.weight"].axes[0].block == 4
    plan = mu.plan(narrow, wide, fresh=narrow, grow=mu.Fresh())
    refuses("with its old units alone", mu.upscale, narrow, wide, plan, inputs=x, grow=mu.Fresh(outgoing=0))


class Whispering(nn.Module):
    """Attention with small queries and keys behind a LayerScale that starts at 1e-6."""

    def __init__(self, k: int) -> None:
        super().__init__()
        n = 8 * k
        self.a, self.q = nn.Linear(5, n), nn.Linear(n, 2 * n, bias=False)
        self.v, self.c, self.gain = nn.Linear(n, n), nn.Linear(n, 2), nn.Parameter(torch.full((n,), 1e-6))
        nn.init.normal_(self.q.weight, std=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (*self.q(h).chunk(2, -1), self.v(h)))
        return self.c(h + self.gain * ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_small_weights_hide_is_seen() -> None:
    plan = mu.plan(Whispering(1), Whispering(2), inputs=torch.randn(2, 4, 5))
    assert plan["q.weight"].axes[0] == plan["v.weight"].axes[0] == mu.Axis(2, 4, side="out")
