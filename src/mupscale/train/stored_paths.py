"""Paths in a recipe that lies in a folder: seen from that folder, so that it may be moved, and called by any path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupscale.train.recipe import Recipe

_HERE = "."


def stored_values(recipe: Recipe, folder: str | Path) -> dict[str, Any]:
    """A recipe's plain values for a file of `folder`, which is its `out`; what it starts from is seen from there.

    >>> from mupscale.train import Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd = Spec("torch.optim.SGD", {"lr": 0.1})
    >>> recipe = Recipe(model, data, sgd, width=16, base=16, steps=4, batch=32, out="runs/wide", start="runs/base")
    >>> values = stored_values(recipe, "runs/wide")
    >>> values["out"], values["from"]
    ('.', '../base')
    """
    return {**recipe.to_json(), "out": _HERE, "from": seen_from(folder, recipe.start)}


def values_in(values: Mapping[str, Any], folder: str | Path) -> Mapping[str, Any]:
    """Values that `stored_values` gave, read in a file of `folder`, wherever that is now.

    >>> Path(values_in({"out": ".", "from": "../base"}, "moved/wide")["from"]) == Path("moved/base").resolve()
    True
    """
    if values.get("out") != _HERE:
        return values
    start = values.get("from")
    if isinstance(start, str):
        start = os.path.normpath(os.path.join(os.path.realpath(folder), start))
    return {**values, "out": str(folder), "from": start}


def seen_from(folder: str | Path, path: str | None) -> str | None:
    """A path as it leads from a folder; None stays None.

    >>> seen_from("runs/wide", "runs/base")
    '../base'
    """
    if path is None:
        return None
    try:
        return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()
    except ValueError:  # on another drive of Windows'
        return os.path.realpath(path)
