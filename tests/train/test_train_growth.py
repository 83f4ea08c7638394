"""Runs that grow by fresh units and in depth: any width, any operators one after another, exact resume, in stacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from mupscale import checkpoint
from mupscale.core import RuleSet, is_new
from mupscale.engine import train_many
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Spec, run_recipe
from mupscale.train.processes import Processes
from mupscale.train.run_models import grow_model
from refusals import refuses
from small_runs import ADAMW, CLASSES, FEATURES, Rows, assert_same_run, checkpoints, column, metrics, recipe, step
from toys import Toy

MIXED = [Growth(5, 13, how="fresh"), Growth(9, 26, noise=0.5, how="paired"), Growth(14, 30, how="lossless")]


def test_events_of_all_kinds(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "run", grow=MIXED))
    assert column(tmp_path / "run", "width")[4:15] == [8, 13, 13, 13, 13, 26, 26, 26, 26, 26, 30]
    assert [record.get("how") for record in metrics(tmp_path / "run", "grow")] == ["fresh", "paired", "lossless"]
    losses = column(tmp_path / "run", "loss")
    plain = recipe(tmp_path / "plain")
    run_recipe(plain)
    assert losses[:5] == column(tmp_path / "plain", "loss")[:5]
    assert losses[5] != column(tmp_path / "plain", "loss")[5]


@pytest.mark.filterwarnings("error::mupscale.UncheckedPlan")
def test_it_is_tried_on_the_data_of_the_recipe(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "run", grow=[Growth(2, 11, how="fresh"), Growth(3, 13, how="lossless")], steps=4))


def test_the_function_stays_in_a_lossless_growth(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path / "plain"))
    run_recipe(recipe(tmp_path / "run", grow=[Growth(5, 11, how="lossless")]))
    ours, theirs = (column(tmp_path / name, "loss") for name in ("run", "plain"))
    assert ours[5] == pytest.approx(theirs[5], rel=1e-12)
    assert ours[8] != pytest.approx(theirs[8], rel=1e-6)  # and then the new units learn


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", pytest.param("resnet", marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    """From checkpoints before, at and after the growths, statistics of new channels included."""
    events = MIXED if kind == "mlp" else [Growth(5, 3, how="fresh")]
    steps = 20 if kind == "mlp" else 8
    what = recipe(tmp_path / "whole", kind, grow=events, steps=steps)
    run_recipe(what)
    for stop in (4, 5, 7) if kind == "mlp" else (4,):
        out = tmp_path / f"stopped-{stop}"
        grow = [growth for growth in events if growth.at < stop]
        run_recipe(replace(what, out=str(out), steps=stop, grow=grow))
        run_recipe(replace(what, out=str(out)), resume=True)
        ours, theirs = ([r for r in metrics(o) if r["kind"] != "eval"] for o in (out, tmp_path / "whole"))
        assert [{**r, "seconds": 0} for r in ours] == [{**r, "seconds": 0} for r in theirs]
    again = replace(what, out=str(tmp_path / "again"))
    run_recipe(again)
    assert_same_run(tmp_path / "again", tmp_path / "whole")


def test_statistics_of_new_channels_are_measured_in_the_loop(tmp_path: Path) -> None:
    """Right after the growth: new channels have the means of the coming batches, old ones go on from theirs."""
    what = recipe(
        tmp_path / "run", "resnet", steps=6, grow=[Growth(5, 3, how="fresh")], checkpoints=Checkpoints(every=5, keep=9)
    )
    run_recipe(what)
    assert step(5) in checkpoints(tmp_path / "run")
    after = checkpoint.load(tmp_path / "run" / "checkpoints" / step(6)).model
    new = is_new(mu.Axis(1.5), 2)
    mean, variance = after["bn1.running_mean"], after["bn1.running_var"]
    assert bool((mean[new] != 0).all())
    assert bool(((variance[new] - 1).abs() > 0.01).all())


def normed(width: int, depth: int) -> nn.Sequential:
    """A residual stream of blocks with a BatchNorm."""

    def block() -> Toy:
        parts = nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)
        return Toy(lambda own, x: x + own.branch(x), branch=nn.Sequential(*parts))

    return nn.Sequential(nn.Linear(FEATURES, width), *(block() for _ in range(depth)), nn.Linear(width, CLASSES))


@pytest.mark.parametrize("how", ["fresh", "copies"])
def test_statistics_of_new_channels_and_blocks_of_a_family_with_a_depth(how: str) -> None:
    """What the block that was there has, goes on; new channels and the new block have means of the coming batches."""
    family = mu.Family(normed, {"width": 4, "depth": 1}, inputs=torch.randn(4, FEATURES))
    model, data = family.init({"width": 4, "depth": 1}), Rows()
    model.get_buffer("1.branch.1.running_mean").fill_(3.0)
    grow: Any = (mu.Fresh() if how == "fresh" else mu.Copies(mu.GaussianNoise(0.5)), mu.Identity())
    grown, _ = grow_model(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        before={"width": 4, "depth": 1},
        width={"width": 8, "depth": 2},
        grow=grow,
        seed=0,
        family=family,
        processes=Processes(torch.device("cpu")),
        data=None,
        batches=[data.batch(0, 0, 16)[0]],
    )
    old, new = (grown.get_buffer(f"{place}.branch.1.running_mean") for place in (1, 2))
    assert (old == 3).sum() == (4 if how == "fresh" else 8)
    assert bool((old != 0).all())
    assert bool((new != 0).all())


def trained(tmp_path: Path, kind: str = "mlp") -> Path:
    run_recipe(recipe(tmp_path / "narrow", kind, steps=6))
    return tmp_path / "narrow"


STARTS: dict[str, dict[str, Any]] = {
    "fresh": {"how": "fresh"},
    "quiet": {"how": "fresh", "outgoing": 0.0},
    "lossless": {"how": "lossless"},
}


def test_a_stack_starts_from_grown_models_as_train_does(tmp_path: Path) -> None:
    """Each with its own operator, in one program."""
    start = str(trained(tmp_path))
    runs = [recipe(None, start=start, width=13, steps=8, **change) for change in STARTS.values()]
    stacked = train_many(runs, engine="vectorised", points=8)
    alone = train_many(runs, engine="serial", points=8)
    for ours, theirs in zip(stacked, alone, strict=True):
        assert [loss for _, loss in ours.curve] == pytest.approx([loss for _, loss in theirs.curve], rel=1e-9)
    fresh, quiet, lossless = (outcome.curve[0][1] for outcome in stacked)
    assert quiet == pytest.approx(lossless, rel=1e-12) != pytest.approx(fresh)  # without norms the two are one


def test_half_a_head_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(mu.MupscaleError):
        run_recipe(recipe(tmp_path / "run", "gpt2-heads", grow=[Growth(5, 10, how="fresh")]))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert torch.get_default_dtype() == torch.float32


def deep(out: Path | None = None, **changes: Any) -> Recipe:
    usual: dict[str, Any] = {"width": {"width": 8, "layers": 2}, "base": {"width": 8, "layers": 2}, "steps": 6}
    usual["model"] = Spec("deep_models.ResidualTable", {"d_in": FEATURES, "d_out": CLASSES})
    return recipe(out, **{**usual, "evaluation": Evaluation(), **changes})


def test_a_growth_event_says_depth() -> None:
    one = deep(grow=[Growth(at=2, depth=4, how="identity"), Growth(at=4, width=16, depth=6, how="fresh")])
    assert [growth.width for growth in one.grow] == [{"width": 8, "layers": 4}, {"width": 16, "layers": 6}]
    assert Recipe.from_json(one.to_json()) == one
    refuses("narrower", deep, grow=[Growth(at=2, depth=1)])
    refuses("the recipe's width must name it", deep, width=8, base=8, grow=[Growth(at=2, depth=4)])
    refuses("give the new width, the new depth, or both", deep, grow=[Growth(at=2)])
    refuses("takes no noise", deep, grow=[Growth(at=2, depth=4, how="identity", noise=1.0)])


@pytest.mark.quick("complete")
@pytest.mark.parametrize("rule", ["none", "complete"])
def test_identity_goes_on_where_it_was_and_resumes_to_the_bit(tmp_path: Path, rule: Any) -> None:
    """The loss of the first step after growth is that of the run which did not grow; a stop changes nothing."""
    grown = deep(tmp_path / "grown", grow=[Growth(at=3, depth=4, how="identity")], rules=RuleSet(depth=rule))
    run_recipe(grown)
    run_recipe(deep(tmp_path / "same", rules=RuleSet(depth=rule)))
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
    base = deep(tmp_path / "base", steps=3)
    run_recipe(base)
    from_it = {"start": str(tmp_path / "base"), "steps": 3, "how": "identity"}
    deeper = [
        deep(width={"width": 8, "layers": 4}, **from_it, optimizer=optimizer)
        for optimizer in (ADAMW, replace(ADAMW, init_args={**ADAMW.init_args, "lr": 1e-3}))
    ]
    stacked, alone = (train_many(deeper, engine=engine, points=3) for engine in ("vectorised", "serial"))
    assert [one.loss for one in stacked] == pytest.approx([one.loss for one in alone], rel=1e-9)
    both = deep(width={"width": 16, "layers": 4}, **{**from_it, "how": "fresh"}, deepen="stack")
    assert torch.isfinite(torch.tensor(train_many([both])[0].loss))


def test_a_model_without_a_depth_is_refused_before_the_first_step(tmp_path: Path) -> None:
    plain = deep(
        tmp_path,
        model=Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": CLASSES}),
        width={"width": 8, "depth": 3},
        base={"width": 8, "depth": 3},
        grow=[Growth(at=2, depth=4)],
    )
    refuses("no residual connection", run_recipe, plain)
