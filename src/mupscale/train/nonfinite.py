"""What a run does where a number is not finite: it stops, leaves the step out, or goes back and takes other data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import local_part
from mupscale.train.processes import Processes

MOST_IN_A_ROW = 10
"""Steps that may be left out, or times that a run may go back, without any progress between them."""


class NonfiniteSteps:
    """The rule of a recipe (`on_nonfinite`), and how often it has been needed since the last progress."""

    def __init__(self, rule: Literal["stop", "skip", "rewind"]) -> None:
        self.rule = rule
        self.in_a_row = 0
        self._reached = (-1, 0)  # the step that a run went back to, and the batches left out there

    @property
    def is_hopeless(self) -> bool:
        """Whether too many steps were left out one after another."""
        return self.rule == "skip" and self.in_a_row >= MOST_IN_A_ROW

    def keep_buffers(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """The model's buffers as they are before a step that may have to be left out."""
        return [(buffer, buffer.clone()) for buffer in model.buffers()] if self.rule == "skip" else []

    @torch.no_grad()
    def must_skip(
        self, loss: Tensor, model: nn.Module, kept: Iterable[tuple[Tensor, Tensor]], processes: Processes
    ) -> bool:
        """Whether the rule "skip" leaves this step out; buffers are then as they were. It waits for the device."""
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        (broken,) = processes.any(not (loss.isfinite() and has_finite_squares(gradients)))
        self.in_a_row = self.in_a_row + 1 if broken else 0
        if broken:
            for buffer, before in kept:
                buffer.copy_(before)
        return broken

    def may_rewind(self) -> bool:
        return self.rule == "rewind" and self.in_a_row < MOST_IN_A_ROW

    def note_rewind(self, bad: int, good: int, left_out: int) -> int:
        """Count a return from one step to another; how many batches of the data are left out from then on.

        left_out: those that were when the checkpoint was written. Back at the same place again, the run goes on behind
        all that it has tried there.
        """
        place, tried = self._reached
        if place == good:
            self.in_a_row, left_out = self.in_a_row + 1, max(left_out, tried)
        else:
            self.in_a_row = 1
        self._reached = (good, left_out + bad - good)
        return self._reached[1]


def has_finite_squares(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries are finite, and their squares, too: Adam keeps those, and they overflow first."""
    parts = [part for part in tensors if part.numel()]
    return not parts or bool(nn.utils.get_total_norm(parts, math.inf).square().isfinite())


@torch.no_grad()
def has_finite_state(model: nn.Module, optimizer: Optimizer, processes: Processes) -> bool:
    """Whether all weights and optimizer state are finite, in every process; buffers may be masks, which are not."""
    parts: list[Tensor] = list(model.parameters())
    for values in optimizer.state.values():
        parts += [v for v in values.values() if isinstance(v, Tensor)] if isinstance(values, Mapping) else []
    local = [local_part(part.detach()) for part in parts if part.is_floating_point()]
    here = [part for part in local if part.numel()]  # some processes may hold nothing of a small one
    finite = not here or bool(nn.utils.get_total_norm(here, math.inf).isfinite())
    (broken,) = processes.any(not finite)
    return not broken
