"""Tensors that FSDP2 shards over processes: gathering one, laying a tensor out like one, and a module's own class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "full_tensor")


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, for which all processes must ask; any other tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a sharded tensor, which may be nothing; any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def laid_out_like(whole: Tensor, template: Tensor) -> Tensor:
    """The whole tensor, which every process has, laid out as the template is; no communication."""
    if not is_sharded(template):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(template, DTensor)
    return distribute_tensor(whole, template.device_mesh, template.placements, src_data_rank=None)


def copy_into(target: Tensor, whole: Tensor) -> None:
    """target ← whole, in place, whatever the layout and the device of the target."""
    with torch.no_grad():
        target.copy_(laid_out_like(whole.to(target.device), target))


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's class as its author wrote it.

    fully_shard puts a class (FSDPModule, ITS_CLASS) before it, and a parametrisation one for every instance.
    """
    cls = type_before_parametrizations(module)
    if any(base.__name__ == "FSDPModule" for base in cls.__bases__):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return cls
