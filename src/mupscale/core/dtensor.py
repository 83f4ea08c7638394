"""What must be known about FSDP2: gathering a DTensor, laying a tensor out like one, a module's own class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def held(tensor: Tensor) -> Tensor:
    """What this process has of a sharded tensor, which may be nothing; any other as it is."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def like(whole: Tensor, template: Tensor) -> Tensor:
    """The whole tensor, which every process has, laid out as the template is; no communication."""
    if not hasattr(template, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(template, DTensor)
    return distribute_tensor(whole, template.device_mesh, template.placements, src_data_rank=None)


def write(whole: Tensor, target: Tensor) -> None:
    """target ← whole, in place, whatever the layout of the target."""
    with torch.no_grad():
        target.copy_(like(whole.to(target.device), target))


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's class as its author wrote it.

    fully_shard puts a class (FSDPModule, ITS_CLASS) before it, and a parametrisation one for every instance.
    """
    cls = type_before_parametrizations(module)
    if any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return cls
