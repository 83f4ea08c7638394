"""Numbers of a run, one per step, that stay on the device until somebody looks at them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mupscale.train.processes import Processes


class MetricSeries:
    """A number per step, fetched from the device and averaged over processes only when somebody looks."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.pending: list[Tensor] = []
        self.settled: list[float] = []
        self.finite = True  # whether everything fetched so far is

    def add(self, value: Tensor) -> None:
        """The number of the next step."""
        self.pending.append(value)

    def settle(self) -> None:
        """Fetch what is pending."""
        if self.pending:
            values = torch.stack([value.detach() for value in self.pending]).double().to(self.processes.device)
            settled = self.processes.mean(values).tolist()
            self.finite = self.finite and all(map(math.isfinite, settled))
            self.settled += settled
            self.pending = []

    def diverged_at(self, step: int) -> int:
        """The step whose number is the first that is not finite, if the last one is that of `step`; or the next."""
        first = next((i for i, value in enumerate(self.settled) if not math.isfinite(value)), len(self.settled))
        return step - len(self.settled) + first + 1

    def flush(self) -> float:
        """The mean of what is settled, which is then forgotten; no number where every step was left out."""
        mean = math.fsum(self.settled) / len(self.settled) if self.settled else math.nan
        self.settled = []
        return mean
