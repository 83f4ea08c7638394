"""A checkpoint with more layers or experts: is it what mupscale.json says, and how far did its outputs move?"""

from __future__ import annotations

import math

import torch
from torch import nn

from mupscale.hf.describe import Batch
from mupscale.hf.verification.comparison import TOLERANCE, Comparison, ComparisonRow
from mupscale.hf.verification.model_outputs import compare_outputs
from mupscale.hf.verification.relation import Relation
from mupscale.hf.verification.weights import PlannedGrowth, is_exact
from mupscale.planning import Difference


def compare_deep(
    relation: Relation,
    small: nn.Module,
    deep: nn.Module,
    batches: list[Batch],
    files: tuple[list[ComparisonRow], Difference | None],
    precision: torch.dtype,
    tolerance: float | None,
    notes: list[str],
    train: int,
) -> Comparison:
    """Outputs as more rows: the same where new layers are identity, moved where layers or units are not.

    files: what was found of them. tolerance: what the caller allows, instead of what this precision may round. Training
    is never compared: new layers learn what the small model has not.
    """
    outputs = compare_outputs(small, deep, batches[:2], None if relation.fresh is None else relation.old_units)
    movers, (rows, first) = _movers(relation), files
    allowed = math.inf if movers else max(TOLERANCE[precision], 8 * _rounding(relation))
    note = f"moved by {' and '.join(movers)}" if movers else ""
    allowed = allowed if tolerance is None else tolerance
    rows = [*rows, *(ComparisonRow(what, off, allowed, note) for what, off in outputs.differences.items())]
    what, moved = max(outputs.differences.items(), key=lambda item: item[1])
    move = "moves" if movers == ["noise"] else "move"
    told = f"{' and '.join(movers)} {move} {what} by {moved:.1%}" if movers else ""
    if not movers and all(row.ok for row in rows):
        if any(growth.layers is not None for growth in relation.deepened):
            notes = [*notes, "New layers write nothing into the residual stream yet, so the function is the same."]
        if any(growth.experts is not None for growth in relation.deepened):
            notes = [*notes, "All copies of an expert compute the same, so the function is the same."]
    if train:
        notes = [*notes, "Training is not compared: new layers and experts learn from the first step on."]
    return Comparison(tuple(rows), outputs.losses, first, notes=tuple(notes), as_recorded=told)


def _movers(relation: Relation) -> list[str]:
    """What makes the deep model compute something else, in words."""
    stacked = any(growth.deepen != "identity" for growth in relation.deepened)
    parts = {
        "copied layers": stacked,
        "copied experts": relation.moved_by_experts,
        "noise": relation.noisy,
        "fresh units": relation.fresh is not None,
    }
    return [what for what, there in parts.items() if there]


def _rounding(relation: Relation) -> float:
    """The relative error of weights that the files of the deep model cannot hold exactly; 0 where they can."""
    few, many = (
        {stored.dtype for stored in source.tensors.values() if stored.dtype.is_floating_point}
        for source in (relation.small, relation.wide)
    )
    plans = [step.plan for step in relation.steps() if isinstance(step, PlannedGrowth)]
    if few == many and all(is_exact(plan.parameters) for plan in plans):
        return 1e-4 if torch.float16 in many and plans else 0.0
    return max(torch.finfo(dtype).eps for dtype in many)
