"""Outputs of two models of different widths, and the gradients of one loss that is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mupscale.core import naming
from mupscale.planning.tracing import run_in_float64, tensors_in
from mupscale.system import MupscaleError

Shapes = Sequence[tuple[int, ...]]
_UNIT = 1e-6
_Found = TypeVar("_Found")


def outputs_and_gradients(
    narrow: nn.Module, wide: nn.Module, batch: Any
) -> tuple[tuple[list[Tensor], dict[str, Tensor]], tuple[list[Tensor], dict[str, Tensor]]]:
    """Floating-point outputs of both, and the gradients of a generic loss of those.

    Along axes that grow the loss takes the mean, which is the same for both in whatever order units are copied.

    >>> (ours, _), (theirs, gradients) = outputs_and_gradients(nn.Linear(2, 3), nn.Linear(2, 6), torch.ones(1, 2))
    >>> ours[0].shape, theirs[0].shape, gradients["weight"].shape
    (torch.Size([1, 3]), torch.Size([1, 6]), torch.Size([6, 2]))
    """
    models = (narrow, wide)
    first = [_outputs(model, batch) for model in models]
    unused = [first]

    def gradients() -> list[dict[str, Tensor]]:
        outputs = unused.pop() if unused else [_outputs(model, batch) for model in models]
        shapes = [[tuple(output.shape) for output in each] for each in outputs]
        return [_gradients(model, each, *shapes) for model, each in zip(models, outputs, strict=True)]

    ours, theirs = differentiated(gradients, models)
    plain = [[output.detach() for output in each] for each in first]
    return (plain[0], ours), (plain[1], theirs)


def differentiated(attempt: Callable[[], _Found], models: Sequence[nn.Module]) -> _Found:
    """What an attempt finds that runs models and differentiates: in training mode where that fails in theirs.

    In eval mode some write a state in place that the gradient needs, as RWKV does.

    >>> differentiated(lambda: torch.ones(1, requires_grad=True).sum().backward(), [])
    """
    try:
        return attempt()
    except RuntimeError as error:
        for model in models:
            model.zero_grad()
            model.train()
        try:
            return attempt()
        except (RuntimeError, MupscaleError):
            raise MupscaleError(
                f"{type(models[0]).__name__} runs on the batch but gives no gradients "
                f"({' '.join(str(error).split())}). Call it as in training, without a cache that is written in place"
            ) from error


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    return [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()]


def _gradients(model: nn.Module, outputs: Sequence[Tensor], narrow: Shapes, wide: Shapes) -> dict[str, Tensor]:
    loss = gradient_loss(outputs, narrow, wide)
    if loss.requires_grad:
        loss.backward()
    return {name: p.grad for name, p in naming.parameters(model).items() if p.grad is not None}


def gradient_loss(outputs: Sequence[Tensor], narrow: Shapes, wide: Shapes) -> Tensor:
    """A generic loss of outputs that have these shapes in the two models, of which these are one's.

    >>> gradient_loss([torch.zeros(2, 4)], [(2, 2)], [(2, 4)])
    tensor(0., dtype=torch.float64)
    """
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for output, before, after in zip(outputs, narrow, wide, strict=True):
        grown = [d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        shape = [1 if d in grown else n for d, n in enumerate(output.shape)]
        push = torch.randn(shape, generator=generator, dtype=output.dtype)
        if output.requires_grad:
            loss = loss + (_mean(output, grown) * push.to(output.device)).sum()
    return loss


def _mean(output: Tensor, dims: list[int]) -> Tensor:
    """Over these dimensions; of vectors of length 1, whose copies are shorter the more there are, in their own unit."""
    if not dims:
        return output
    mean = output.mean(dims, keepdim=True)
    return mean * output.shape[dims[0]] ** 0.5 if len(dims) == 1 and has_length_one(output, dims[0]) else mean


def has_length_one(vectors: Tensor, dim: int = -1, slack: float = _UNIT) -> bool:
    """Whether all of them are divided by their own length, as embeddings that are compared by angle.

    >>> has_length_one(torch.tensor([[0.6, 0.8], [1.0, 0.0]])), has_length_one(torch.ones(2, 2))
    (True, False)
    """
    lengths = vectors.detach().norm(dim=dim)
    return vectors.numel() > 0 and bool((lengths - 1).abs().max() <= slack)
