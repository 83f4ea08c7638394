"""Which dimensions of a family's parameters are widths, and which of its sizes is the number of blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import Tensor, nn

from mupscale.core import Width, naming
from mupscale.system import MupscaleError

Sketch = Callable[[Width], nn.Module]
"""A family's member at a width, without memory."""


def find_width_dims(sketch: Sketch, base: Width) -> dict[str, set[int]]:
    """Dimensions that change when the widths double, together or one at a time.

    >>> find_width_dims(lambda width: nn.Linear(3, width.sizes["width"]), Width.of(8))
    {'weight': {0}, 'bias': {0}}
    """
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
        raise MupscaleError(f"no parameter changes when the width doubles from {base.plain}: does build use its width?")
    return width_dims


def find_depth_size(sketch: Sketch, base: Width) -> str | None:
    """The one of a width's sizes that is a number of blocks: with twice as much of it there are more parameters.

    >>> def sketch(width):
    ...     return nn.Sequential(*(nn.Linear(3, width.sizes["width"]) for _ in range(width.sizes["layers"])))
    >>> find_depth_size(sketch, Width.of({"width": 8, "layers": 2}))
    'layers'
    """
    if base.is_plain or len(base.sizes) < 2 or not base.is_whole:
        return None
    found = []
    small = all_tensors(sketch(base)).keys()
    for name in base.sizes:
        with suppress(Exception):  # a size alone may not be buildable
            if len(all_tensors(sketch(base.times(2, [name]))).keys() - small):
                found.append(name)
    if len(found) > 1:
        raise MupscaleError(f"both {found[0]} and {found[1]} change the number of parameters, and one of them may")
    return found[0] if found else None


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and buffers.

    >>> list(all_tensors(nn.BatchNorm1d(2)))[:3]
    ['weight', 'bias', 'running_mean']
    """
    model = naming.unwrap(model)
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {naming.canonical(name): tensor for name, tensor in pairs}
