"""A step of a stack as one CUDA graph: launching its kernels one by one takes longer than small models compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mupscale.engine.replicas import Replicas

StepResult = tuple[Tensor, Tensor | None]
"""The loss of every run, and the norms of their gradients where those are clipped."""


class NotCapturable(Exception):
    """The model or its loss does something that a CUDA graph cannot record; its steps still work without one."""


class StepGraph:
    """A captured step: inputs are copied to a fixed place, everything else stays where it is."""

    def __init__(self, step: Callable[[Tensor, Tensor], StepResult], replicas: Replicas, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self._warm_up(step, replicas)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.losses = step(self.x, self.y)
        except RuntimeError as error:  # what ends a capture that ran out of memory may hide that it did
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise NotCapturable(str(error)) from error

    def _warm_up(self, step: Callable[[Tensor, Tensor], StepResult], replicas: Replicas) -> None:
        """Take a few steps on a stream of their own, as capturing needs, and put the runs back to where they stood."""
        before = {name: tensor.clone() for name, tensor in replicas.tensors().items()}
        here, side = torch.cuda.current_stream(self.x.device), torch.cuda.Stream(self.x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.x, self.y)
        here.wait_stream(side)
        with torch.no_grad():
            for name, tensor in replicas.tensors().items():
                tensor.copy_(before[name])

    def replay(self, x: Tensor, y: Tensor) -> StepResult:
        """Take the step with this batch; its result is valid until the next."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.losses
