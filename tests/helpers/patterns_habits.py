"""Habits of other libraries' models that a plan by running once stumbled over; tests/zoo has the models themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, floats, pattern, tokens, weight
from toys import of, toy

X = floats(3, 5, 4)


@pattern("one head becomes two, flattened", X)
@toy(lambda k: of(a=(4, 8 * k), b=(8 * k, 24 * k), c=(8 * k, 3)))
def one_head(m: Any, x: Tensor) -> Tensor:
    """A single head lies in order after the transposition, so the narrow model copies nothing in memory."""
    q, k, v = m.b(m.a(x)).view(*x.shape[:2], 3, -1, 8).permute(2, 0, 3, 1, 4).unbind(0)
    y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return m.c(y.transpose(1, 2).reshape(*x.shape[:2], -1))


@pattern("scores biased by a small network of distances, relu in place", X)
class Distances(Network):
    """The network sees no data, and changes what it computes from its weights in place."""

    def make(self, k: int) -> None:
        self.a, self.b, self.c = nn.Linear(4, 8 * k), nn.Linear(8 * k, 24 * k), nn.Linear(8 * k, 3)
        self.s = nn.Sequential(nn.Linear(1, 6), nn.ReLU(inplace=True), nn.Linear(6, 2 * k))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.b(self.a(x)).view(*x.shape[:2], 3, -1, 4).permute(2, 0, 3, 1, 4).unbind(0)
        at = torch.arange(5, dtype=x.dtype)
        bias = self.s((at[:, None] - at)[..., None]).permute(2, 0, 1)
        y = (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.c(y.transpose(1, 2).flatten(2))


@pattern("positions divided by sqrt(width), norm by length", tokens(7, 3, 5))
class Positions(Network):
    """The constant belongs into the table of positions: into the tokens' it would scale the residual stream."""

    def make(self, k: int) -> None:
        self.e, self.p, self.g = nn.Embedding(7, 8 * k), nn.Embedding(5, 8 * k), weight(1)
        self.a, self.b, self.c = nn.Linear(8 * k, 6 * k), nn.Linear(6 * k, 8 * k), nn.Linear(8 * k, 3)

    def forward(self, t: Tensor) -> Tensor:
        width = self.e.weight.shape[1]
        x = self.e(t) + self.p(torch.arange(5)) * width**-0.5
        y = F.normalize(x, dim=-1) * width**0.5 * self.g
        return self.c(x + self.b(torch.relu(self.a(y))))


@pattern("random projections that layers share", X)
class Shared(Network):
    """One pair of buffers under three names, in modules that hold nothing else; each layer has gains of its own."""

    def make(self, k: int) -> None:
        self.i, self.a, self.b = nn.Linear(4, 8 * k), Fixed(4, 8 * k), Fixed(8 * k, 4)
        self.layers, self.c = nn.ModuleList(Projected(k, self.a, self.b) for _ in range(2)), weight(3, 8 * k)

    def forward(self, x: Tensor) -> Tensor:
        x = self.i(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.einsum("btd,od->bto", x, self.c)


class Fixed(Network):
    """A random matrix that is saved and not trained."""

    def make(self, *shape: int) -> None:
        self.register_buffer("w", torch.randn(shape))


class Projected(Network):
    """A fixed projection down and up, with gains."""

    def make(self, k: int, a: nn.Module, b: nn.Module) -> None:
        self.a, self.b, self.d, self.e = a, b, weight(4), weight(8 * k)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a.w) * self.d, self.b.w) * self.e
