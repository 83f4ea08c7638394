"""Another operator is a class and a line in the table of words: recipes, engine, comparisons and files know it then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mupscale as mu
from mupscale.core import Plan, is_new
from mupscale.engine import train_many
from mupscale.growth import OPERATORS, Part
from mupscale.growth.draws import standard_normal
from mupscale.growth.fresh import law_of
from mupscale.growth.settings import OperatorWord
from mupscale.study import contender_named
from mupscale.study.contenders import check_contenders, contenders_named
from mupscale.train import Growth, Recipe, run_recipe
from small_runs import ADAMW, FEATURES, GENTLE, recipe


@dataclass(frozen=True)
class HalfFresh(mu.Copies):
    """Copies of which half of the incoming weights are drawn afresh; the first copy of each unit stays as it was."""

    def check(self, plan: Plan) -> None:
        for name in plan.parameters:
            law_of(plan, name)

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        entry = part.entry
        entry.widened(narrow, out)
        if entry.out:
            (dim,) = entry.out
            places = is_new(entry.axes[dim], entry.narrow[dim])
            new = places.reshape([-1 if d == dim else 1 for d in range(out.dim())])
            half = standard_normal(entry.wide, out.dtype, part.seed, f"half {part.name}") > 0
            drawn = standard_normal(entry.wide, out.dtype, part.seed, part.name) * part.plan.fresh[part.name]
            out.copy_(torch.where((new & half).to(out.device), drawn.to(out), out))


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "half-fresh", OperatorWord(HalfFresh))


def test_in_a_recipe_the_engine_and_a_file(tmp_path: Path) -> None:
    """One run, the same run in a stack of two, and the recipe through JSON; a setting that it lacks is refused."""
    grow = [Growth(at=2, width=16, how="half-fresh")]
    alone = run_recipe(recipe(tmp_path / "alone", steps=4, grow=grow))
    rates = {"fast": ADAMW, "slow": GENTLE}
    both = [recipe(tmp_path / name, steps=4, grow=grow, optimizer=adamw) for name, adamw in rates.items()]
    assert Recipe.from_json(both[0].to_json()) == both[0]
    first, second = train_many(both, note=lambda line: None)
    assert first.loss is not None
    assert second.loss != first.loss
    weight = alone.model.state_dict()["layers.0.weight"]
    assert weight.shape == (16, FEATURES)
    with pytest.raises(mu.MupscaleError, match="how: half-fresh takes no noise"):
        recipe(None, grow=[replace(grow[0], noise=1.0)])
    with pytest.raises(mu.MupscaleError, match=r"how is 'half', but must be copies, .* half-fresh, identity, stack or"):
        recipe(None, grow=[replace(grow[0], how="half")])


def test_in_a_comparison() -> None:
    """It takes part under its own word, and grows as it says."""
    check_contenders(["continued", "half-fresh"], "contenders")
    *_, one = contenders_named(["half-fresh", "from-scratch", "continued"])
    assert (one, one.is_grown, one.needs_multiples) == (contender_named("half-fresh"), True, True)
    assert isinstance(Growth(at=1, width=16, how=one.how).build_operator(), HalfFresh)


def test_in_a_checkpoint_of_hugging_face(tmp_path: Path) -> None:
    """Written, recorded and verified; without what was drawn it is the small model, copied, optimizer included."""
    transformers = pytest.importorskip("transformers")
    from mupscale import hf

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=11)
    small = transformers.GPT2LMHeadModel(config)
    small.save_pretrained(tmp_path / "small")
    optimizer = torch.optim.AdamW(small.parameters())
    for p in small.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "small" / "optimizer.pt")
    carried: Any = {"optimizer": tmp_path / "small", "progress": False}
    grown = hf.upscale(tmp_path / "small", tmp_path / "wide", grow=HalfFresh(), seed=3, **carried)
    rows = {row.what: row for row in grown.comparison.rows}
    assert rows["tensors in the files"].ok
    assert rows["logits"].difference > 1e-3
    assert rows["logits, without the half-fresh"].difference < 1e-5
    assert isinstance(hf.Record.load(tmp_path / "wide").growths[0].grow, HalfFresh)
    state = torch.load(tmp_path / "wide" / "optimizer.pt")["state"]
    assert any(torch.equal(kept["exp_avg"][:, 1::2], torch.full((8, 8), 0.05)) for kept in state.values())  # of wpe
    wide = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "wide")
    small = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "small")
    ours, theirs = (model.transformer.wpe.weight.detach() for model in (small, wide))
    assert torch.equal(theirs[:, ::2], ours)
    assert 0.3 < (theirs[:, 1::2] != ours).float().mean() < 0.7
