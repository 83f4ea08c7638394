"""How many runs fit into memory at once."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mupscale.data import Data
from mupscale.engine.stack import RunStack
from mupscale.system import available_memory
from mupscale.train import Recipe

_SHARE = 0.7  # of free memory, that a stack may take
_ASSUMED_FREE = 4 << 30  # bytes, where the system does not tell


def runs_at_once(recipe: Recipe, device: torch.device, data: Data, memory: int | None = None) -> int:
    """How many runs fit into memory (bytes; what is free if not given) at once; one at least.

    A run takes what a step keeps for its backward pass, its parameters and optimizer state with room to work on them,
    and its batch.
    """
    stack = RunStack([replace(recipe, out=None)], device, data)
    x, y = data.batch(recipe.seeds.data, 0, recipe.batch)
    replicas = stack.replicas
    activations = stack.vmapped.bytes_for_backward(*replicas.row(0), x, y)
    parameters = replicas.flat.nbytes
    each = 2 * activations + (6 + len(replicas.state)) * parameters + 2 * (x.nbytes + y.nbytes)
    return max(1, int(_SHARE * (free_memory(device) if memory is None else memory) / each))


def even_share(count: int, most: int) -> int:
    """The size of the largest part, if `count` is cut into equal parts of at most `most`."""
    return math.ceil(count / math.ceil(count / most))


def free_memory(device: torch.device) -> int:
    """Bytes that are free: on the GPU, or in the machine or container that this process runs in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    size = available_memory()
    return _ASSUMED_FREE if size is None else size
