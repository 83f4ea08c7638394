"""Small models in two lines: their parts by name, and what is computed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


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

    def forward(self, *inputs: Any) -> Any:
        assert self.compute is not None
        return self.compute(self, *inputs)
