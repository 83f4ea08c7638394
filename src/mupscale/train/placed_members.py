"""Members of a family where they train: under FSDP2 each process makes its own shards, and none the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mupscale.core import WholeWidth, copy_into, naming
from mupscale.family import Family
from mupscale.growth import materialize
from mupscale.train.processes import Processes, divide_by_size

_ROUNDS = 4  # in which a sharded model is made: in each, a process holds a fourth of its share beside its shards


def place_member(family: Family, width: WholeWidth, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The model of this width where it trains, for parameters that are read from somewhere; its buffers have values.

    >>> family = Family(lambda width: nn.Linear(3, width), 8)
    >>> place_member(family, 16, Processes(torch.device("cpu")), torch.float64).weight.shape
    torch.Size([16, 3])
    """
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.build(width).to(dtype))
    model = processes.place(family.sketch(width).to(dtype))
    materialize(model, processes.device)
    _fill_buffers(model, family.drawn_part(width, 0, ()))
    return model


def init_member(family: Family, width: WholeWidth, seed: int, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The freshly initialised model of this width where it trains; the same for any number of processes.

    >>> family = Family(lambda width: nn.Linear(3, width), 64)
    >>> model = init_member(family, 64, 0, Processes(torch.device("cpu")), torch.float32)
    >>> torch.equal(model.weight, family.init(64).weight)
    True
    """
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.init_untried(width, seed=seed).to(dtype))
    sketch = family.sketch(width)
    sizes = {name: p.numel() * p.element_size() for name, p in naming.parameters(sketch).items()}
    shapes = {name: (p.shape, p.dtype) for name, p in naming.parameters(sketch).items()}
    model = processes.place(sketch.to(dtype))
    materialize(model, processes.device)
    targets, parts = naming.parameters(model), divide_by_size(sizes, _ROUNDS * processes.world)
    for number in range(0, len(parts), processes.world):
        ours = parts[number + processes.rank]
        member = family.init_part(width, seed, ours)
        _fill_buffers(model, member)
        made = {name: naming.parameters(member)[name].detach() for name in ours}
        del member  # and with it the memory that all others share
        for owner, part in enumerate(parts[number : number + processes.world]):
            for name in part:
                shape, kind = shapes[name]
                whole = made.pop(name) if owner == processes.rank else torch.empty(shape, dtype=kind)
                whole = whole.to(processes.device)
                dist.broadcast(whole, owner)
                copy_into(targets[name], whole)
                del whole
    return model


@torch.no_grad()
def _fill_buffers(model: nn.Module, built: nn.Module) -> None:
    theirs: Mapping[str, Tensor] = naming.buffers(built)
    for name, buffer in naming.buffers(model).items():
        buffer.copy_(theirs[name])
