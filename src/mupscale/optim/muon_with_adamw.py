"""Muon for hidden matrices and AdamW for all else, as one optimizer: one learning rate, one state, one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan


class MuonAdamW(Optimizer):
    """torch's Muon in groups with `muon=True` and torch's AdamW in the others; `muon_groups` makes them of a plan.

    The learning rate and weight decay are shared, as Moonlight does it (adjust_lr_fn="match_rms_adamw"); AdamW takes
    `adam_scale` times the rate.

    >>> weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4))
    >>> optimizer = MuonAdamW([{"params": [weight], "muon": True}, {"params": [bias]}], lr=0.1)
    >>> weight.grad, bias.grad = torch.eye(4), torch.ones(4)
    >>> optimizer.step()
    >>> sorted(optimizer.state[weight]), sorted(optimizer.state[bias])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adam_scale: float = 1.0,
        muon: bool = False,
    ) -> None:
        dummy = [nn.Parameter(torch.zeros(1, 1))]
        self._muon = torch.optim.Muon(dummy, ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn)
        self._adamw = torch.optim.AdamW(dummy, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients)}
        own |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "adam_scale": adam_scale, "muon": muon}
        super().__init__(params, {**self._adamw.defaults, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each on its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.param_groups = [group for group in self.param_groups if group["muon"]]
        self._adamw.param_groups = [
            {**group, "lr": group["lr"] * group["adam_scale"]} for group in self.param_groups if not group["muon"]
        ]
        self._muon.state = self._adamw.state = self.state
        self._muon.step()
        self._adamw.step()
        return loss


def muon_groups(plan: Plan) -> list[dict[str, Any]]:
    """Groups by name for MuonAdamW: hidden matrices, whose both axes are widths, and everything else."""
    hidden = [name for name, e in plan.parameters.items() if e.out and e.in_ and len(e.narrow) == 2]
    rest = [name for name in plan.parameters if name not in set(hidden)]
    groups = [{"params": hidden, "muon": True}, {"params": rest, "muon": False}]
    return [group for group in groups if group["params"]]
