"""Growth that keeps the function: which new weights start at zero, which at a mean, and which gains shrink.

An axis that no norm reads: new units have fresh incoming weights and none towards old units, so nothing sees them yet.
An axis that an RMSNorm reads: new units start at 0, with fresh outgoing weights. The mean square over N units is n/N of
what it was, so that gains are multiplied by √(n/N); that is exact up to the norm's eps.
An axis that a LayerNorm reads: new units start at the mean of the old ones, which leaves the mean where it is and
makes the variance n/N of what it was; the normalised new units are 0, and gains are multiplied by √(n/N).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, gather_whole
from mupscale.planning import call_arguments, kind_of_norm, tensors_in
from mupscale.system import MupscaleError

_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3}  # a norm's eps leaves a trace, too


def normed_axes(plan: Plan) -> dict[tuple[int, int], set[str]]:
    """The axes that norms are over, by their narrow and wide sizes, and what these norms do.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 2)) for n in (8, 12))
    >>> normed_axes(mu.plan(narrow, wide, grow=mu.Fresh()))
    {(8, 12): {'layer'}}
    """
    axes: dict[tuple[int, int], set[str]] = {}
    for name, kind in plan.norms.items():
        entry = plan.parameters[name]
        if kind in ("layer", "rms") and entry.axes[0].block == 1:
            axes.setdefault((entry.narrow[0], entry.wide[0]), set()).add(kind)
    return axes


def gain_factor(name: str, plan: Plan) -> float:
    """What a norm's old gains are multiplied by; 1 for every other parameter.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 2)) for n in (4, 16))
    >>> plan = mu.plan(narrow, wide, grow=mu.Fresh())
    >>> gain_factor("1.weight", plan), gain_factor("1.bias", plan)
    (0.5, 1.0)
    """
    if plan.norms.get(name) not in ("layer", "rms"):
        return 1.0
    entry = plan.parameters[name]
    return math.sqrt(entry.narrow[0] / entry.wide[0])


def _kinds(entry: Entry, dims: tuple[int, ...], plan: Plan) -> set[str]:
    """What the norms do that read this parameter's outputs, or make its inputs."""
    normed = normed_axes(plan)
    if len(dims) != 1 or dims[0] not in entry.axes:
        return set()
    axis = entry.axes[dims[0]]
    plain = axis.times != 1 and axis.block == 1 and not axis.sections
    return normed.get((entry.narrow[dims[0]], entry.wide[dims[0]]), set()) if plain else set()


def keeps_outgoing(entry: Entry, plan: Plan) -> bool:
    """Whether new inputs of this parameter are zero at first, so that their weights may be fresh."""
    return bool(_kinds(entry, entry.in_, plan))


def is_written_by_mean(name: str, entry: Entry, plan: Plan) -> bool:
    """Whether new outputs start at the mean of the old ones, since a LayerNorm reads them."""
    return name not in plan.norms and "layer" in _kinds(entry, entry.out, plan)


def is_zero(name: str, entry: Entry, plan: Plan) -> bool:
    """Whether new outputs start at zero, since an RMSNorm reads them."""
    return name not in plan.norms and _kinds(entry, entry.out, plan) == {"rms"}


def obstacles(narrow: nn.Module, plan: Plan) -> list[str]:
    """Why a lossless growth is not exact, as far as the modules tell; a batch tells the rest.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Conv1d(3, n, 1), nn.GroupNorm(2, n)) for n in (8, 12))
    >>> obstacles(narrow, mu.plan(narrow, wide, grow=mu.Fresh()))
    ["the GroupNorm of '1.weight' mixes old and new units"]
    """
    reasons = []
    for name, kind in plan.norms.items():
        if kind == "group":
            reasons.append(f"the GroupNorm of '{name}' mixes old and new units")
        elif plan.parameters[name].axes[0].block != 1:
            reasons.append(f"the norm of '{name}' is over heads, old and new together")
    for sizes, kinds in normed_axes(plan).items():
        if len(kinds) > 1:
            reasons.append(f"LayerNorms and RMSNorms read the same axis of {sizes[0]} units")
    widths = {e.narrow[d] for e in plan.parameters.values() for d, axis in e.axes.items() if axis.times != 1}
    for path, module in narrow.named_modules():
        bare = isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is None
        if bare and module.normalized_shape[-1] in widths:
            reasons.append(f"the norm '{path}' has no gain that could be rescaled ({kind_of_norm(module)})")
    return reasons


def warn_of_loss(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any = None) -> None:
    """Warn where a lossless growth has changed the function: by how much on a batch, and why if that is known."""
    reasons = obstacles(narrow, plan)
    if inputs is None:
        if reasons:
            warnings.warn(f"the growth is not lossless: {'; '.join(reasons)}", stacklevel=3)
        return
    difference, rounding = difference_of_outputs(narrow, wide, inputs)
    if difference > rounding:
        why = "; ".join(reasons) or "a norm inside the residual stream, or an activation that is not 0 at 0"
        warnings.warn(
            f"the growth is not lossless: outputs differ by {difference:.2g} of their size on the batch ({why})",
            stacklevel=3,
        )


@torch.no_grad()
def difference_of_outputs(narrow: nn.Module, wide: nn.Module, batch: Any) -> tuple[float, float]:
    """By how much the outputs of two models differ, relative to their size, and how much rounding and eps may explain.

    >>> model = nn.Linear(2, 2)
    >>> difference_of_outputs(model, model, torch.ones(1, 2))[0]
    0.0
    """
    args, kwargs = call_arguments(batch)
    outputs = []
    for model in (narrow, wide):
        modes = {module: module.training for module in model.modules()}
        model.eval()
        outputs.append(_first_tensor(model(*args, **kwargs)))
        for module, training in modes.items():
            module.training = training
    before, after = (gather_whole(output).double() for output in outputs)
    size = float(before.square().mean().sqrt()) or 1.0
    return float((after - before).abs().max()) / size, _ROUNDING.get(outputs[0].dtype, 0.05)


def _first_tensor(output: Any) -> Tensor:
    tensors = tensors_in(output)
    if not tensors:
        raise MupscaleError(f"the model gives {type(output).__name__}, in which there is no tensor to compare")
    return tensors[0]
