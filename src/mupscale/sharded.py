"""The two things that must be known about FSDP2's DTensors: gathering one, and laying a tensor out like one."""

from __future__ import annotations

import torch
from torch import Tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


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
