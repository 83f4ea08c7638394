"""Recipes: what is refused in one sentence, and that one can be written down and read again."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from mupscale.core import RuleSet
from mupscale.family.members import DepthMembers
from mupscale.growth import GrowthSettings
from mupscale.growth.copies import build_noise
from mupscale.system.errors import MupscaleError
from mupscale.train import (
    MAY_CHANGE,
    Checkpoints,
    Evaluation,
    Growth,
    Recipe,
    Schedule,
    Seeds,
    Spec,
    TunedAt,
    run_recipe,
)
from refusals import refuses
from small_runs import ADAMW, CLASSES, FEATURES, KINDS, MLP, SGD, column, copies, recipe, refused
from toys import Toy

DIMS = KINDS["gpt2-dims"]


def at_5(*parts: str, width: Any = 16, **growth: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A growth at step 5, and what is said of it."""
    return {"grow": [Growth(5, width, **growth)]}, ("growth at step 5", *parts)


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "steps": ({"steps": 0}, ("steps is 0", "at least 1")),
    "batch": ({"batch": -8}, ("batch is -8", "at least 1")),
    "accumulate": ({"accumulate": 0}, ("accumulate is 0", "at least 1")),
    "log_every": ({"log_every": 0}, ("log_every is 0", "at least 1")),
    "parts": ({"batch": 10, "accumulate": 4}, ("batch of 10", "4 equal parts", "accumulate")),
    "keep": ({"checkpoints": Checkpoints(keep=0)}, ("checkpoints.keep is 0", "at least 1")),
    "no checkpoint steps": ({"checkpoints": Checkpoints(every=-1)}, ("checkpoints.every is -1", "at least 0")),
    "minutes": ({"checkpoints": Checkpoints(minutes=-1)}, ("checkpoints.minutes is -1", "0 or more")),
    "no evaluation steps": ({"evaluation": Evaluation(every=-5)}, ("evaluation.every is -5", "at least 0")),
    "no evaluation batch": ({"evaluation": Evaluation(batch=0)}, ("evaluation.batch is 0", "at least 1")),
    "no rate": ({"optimizer": Spec("torch.optim.AdamW")}, ("optimizer", "lr")),
    "warm-up": ({"schedule": Schedule(warmup=21)}, ("warm-up (21)", "decay (0)", "20 steps")),
    "warm-up and decay": ({"schedule": Schedule("wsd", 10, 11)}, ("warm-up (10)", "decay (11)", "20 steps")),
    "clip": ({"clip": 0.0}, ("clip is 0.0", "positive")),
    "width": ({"width": 0}, ("width is 0", "positive whole numbers")),
    "base": ({"base": -4}, ("base is -4", "positive whole numbers")),
    "some width": ({**DIMS, "width": {"head_dim": 0}}, ("width is {'head_dim': 0}", "positive whole numbers")),
    "names for the base alone": (
        {"base": {"heads": 4, "head_dim": 1}},
        ("width 8", "base {'heads': 4", "same arguments"),
    ),
    "a name for init_at alone": ({"init_at": {"width": 4}}, ("init_at {'width': 4}", "same arguments")),
    "other names": ({**DIMS, "base": {"heads": 2}}, ("width {'head_dim': 4}", "base {'heads': 2}", "same arguments")),
    "fewer names": (
        {**DIMS, "base": {"heads": 2, "head_dim": 2}},
        ("width {'head_dim': 4}", "base {'heads': 2, 'head_dim': 2}", "same arguments"),
    ),
    "growth at the start": ({"grow": [copies(0, 16)]}, ("growth at step 0", "after the first step")),
    "growth at the end": ({"grow": [copies(20, 16)]}, ("growth at step 20", "before the end at 20")),
    "growth out of order": ({"grow": [copies(9, 16), copies(9, 32)]}, ("growth at step 9", "after the one at 9")),
    "less than no noise": at_5("noise is -0.5", noise=-0.5),
    "endless noise": at_5("noise is inf", noise=math.inf),
    "growth without rate": at_5("lr is -0.1", lr=-0.1, how="copies"),
    "no multiple": at_5("20 is not a multiple of 8", "Choose 16 or 24", "how: fresh", width=20, how="copies"),
    "smaller": ({"grow": [copies(5, 16), copies(6, 8)]}, ("growth at step 6", "8 is narrower than 16")),
    "growth of nothing": at_5("give the new width, the new depth, or both", width=0),
    "growth by other names": at_5("{'heads': 2}", "same arguments as 8", width={"heads": 2}, how="copies"),
    "no multiple of one": (
        {**DIMS, "grow": [copies(5, {"head_dim": 6})]},
        ("growth at step 5", "head_dim 6 is not a multiple of 4", "Choose 4 or 8"),
    ),
    "noise for fresh": at_5("how: fresh takes no noise", noise=0.5, how="fresh"),
    "fresh units, but fewer": at_5("width 6 is narrower than 8", width=6, how="fresh"),
    "an unknown operator": at_5("how", how="magic"),
    "copies' outgoing": at_5("how: copies takes no outgoing", outgoing=0.5, how="copies"),
    "lossless, outgoing": at_5("how: lossless takes no outgoing", outgoing=0.5, how="lossless"),
    "nothing to grow from": ({"how": "fresh"}, ("how is for a run that starts from a checkpoint",)),
    "noise at the start": ({"noise": -1.0}, ("noise is -1.0",)),
    "schedule": ({"schedule": Schedule("linear")}, ("schedule.kind is 'linear'", "'constant', 'cosine' or 'wsd'")),  # type: ignore[arg-type]
    "precision": ({"precision": "fp16"}, ("precision is 'fp16'", "'fp32', 'tf32', 'bf16' or 'fp64'")),
    "parallel": ({"parallel": "pipeline"}, ("parallel is 'pipeline'", "'ddp' or 'fsdp'")),
    "compile": ({"compile": "fast"}, ("compile is 'fast'", "default", "max-autotune")),
    "precision, not at all": ({"precision": True}, ("precision is True", "'fp32', 'tf32', 'bf16' or 'fp64'")),
    "unit": at_5("noise_unit is 'sigma'", "'init', 'theory' or 'signal'", noise=1.0, noise_unit="sigma"),
}


@pytest.mark.parametrize(("changes", "parts"), WRONG.values(), ids=WRONG.keys())
def test_refused_when_it_is_made(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        recipe(**changes)


def no_module(width: int) -> int:
    """Something else."""
    return width


NOT_MADE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no such package": ({"model": Spec("nowhere.Model")}, ("'nowhere.Model'", "cannot be imported", "nowhere")),
    "no such class": ({"model": Spec("mupscale.models.MPL")}, ("'mupscale.models.MPL'", "cannot be imported", "MPL")),
    "no dots": ({"model": Spec("MLP")}, ("'MLP'", "not an import path", "module.name")),
    "no data": ({"data": Spec("small_runs.Rowz")}, ("'small_runs.Rowz'", "cannot be imported")),
    "no optimizer": ({"optimizer": Spec("torch.optim.Adamm", {"lr": 1})}, ("'torch.optim.Adamm'", "imported")),
    "no loss": ({"loss": "mupscale.train.hinge"}, ("'mupscale.train.hinge'", "cannot be imported")),
    "unknown argument": (
        {"model": Spec(MLP.class_path, {**MLP.init_args, "layers": 2})},
        ("mupscale.models.MLP", "'layers'"),
    ),
    "missing argument": ({"model": Spec(MLP.class_path, {"d_in": 6})}, ("mupscale.models.MLP", "'d_out'")),
    "unknown argument of data": ({"data": Spec("small_runs.Rows", {"path": "x"})}, ("small_runs.Rows", "'path'")),
    "unknown argument of the optimizer": (
        {"optimizer": Spec("torch.optim.AdamW", {"lr": 0.1, "momentum": 0.9})},
        ("AdamW does not take these hyperparameters", "'momentum'"),
    ),
    "impossible value for the optimizer": (
        {"optimizer": Spec("torch.optim.AdamW", {"lr": 0.1, "betas": [1.5, 0.9]})},
        ("AdamW does not take these hyperparameters", "Invalid beta parameter"),
    ),
    "no module": ({"model": Spec("test_train_recipe.no_module")}, ("test_train_recipe.no_module", "nn.Module")),
    "no source of data": ({"data": Spec("pathlib.PurePath")}, ("pathlib.PurePath", "mupscale.data.Data")),
    "an optimizer that is none": (
        {"optimizer": Spec("small_runs.Rows", {"lr": 1})},
        ("small_runs.Rows", "no torch.optim.Optimizer"),
    ),
    "an optimizer that cannot widen": ({"optimizer": Spec("torch.optim.LBFGS", {"lr": 0.1})}, ("LBFGS", "Use ")),
    "a width that the model lacks": ({"width": {"size": 8}, "base": {"size": 4}}, ("mupscale.models.MLP", "'width'")),
}


@pytest.mark.parametrize(("changes", "parts"), NOT_MADE.values(), ids=NOT_MADE.keys())
def test_refused_before_the_first_step(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    """And nothing is left behind that would be taken for a run."""
    with refused(*parts):
        run_recipe(recipe(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_noise() -> None:
    """None is none, whatever its unit: a signal's level 0 would still look at the weights."""
    assert [build_noise(0, unit) for unit in ("init", "theory", "signal")] == [0.0] * 3
    assert [type(build_noise(1, unit)).__name__ for unit in ("init", "signal")] == ["GaussianNoise", "SignalNoise"]
    assert getattr(build_noise(2, "theory"), "unit", None) == "theory"


OTHER: dict[str, Any] = {
    "how": "paired",
    "outgoing": 0.5,
    "spread": "trained",
    "shrink": 0.5,
    "model": Spec("mupscale.models.MLP", {**MLP.init_args, "bias": False}),
    "data": Spec("small_runs.Slow"),
    "optimizer": SGD,
    "width": 16,
    "base": 8,
    "init_at": 16,
    "steps": 30,
    "batch": 16,
    "accumulate": 2,
    "grow": [Growth(5, 32, noise=0.5, noise_unit="theory", lr=0.01), copies(9, 64)],
    "schedule": Schedule("wsd", 2, 3, 0.1, before=1, after=2),
    "clip": 1.0,
    "loss": "small_runs.squared",
    "precision": "bf16",
    "compile": True,
    "seeds": Seeds(1, 2, 3, 4),
    "evaluation": Evaluation(5, 6),
    "checkpoints": Checkpoints(7, 0.5, 8),
    "on_nonfinite": "rewind",
    "log_every": 3,
    "tensorboard": True,
    "device": "cuda:1",
    "parallel": "fsdp",
    "out": "elsewhere",
    "start": "a.safetensors",
    "start_width": 4,
    "noise": 1.0,
    "noise_unit": "signal",
    "no_decay": ["bias", "norm"],
    "callbacks": ["mupscale.train.JsonLines"],
    "deepen": "stack",
    "state": "reset",
    "rules": RuleSet("sqrt", "complete", 4.0, "none", 0.3),
    "tuned_at": TunedAt(4, 20),
}
"""For every field of a recipe another value than it has by itself."""
FULL = recipe(**{name: value for name, value in OTHER.items() if name not in ("outgoing", "spread", "tuned_at")})


def test_a_recipe_comes_back_from_json() -> None:
    """The real one, whose objects have text for keys and lists for tuples."""
    for one in (recipe(), FULL, recipe(optimizer=Spec("torch.optim.AdamW", {"lr": 0.1, "betas": (0.9, 0.95)}))):
        again = Recipe.from_json(json.loads(json.dumps(one.to_json())))
        assert again == one
        assert again.describe_difference(one, 10**9) is None
    default = Recipe(MLP, MLP, ADAMW, 8, 4, 20, 8)
    fresh = replace(FULL, noise=0.0, shrink=1.0, how="fresh", outgoing=0.5)
    assert Recipe.from_json(json.loads(json.dumps(fresh.to_json()))) == fresh
    changed = replace(FULL, noise=0.0, shrink=1.0, grow=[Growth(5, 17, how="fresh", outgoing=0.5)])
    assert Recipe.from_json(json.loads(json.dumps(changed.to_json()))) == changed
    same = [each.name for each in fields(Recipe) if getattr(FULL, each.name) == getattr(default, each.name)]
    assert same == ["spread", "outgoing", "tuned_at"]  # every other field was put to the test


def test_what_fills_new_units_is_defined_once() -> None:
    """A recipe that starts from a checkpoint and a growth event have the same fields for it."""
    names = [each.name for each in fields(GrowthSettings)]
    told = {"how": "fresh", "outgoing": 0.5, "deepen": "stack"}
    assert recipe(start="a.safetensors", **told).growth_settings == Growth(5, 16, **told).growth_settings  # type: ignore[arg-type]
    assert names == list(Growth(5, 16).growth_settings)
    assert not {*names} & {*Growth.__annotations__, *Recipe.__annotations__}


def test_rules_of_a_recipe() -> None:
    """They are one field."""
    assert replace(recipe(), rules=RuleSet("fixed")).to_json()["rules"]["decay"] == "fixed"
    with pytest.raises(MupscaleError, match=r"rules\.decay' is 'half', but must be invariant"):
        Recipe.from_json({**recipe().to_json(), "rules": {"decay": "half"}})


def test_hyperparameters_of_another_batch_and_duration_are_taken_over() -> None:
    adamw = Spec("torch.optim.AdamW", {"lr": 0.1, "weight_decay": 0.5})
    grow = [Growth(5, 16, lr=0.02)]
    rules = RuleSet(duration=0.25)
    one = recipe(optimizer=adamw, batch=32, steps=80, grow=grow, rules=rules, tuned_at=TunedAt(batch=8, steps=20))
    assert one.tuned_at is None
    assert one.optimizer.init_args["lr"] == pytest.approx(0.1 * 2 * 16**-0.25)
    assert one.optimizer.init_args["weight_decay"] == pytest.approx(0.5 * 4 / 16 / (2 * 16**-0.25))
    assert one.optimizer.init_args["betas"] == [0.9, pytest.approx(0.999**4)]
    assert one.grow[0].lr == pytest.approx(0.02 * 2 * 16**-0.25)
    assert Recipe.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(MupscaleError, match=r"rules for Adam and its variants only, and torch\.optim\.SGD is not one"):
        recipe(optimizer=SGD, tuned_at=TunedAt(8, 20))
    refuses("at least 1", TunedAt, 0, 5)


def test_json_has_the_names_of_files() -> None:
    values = FULL.to_json()
    assert values["from"] == "a.safetensors"
    assert values["from_width"] == 4
    assert not {"start", "start_width"} & values.keys()
    growth = {"at": 5, "width": 32, "noise": 0.5, "noise_unit": "theory", "lr": 0.01, "how": "copies"}
    assert values["grow"][0] == growth


def test_paths_are_text_in_a_recipe() -> None:
    one = recipe(data=Spec("small_runs.Rows", {"path": Path("data") / "covtype"}))
    assert one.data.init_args == {"path": str(Path("data") / "covtype")}
    assert Recipe.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_what_may_change_in_the_middle_of_a_run(name: str) -> None:
    """A field is named where it differs and would have made another model; this test knows all fields."""
    one = recipe(start="b.safetensors", how="copies")
    if name in ("outgoing", "spread"):  # which only fresh units have
        one = replace(one, how="fresh")
    why = one.describe_difference(replace(one, **{name: OTHER[name]}), 10)
    name = {"start": "from", "start_width": "from_width", "tuned_at": "optimizer"}.get(name, name)
    may_change = {"steps", "accumulate", "compile", "evaluation", "checkpoints", "log_every", "tensorboard", "device"}
    may_change |= {"parallel", "out", "on_nonfinite", "callbacks"}
    assert may_change == MAY_CHANGE
    assert why is None if name in may_change else why is not None and why.startswith(f"{name} is ")


def test_growth_to_come_may_change() -> None:
    """What comes at the step itself is still to come: the checkpoint was written before it."""
    one = recipe(grow=[copies(5, 16), copies(10, 32)])
    other = replace(one, grow=[copies(5, 16), copies(12, 48)])
    assert one.describe_difference(other, 10) is None
    assert one.describe_difference(other, 11) is not None
    assert one.describe_difference(replace(one, grow=[]), 5) is None
    assert one.describe_difference(replace(one, grow=[]), 6) is not None


def test_widths_and_growth_by_step() -> None:
    one = recipe(grow=[copies(5, 16), copies(10, 32)])
    assert [one.width_after(step) for step in (0, 4, 5, 6, 10, 11, 99)] == [8, 8, 8, 16, 16, 32, 32]
    assert [one.growth_at(step) for step in (4, 5, 10)] == [None, one.grow[0], one.grow[1]]


def needy(d_model: int, d_hidden: int, classes: int) -> nn.Sequential:
    """Widths by names of its own."""
    first, second = nn.Linear(FEATURES, d_model), nn.Linear(d_model, d_hidden)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(d_hidden, classes))


def test_several_widths_by_name(tmp_path: Path) -> None:
    """Each may grow by a factor of its own."""
    widths = {"d_model": 4, "d_hidden": 8}
    model = Spec("test_train_recipe.needy", {"classes": 3})
    grow = [copies(5, {"d_model": 12, "d_hidden": 8}), copies(9, {"d_model": 12, "d_hidden": 32})]
    what = recipe(tmp_path, model=model, width=widths, base=widths, grow=grow, optimizer=ADAMW)
    result = run_recipe(what)
    assert result.width == {"d_model": 12, "d_hidden": 32}
    assert result.model.get_submodule("2").weight.shape == (32, 12)
    plain = run_recipe(replace(what, grow=[], out=None)).model.eval()
    x = torch.randn(5, 6, dtype=torch.float64)
    assert torch.allclose(result.model(x), plain(x), rtol=0, atol=1e-10)


def test_what_is_not_of_its_kind_is_not_called() -> None:
    assert Spec("small_runs.squared").load() is not None
    assert math.isclose(Spec("fractions.Fraction", {"numerator": 1}).make(Fraction, denominator=2), 0.5)
    with pytest.raises(MupscaleError, match=r"math\.pi is neither a fractions\.Fraction"):
        Spec("math.pi").make(Fraction)
    with pytest.raises(MupscaleError, match=r"fractions\.Fraction is no torch\.nn\.Module"):
        Spec("fractions.Fraction").make(nn.Module)
    with pytest.raises(
        MupscaleError, match=r"os\.mkdir is neither a torch\.nn\.Module nor a function that returns one"
    ):
        Spec("os.mkdir", {"path": "made"}).make(nn.Module)
    with pytest.raises(MupscaleError, match=r"textwrap\.dedent gave a str, which is not a torch\.nn\.Module"):
        Spec("textwrap.dedent", {"text": "x"}).make(nn.Module)


def bare(width: int) -> Toy:
    """A square matrix and a readout that are no layers: its modules do not tell what they are."""
    mix, q = nn.Parameter(torch.eye(width)), nn.Parameter(torch.randn(width, CLASSES) / width)
    return Toy(lambda own, x: own.first(x).tanh() @ own.mix @ own.q, first=nn.Linear(FEATURES, width), mix=mix, q=q)


def test_what_modules_do_not_tell_is_learnt_from_the_data(tmp_path: Path) -> None:
    what = recipe(tmp_path, model=Spec("test_train_recipe.bare"), grow=[copies(10, 16)])
    plan = what.family().plan(8)
    assert plan["q"].rule == mu.Rule(1, 2)
    assert {d: axis.side for d, axis in plan.parameters["mix"].axes.items()} == {0: "in", 1: "out"}
    with pytest.raises(mu.PlanError, match=r"'mix' of shape 4×4 grows along dimensions \[0, 1\]"):
        mu.Family(bare, base=4).plan(4)
    run_recipe(what)
    run_recipe(replace(what, grow=[], out=str(tmp_path / "narrow")))
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path / "narrow", "loss"), rel=1e-9)


def test_copies_are_tried_once_for_all_runs_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run asks for its family; another model, other data or other sizes are tried by themselves."""
    tried = []
    check = DepthMembers._check_at

    def counted(family: DepthMembers, *args: Any) -> None:
        tried.append(args[-1])
        check(family, *args)

    monkeypatch.setattr(DepthMembers, "_check_at", counted)
    model = Spec("mupscale.models.MLP", {"d_in": FEATURES, "d_out": CLASSES, "depth": 4})
    short: dict[str, Any] = {"model": model, "steps": 2, "grow": [copies(1, 16)]}
    for seed in range(3):
        run_recipe(recipe(None, seeds=Seeds(init=seed), **short))
    assert tried == [frozenset({"width"})]
    run_recipe(recipe(None, **{**short, "data": Spec("small_runs.Slow", {"seconds": 0.0})}))
    assert len(tried) == 2
    other = Spec("mupscale.models.MLP", {**model.init_args, "activation": "tanh"})
    run_recipe(recipe(None, **{**short, "model": other}))
    assert len(tried) == 3
