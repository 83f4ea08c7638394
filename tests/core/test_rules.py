"""The table: its values as the paper prints them, and that every exponent in it matters."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from mupscale import Rule
from zoo import ARCHITECTURES, TRAININGS, Outcome, train_pair

K, L = 2, 3  # multipliers of the output and the input axis


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize(
    ("rule", "out", "in_"),
    [(Rule(), 1, 1), (Rule(out=K), K, 1), (Rule(out=K, in_=L), K, L), (Rule(out=1, in_=K, fold=K), K, 1)],
    ids=["scalar-like", "vector-like", "matrix-like", "a readout that keeps its multiplier"],
)
def test_table_of_widening(rule: Rule, out: int, in_: int, m: int) -> None:
    """The mup package's MuReadout divides by the width in forward: fold = in_ gives the vector-like row."""
    assert rule.weight == pytest.approx(1 / in_)
    assert rule.lr(m) == pytest.approx(out**m / in_)
    assert rule.eps == 1 / out
    assert rule.coupled_decay == in_ / out
    assert rule.decoupled_decay(m) == in_ / out**m
    assert (rule.gradient(1), rule.gradient(2)) == (1 / out, 1 / out**2)


@pytest.mark.parametrize("m", [0, 1])
def test_proposition_symmetry_of_scalings(m: int) -> None:
    """A ← Aθ with B/θ², C/θ^(1+m), Dθ², D̃θ^(1+m), Eθ: a multiplier θ in forward is fold = 1/θ."""
    theta, plain = 5.0, Rule(out=K, in_=L)
    moved = Rule(out=K, in_=L, fold=1 / theta)
    assert moved.lr(m) == pytest.approx(plain.lr(m) / theta ** (1 + m))
    assert moved.coupled_decay == pytest.approx(plain.coupled_decay * theta**2)
    assert moved.decoupled_decay(m) == pytest.approx(plain.decoupled_decay(m) * theta ** (1 + m))
    assert moved.eps == pytest.approx(plain.eps * theta)
    for out, in_ in ((True, True), (False, True), (True, False)):
        scales = [r.init(out_is_width=out, in_is_width=in_) for r in (moved, plain)]
        assert scales[0] == pytest.approx(scales[1] / theta)


def test_table_mup_initial_std() -> None:
    rule = Rule(out=K, in_=L)
    assert rule.init(out_is_width=True, in_is_width=True) == pytest.approx(L**-0.5)
    assert Rule(in_=L).init(out_is_width=False, in_is_width=True) == pytest.approx(1 / L)
    assert Rule(out=K).init(out_is_width=True, in_is_width=False) == 1
    assert Rule(in_=L).init(out_is_width=True, in_is_width=True) == pytest.approx(L**-0.5)  # an axis that rests today


def test_norm_weights() -> None:
    """K·L copies of entries that are 1/K as large."""
    rule = Rule(out=K, in_=L)
    for p in (1.0, 2.0, 3.0):
        assert rule.norm(p) * (K * L) * K**-p == pytest.approx(1)
    assert rule.norm(math.inf) == K
    assert rule.norm() == pytest.approx(K / L)


def test_rules_compose_exactly() -> None:
    mup, widening = Rule(Fraction(7, 3), Fraction(5, 3), Fraction(3, 7)), Rule(3, 2, Fraction(1, 3))
    assert mup * widening == Rule(7, Fraction(10, 3), Fraction(1, 7))
    assert (Rule(depth=3) * Rule(depth=2)).depth == 6
    for m in (0, 1):
        assert (mup * widening).lr(m) == pytest.approx(mup.lr(m) * widening.lr(m))


SENSITIVE = [
    ("mlp", "SGD-momentum", None),
    ("mlp", "AdamW", None),
    ("mlp", "Adam", None),
    ("mlp", "ASGD", None),
    ("mlp", "SGD", 0.1),
    ("mlp", "Muon", None),
    ("gpt2-heads", "SGD-momentum", None),
    ("gpt2-heads", "Adam", None),
    ("gpt2-heads", "AdamW", None),
    ("gpt2-heads", "ASGD", None),
    ("gpt2-heads", "SGD", 0.05),
    ("sqrt-attention", "Muon", None),
]


def _sensitive(number: int) -> Outcome:
    architecture, training, clip = SENSITIVE[number]
    return train_pair(ARCHITECTURES[architecture], TRAININGS[training], before=3, after=4, clip=clip)


@pytest.mark.quick("1", "7")  # test_dynamic_equivalence.py has them all
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("number", range(len(SENSITIVE)))
def test_the_unchanged_table_passes(number: int) -> None:
    assert _sensitive(number).difference <= 1e-10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variable", ["out", "in_", "fold"])
@pytest.mark.parametrize(
    "factor", ["weight", "gradient", "lr", "spectral_lr", "eps", "coupled_decay", "decoupled_decay", "norm"]
)
def test_every_exponent_matters(factor: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One exponent at a time is changed by a half, and the matrix must fail."""
    original = getattr(Rule, factor)

    def wrong(self: Rule) -> float:
        return float(getattr(self, variable)) ** 0.5

    if isinstance(original, property):
        changed: object = property(lambda self: original.fget(self) * wrong(self))
    else:
        changed = lambda self, *args: original(self, *args) * wrong(self)  # noqa: E731
    monkeypatch.setattr(Rule, factor, changed)
    first = reversed if variable == "fold" else iter  # the last ones have a fold
    assert any(not _sensitive(number).difference <= 1e-6 for number in first(range(len(SENSITIVE))))
