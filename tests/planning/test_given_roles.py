"""Roles that the user gave, where the modules do not tell and a run has to: they hold, or are named as the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.planning import keeps_outputs
from own_norms import OwnScale


class Net(nn.Module):
    """Three layers, of which the modules tell everything."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.hid, self.out = nn.Linear(7, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hid(self.inp(x).relu()).relu())


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
TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
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
    with pytest.raises(mu.MupscaleError, match=re.escape(message)):
        mu.plan(Net(8), Net(32), inputs=VECTORS, roles=roles)
    with pytest.raises(mu.MupscaleError, match=re.escape(message)):
        mu.Family(Net, base=8, inputs=VECTORS, roles=roles)


def test_the_refusal_tells_what_the_run_shows_instead() -> None:
    with pytest.raises(mu.MupscaleError, match=re.escape("A run of the models shows Role(in_=1) for 'out.weight'")):
        mu.plan(Net(8), Net(32), inputs=VECTORS, roles={"out.weight": mu.Role(out=1)})


def test_a_given_role_that_holds_is_taken_beside_learnt_ones() -> None:
    """A given order of copies that is not the learnt one, but right."""
    roles = {
        "up.bias": mu.Role(out=0, out_block=2),
        "up.*": mu.Role(out=0, in_=1, out_block=2),
        "down.weight": mu.Role(out=0, in_=1, in_block=2),
    }
    plan = mu.plan(Tied(8), Tied(16), inputs=TOKENS, roles=roles)
    assert plan["up.weight"].axes[0].block == plan["up.bias"].axes[0].block == 2
    family = mu.Family(Tied, base=8, inputs=TOKENS, roles=roles)
    assert family.widening(8, 16)["down.weight"].axes[1].block == 2


# --- a tied readout, where roles are learnt
@pytest.mark.quick("RMSNorm, scaled", "own norm")
@pytest.mark.parametrize("name", TIED)
@pytest.mark.usefixtures("float64")
def test_a_family_learns_the_roles_of_a_tied_readout(name: str) -> None:
    """For all widths; with the optimizer's state, and over steps of training."""
    family = mu.Family(TIED[name], base=8, inputs=TOKENS)
    family.check(TOKENS)
    narrow = family.init(16, seed=1)
    optimizer = family.optimizer(narrow, torch.optim.AdamW, lr=1e-2)
    narrow(TOKENS).square().mean().backward()
    optimizer.step()
    wide, _ = family.upscale(narrow, optimizer, width=48, inputs=TOKENS, exact=True)
    assert wide.head.weight is wide.tok.weight
    assert torch.allclose(wide(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)
    report = mu.verify(
        narrow,
        wide,
        family.widening(16, 48),
        [TOKENS],
        lambda model, tokens: model(tokens).square().mean(),
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        steps=3,
    )
    assert report.ok


def root(out: mu.Number, in_: mu.Number) -> float:
    return float(out) ** -0.5


SCALED = {"tok.weight": mu.Role(out=1, fold=root), "last.weight": mu.Role(out=0, fold=root)}


def test_a_role_given_for_one_name_of_a_tied_tensor_serves_for_the_others() -> None:
    """With a batch and without one; and it is the embedding's constant that the last norm has to make up for."""
    narrow, wide = Tied(8, scaled=True), Tied(32, scaled=True)
    by_run = mu.plan(narrow, wide, inputs=TOKENS, roles=SCALED)
    by_modules = mu.plan(narrow, wide, roles=SCALED | {"first.weight": mu.Role(out=0)})
    normed = Tied(8, nn.LayerNorm, scaled=True), Tied(32, nn.LayerNorm, scaled=True)
    by_norm = mu.plan(*normed, roles={"tok.weight": SCALED["tok.weight"]})
    for plan in (by_run, by_modules, by_norm):
        assert [float(plan[name].fold) for name in ("tok.weight", "last.weight")] == pytest.approx([0.5, 0.5])
    mu.upscale(narrow, wide, by_modules, inputs=TOKENS, exact=True)  # which checks it
    mu.upscale(*normed, by_norm, inputs=TOKENS, exact=True)


def test_roles_of_tied_names_that_differ_are_shown_with_what_differs() -> None:
    roles = SCALED | {"head.weight": mu.Role(out=1)}
    shown = re.escape("tok.weight: Role(out=1, fold=…); head.weight: Role(out=1))")
    with pytest.raises(mu.MupscaleError, match=shown):
        mu.plan(Tied(8, scaled=True), Tied(16, scaled=True), inputs=TOKENS, roles=roles)


@pytest.mark.quick("RMSNorm", "OwnScale")
@pytest.mark.parametrize("norm", [OwnScale, nn.LayerNorm, nn.RMSNorm])
def test_a_scaled_and_tied_embedding_is_planned_whatever_the_norms_class(norm: Callable[[int], nn.Module]) -> None:
    """An RMSNorm without eps does not see the factor, which shows only where the stream is added to."""
    plan = mu.plan(Tied(8, norm, scaled=True), Tied(32, norm, scaled=True), inputs=TOKENS)
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

    plan = mu.plan(build(8), build(32), inputs=TOKENS, grow=mu.Fresh(), roles=roles, fresh=lambda: build(8))
    kept = {name: float(entry.keep) for name, entry in plan.parameters.items() if entry.keep != 1}
    gains = {name: 2.0 for name in plan.parameters if name.startswith("last.")}
    assert kept == pytest.approx({"tok.weight": 0.5, **gains})
    assert keeps_outputs(build(8), build(32), plan, TOKENS)


def test_a_family_finds_what_old_weights_keep_for_every_width() -> None:
    family = mu.Family(TIED["own norm, scaled"], base=8, inputs=TOKENS)
    plan = family.widening(8, 12, grow=mu.Fresh())
    assert float(plan["tok.weight"].keep) == pytest.approx(1.5**-0.5)
    assert float(plan["last.weight"].keep) == pytest.approx(1.5**0.5)


def test_a_constant_given_without_its_part_for_old_units_is_asked_for_where_no_run_looks() -> None:
    with pytest.raises(mu.MupscaleError, match=re.escape("keep=…). With a batch (inputs=)")):
        mu.plan(Net(8), Net(16), grow=mu.Fresh(), roles={"out.weight": mu.Role(in_=1, fold=2.0)})


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
