"""Every recipe that ships can be read and grown; the tiny ones run to their end, and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mupscale.cli import main
from mupscale.cli.recipe_options import shipped_recipes
from mupscale.cli.studies import RUN, read_study
from mupscale.cli.training import read_recipe
from mupscale.core import Width
from mupscale.study import Space
from mupscale.study.paper import PaperStudy
from mupscale.train import Recipe
from slow_cases import with_slow
from small_runs import metrics

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = [path for path in RECIPES if path.stem.endswith("-tiny")]


def test_the_recipes_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {"mlp-covtype", "mlp-covtype-sgd", "resnet-cifar100", "gpt2-text"} <= names
    assert {f"{name}-tiny" for name in ("mlp-covtype", "resnet-cifar100", "gpt2-text")} <= names
    assert set(shipped_recipes()) == names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_can_be_read(path: Path) -> None:
    recipe, options = read_recipe([str(path)])
    assert options["resume"] is options["overwrite"] is False
    assert recipe.out == str(Path("runs", path.stem))
    assert isinstance(recipe.optimizer_class(), type)
    assert callable(recipe.loss_function())
    assert len(recipe.grow) == 1


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem.startswith("mlp") else pytest.mark.slow)
        for path in RECIPES
        if path not in TINY  # those are grown below
    ],
)
def test_its_growth_can_be_planned(path: Path) -> None:
    recipe, _ = read_recipe([str(path)])
    plan = recipe.family().widening(recipe.width, recipe.grow[0].width)
    assert any(entry.axes for entry in plan.parameters.values())


MLPS = [path for path in RECIPES if path.stem.startswith("mlp")]


@pytest.mark.parametrize("path", with_slow(RECIPES, MLPS), ids=lambda path: path.stem)
def test_recipe_tells_where_to_tune(path: Path, tmp_path: Path) -> None:
    """Its section `study` is one, for widths that are smaller than its own and can be upscaled as it is."""
    recipe, settings, _ = read_study(RUN, [str(path)])
    PaperStudy(recipe, settings, tmp_path / "run")
    assert settings.widths
    assert all(Width.of(width).size < Width.of(recipe.width).size for width in settings.widths)
    assert len(Space(tuple(settings.grown_lrs), tuple(settings.noises)).cells) >= 9
    assert recipe == read_recipe([str(path)])[0]


@pytest.mark.quick("mlp-covtype-sgd", "gpt2-text")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_print_config_is_the_same_recipe(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["--optimizer.lr", "0.5", "--seeds.data", "3", "--clip", "2", "--schedule.warmup", "7"]
    assert main(["train", str(path), *changed, "--print_config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert read_recipe([str(printed)])[0] == read_recipe([str(path), *changed])[0]


def settings(recipe: Recipe) -> list[Any]:
    """Widths, rates, noise, batch, decay and class."""
    growth, hyper = recipe.grow[0], recipe.optimizer.init_args
    changed = [(recipe.width, growth.width), (hyper["lr"], growth.lr), (growth.noise, growth.noise_unit)]
    return [*changed, recipe.batch, hyper["weight_decay"], recipe.optimizer.class_path]


def read(name: str) -> Recipe:
    return read_recipe([str(ROOT / "recipes" / f"{name}.yaml")])[0]


def test_paper_appendix_experiments_mlp() -> None:
    """Appendix 'Experiments', MLPs: 500 epochs of 464,810 rows before the growth and after it."""
    adamw, sgd = read("mlp-covtype"), read("mlp-covtype-sgd")
    assert settings(adamw) == [(500, 2000), (0.1, 0.013), (1.0, "theory"), 2000, 1e-4, "torch.optim.AdamW"]
    assert adamw.optimizer.init_args["betas"] == [0.9, 0.999]
    assert adamw.optimizer.init_args["eps"] == 1e-8
    assert settings(sgd) == [(500, 2000), (0.4, 0.1), (1.25, "theory"), 2000, 1e-4, "torch.optim.SGD"]
    for recipe in (adamw, sgd):
        assert (recipe.base, recipe.init_at) == (1, 100)
        assert recipe.model.init_args == {"d_in": 54, "d_out": 7, "depth": 4, "bias": True, "activation": "relu"}
        assert recipe.steps == 1000 * 464_810 // 2000
        assert recipe.grow[0].at == 500 * 464_810 // 2000


def test_paper_appendix_experiments_resnet() -> None:
    """Appendix 'Experiments', ResNet: 100 epochs of 50,000 images before the growth and after it."""
    recipe = read("resnet-cifar100")
    assert settings(recipe) == [(128, 256), (0.01, 0.003), (0.4, "signal"), 128, 1e-4, "torch.optim.SGD"]
    assert recipe.optimizer.init_args["momentum"] == 0.9
    assert recipe.base == 64
    assert (recipe.grow[0].at, recipe.steps) == (100 * 50_000 // 128, 200 * 50_000 // 128)


def test_paper_appendix_experiments_gpt2() -> None:
    """Appendix 'Experiments', GPT-2: 10,000 steps of half a million tokens before the growth and after it."""
    recipe = read("gpt2-text")
    widths = ({"head_dim": 160}, {"head_dim": 320})
    assert settings(recipe) == [widths, (0.0039, 0.002), (0.005, "theory"), 512, 0.1, "torch.optim.AdamW"]
    assert recipe.optimizer.init_args["betas"] == [0.9, 0.95]
    assert (recipe.clip, recipe.schedule.kind, recipe.precision) == (1.0, "constant", "bf16")
    assert (recipe.grow[0].at, recipe.steps) == (10_000, 20_000)
    model = recipe.model.init_args
    assert (model["layers"], model["heads"], model["context"], model["vocab"]) == (12, 12, 1024, 50304)
    assert recipe.base == {"head_dim": 16}
    assert model["attention_multiplier"] / 16 == 16**-0.5  # at the base, GPT-2's own attention


LOSSES = {"mlp-covtype-tiny": (1.2, 0.35), "resnet-cifar100-tiny": (2.2, 2.0), "gpt2-text-tiny": (3.0, 2.45)}


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_tiny_recipe_runs_and_learns(path: Path, tmp_path: Path) -> None:
    """The loss starts above the first number and ends below the second; growth is no catastrophe."""
    assert main(["train", str(path), "--out", str(tmp_path / "run"), "--log_every", "10"]) == 0
    records = metrics(tmp_path / "run")
    train = [record for record in records if record["kind"] == "train"]
    above, below = LOSSES[path.stem]
    assert train[0]["loss"] > above
    assert train[-1]["loss"] < below
    (grown,) = [record for record in records if record["kind"] == "grow"]
    before = [record["loss"] for record in train if record["step"] <= grown["step"]]
    assert train[-1]["loss"] < min(before)
    assert records[-1]["status"] == "finished"
    assert train[-1]["width"] == read(path.stem).grow[0].width
