"""Small models in two lines: their parts by name, and what is computed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Toy(nn.Module):
    """Of modules, parameters, buffers and numbers. forward is given the model itself, and what that is called with.

    A size that forward reads is to be a part: the library sees no size that a closure holds.
    """

    def __init__(self, forward: Callable[..., Any] | None = None, /, **parts: Any) -> None:
        super().__init__()
        self.compute = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        assert self.compute is not None
        return self.compute(self, *inputs, **named)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a classifier."""
    return F.cross_entropy(model(batch[0]), batch[1])


def language(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a language model."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def of(**parts: Any) -> dict[str, Any]:
    """Parts by name, where two numbers stand for a linear layer."""
    return {name: nn.Linear(*part) if isinstance(part, tuple) else part for name, part in parts.items()}


def toy(parts: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Any]], Callable[..., nn.Module]]:
    """Of a function of a model and its inputs, the models that have these parts, made from the sizes that they take."""
    return lambda compute: lambda *sizes: Toy(compute, **parts(*sizes))
