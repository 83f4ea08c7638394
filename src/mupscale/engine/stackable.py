"""What the runs of a stack must share, and what each of them may have for itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mupscale.system import MupscaleError
from mupscale.train import Filling, Recipe, Seeds

PER_RUN = ("lr", "weight_decay", "eps")
"""Hyperparameters of which each run may have its own."""


class NotStackable(MupscaleError):
    """These runs cannot be trained as one program; they can still be trained one at a time."""


def check_stackable(recipes: Sequence[Recipe]) -> None:
    """Refuse runs that cannot be trained as one program, as far as their recipes tell."""
    if recipes[0].accumulate > 1:
        raise NotStackable("steps that are cut into parts (accumulate) are taken one run at a time")
    if recipes[0].on_nonfinite == "rewind":
        raise NotStackable("a run that may go back (on_nonfinite: rewind) cannot do so among others that go on")
    if any(recipe.no_decay or recipe.callbacks for recipe in recipes):
        raise NotStackable("parameter groups (no_decay) and callbacks are for runs that are trained one at a time")
    for recipe in recipes:
        for growth in recipe.grow:
            if growth.width != recipe.width or growth.noise:
                raise NotStackable("a stack cannot grow in the middle; start from a checkpoint (from) instead")
    if len({recipe.out is None for recipe in recipes}) > 1:
        raise NotStackable("some of the runs have a folder (out) and others have none")
    first, *others = (_shared_part(recipe) for recipe in recipes)
    for other in others:
        if other != first:
            differing = next(name for name in vars(other) if getattr(other, name) != getattr(first, name))
            raise NotStackable(f"the runs differ in {differing}, which must be one for all")


def _shared_part(recipe: Recipe) -> Recipe:
    """The recipe without what may differ between the runs of a stack."""
    shared = {name: value for name, value in recipe.optimizer.init_args.items() if name not in PER_RUN}
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, init_args={**shared, "lr": 1.0}),
        seeds=Seeds(),
        out=None,
        start=None,
        start_width=None,
        **Filling(how="copies").filling,
        state="keep",
        grow=[],
    )


def group_by_start(recipes: Sequence[Recipe]) -> list[list[int]]:
    """The numbers of the recipes, in groups whose models are the same before their first step."""
    groups: dict[str, list[int]] = {}
    for number, recipe in enumerate(recipes):
        upscaled = [recipe.start, recipe.start_width, recipe.width, recipe.filling, recipe.state, recipe.seeds.noise]
        key = json.dumps([recipe.seeds.init, *upscaled], sort_keys=True)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def rate_after(recipe: Recipe, step: int) -> float:
    """The learning rate for the step after `step` ones, before the schedule; growth may have changed it."""
    changed = [growth.lr for growth in recipe.grow if growth.at <= step and growth.lr is not None]
    return float(changed[-1] if changed else recipe.optimizer.init_args["lr"])
