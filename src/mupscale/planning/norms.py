"""Norms over a growing axis: what they do to it, found by their class or by calling them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mupscale.core import Entry

_SHIFT = 3.0


def norms_over_widths(modules: Mapping[str, nn.Module], entries: Mapping[str, Entry]) -> dict[str, str]:
    """By the name of each parameter of a norm over an axis that grows: "layer", "rms", "group" (its gain) or "bias".

    modules: the narrow model's, by path. A norm that has statistics for every unit of its own is none here.

    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.RMSNorm(n)) for n in (8, 16))
    >>> from mupscale.core import Axis
    >>> entry = Entry(narrow=(8,), wide=(16,), axes={0: Axis(2)}, out=(0,))
    >>> norms_over_widths(dict(narrow.named_modules()), {"1.weight": entry})
    {'1.weight': 'rms'}
    """
    kinds = {}
    for name, entry in entries.items():
        path, _, _ = name.rpartition(".")
        grows = any(axis.times != 1 for axis in entry.axes.values())
        if grows and path in modules and len(entry.narrow) == 1 and (kind := kind_of_norm(modules[path])):
            first = next(local for local, _ in modules[path].named_parameters(recurse=False))
            kinds[name] = kind if name == f"{path}.{first}".strip(".") else "bias"
    return kinds


def kind_of_norm(module: nn.Module) -> str:
    """What a norm does to the axis it is over: "layer", "rms" or "group"; "" for what is none.

    >>> kind_of_norm(nn.LayerNorm(4)), kind_of_norm(nn.RMSNorm(4)), kind_of_norm(nn.BatchNorm1d(4))
    ('layer', 'rms', '')
    """
    if isinstance(module, nn.LayerNorm):
        return "layer"
    if isinstance(module, nn.RMSNorm):
        return "rms"
    if isinstance(module, nn.GroupNorm):
        return "group"
    own = list(module.named_parameters(recurse=False))
    if "norm" not in type(module).__name__.lower() or isinstance(module, nn.modules.batchnorm._NormBase) or not own:
        return ""
    weight = own[0][1]
    if weight.is_meta:
        return _kind_by_name(module)
    x = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad():
            y, shifted, scaled = module(x), module(x + _SHIFT), module(x * _SHIFT)
    except Exception:  # it takes other arguments
        return _kind_by_name(module)
    if _are_close(y, shifted):
        return "layer"
    return "rms" if _are_close(y, scaled) else ""


def _kind_by_name(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    return "rms" if "rms" in name else "layer" if "layernorm" in name else ""


def _are_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and float((left - right).abs().max()) <= 0.02 * float(left.abs().max())
