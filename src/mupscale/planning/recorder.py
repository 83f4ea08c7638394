"""Looking into a model while it runs: the output of every module, with nothing random in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from mupscale.core import naming
from mupscale.planning.tracing import tensors_in


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
            tensor = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if tensor is not None:
                self.outputs.setdefault(path, tensor.detach())

        return record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()
