"""Evaluation on held-out data, each process on its part of every batch."""

from __future__ import annotations

import torch
from torch import nn

from mupscale.data import Data
from mupscale.train.loss_functions import count_correct
from mupscale.train.numeric_precision import cast_input
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, recipe: Recipe, processes: Processes) -> dict[str, float]:
    """Mean loss over the evaluation set, and the accuracy where targets are classes."""
    loss_of = recipe.loss_function()
    totals = torch.zeros(4, dtype=torch.float64, device=processes.device)  # loss, examples, correct, targets
    processes.share_buffers(model)
    model.eval()
    try:
        for x, y in data.evaluation(recipe.evaluation.batch or recipe.batch):
            mine = slice(len(x) * processes.rank // processes.world, len(x) * (processes.rank + 1) // processes.world)
            part_x, part_y, weight = x[mine], y[mine], 1.0
            if not len(part_x):  # all processes must take part, those without an example, too
                part_x, part_y, weight = x[:1], y[:1], 0.0
            with torch.autocast(processes.device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
                outputs = model(cast_input(part_x, recipe))
                loss = loss_of(outputs, part_y)
            right = count_correct(outputs, part_y)
            counts = [loss.double() * len(part_x), len(part_x), 0 if right is None else right]
            row = torch.stack([torch.as_tensor(c, dtype=torch.float64, device=processes.device) for c in counts])
            totals[:3] += weight * row
            totals[3] += weight * part_y.numel() * (right is not None)
    finally:
        model.train()
        processes.reshard(model)
    loss_sum, examples, right_sum, targets = processes.sum(totals).tolist()
    accuracy = {"accuracy": right_sum / targets} if targets else {}
    return {"loss": loss_sum / examples, **accuracy}
