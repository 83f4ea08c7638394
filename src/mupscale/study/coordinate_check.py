"""The coordinate check of a study: is the family set up right at all? One picture of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mupscale.checks import coord_check
from mupscale.core import WholeWidth, Width
from mupscale.study.training import Ground, Note
from mupscale.study.tree import hash_values
from mupscale.system import MupscaleError, read_json, write_json
from mupscale.train import cast_input

_EXAMPLES = 256  # in a batch of the coordinate check, at most; of text so many tokens
_FEW = 8  # examples, below which the check is made at smaller widths
_AFFORDABLE = 5e10  # FLOPs of a step of the check
_WIDE_ENOUGH = 64  # below this width the readout's own start shows in a coordinate check


def check_coordinates(
    ground: Ground,
    small: Sequence[WholeWidth],
    times: Callable[[WholeWidth, int], WholeWidth],
    folder: Path,
    lr: float,
    note: Note,
) -> dict[str, Any] | None:
    """Title and rows of the check, kept in the study's folder; None where it cannot be made.

    small: widths that were tuned at; times: a width so many times as large.
    """
    widths = _widths(ground, small, times)
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


def _widths(
    ground: Ground, widths: Sequence[WholeWidth], times: Callable[[WholeWidth, int], WholeWidth]
) -> list[WholeWidth]:
    """Three, from the smallest width that is tuned at, or from 64 where that is cheap."""
    small = min(widths, key=lambda width: Width.of(width).size)
    narrow = Width.of(small)
    start = narrow.times(math.ceil(_WIDE_ENOUGH / narrow.size)).whole if narrow.is_plain else small
    if _examples(ground, times(start, 4)) < _FEW:
        start = small
    return [times(start, factor) for factor in (1, 2, 4)]


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
    batches = [_on_cpu(data.batch(recipe.seeds.data, number * count, count)) for number in range(3)]

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


def _on_cpu(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Where the check's models are."""
    return batch[0].cpu(), batch[1].cpu()
