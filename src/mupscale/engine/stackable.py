"""What the runs of one program must share, and what each of them may have for itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mupscale.system import MupscaleError
from mupscale.train import Recipe, Seeds

OWN = ("lr", "weight_decay", "eps")  # hyperparameters of which each run may have its own


class NotStackable(MupscaleError):
    """Why these runs cannot be one program; they can still be trained one at a time."""


def check_alike(recipes: Sequence[Recipe]) -> Recipe:
    """What the runs share, as one recipe; or what is in the way of training them as one."""
    first = recipes[0]
    if first.accumulate > 1:
        raise NotStackable("steps that are cut into parts (accumulate) are taken one run at a time")
    for recipe in recipes:
        for growth in recipe.grow:
            if growth.width != recipe.width or growth.noise:
                raise NotStackable("a stack cannot grow in the middle; start from a checkpoint (from) instead")
    if len({recipe.out is None for recipe in recipes}) > 1:
        raise NotStackable("some of the runs have a folder (out) and others have none")
    alike = [_without_own(recipe) for recipe in recipes]
    for other in alike[1:]:
        if other != alike[0]:
            differing = next(name for name in vars(other) if getattr(other, name) != getattr(alike[0], name))
            raise NotStackable(f"the runs differ in {differing}, which must be one for all")
    return first


def _without_own(recipe: Recipe) -> Recipe:
    """The recipe without what may differ between the runs of a stack."""
    shared = {name: value for name, value in recipe.optimizer.init_args.items() if name not in OWN}
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, init_args={**shared, "lr": 1.0}),
        seeds=Seeds(),
        out=None,
        start=None,
        start_width=None,
        noise=0.0,
        noise_unit="init",
        grow=[],
    )


def same_beginnings(recipes: Sequence[Recipe]) -> list[list[int]]:
    """The rows in groups whose models are the same before their first step."""
    groups: dict[str, list[int]] = {}
    for row, recipe in enumerate(recipes):
        upscaled = [recipe.start, recipe.start_width, recipe.noise, recipe.noise_unit, recipe.seeds.noise]
        key = json.dumps([recipe.seeds.init, *upscaled], sort_keys=True)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def rate_after(recipe: Recipe, step: int) -> float:
    """The learning rate for the step after `step` ones, before the schedule; growth may have changed it."""
    changed = [growth.lr for growth in recipe.grow if growth.at <= step and growth.lr is not None]
    return float(changed[-1] if changed else recipe.optimizer.init_args["lr"])
