"""Norms over a growing axis: what they do to it, found by their class or by calling them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import torch
from torch import nn
from torch.func import functional_call

from mupscale.core import Entry, copy_model
from mupscale.planning.role_registry import is_torchs_own

_SHIFT = 3.0


def norms_over_widths(modules: Mapping[str, nn.Module], entries: Mapping[str, Entry]) -> dict[str, str]:
    """By the name of each parameter of a norm over an axis that grows: "layer", "rms", "group" (its gain) or "bias".

    modules: the narrow model's, by path. A norm that has statistics for every unit of its own is none here.

    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.RMSNorm(n)) for n in (8, 16))
    >>> from mupscale.core import Axis
    >>> entry = Entry(narrow=(8,), wide=(16,), axes={0: Axis(2, side="out")})
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


def offset_of_gain(module: nn.Module, name: str) -> int:
    """What a norm adds to the gain that it stores: 1 where its output is zero at a gain of −1, else 0.

    >>> offset_of_gain(nn.RMSNorm(4), "weight")
    0
    """
    own = dict(module.named_parameters(recurse=False))
    if own[name].is_meta:
        return 0
    x = torch.randn(2, own[name].numel(), generator=torch.Generator().manual_seed(0)).to(own[name])
    values = {n: torch.full_like(p, -1.0 if n == name else 0.0) for n, p in own.items()}
    try:
        with torch.no_grad():
            return int(not functional_call(copy_model(module), values, (x,)).any())
    except Exception:  # it takes other arguments
        return 0


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
    if isinstance(module, nn.modules.batchnorm._NormBase) or not own:
        return ""
    if "norm" not in type(module).__name__.lower():
        return _kind_of_unnamed(module)
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


def _kind_of_unnamed(module: nn.Module) -> str:
    """The same of a module whose class is called something else: only what is certainly a norm is one.

    It has a gain for every unit, and a bias at most. Its outputs are as large for larger inputs, of mean square 1 for a
    gain of 1, and each depends on all inputs. It is called with weights of its own, and none of the model's change.
    """
    own = dict(module.named_parameters(recurse=False))
    gain, *rest = own.values()
    is_plain = not is_torchs_own(module) and not any(True for _ in module.children()) and not list(module.buffers())
    if not is_plain or len(rest) > 1 or gain.dim() != 1 or gain.numel() < 2 or any(p.shape != gain.shape for p in rest):
        return ""
    with torch.random.fork_rng(devices=[]):
        try:
            return _kind_by_calling(copy_model(module).to_empty(device="cpu"), list(own), gain.numel())
        except Exception:  # it takes other arguments
            return ""


def bare_norms(modules: Mapping[str, nn.Module], widths: Collection[int]) -> dict[str, str]:
    """By path, what norms without a gain do that take units of one of these numbers.

    >>> bare_norms({"norm": nn.LayerNorm(4, elementwise_affine=False), "other": nn.LayerNorm(4)}, [4, 8])
    {'norm': 'layer'}
    """
    found = {}
    for path, module in modules.items():
        if "norm" in type(module).__name__.lower() and not module.state_dict():
            for units in widths:
                with suppress(Exception):  # it takes another number of units
                    if units > 1 and (kind := _kind_of_function(module, units)):
                        found[path] = kind
    return found


@torch.no_grad()
def _kind_by_calling(module: nn.Module, names: list[str], units: int) -> str:
    ones, zeros = ({name: torch.full((units,), value) for name in names} for value in (1.0, 0.0))
    ones |= {name: zeros[name] for name in names[1:]}

    def normed(values: torch.Tensor) -> torch.Tensor:
        with_gain, without = (functional_call(module, weights, (values,)) for weights in (ones, zeros))
        return torch.sub(with_gain, without)  # some gains are 1 + weight

    return _kind_of_function(normed, units)


def _kind_of_function(normed: Callable[[torch.Tensor], torch.Tensor], units: int) -> str:
    x = torch.randn(4, units, generator=torch.Generator().manual_seed(0))
    y, other = normed(x), normed(torch.cat([x[:, :1] * 9 * _SHIFT, x[:, 1:]], dim=1))
    if not _are_close(y, normed(x * _SHIFT)) or _are_close(y[:, 1:], other[:, 1:]):
        return ""
    if not math.isclose(float(y.square().mean()), 1.0, rel_tol=0.05):
        return ""
    return "layer" if _are_close(y, normed(x + _SHIFT)) else "rms"


def _kind_by_name(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    return "rms" if "rms" in name else "layer" if "layernorm" in name else ""


def _are_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and float((left - right).abs().max()) <= 0.02 * float(left.abs().max())
