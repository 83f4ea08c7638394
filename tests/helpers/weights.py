"""Weights, state and all else that is held: a step that changes them, and whether they are the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def take_step(optimizer: Optimizer, loss: Tensor) -> float:
    """Train down this loss, and nothing that was left before; its value."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def identical(a: Any, b: Any) -> bool:
    """Equal in structure, dtype and every bit: numbers, tensors, all kept in them, models and optimizers."""
    a, b = _held(a), _held(b)
    if isinstance(a, Tensor):
        raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b) if isinstance(t, Tensor)]
        return len(raw) == 2 and a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and (a == b or a != a)


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference of tensors with the same names."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it, where processes hold parts."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@contextmanager
def unchanged(*things: Any) -> Iterator[None]:
    """Whatever is tried inside, these models, optimizers and others are afterwards as they were."""
    kept = copy.deepcopy([_held(thing) for thing in things])
    yield
    assert identical([_held(thing) for thing in things], kept), "it changed"


def _held(thing: Any) -> Any:
    return thing.state_dict() if isinstance(thing, nn.Module | Optimizer) else thing
