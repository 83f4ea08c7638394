"""Float64 that stays float64: norms and softmaxes of transformers go to float32 whatever they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LESS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_NAMED = frozenset(f"torch.{device}{kind}Tensor" for device in ("", "cuda.") for kind in ("Float", "BFloat16", "Half"))
_LOWER = frozenset((Tensor.float, Tensor.bfloat16, Tensor.half))
_LIKE_ANOTHER = frozenset((Tensor.to, Tensor.type_as))
_MADE = frozenset((torch.full, torch.tensor, torch.arange, torch.linspace))
_PRODUCTS = frozenset(
    (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, nn.functional.linear)
)


def in_double(values: Any) -> Any:
    """A batch, or any nesting of tensors, with those of floating point in float64.

    >>> in_double((torch.ones(1), torch.tensor([1])))
    (tensor([1.], dtype=torch.float64), tensor([1]))
    """
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, values)


class KeepDouble(TorchFunctionMode):
    """While it is entered, no operation turns a float64 tensor into one of less precision.

    What was less before (rotary frequencies, positions as floats) stays as it is: it does not depend on the width.
    In a product with float64 it becomes that. Numbers that are made of none, which may (ALiBi's slopes), are float64.
    Autocast leaves float64 alone by itself.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with KeepDouble():
    ...     x.float().dtype, x.to(torch.bfloat16).dtype, (torch.ones(2) @ x.float()).dtype
    (torch.float64, torch.float64, torch.float64)
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        lowers = function in _LOWER
        if len(args) + len(kwargs) < 2 and not lowers:  # an attribute of a tensor, as most of the many calls are
            return function(*args, **kwargs)
        if function in _PRODUCTS and _has_double(args):  # torch refuses two precisions in one product
            return function(*in_double(args), **kwargs)
        if function in _MADE and kwargs.get("dtype") in _LESS:
            return function(*args, **{**kwargs, "dtype": torch.float64})
        tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or function is Tensor.view:
            return function(*args, **kwargs)
        if lowers:
            return tensor
        if function in _LIKE_ANOTHER and (other := _another(args, kwargs)) is not None and other.dtype in _LESS:
            return tensor.to(other.device)
        return function(*(_double(a) for a in args), **{name: _double(value) for name, value in kwargs.items()})


def _has_double(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)


def _another(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor whose dtype a cast takes over."""
    return next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)), None)


def _double(value: Any) -> Any:
    """A dtype of less precision, or the name of one, as float64; anything else as it is."""
    kind = type(value)
    lower = (kind is torch.dtype and value in _LESS) or (kind is str and value in _NAMED)
    return torch.float64 if lower else value
