"""A small transformer-like model with a dense feed-forward part, and the same with experts, stored in two ways."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HIDDEN = 6, 10


class FeedForward(nn.Module):
    """A gated one, so that two of its matrices have one shape."""

    def __init__(self, d: int = D, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden), nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Renamed(nn.Module):
    """The same under other names, in another order."""

    def __init__(self, d: int = D, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.w3, self.w1 = nn.Linear(d, hidden), nn.Linear(d, hidden)
        self.w2 = nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Listed(nn.Module):
    """Experts in a ModuleList. renormalised: whether the weights of the active ones sum to 1."""

    def __init__(
        self, experts: int, active: int, d: int = D, renormalised: bool = True, kind: type[nn.Module] = FeedForward
    ) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(kind() if d == D else kind(d, 2 * HIDDEN) for _ in range(experts))
        self.active, self.renormalised = active, renormalised

    def weights(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        chosen = logits.topk(self.active, dim=-1).indices
        if self.renormalised:
            logits = torch.full_like(logits, -torch.inf).scatter(-1, chosen, logits.gather(-1, chosen))
        return logits.softmax(-1) * torch.zeros_like(logits).scatter(-1, chosen, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        return sum((weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros_like(x))


class Stacked(Listed):
    """Experts in the first dimension of tensors."""

    def __init__(self, experts: int, active: int, d: int = D) -> None:
        super().__init__(experts, active, d)
        one = FeedForward() if d == D else FeedForward(d, 2 * HIDDEN)
        del self.experts
        for name, p in one.named_parameters():
            setattr(self, name.replace(".", "_"), nn.Parameter(torch.randn(experts, *p.shape) / 4))

    def forward(self, x: Tensor) -> Tensor:
        def linear(name: str, y: Tensor) -> Tensor:
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            return torch.einsum("efd,bed->bef", weight, y) + bias

        each = x[:, None].expand(-1, self.active and len(self.gate_weight), -1)
        out = linear("down", F.silu(linear("gate", each)) * linear("up", each))
        return (self.weights(x)[..., None] * out).sum(1)


class Model(nn.Module):
    """Blocks with a norm and a feed-forward part, or what stands in its place."""

    def __init__(self, part: object = FeedForward, blocks: int = 2, d: int = D) -> None:
        super().__init__()
        self.embed = nn.Linear(5, d)
        made = [part() for _ in range(blocks)]
        self.h = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(d), "mlp": each}) for each in made)
        self.readout = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.h:
            x = x + block["mlp"](block["norm"](x))
        return self.readout(x)
