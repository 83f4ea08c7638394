"""A model's own initial values, rescaled to those that μP has at its width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mupscale.core import Entry
from mupscale.planning import rescale_spread


@torch.no_grad()
def rescale_to_mup(
    parameters: Mapping[str, Tensor],
    entries: Mapping[str, Entry],
    stds: Mapping[str, float],
    means: Mapping[str, tuple[float, ...]],
    reference: Mapping[str, Tensor],
) -> None:
    """Give these parameters of a model the values that they start with under μP, in place.

    entries: how the model whose initial values are taken as they are becomes this one. stds, means: measured on that
    one; a std of 0 is a constant. reference: draws of what is random and has no width, which is taken from there.
    """
    for name, p in parameters.items():
        entry = entries[name]
        fold, offset = float(entry.fold), float(entry.offset)
        if stds[name] == 0:
            p.mul_(fold).add_(offset * (fold - 1))
        elif not entry.axes:
            p.copy_(reference[name])
        else:
            rescale_spread(p, stds[name] * entry.init, fold, centred=means[name] != (0.0,))
