"""Looking into a model while it runs: the output of every module, with nothing random in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from mupscale.core import naming


class Recorder(AbstractContextManager["Recorder"]):
    """Outputs of every module of a model, in the order in which they were computed.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Recorder(model) as recorder:
    ...     _ = model(torch.ones(1, 2))
    >>> {path: tuple(output.shape) for path, output in recorder.outputs.items()}
    {'0': (1, 3), '1': (1, 3), '': (1, 3)}
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.outputs: dict[str, Tensor] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for path, module in naming.modules(self.model).items():
            self.handles.append(module.register_forward_hook(self._hook(path)))
        return self

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                self.outputs.setdefault(path, tensor.detach())

        return record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    """The first floating-point tensor in a module's output, which may be a tuple, a dict or a dataclass-like dict."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((t for t in map(_first_tensor, values) if t is not None), None)
