"""Runs that grow in depth: events, checkpoints, resuming, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
from mupscale.core import RuleSet
from mupscale.engine import train_many
from mupscale.system import MupscaleError
from mupscale.train import Evaluation, Growth, Recipe, Spec, run_recipe
from small_runs import ADAMW, CLASSES, FEATURES, column


def recipe(out: Path | None = None, **changes: Any) -> Recipe:
    usual: dict[str, Any] = {"width": {"width": 8, "layers": 2}, "base": {"width": 8, "layers": 2}, "steps": 6}
    usual["model"] = Spec("deep_models.ResidualTable", {"d_in": FEATURES, "d_out": CLASSES})
    return small_runs.recipe(out, **{**usual, "evaluation": Evaluation(), **changes})


def test_a_growth_event_says_depth() -> None:
    one = recipe(grow=[Growth(at=2, depth=4, how="identity"), Growth(at=4, width=16, depth=6, how="fresh")])
    assert [growth.width for growth in one.grow] == [{"width": 8, "layers": 4}, {"width": 16, "layers": 6}]
    assert Recipe.from_json(one.to_json()) == one
    with pytest.raises(MupscaleError, match="narrower"):
        recipe(grow=[Growth(at=2, depth=1)])
    with pytest.raises(MupscaleError, match="the recipe's width must name it"):
        recipe(width=8, base=8, grow=[Growth(at=2, depth=4)])
    with pytest.raises(MupscaleError, match="give the new width, the new depth, or both"):
        recipe(grow=[Growth(at=2)])
    with pytest.raises(MupscaleError, match="takes no noise"):
        recipe(grow=[Growth(at=2, depth=4, how="identity", noise=1.0)])


@pytest.mark.quick("complete")
@pytest.mark.parametrize("rule", ["none", "complete"])
def test_identity_goes_on_where_it_was_and_resumes_to_the_bit(tmp_path: Path, rule: Any) -> None:
    """The loss of the first step after growth is that of the run which did not grow; a stop changes nothing."""
    grown = recipe(tmp_path / "grown", grow=[Growth(at=3, depth=4, how="identity")], rules=RuleSet(depth=rule))
    run_recipe(grown)
    run_recipe(recipe(tmp_path / "same", rules=RuleSet(depth=rule)))
    ours, theirs = column(tmp_path / "grown", "loss"), column(tmp_path / "same", "loss")
    assert ours[:4] == pytest.approx(theirs[:4], rel=1e-12)
    assert ours[5] != theirs[5]
    part = replace(grown, steps=4, out=str(tmp_path / "part"))
    run_recipe(part)
    run_recipe(replace(part, steps=6), resume=True)
    assert column(tmp_path / "part", "loss") == ours


@pytest.mark.slow
def test_from_a_checkpoint_and_in_the_engine(tmp_path: Path) -> None:
    """Runs that start from a shallow model are stacked, with the losses of one at a time."""
    base = recipe(tmp_path / "base", steps=3)
    run_recipe(base)
    from_it = {"start": str(tmp_path / "base"), "steps": 3, "how": "identity"}
    deeper = [
        recipe(width={"width": 8, "layers": 4}, **from_it, optimizer=optimizer)
        for optimizer in (ADAMW, replace(ADAMW, init_args={**ADAMW.init_args, "lr": 1e-3}))
    ]
    stacked, alone = (train_many(deeper, engine=engine, points=3) for engine in ("vectorised", "serial"))
    assert [one.loss for one in stacked] == pytest.approx([one.loss for one in alone], rel=1e-9)
    both = recipe(width={"width": 16, "layers": 4}, **{**from_it, "how": "fresh"}, deepen="stack")
    assert torch.isfinite(torch.tensor(train_many([both])[0].loss))


def test_refused_before_the_first_step(tmp_path: Path) -> None:
    plain = recipe(
        tmp_path,
        model=Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": CLASSES}),
        width={"width": 8, "depth": 3},
        base={"width": 8, "depth": 3},
        grow=[Growth(at=2, depth=4)],
    )
    with pytest.raises(MupscaleError, match="no residual connection"):
        run_recipe(plain)
