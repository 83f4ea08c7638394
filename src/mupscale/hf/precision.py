"""Float64 that stays float64: transformers' norms and softmaxes go to float32 whatever they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LESS = (torch.float32, torch.bfloat16, torch.float16)


class KeepDouble(TorchFunctionMode):
    """While it is entered, no operation turns a float64 tensor into one of less precision, and none is made in less."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return first
            args = tuple(torch.float64 if a in _LESS else a for a in args) if _hold_dtypes(args) else args
            if kwargs.get("dtype") in _LESS:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _hold_dtypes(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.dtype) for a in args)
