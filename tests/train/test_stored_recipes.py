"""The one door from a recipe in somebody's folder to code: what it names is looked at before anything is imported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile_folders import DATA, MLP, SGD
from hostile_folders import RECIPE as VALUES
from mupscale.system import MupscaleError
from mupscale.train import Recipe, RunFolder, Spec, StoredRecipe, run_recipe
from mupscale.train.stored_recipes import packages_to_trust
from refusals import refuses

HOSTILE: dict[str, dict[str, Any]] = {
    "os.system": {"data": {"class_path": "os.system", "init_args": {"command": "touch ran"}}},
    "a model": {"model": {"class_path": "os.mkdir", "init_args": {"path": "ran"}}},
    "an optimizer": {"optimizer": {"class_path": "subprocess.Popen", "init_args": {"lr": 0.1}}},
    "a loss": {"loss": "antigravity.geohash"},
    "a module of its own": {"model": {"class_path": "payload.Net", "init_args": {}}},
    "near torch": {"model": {"class_path": "torch.utils.cpp_extension.load", "init_args": {}}},
    "torch itself": {"data": {"class_path": "torch.load", "init_args": {"f": "x"}}},
    "a name that begins so": {"model": {"class_path": "mupscale_evil.Net", "init_args": {}}},
    "a callback": {"callbacks": ["payload.Callback"]},
    "a callback with arguments": {"callbacks": [{"class_path": "os.mkdir", "init_args": {"path": "ran"}}]},
    "no path at all": {"model": {"class_path": "system", "init_args": {}}},
    "a path with spaces": {"loss": "mupscale.train.cross_entropy import os"},
}
OF_NO_KIND: dict[str, dict[str, Any]] = {
    "an import behind mupscale's name": {
        "data": {"class_path": "mupscale.system.errors.import_module", "init_args": {"name": "payload"}}
    },
    "a writer of files": {
        "data": {"class_path": "mupscale.system.replace_text", "init_args": {"path": "ran", "text": "x"}}
    },
    "what makes data of anything": {"data": {"class_path": "mupscale.data.as_data", "init_args": {"source": [1, 2]}}},
    "a model as a callback": {"callbacks": ["mupscale.models.MLP"]},
    "data as a model": {"model": DATA},
    "a model as data": {"data": MLP},
    "a class that is no loss": {"loss": "torch.nn.CrossEntropyLoss"},
    "a module behind mupscale's name": {"loss": "mupscale.system.files.os"},
    "a function of one thing": {"loss": "mupscale.system.usable_cores"},
    "a scheduler": {"optimizer": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"lr": 1}}},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "payload.py").write_text("open('ran', 'w')\n")
    (tmp_path / "mine.py").write_text(
        "from subprocess import run\nfrom mupscale.models import MLP\n"
        "class Net(MLP): pass\ndef build(width): return MLP(54, width, 7)\n"
    )
    yield tmp_path
    assert not (tmp_path / "ran").exists()
    for name in ("payload", "mine"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_foreign_names_are_refused_before_anything_is_imported(here: Path, change: dict[str, Any]) -> None:
    before = set(sys.modules)
    stored = StoredRecipe.of({**VALUES, **change}, here / "recipe.json")
    refuses(r"recipe\.json(: \w+: .*is no import path$| names .*trust=\['\w+'\]$)", stored.load)
    assert set(sys.modules) == before


def test_a_callback_that_is_told_where_to_write_is_refused_unless_trusted(here: Path) -> None:
    values = {**VALUES, "callbacks": [{"class_path": "mupscale.train.JsonLines", "init_args": {"path": "ran"}}]}
    stored = StoredRecipe.of(values, "recipe.json")
    refuses(r"gives its callback mupscale\.train\.JsonLines arguments.*trust=\['mupscale'\]", stored.load)
    assert packages_to_trust(stored.load(trust=["mupscale"])) == ["mupscale"]


def test_a_callback_that_tells_others_is_refused_unless_trusted(here: Path) -> None:
    """Whoever resumes a run would send it to a service under their own name, and get a folder of its where they are."""
    stored = StoredRecipe.of({**VALUES, "callbacks": ["mupscale.train.WeightsAndBiases"]}, "recipe.json")
    refuses(r"WeightsAndBiases .*sends data .* elsewhere: .*trust=\['mupscale'\]", stored.load)
    assert packages_to_trust(stored.load(trust=["mupscale"])) == ["mupscale"]
    StoredRecipe.of({**VALUES, "callbacks": ["mupscale.train.TensorBoard"]}, "recipe.json").load()


def test_text_that_would_be_packed_somewhere_is_refused_unless_trusted(here: Path) -> None:
    (here / "text.txt").write_text("to be or not to be, that is the question\n" * 50)
    arguments = {"tokens": str(here / "elsewhere"), "source": str(here / "text.txt"), "context": 4}
    stored = StoredRecipe.of({**VALUES, "data": {"class_path": "mupscale.data.Text", "init_args": arguments}}, "r.json")
    refuses(r"Text write to .*elsewhere, .*data tokenize.*trust=\['mupscale\.data", stored.load)
    assert not (here / "elsewhere").exists()
    stored.load(trust=["mupscale.data"]).make_data()
    assert stored.load().make_data().size > 0  # it is packed by now, and only read


@pytest.mark.parametrize("change", OF_NO_KIND.values(), ids=OF_NO_KIND)
def test_what_is_of_another_kind_is_refused_before_it_is_called(here: Path, change: dict[str, Any]) -> None:
    with pytest.raises(MupscaleError, match=r"recipe\.json: (model|data|optimizer|loss|callbacks\[0\]): "):
        StoredRecipe.of({**VALUES, **change}, here / "recipe.json").load()


def test_trust_opens_the_door_for_the_named_package_alone(here: Path) -> None:
    own = StoredRecipe.of({**VALUES, "model": {**MLP, "class_path": "mine.Net"}}, "recipe.json")
    for trust in ((), ("min",), ("mine2",), ("payload",)):
        refuses(r"trust=\['mine'\]", own.load, trust)
    assert own.load(["mine"]).model.class_path == "mine.Net"
    assert packages_to_trust(own.load(["mine.Net"])) == ["mine"]
    StoredRecipe.of({**VALUES, "model": {"class_path": "mine.build"}}, "recipe.json").load(["mine"])
    borrowed = StoredRecipe.of({**VALUES, "model": {"class_path": "mine.run"}}, "recipe.json")
    refuses(r"mine\.run as its model, which is subprocess\.run: .*trust=\['subprocess'\]", borrowed.load, ["mine"])


def test_ones_own_recipe_is_not_restricted(here: Path) -> None:
    """With classes of one's own, before and after its folder exists."""
    recipe = Recipe.from_json({**VALUES, "model": {**MLP, "class_path": "mine.Net"}, "out": str(here / "run")})
    assert run_recipe(recipe).status == "finished"
    assert run_recipe(recipe, resume=True).status == "finished"


FIELDS: dict[str, tuple[Any, str]] = {
    "a number": (5, "5 is not a recipe"),
    "null": (None, "None is not a recipe"),
    "a list": ([1], r"\[1\] is not a recipe"),
    "a field that is missing": ({name: VALUES[name] for name in VALUES if name != "steps"}, "'steps' is missing"),
    "a field that is not one": ({**VALUES, "stesp": 3}, "there is no field 'stesp'"),
    "text for a number": ({**VALUES, "steps": "many"}, "'steps' is 'many', but must be a whole number"),
    "true for a number": ({**VALUES, "batch": True}, "'batch' is True, but must be a whole number"),
    "a fraction": ({**VALUES, "batch": 1.5}, "'batch' is 1.5, but must be a whole number"),
    "too large": ({**VALUES, "steps": 10**30}, "'steps' is 1000.*, but must be a whole number"),
    "a class as a list": ({**VALUES, "model": []}, r"'model' is \[\], but must be a mapping"),
    "a class path as a number": ({**VALUES, "model": {"class_path": 3}}, "'model.class_path' is 3, but must be text"),
    "arguments as a list": ({**VALUES, "data": {**DATA, "init_args": [1]}}, "'data.init_args' is .* must be a mapping"),
    "a part of a part": ({**VALUES, "schedule": {"warmup": None}}, "'schedule.warmup' is None"),
    "growth by a class": (
        {**VALUES, "grow": [{"class_path": "os.system"}]},
        r"there is no field 'grow\[0\]\.class_path'",
    ),
    "a width of text": ({**VALUES, "width": {"heads": "x"}}, r"'width.heads' is 'x', but must be a whole number"),
    "no learning rate": ({**VALUES, "optimizer": {**SGD, "init_args": {"lr": None}}}, "lr is None"),
    "an endless learning rate": ({**VALUES, "optimizer": {**SGD, "init_args": {"lr": float("inf")}}}, "lr is inf"),
}


@pytest.mark.parametrize(("values", "said"), FIELDS.values(), ids=FIELDS)
def test_values_that_are_no_recipe_name_file_and_field(tmp_path: Path, values: Any, said: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=said) as refused:
        StoredRecipe.read(path)
    assert "recipe.json: " in str(refused.value)


def test_a_recipe_of_ones_own_says_its_kind_of_mistake_too() -> None:
    with pytest.raises(MupscaleError, match="lr is 'x', but must be a number"):
        Recipe.from_json({**VALUES, "optimizer": {**SGD, "init_args": {"lr": "x"}}})
    with pytest.raises(MupscaleError, match="lr is -1"):
        Recipe(Spec(**MLP), Spec(**DATA), Spec("torch.optim.SGD", {"lr": -1}), width=8, base=8, steps=2, batch=2)  # type: ignore[arg-type]


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run that this user has begun, with a class of his own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    begin(here / "own", recipe())
    yield here / "own"
    sys.modules.pop("mine", None)


def recipe(**changed: Any) -> Recipe:
    return Recipe.from_json({**VALUES, "model": {"class_path": "mine.Net", "init_args": {}}, **changed})


def begin(place: Path, recipe: Recipe, *, resume: bool = False) -> None:
    """As a run writes its folder when it begins."""
    folder = RunFolder(place)
    folder.begin(resume)
    folder.go_on(recipe, 0)
    folder.release()


def key(own: Path) -> Path:
    """This user's key, with which he signs the runs that he begins."""
    return own.parent / "config" / "mupscale" / "key"


def trusted(place: Path) -> list[str]:
    return StoredRecipe.read(place / "recipe.json").packages_if_own()


def test_an_own_run_is_known_again_and_stays_so_when_it_is_resumed(own: Path) -> None:
    assert trusted(own) == ["mine", "mupscale", "torch"]
    begin(own, recipe(steps=9, callbacks=["mine.Callback"]), resume=True)
    assert trusted(own) == ["mine", "mupscale", "torch"]
    link = own.with_name("link")
    link.symlink_to(own)
    assert trusted(link)
    assert key(own).stat().st_mode & 0o777 == 0o600
    assert key(own).stat().st_size == 32
    assert [path.name for path in key(own).parent.iterdir()] == ["key"]


def test_a_run_without_classes_of_ones_own_makes_no_key(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    begin(here / "plain", Recipe.from_json(VALUES))
    assert not (here / "config").exists()


def change_model(own: Path, **changes: Any) -> None:
    values = json.loads((own / "recipe.json").read_text())
    values["model"] |= changes
    (own / "recipe.json").write_text(json.dumps(values))


def link_key(own: Path) -> None:
    key(own).rename(own / "key")
    key(own).symlink_to(own / "key")


def pipe_signature(own: Path) -> None:
    (own / "own.json").unlink()
    os.mkfifo(own / "own.json")


def copied(own: Path) -> Path:
    return Path(shutil.copytree(own, own.with_name("theirs")))


def resumed_by_trust(own: Path) -> Path:
    """Somebody's folder does not become one's own by --trust, which is for one command."""
    theirs = copied(own)
    begin(theirs, recipe(steps=9), resume=True)
    return theirs


def send_module_along(own: Path) -> None:
    (own.parent / "download").mkdir()
    (own.parent / "mine.py").rename(own.parent / "download" / "mine.py")
    sys.modules.pop("mine", None)
    os.chdir(own.parent / "download")


FORGED: dict[str, Callable[[Path], Path | object]] = {
    "another class": lambda own: change_model(own, class_path="mine.run"),
    "other arguments": lambda own: change_model(own, init_args={"d_in": 3}),
    "a copy": copied,
    "signed by another user, or on another machine": lambda own: key(own).write_bytes(os.urandom(32)),
    "no key": lambda own: key(own).unlink(),
    "a key for all to read": lambda own: key(own).chmod(0o644),
    "a key that is a link": link_key,
    "no signature": lambda own: (own / "own.json").write_text('{"signature": ["a", 1]}'),
    "a signature that is a pipe": pipe_signature,
    "resumed by trust": resumed_by_trust,
    "a module of the same name in another current folder": send_module_along,
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_no_folder_of_somebody_else_counts_as_own(forge: Callable[[Path], Path | object], own: Path) -> None:
    assert trusted(own)
    made = forge(own)
    place = made if isinstance(made, Path) else own
    assert trusted(place) == []
    with pytest.raises(MupscaleError, match=r"trust=\['mine'\]"):
        StoredRecipe.read(place / "recipe.json").load(trusted(place))
