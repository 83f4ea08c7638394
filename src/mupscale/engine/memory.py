"""How many runs can be one program: what one of them takes, and what is free."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mupscale.data import Data
from mupscale.engine.stack import Stack
from mupscale.system import available_memory
from mupscale.train import Recipe

_SPARE = 0.7  # how much of what is free a stack may take
_UNKNOWN = 4 << 30  # taken to be free where nobody tells


def runs_at_once(recipe: Recipe, device: torch.device, data: Data, memory: int | None = None) -> int:
    """How many runs fit into memory (bytes; what is free if not given) together, one at least.

    A run takes what a step keeps for its backward pass, its parameters and optimizer state with room to work on them,
    and its batch.
    """
    probe = Stack([replace(recipe, out=None)], device, data)
    x, y = data.batch(recipe.seeds.data, 0, recipe.batch)
    replicas = probe.replicas
    kept = probe.program.kept(*replicas.one(0), x, y)
    rows = replicas.flat.nbytes
    each = 2 * kept + (6 + len(replicas.state)) * rows + 2 * (x.nbytes + y.nbytes)
    return max(1, int(_SPARE * (free_memory(device) if memory is None else memory) / each))


def even_share(count: int, most: int) -> int:
    """The size of the largest of equal parts, none of which is more than so many."""
    return math.ceil(count / math.ceil(count / most))


def free_memory(device: torch.device) -> int:
    """Bytes that can be had: of the device, or of the machine and the container that this process lives in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    size = available_memory()
    return _UNKNOWN if size is None else size
