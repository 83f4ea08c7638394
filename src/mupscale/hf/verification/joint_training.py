"""Two models trained side by side: do they go on computing the same?"""

from __future__ import annotations

import math

import torch
from torch import nn

from mupscale.checks import verify as train_both
from mupscale.core import Plan, naming
from mupscale.hf.describe import Batch
from mupscale.hf.training import decay_groups
from mupscale.hf.verification.comparison import ComparisonRow
from mupscale.hf.verification.model_outputs import loss_of, plain_outputs, run_model, widths_of
from mupscale.planning import Difference

_LR, _DECAY = 1e-3, 0.1


def compare_training(
    ours: nn.Module, theirs: nn.Module, plan: Plan, batches: list[Batch], steps: int, tolerance: float
) -> tuple[ComparisonRow, Difference | None]:
    """Both trained side by side: Theorem 'Dynamic equivalence' on the checkpoints themselves."""
    optimizer, clip = _optimizer(ours, batches[0])
    with torch.no_grad():
        widths = widths_of(run_model(ours, batches[0]))
    with plain_outputs(ours, widths), plain_outputs(theirs, widths):
        turns = (batches[i % len(batches)] for i in range(steps + 1))
        report = train_both(
            ours,
            theirs,
            plan,
            turns,
            lambda model, batch: loss_of(model, model(**batch), batch),
            optimizer=optimizer,
            steps=steps,
            clip=clip,
            tolerance=tolerance,
            in_float64=False,  # in the precision of the comparison, for which there is memory
        )
    return ComparisonRow(
        f"outputs over {steps} steps of AdamW", report.max_relative_difference, tolerance
    ), report.first


def _optimizer(model: nn.Module, batch: Batch) -> tuple[torch.optim.Optimizer, float]:
    """AdamW that decays all but biases and norms, eps a tenth of the gradients' size; half their norm to clip at."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss_of(model, run_model(model, batch), batch), parameters, allow_unused=True)
    present = [g for g in grads if g is not None]
    norm = float(nn.utils.get_total_norm(present))
    eps = max(0.1 * norm / math.sqrt(sum(g.numel() for g in present)), 1e-12)
    named = naming.parameters(model)
    groups = [{**group, "params": [named[name] for name in group["params"]]} for group in decay_groups(model, _DECAY)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=_LR, eps=eps), norm / 2
