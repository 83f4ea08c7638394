"""Evaluation on held-out data, each process on its part of every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mupscale.train.loss import correct

if TYPE_CHECKING:
    from mupscale.train.loop import Run


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Mean loss over the evaluation set, and the accuracy where targets are classes."""
    recipe, among = run.recipe, run.processes
    totals = torch.zeros(4, dtype=torch.float64, device=among.device)  # loss, examples, correct, targets
    among.share_buffers(run.model)
    run.model.eval()
    try:
        for x, y in run.data.evaluation(recipe.evaluation.batch or recipe.batch):
            mine = slice(len(x) * among.rank // among.world, len(x) * (among.rank + 1) // among.world)
            part_x, part_y, weight = x[mine], y[mine], 1.0
            if not len(part_x):  # all processes must take part, those without an example, too
                part_x, part_y, weight = x[:1], y[:1], 0.0
            with torch.autocast(among.device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
                outputs = run.model(run.as_input(part_x))
                loss = run.loss(outputs, part_y)
            right = correct(outputs, part_y)
            counts = [loss.double() * len(part_x), len(part_x), 0 if right is None else right]
            row = torch.stack([torch.as_tensor(c, dtype=torch.float64, device=among.device) for c in counts])
            totals[:3] += weight * row
            totals[3] += weight * part_y.numel() * (right is not None)
    finally:
        run.model.train()
        among.reshard(run.model)
    loss_sum, examples, right_sum, targets = among.sum(totals).tolist()
    accuracy = {"accuracy": right_sum / targets} if targets else {}
    return {"loss": loss_sum / examples, **accuracy}
