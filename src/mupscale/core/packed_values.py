"""Nested values with tensors in them as JSON and a table of tensors: how a checkpoint's header holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mupscale.core.dtensor import gather_whole
from mupscale.system import MupscaleError


class PackedTensors:
    """Tensors by a name of their own; one that is met again, as a tied weight is, is kept once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.names: dict[Any, str] = {}

    def add(self, tensor: Tensor, key: str) -> str:
        """Keep the tensor, and return its name: the key, where that is free."""
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "one without values (meta)" if tensor.is_meta else "sparse or quantised"
            raise MupscaleError(f"'{key}' is a tensor which a checkpoint cannot store: {kind}")
        memory = (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if memory not in self.names:
            while key in self.by_name:
                key += "+"
            self.by_name[key], self.names[memory] = tensor, key
        return self.names[memory]

    def storable(self) -> dict[str, Tensor]:
        """As safetensors wants them: contiguous, and none in the memory of another (two slices of one tensor)."""
        contiguous: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.by_name.items():
            storage = tensor.untyped_storage().data_ptr()
            own = tensor if storage not in seen else tensor.clone()
            contiguous[name] = own.contiguous()
            seen.add(storage)
        return contiguous


def pack_values(value: Any, key: str, tensors: PackedTensors) -> Any:
    """JSON for the value; tensors go into `tensors` and leave their name."""
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(gather_whole(value.detach()), key)}
    if isinstance(value, Mapping):
        items = ((pack_values(k, key, tensors), pack_values(v, f"{key}.{k}", tensors)) for k, v in value.items())
        return {"$items": [list(item) for item in items]}
    if isinstance(value, tuple):
        return {"$tuple": [pack_values(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [pack_values(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MupscaleError(
        f"'{key}' is a {type(value).__name__}, which a checkpoint cannot store. Use tensors or JSON values"
    )


def unpack_values(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack_values` was given; a KeyError, TypeError or ValueError where it did not make this."""
    if isinstance(value, list):
        return [unpack_values(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$tensor":
        return tensors[content]
    if tag == "$tuple":
        return tuple(unpack_values(v, tensors) for v in content)
    return {unpack_values(k, tensors): unpack_values(v, tensors) for k, v in content}
