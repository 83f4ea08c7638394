"""Rules by name: their words, and what another batch and duration do to hyperparameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mupscale.core import RuleSet
from mupscale.system import MupscaleError

HYPER: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.5, 0.95), "eps": 1e-8}


@pytest.mark.parametrize("rules", [RuleSet(), RuleSet("fixed", "sqrt", 4.0, "none", 0.35), RuleSet(embeddings=0.5)])
def test_a_text_names_a_rule_set_as_it_is_shown(rules: RuleSet) -> None:
    assert RuleSet.of(str(rules)) == rules


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("decay", "not a rule set: write default, or some of decay=invariant, depth=none"),
        ("colour=red", "not a rule set"),
        ("embeddings=many", "embeddings takes a number"),
        ("decay=none", "rules.decay is 'none': choose from invariant, sqrt, fixed, inverse"),
        ("embeddings=0", "must be a positive number"),
        ("duration=nan", "must be a number"),
    ],
)
def test_what_is_no_rule_set_is_refused(text: str, told: str) -> None:
    with pytest.raises(MupscaleError, match=told):
        RuleSet.of(text)


def times_of_decay(hyper: dict[str, Any], batch: float, duration: float) -> float:
    """τ: over which share of the run weights forget."""
    return batch / (hyper["lr"] * hyper["weight_decay"] * duration)


@pytest.mark.parametrize("power", [0.0, 0.35])
@pytest.mark.parametrize("batch", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("duration", [0.5, 20.0])
def test_what_another_batch_and_duration_keep(power: float, batch: float, duration: float) -> None:
    at = RuleSet(duration=power).at(HYPER, batch=batch, duration=duration)
    assert at["lr"] == pytest.approx(3e-3 * batch**0.5 * duration**-power, rel=1e-12)
    assert times_of_decay(at, batch, duration) == pytest.approx(times_of_decay(HYPER, 1, 1), rel=1e-12)
    assert at["betas"][1] ** (1 / batch) == pytest.approx(0.95, rel=1e-12)
    assert at["betas"][0] == 0.5
    assert at["eps"] == 1e-8


def test_two_changes_are_one() -> None:
    rules = RuleSet(duration=0.3)
    for first, then in itertools.permutations([(4.0, 2.0), (0.5, 9.0), (1.0, 3.0)], 2):
        twice = rules.at(rules.at(HYPER, batch=first[0], duration=first[1]), batch=then[0], duration=then[1])
        once = rules.at(HYPER, batch=first[0] * then[0], duration=first[1] * then[1])
        assert twice["betas"] == pytest.approx(once.pop("betas"), rel=1e-12)
        assert {k: v for k, v in twice.items() if k != "betas"} == pytest.approx(once, rel=1e-12)


def test_adam_does_not_forget_squares_faster_than_gradients() -> None:
    """With β2 below β1² a step has no bound; a β2 that was below β1 stays as it was."""
    assert RuleSet().at({"lr": 1.0, "betas": (0.9, 0.95)}, batch=16)["betas"] == (0.9, 0.9)
    assert RuleSet().at({"lr": 1.0, "betas": (0.95, 0.9)}, batch=16)["betas"] == (0.95, 0.9)


def test_without_the_rule_for_batches_nothing_follows_them() -> None:
    assert RuleSet(batch="none").at(HYPER, batch=16) == HYPER
    with pytest.raises(MupscaleError, match="must be positive"):
        RuleSet().at(HYPER, batch=0)
