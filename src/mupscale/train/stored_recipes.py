"""Recipes that lie in a folder or a checkpoint: data, until the user says whose code they may load.

This is the one door from a stored recipe to one that runs. Anybody may have written the file, and a class path in it
would be imported and called; so nothing is loaded but what is mupscale's or torch's own, and packages that are trusted.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from mupscale.data import Data
from mupscale.system import MupscaleError, as_asked, is_signed, read_json, remove, replace_text, show_short, sign
from mupscale.train.callbacks import Callback, callback_specs
from mupscale.train.recipe import Recipe, Spec, kind_name, load_loss, load_of_kind

_HERE = "."


def stored_values(recipe: Recipe, folder: str | Path) -> dict[str, Any]:
    """A recipe's plain values for a file of `folder`, which is its `out`; what it starts from is seen from there."""
    return {**recipe.to_json(), "out": _HERE, "from": seen_from(folder, recipe.start)}


def values_in(values: Mapping[str, Any], folder: str | Path) -> Mapping[str, Any]:
    """Values that `stored_values` gave, read in a file of `folder`, wherever that is now."""
    if values.get("out") != _HERE:
        return values
    start = values.get("from")
    if isinstance(start, str):
        start = os.path.normpath(os.path.join(os.path.realpath(folder), start))
    return {**values, "out": str(folder), "from": start}


def seen_from(folder: str | Path, path: str | None) -> str | None:
    """A path as it leads from a folder; None stays None."""
    if path is None:
        return None
    try:
        return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()
    except ValueError:  # on another drive of Windows'
        return os.path.realpath(path)


SIGNATURE = "own.json"
_OURS = ("mupscale", "torch")
_HARMLESS = ("mupscale.", "torch.nn.", "torch.optim.")
_KINDS: dict[str, type] = {"model": nn.Module, "data": Data, "optimizer": Optimizer}


def specs_in(recipe: Recipe) -> dict[str, Spec]:
    callbacks = {f"callbacks[{number}]": spec for number, spec in enumerate(callback_specs(recipe.callbacks))}
    return {**{what: getattr(recipe, what) for what in _KINDS}, "loss": Spec(recipe.loss), **callbacks}


def _packages(specs: Iterable[Spec]) -> list[str]:
    return sorted({spec.class_path.split(".")[0] for spec in specs})


def sign_run(folder: Path, recipe: Recipe) -> None:
    """Remember that the run in this folder is this user's own, where it names classes of his own."""
    text = _text(folder, recipe) if {*_packages(specs_in(recipe).values())} - {*_OURS} else None
    signature = None if text is None else sign(text)
    if signature is not None:
        replace_text(folder / SIGNATURE, json.dumps({"signature": signature}) + "\n")
    elif (folder / SIGNATURE).exists():
        remove(folder / SIGNATURE)


def is_own_run(folder: Path, recipe: Recipe) -> bool:
    """Whether this user began the run in this folder, with this recipe, on this machine."""
    try:
        stored: Any = read_json(folder / SIGNATURE)
    except (OSError, MupscaleError):
        return False
    signature = stored.get("signature") if isinstance(stored, dict) else None
    text = _text(folder, recipe)
    return isinstance(signature, str) and text is not None and is_signed(text, signature)


def _text(folder: Path, recipe: Recipe) -> str | None:
    """What is signed; None where code comes from no file, as in a notebook."""
    specs = specs_in(recipe)
    code = {name: _origin(name) for name in _packages(specs.values()) if name not in _OURS}
    if None in code.values():
        return None
    values = [[spec.class_path, spec.init_args] for what, spec in specs.items() if what != "loss"]
    try:
        return json.dumps(["run", os.path.realpath(folder), code, recipe.loss, values], sort_keys=True)
    except TypeError:  # an argument that no file can hold, so nobody resumes it from one
        return None


def _origin(package: str) -> list[str] | None:
    """Where a package lies, as an import in the current folder would find it; it is not imported."""
    spec = None
    with suppress(ValueError):  # __main__ has none
        spec = find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    places = [] if spec is None else [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return [os.path.realpath(place) for place in places if place] or None


@dataclass(frozen=True)
class StoredRecipe:
    """A recipe as somebody's file has it: it can be compared with one's own, and run through `load` alone.

    Args:
        path: the file, which errors name
    """

    path: Path
    _recipe: Recipe = field(repr=False)

    @classmethod
    def of(cls, values: Any, path: str | Path, folder: Path | None = None) -> StoredRecipe:
        """The recipe whose plain values were found in the file at `path`, of this folder (default: its parent)."""
        placed = values_in(values, folder or Path(path).parent) if isinstance(values, Mapping) else values
        return cls(Path(path), Recipe.from_json(placed, path))

    @classmethod
    def read(cls, path: str | Path) -> StoredRecipe:
        """The recipe in a file of its own; an OSError if it cannot be opened."""
        return cls.of(read_json(path), path)

    @property
    def steps(self) -> int:
        return self._recipe.steps

    def packages_if_own(self) -> list[str]:
        """The packages that it names, where this user began the run in its folder, on this machine; else none."""
        return _packages(specs_in(self._recipe).values()) if is_own_run(self.path.parent, self._recipe) else []

    def to_json(self) -> dict[str, Any]:
        return self._recipe.to_json()

    def describe_difference(self, recipe: Recipe, step: int, *, same_start: bool = False) -> str | None:
        """What in one's own recipe would have led to another model after `step` steps; None if nothing.

        What it starts from may have been moved: then it is no longer where the file says, and has the same name.
        """
        there, here = Path(self._recipe.start or ""), Path(recipe.start or "")
        is_moved = bool(here.name) and there.name == here.name and not there.exists()
        return self._recipe.describe_difference(recipe, step, same_start=same_start or is_moved)

    def load(self, trust: Collection[str] = ()) -> Recipe:
        """The recipe, to be run: all that it names is mupscale's, torch's or of a trusted package, and of its kind.

        trust: names of packages or modules. Nothing is imported before all names are looked at.
        """
        specs = specs_in(self._recipe)
        for look in (_doubt_name, _doubt_code, _doubt_reach):
            for what, spec in specs.items():
                try:
                    doubt = look(what, spec)
                except MupscaleError as error:
                    raise MupscaleError(f"{self.path}: {what}: {error}") from None
                if doubt is not None and not any(f"{doubt.code}.".startswith(f"{name}.") for name in trust):
                    trust = as_asked(f"trust=[{doubt.package!r}]", f"--trust {doubt.package}")
                    raise MupscaleError(f"{self.path} {doubt.words}, add {trust}")
        return self._recipe


class _Doubt(NamedTuple):
    """Why what a file names is not used unless it is trusted: which code, and the package to trust."""

    words: str
    code: str
    package: str


def _doubt_name(what: str, spec: Spec) -> _Doubt | None:
    """Of names and arguments alone: nothing is imported."""
    path = spec.class_path
    if not all(part.isidentifier() for part in path.split(".")) or "." not in path:
        raise MupscaleError(f"{show_short(path)} is no import path")
    package = path.split(".")[0]
    if not path.startswith(_HARMLESS):
        words = (
            f"names {path} as its {what}. mupscale does not import {package} for a file that may come from somebody "
            "else. If you trust that code"
        )
        return _Doubt(words, path, package)
    if what.startswith("callbacks") and spec.init_args:
        words = f"gives its callback {path} arguments, which may tell it where to write: if you trust that file"
        return _Doubt(words, path, package)
    return None


def _doubt_code(what: str, spec: Spec) -> _Doubt | None:
    """Of mupscale and torch only classes are called, and no function may come from elsewhere than its name says."""
    path, target, kind = spec.class_path, spec.load(), Callback if what.startswith("callbacks") else _KINDS.get(what)
    if kind is None:
        load_loss(path)
    else:
        load_of_kind(path, kind)
        if path.startswith(_HARMLESS) and not inspect.isclass(target):
            raise MupscaleError(f"{path} is a function, but must be a {kind_name(kind)}")
    home = f"{getattr(target, '__module__', None) or ''}."
    if inspect.isclass(target) or home.startswith(("mupscale.", "torch.")):
        return None
    named = f"{home}{getattr(target, '__name__', '?')}"
    return _Doubt(f"names {path} as its {what}, which is {named}: if you trust that code", home, home.split(".")[0])


def _doubt_reach(what: str, spec: Spec) -> _Doubt | None:
    """Of what sends data elsewhere, or writes to a place of the file's choice."""
    path, target = spec.class_path, spec.load()
    if getattr(target, "reaches_out", False):
        words = f"names {path} as {what}, which sends data about the run elsewhere: if you want that"
        return _Doubt(words, path, path.split(".")[0])
    if what != "data" or not isinstance(target, type(Data)):  # else a function of a trusted package
        return None
    place: Path | None = target.writes_to(spec.init_args)
    words = (
        f"would have {path} write to {place}, where nothing is packed yet: make it yourself (mupscale data tokenize), "
        "or, if you trust that file"
    )
    return None if place is None else _Doubt(words, path, "mupscale.data")


def packages_to_trust(recipe: Recipe) -> list[str]:
    """The packages of one's own that a run names, which `mupscale resume` has to be told to trust."""
    specs = specs_in(recipe).items()
    return _packages(s for what, s in specs if _doubt_name(what, s) or getattr(s.load(), "reaches_out", False))
