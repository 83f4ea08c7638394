"""The coordinate check of a study: is the family set up right at all? One picture of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mupscale.checks import coord_check
from mupscale.core import WholeWidth, Width
from mupscale.study.systems import System
from mupscale.study.training import Ground, Note
from mupscale.study.tree import hash_values
from mupscale.system import MupscaleError, read_json, write_json
from mupscale.train import cast_input

_EXAMPLES = 256  # in a batch of the coordinate check, at most; of text so many tokens
_FEW = 8  # examples, below which the check is made at smaller widths
_AFFORDABLE = 5e10  # FLOPs of a step of the check
_WIDE_ENOUGH = 64  # below this width the readout's own start shows in a coordinate check


def check_coordinates(ground: Ground, small: System, folder: Path, lr: float, note: Note) -> dict[str, Any] | None:
    """Title and rows of the check, kept in the study's folder; None where it cannot be made.

    small: the smallest system that was tuned at.
    """
    widths = _widths(ground, small)
    settings = {"recipe": hash_values(ground.identity), "lr": lr, "widths": widths}
    path = folder / "coordinates.json"
    if (stored := _read(path, settings)) is not None:
        return stored
    note(f"coordinate check: widths {', '.join(Width.of(width).label for width in widths)}")
    try:
        check = _check(ground, widths, lr)
    except Exception as error:  # one picture of the report, and no reason to lose a run
        note(f"the coordinate check could not be made: {' '.join(str(error).split())[:160]}")
        return None
    write_json(path, {"asked": settings, "check": check})
    return check


def _widths(ground: Ground, system: System) -> list[WholeWidth]:
    """Three, from the smallest width that is tuned at, or from 64 where that is cheap."""
    narrow = Width.of(system.narrow)
    growing = narrow.growing(Width.of(system.wide))
    start = narrow.times(math.ceil(_WIDE_ENOUGH / narrow.size)) if narrow.is_plain else narrow
    if _examples(ground, start.times(4, growing).whole) < _FEW:
        start = narrow
    return [start.times(factor, growing).whole for factor in (1, 2, 4)]


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """A check that is there already, made with the same recipe, learning rate and widths."""
    try:
        stored = read_json(path)
        return dict(stored["check"]) if stored["asked"] == settings else None
    except (OSError, ValueError, KeyError, TypeError, MupscaleError):
        return None


def _check(ground: Ground, widths: Sequence[WholeWidth], lr: float) -> dict[str, Any]:
    recipe, data, loss = ground.recipe, ground.data, ground.recipe.loss_function()
    count = _examples(ground, widths[-1])
    drawn = [data.batch(recipe.seeds.data, number * count, count) for number in range(3)]
    batches = [(x.cpu(), y.cpu()) for x, y in drawn]  # where the check's models are

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(cast_input(batch[0], recipe)), batch[1])

    hyper: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.optimizer.init_args.items()}
    check = coord_check(
        recipe.family(),
        widths,
        batches,
        objective,
        recipe.optimizer_class(),
        steps=3,
        seeds=2,
        dtype=recipe.dtype(),
        **{**hyper, "lr": lr},
    )
    return {"title": check.title, "rows": [asdict(row) for row in check.rows]}


def _examples(ground: Ground, width: WholeWidth) -> int:
    """How many examples a batch of the check may have, for it to take seconds on a CPU."""
    cost = ground.flops_per_step(width)
    affordable = _EXAMPLES if cost is None else int(_AFFORDABLE * ground.recipe.batch / cost)
    return max(1, min(ground.recipe.batch, _EXAMPLES // ground.data.per_example, affordable))
