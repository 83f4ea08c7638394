"""Whose run is in a folder: one that this user began on this machine may load his own classes again.

What is signed is all that names code in a recipe, the folder's place, and the files that the code comes from. So no
folder of somebody else's counts as own, nor a copy of an own one, nor one whose recipe was changed; and in another
current folder, a module of the same name is another one.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mupscale.system import MupscaleError, is_signed, read_json, remove, replace_text, sign
from mupscale.train.callbacks import callback_specs
from mupscale.train.recipe import Recipe

SIGNATURE = "own.json"
_OURS = ("mupscale", "torch")


def packages_named(recipe: Recipe) -> list[str]:
    """The packages and modules that a recipe names; nothing is imported.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mine.Net", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd = Spec("torch.optim.SGD", {"lr": 0.1})
    >>> packages_named(Recipe(model, data, sgd, width=16, base=16, steps=4, batch=32))
    ['mine', 'mupscale', 'torch']
    """
    specs = [recipe.model, recipe.data, recipe.optimizer, *callback_specs(recipe.callbacks)]
    return sorted({path.split(".")[0] for path in (recipe.loss, *(spec.class_path for spec in specs))})


def sign_run(folder: Path, recipe: Recipe) -> None:
    """Remember that the run in this folder is this user's own, where it names classes of his own."""
    text = _text(folder, recipe) if set(packages_named(recipe)) - {*_OURS} else None
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
    named = [recipe.model, recipe.data, recipe.optimizer, *callback_specs(recipe.callbacks)]
    code = {name: _origin(name) for name in packages_named(recipe) if name not in _OURS}
    if None in code.values():
        return None
    values = [[spec.class_path, spec.init_args] for spec in named]
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
