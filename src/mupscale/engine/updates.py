"""One optimizer update for a whole stack of models, each with a learning rate, decay and eps of its own.

A stack's parameters lie in one matrix, a row for each model, with parameters of equal factors side by side: a
segment of columns is what a parameter group is to an optimizer. SGD, Adam and AdamW are written for such matrices as
torch.optim writes them for tensors; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from mupscale.engine.stackable import NotStackable

Rows = dict[str, Tensor]
"""State tensors by their torch names, each a matrix like the parameters."""


@dataclass(frozen=True)
class Segment:
    """Columns whose hyperparameters are the model's own times these factors; norm: their weight in the clipped norm.

    A factor may also be one for each column.
    """

    columns: slice
    lr: float | Tensor
    weight_decay: float | Tensor
    eps: float | Tensor
    norm: float | Tensor


def merge_segments(segments: Sequence[Segment], like: Tensor) -> list[Segment]:
    """All columns as one segment with a factor for each column: one pass over memory where a compiler fuses it."""

    def columns(name: str) -> Tensor:
        factors = like.new_empty(like.shape[1])
        for segment in segments:
            factors[segment.columns] = getattr(segment, name)
        return factors

    return [Segment(slice(None), *(columns(name) for name in ("lr", "weight_decay", "eps", "norm")))]


@dataclass(frozen=True)
class Hyperparameters:
    """Each model's hyperparameters at factor 1, as columns of numbers, and those that all models share."""

    lr: Tensor
    weight_decay: Tensor
    eps: Tensor
    shared: Mapping[str, Any]

    def rows(self, rows: slice | list[int]) -> Hyperparameters:
        """Those of some models; a slice shares their memory."""
        return Hyperparameters(self.lr[rows], self.weight_decay[rows], self.eps[rows], self.shared)


Update = Callable[[Tensor, Tensor, Rows, Tensor, Hyperparameters, Sequence[Segment]], None]
"""From parameters, gradients (which it may overwrite), state, steps taken so far (a number for each run, or for each
of its columns) and hyperparameters; in place."""


def adam_update(
    p: Tensor, g: Tensor, state: Rows, step: Tensor, hyper: Hyperparameters, segments: Sequence[Segment]
) -> None:
    """Adam, AMSGrad and AdamW."""
    beta1, beta2 = hyper.shared["betas"]
    corrections = (1 - beta1**step).to(p.dtype), (1 - beta2**step).sqrt().to(p.dtype)
    for segment in segments:
        at = (slice(None), segment.columns)
        correction1, correction2 = (_columns(each, at) for each in corrections)
        weights, gradient = p[at], g[at]
        lr, decay = hyper.lr * segment.lr, hyper.weight_decay * segment.weight_decay
        if hyper.shared["decoupled"]:
            weights.mul_(1 - lr * decay)
        elif hyper.shared["decays"]:
            gradient.addcmul_(weights, decay)
        mean, square = state["exp_avg"][at], state["exp_avg_sq"][at]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if hyper.shared["amsgrad"]:
            square = state["max_exp_avg_sq"][at]
            torch.maximum(square, state["exp_avg_sq"][at], out=square)
        size = square.sqrt().add_(hyper.eps * segment.eps * correction2)
        weights.addcmul_(torch.div(mean, size, out=size), -lr * correction2 / correction1)


def _columns(numbers: Tensor, at: tuple[slice, slice]) -> Tensor:
    """Those of a segment, where there is one number for each column; the one number of each run otherwise."""
    return numbers if numbers.shape[1] == 1 else numbers[at]


def sgd_update(
    p: Tensor, g: Tensor, state: Rows, step: Tensor, hyper: Hyperparameters, segments: Sequence[Segment]
) -> None:
    """SGD, with momentum, dampening and Nesterov's."""
    momentum, dampening = hyper.shared["momentum"], hyper.shared["dampening"]
    for segment in segments:
        at = (slice(None), segment.columns)
        weights, gradient = p[at], g[at]
        if hyper.shared["decays"]:
            gradient.addcmul_(weights, hyper.weight_decay * segment.weight_decay)
        if momentum:
            buffer = state["momentum_buffer"][at]
            first = (_columns(step, at) == 1).to(p.dtype)  # torch takes the first gradient whole
            buffer.mul_(momentum).add_(gradient * (1 - dampening * (1 - first)) if dampening else gradient)
            gradient = gradient.add_(buffer, alpha=momentum) if hyper.shared["nesterov"] else buffer
        weights.addcmul_(gradient, -hyper.lr * segment.lr)


@dataclass(frozen=True)
class StackOptimizer:
    """An optimizer that can train a stack: its update, the names of its state, and what all models share."""

    update: Update
    state: tuple[str, ...]
    shared: Mapping[str, Any]


def find_stack_optimizer(cls: type[Optimizer], group: Mapping[str, Any]) -> StackOptimizer:
    """The same optimizer for a stack, with the hyperparameters of such a parameter group."""
    for option in ("maximize", "differentiable"):
        if group.get(option):
            raise NotStackable(f"{option} is not among what can train as one program")
    decays = bool(group.get("weight_decay"))
    if cls is SGD:
        shared = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        return StackOptimizer(
            sgd_update, ("momentum_buffer",) if group["momentum"] else (), {**shared, "decays": decays}
        )
    if cls in (Adam, AdamW):
        decoupled = decays and bool(group.get("decoupled_weight_decay", cls is AdamW))
        state = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        shared = {"betas": tuple(map(float, group["betas"])), "amsgrad": group["amsgrad"]}
        return StackOptimizer(adam_update, state, {**shared, "decays": decays, "decoupled": decoupled})
    raise NotStackable(f"{cls.__name__} is not (SGD, Adam and AdamW are) among what can train as one program")


def clip_rows(g: Tensor, largest: float, segments: Sequence[Segment]) -> Tensor:
    """Scale rows of gradients down to the largest width-invariant norm, as optim.clip_grad_norm_ does; the norms."""
    parts = [torch.linalg.vector_norm(g[:, s.columns], dim=1, keepdim=True).square() * s.norm for s in segments]
    norm = torch.stack(parts).sum(0).sqrt()
    g.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm[:, 0]
