"""Parameters, optimizer state and buffers of the runs of a stack: matrices with a row for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Plan, naming
from mupscale.engine.stackable import PER_RUN
from mupscale.engine.updates import Rows, Segment

_ALIGNED = 64  # columns at which a parameter may begin: matrix units want addresses that are multiples of 16 bytes


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter lies in a row of the stack, and the segments of equal factors."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    total: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, plan: Plan) -> ParameterLayout:
        """Parameters with equal factors side by side, each at an aligned column."""
        parameters, norms = naming.parameters(model), plan.norm_weights(2.0)
        by_identity = {id(p): name for name, p in parameters.items()}
        grouped: dict[tuple[float, ...], list[str]] = {}
        for group in optimizer.param_groups:
            factors = tuple(float(group.get(f"{name}_factor", 1.0)) for name in PER_RUN)
            for p in group["params"]:
                name = by_identity[id(p)]
                grouped.setdefault((*factors, norms[name]), []).append(name)
        names, starts, segments, column = list[str](), list[int](), list[Segment](), 0
        for factors, members in grouped.items():
            first = column
            for name in members:
                names.append(name)
                starts.append(column)
                column += math.ceil(parameters[name].numel() / _ALIGNED) * _ALIGNED
            segments.append(Segment(slice(first, column), *factors))
        shapes = tuple(parameters[name].shape for name in names)
        return cls(tuple(names), shapes, tuple(starts), column, tuple(segments))

    def cut(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters in a stack of rows (or in one row), by name; views."""
        parts = rows.split([b - a for a, b in pairwise((*self.starts, self.total))], dim=-1)
        lead = rows.shape[:-1]
        return {
            name: part[..., : shape.numel()].unflatten(-1, tuple(shape)) if shape else part[..., 0].view(lead)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


class Replicas:
    """The runs' parameters (`flat`), optimizer state, steps it has taken and buffers; dimension 0 is the run.

    Steps taken are one number for a run, or one for each of its columns where some parameters have come in later.
    """

    def __init__(
        self, layout: ParameterLayout, model: nn.Module, state: Sequence[str], rows: int, dtype: torch.dtype
    ) -> None:
        device = next(model.parameters()).device
        self.layout = layout
        self.flat = torch.zeros(rows, layout.total, dtype=dtype, device=device)
        self.state: Rows = {name: torch.zeros_like(self.flat) for name in state}
        self.steps_taken = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.buffers = {
            name: buffer.detach().expand(rows, *buffer.shape).clone() for name, buffer in naming.buffers(model).items()
        }
        self.flat.requires_grad_()

    def __len__(self) -> int:
        return len(self.flat)

    @torch.no_grad()
    def copy_in(self, row: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Copy a run's model and optimizer into its row."""
        parameters = naming.parameters(model)
        for name, view in self.layout.cut(self.flat.detach()[row]).items():
            view.copy_(parameters[name])
        for name, buffer in naming.buffers(model).items():
            self.buffers[name][row].copy_(buffer)
        held = [optimizer.state.get(parameters[name], {}) for name in self.layout.names]
        steps = [float(state.get("step", 1.0)) if self.state.keys() <= state.keys() else 0.0 for state in held]
        self._note_steps(row, steps)
        for kind, matrix in self.state.items():
            for state, taken, view in zip(held, steps, self.layout.cut(matrix[row]).values(), strict=True):
                if taken:
                    view.copy_(state[kind])

    def _note_steps(self, row: int, steps: Sequence[float]) -> None:
        """How many steps each parameter has taken: those of new blocks fewer than the others."""
        if len(set(steps)) > 1 and self.steps_taken.shape[1] == 1:
            self.steps_taken = self.steps_taken.expand(-1, self.layout.total).contiguous()
        if self.steps_taken.shape[1] == 1:
            self.steps_taken[row] = steps[0]
        else:
            for taken, view in zip(steps, self.layout.cut(self.steps_taken[row]).values(), strict=True):
                view.fill_(taken)

    @torch.no_grad()
    def copy_out(self, row: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Copy a row into a model and an optimizer made for it."""
        parameters = naming.parameters(model)
        for name, view in self.layout.cut(self.flat.detach()[row]).items():
            parameters[name].copy_(view)
        for name, buffer in naming.buffers(model).items():
            buffer.copy_(self.buffers[name][row])
        names = {id(p): name for name, p in parameters.items()}
        states = {kind: self.layout.cut(matrix[row]) for kind, matrix in self.state.items()}
        taken = self.layout.cut(self.steps_taken[row].expand(self.layout.total))
        for group in optimizer.param_groups if states else ():
            for p in group["params"]:
                steps = float(taken[names[id(p)]].flatten()[0])
                if not steps:
                    continue
                held: dict[str, Any] = {kind: views[names[id(p)]].clone() for kind, views in states.items()}
                if "exp_avg" in held:
                    on = p.device if group.get("fused") or group.get("capturable") else None
                    held["step"] = torch.tensor(steps, dtype=torch.float32, device=on)
                optimizer.state[p] = held

    @torch.no_grad()
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        index = torch.tensor(list(rows), device=self.flat.device)
        self.flat = self.flat.detach()[index].requires_grad_()
        self.state = {name: matrix[index] for name, matrix in self.state.items()}
        self.steps_taken = self.steps_taken[index]
        self.buffers = {name: buffer[index] for name, buffer in self.buffers.items()}

    def view(self, rows: slice) -> Replicas:
        """Some of the runs, in the same memory."""
        view = copy(self)
        view.flat = self.flat.detach()[rows].requires_grad_()
        view.state = {name: matrix[rows] for name, matrix in self.state.items()}
        view.steps_taken = self.steps_taken[rows]
        view.buffers = {name: buffer[rows] for name, buffer in self.buffers.items()}
        return view

    def row(self, row: int) -> tuple[Tensor, dict[str, Tensor]]:
        """One run's parameters and buffers, in the same memory."""
        return self.flat.detach()[row], {name: buffer[row] for name, buffer in self.buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All of these tensors by name, in the same memory."""
        tensors = {"flat": self.flat.detach(), "taken": self.steps_taken}
        tensors |= {f"state/{name}": matrix for name, matrix in self.state.items()}
        return tensors | {f"buffer/{name}": buffer for name, buffer in self.buffers.items()}

    def put_back(self, before: Mapping[str, Tensor], sound: Tensor) -> None:
        """Give the runs that are not sound all that they had before a step; `before`: copies of `tensors`."""
        for name, tensor in self.tensors().items():
            mask = sound.reshape(-1, *(1 for _ in tensor.shape[1:]))
            tensor.copy_(torch.where(mask, tensor, before[name]))

    def finite_rows(self) -> list[bool]:
        """Whether each run's parameters and state are finite; what lies between them for alignment does not matter."""
        matrices = [self.flat.detach(), *self.state.values()]
        parts = [part for matrix in matrices for part in self.layout.cut(matrix).values()]
        finite: list[bool] = torch.stack([p.reshape(len(p), -1).isfinite().all(1) for p in parts]).all(0).tolist()
        return finite
