"""Models in float64 that stays float64: many norms and softmaxes go to float32 whatever they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LESS = (torch.float32, torch.bfloat16, torch.float16)
_NAMED = tuple(f"torch.{device}{kind}Tensor" for device in ("", "cuda.") for kind in ("Float", "BFloat16", "Half"))
_LOWER = (Tensor.float, Tensor.bfloat16, Tensor.half)
_LIKE_ANOTHER = (Tensor.to, Tensor.type_as)


class KeepDouble(TorchFunctionMode):
    """While it is entered, no operation turns a float64 tensor into one of less precision.

    What was less before (rotary frequencies, positions as floats) stays as it is: it does not depend on the width.
    Autocast leaves float64 alone by itself.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with KeepDouble():
    ...     x.float().dtype, x.to(torch.bfloat16).dtype
    (torch.float64, torch.float64)
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or function is Tensor.view:
            return function(*args, **kwargs)
        if function in _LOWER:
            return tensor
        if function in _LIKE_ANOTHER and (other := _another(args, kwargs)) is not None and other.dtype in _LESS:
            return tensor.to(other.device)
        return function(*(_double(a) for a in args), **{name: _double(value) for name, value in kwargs.items()})


def _another(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor whose dtype a cast takes over."""
    return next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)), None)


def _double(value: Any) -> Any:
    """A dtype of less precision, or the name of one, as float64; anything else as it is."""
    lower = isinstance(value, torch.dtype) and value in _LESS
    return torch.float64 if lower or (isinstance(value, str) and value in _NAMED) else value


def rounding_of(model: nn.Module) -> float:
    """The relative rounding of a model's least precise parameter; float32's where there is none.

    >>> rounding_of(nn.Linear(1, 1).bfloat16()) == 2**-7
    True
    """
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)


def can_double(model: nn.Module) -> bool:
    """Whether its device computes in float64.

    >>> can_double(nn.Linear(1, 1))
    True
    """
    return all(p.device.type != "mps" for p in model.parameters())


def into_double(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Turn a model, and the state of an optimizer that holds its parameters, into float64, in place.

    >>> model = nn.Linear(1, 1)
    >>> into_double(model)
    >>> model.weight.dtype
    torch.float64
    """
    model.double()
    if optimizer is not None:
        for state in optimizer.state.values():
            state.update(in_double(dict(state)))


def in_double(values: Any) -> Any:
    """A batch with its floating-point tensors in float64.

    >>> in_double((torch.ones(1), torch.tensor([1])))
    (tensor([1.], dtype=torch.float64), tensor([1]))
    """
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, values)


@torch.no_grad()
def move_by_rounding(model: nn.Module, seed: int = 0) -> None:
    """Change every parameter by its last bit, up or down at random, in place.

    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> before = model.weight.item()
    >>> move_by_rounding(model)
    >>> 0 < abs(model.weight.item() / before - 1) < 1e-15
    True
    """
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
        p.mul_(1 + torch.finfo(p.dtype).eps * signs)
