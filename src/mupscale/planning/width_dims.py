"""Which dimensions of a family's parameters are widths, and which of its sizes is the number of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor, nn

from mupscale.core import Width, naming
from mupscale.system import MupscaleError

_WIDE_ENOUGH = 64  # below this width an initialisation says little about wide ones

Sketch = Callable[[Width], nn.Module]
"""A family's member at a width, without memory."""


def find_width_dims(sketch: Sketch, base: Width) -> dict[str, set[int]]:
    """Dimensions that change when the widths double, together or one at a time."""
    names = list(base.sizes)
    probes = [base.times(2)]
    if len(names) > 1:
        probes += [base.times(2, [name]) for name in names]
    width_dims: dict[str, set[int]] = {}
    small = all_tensors(sketch(base))
    for number, width in enumerate(probes):
        try:
            probe = all_tensors(sketch(width))
        except Exception:  # a width alone may not be buildable; all of them together must be
            if number == 0:
                raise
            continue
        for name, tensor in probe.items():
            if name in small and small[name].dim() == tensor.dim():
                grown = {d for d in range(tensor.dim()) if tensor.shape[d] != small[name].shape[d]}
                width_dims.setdefault(name, set()).update(grown)
    if not any(width_dims.values()):
        raise MupscaleError(
            f"no parameter changes when the width doubles from {base.plain}: does build use its argument?"
        )
    return width_dims


def find_depth_size(sketch: Sketch, base: Width) -> str | None:
    """The one of a width's sizes that is a number of blocks: with twice as much of it there are more parameters."""
    if base.is_plain or len(base.sizes) < 2 or not base.is_whole:
        return None
    depths = []
    small = all_tensors(sketch(base)).keys()
    for name in base.sizes:
        with suppress(Exception):  # a size alone may not be buildable
            if len(all_tensors(sketch(base.times(2, [name]))).keys() - small):
                depths.append(name)
    if len(depths) > 1:
        raise MupscaleError(
            f"both {depths[0]} and {depths[1]} change the number of parameters, but only one size may do that"
        )
    return depths[0] if depths else None


def default_init_at(base: Width, model: nn.Module, width_dims: Mapping[str, set[int]]) -> Width:
    """The base, or its smallest multiple at which every matrix is 64 wide: a base of 2 may be 2 heads of 32.

    model: the member of the family at the base.
    """
    tensors = all_tensors(model)
    widths = [tensors[n].shape[d] for n, dims in width_dims.items() if tensors[n].dim() > 1 for d in dims]
    size = max(base.size, min(widths, default=0))
    return base.times(max(1, math.ceil(_WIDE_ENOUGH / size))) if base.is_whole else base


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and buffers."""
    model = naming.unwrap(model)
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {naming.canonical(name): tensor for name, tensor in pairs}
