"""Patterns: MLPs, bare weights, gates, factors."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from patterns_kit import Network, add, floats, pattern, weight

X = floats(3, 5)


def plain(k: int, bias: bool = True) -> nn.Module:
    """Two hidden layers, one wider than the other."""
    return nn.Sequential(
        nn.Linear(5, 8 * k, bias), nn.GELU(), nn.Linear(8 * k, 6 * k, bias), nn.Tanh(), nn.Linear(6 * k, 3, bias)
    )


add("mlp, plain", plain, X)
add("mlp, without biases", lambda k: plain(k, bias=False), X)
add(
    "mlp, one of two widths grows",
    lambda k: nn.Sequential(plain(1), nn.ReLU(), nn.Linear(3, 4 * k), nn.Linear(4 * k, 2)),
    X,
)


class Bare(Network):
    """Two bare matrices between bare biases, multiplied in one of several notations."""

    def make(self, k: int, how: str) -> None:
        self.how = how
        turned = how in ("W @ x", "F.linear", "einsum oi,bi", "einsum bi,oi", "matmul, transposed inside")
        d, e = 8 * k, 6 * k
        self.a, self.b, self.c = (weight(*(s[::-1] if turned else s)) for s in ((5, d), (d, e), (e, 3)))
        self.p, self.q = weight(d), weight(e)

    def mix(self, x: Tensor, w: Tensor) -> Tensor:
        match self.how:
            case "x @ W":
                return x @ w
            case "W @ x":
                return (w @ x.T).T
            case "F.linear":
                return F.linear(x, w)
            case "F.linear, transposed":
                return F.linear(x, w.T)
            case "matmul, transposed inside":
                return torch.matmul(x, w.transpose(0, 1))
            case "mm":
                return torch.mm(x, w)
            case "addmm":
                return torch.addmm(torch.ones(w.shape[1], dtype=x.dtype), x, w)
            case "tensordot":
                return torch.tensordot(x, w, dims=([1], [0]))
            case "sum of products":
                return (x[:, :, None] * w[None]).sum(1)
            case _:
                letters = self.how.removeprefix("einsum ")
                return torch.einsum(f"{letters}->bo", *((w, x) if letters.startswith(("io", "oi")) else (x, w)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.mix(torch.relu(self.mix(x, self.a) + self.p), self.b) + self.q), self.c)


for notation in (
    *("x @ W", "W @ x", "F.linear", "F.linear, transposed", "matmul, transposed inside", "mm", "addmm"),
    *("tensordot", "sum of products", "einsum bi,io", "einsum bi,oi", "einsum oi,bi", "einsum io,bi"),
):
    add(f"bare weights, {notation}", partial(Bare, how=notation), X)


@pattern("bare weights, square and used both ways round", X)
class BothWays(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.c = weight(5, 8 * k), weight(8 * k, 8 * k), weight(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.a)
        h = torch.tanh(h @ self.b)
        return torch.tanh(h @ self.b.T) @ self.c


@pattern("stacked weights, bmm", X)
class Stacked(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.p = weight(4, 5, 8 * k), weight(4, 8 * k, 3), weight(4, 1, 8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(torch.baddbmm(self.p, x.expand(4, -1, -1), self.a))
        return torch.bmm(h, self.b).mean(0)


@pattern("stacked weights, the layers of one depth", X)
class Depth(Network):
    def make(self, k: int) -> None:
        self.a, self.w, self.p = nn.Linear(5, 8 * k), weight(3, 8 * k, 8 * k, size=0.3), weight(3, 8 * k)
        self.c = nn.Linear(8 * k, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for w, p in zip(self.w, self.p, strict=True):
            h = h + torch.tanh(h @ w + p)
        return self.c(h)


@pattern("slices of one big parameter, along the output", X)
class SlicedOut(Network):
    def make(self, k: int) -> None:
        self.d, self.a, self.w, self.c = 8 * k, nn.Linear(5, 8 * k), weight(8 * k, 16 * k), weight(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return (torch.sigmoid(h @ self.w[:, : self.d]) * (h @ self.w[:, self.d :])) @ self.c


@pattern("slices of one big parameter, along the input", X)
class SlicedIn(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.w = nn.Linear(5, 8 * k), nn.Linear(5, 4 * k), weight(6 * k, 12 * k)
        self.c = nn.Linear(6 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = self.a.out_features
        return self.c(
            torch.tanh(F.linear(torch.relu(self.a(x)), self.w[:, :n]) + F.linear(torch.tanh(self.b(x)), self.w[:, n:]))
        )


@pattern("a flat vector of all weights", X, refused="weights of one axis need different factors")
class Flat(Network):
    def make(self, k: int) -> None:
        self.d = 8 * k
        self.w = weight(8 * k * (5 + 1 + 3))

    def forward(self, x: Tensor) -> Tensor:
        a, p, c = self.w.split([5 * self.d, self.d, 3 * self.d])
        return torch.tanh(x @ a.view(5, self.d) + p) @ c.view(self.d, 3)


@pattern("a list of parameters", X)
class Listed(Network):
    def make(self, k: int) -> None:
        sizes = (5, 8 * k, 6 * k, 3)
        self.ws = nn.ParameterList([weight(i, o) for i, o in pairwise(sizes)])
        self.ps = nn.ParameterList([weight(o) for o in sizes[1:]])

    def forward(self, x: Tensor) -> Tensor:
        for i, (w, p) in enumerate(zip(self.ws, self.ps, strict=True)):
            x = (torch.tanh(x) if i else x) @ w + p
        return x


@pattern("a dictionary of parameters", X)
class Named(Network):
    def make(self, k: int) -> None:
        self.all = nn.ParameterDict({"u": weight(8 * k, 5), "v": weight(8 * k, 8 * k), "w": weight(3, 8 * k)})

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(F.silu(F.linear(x, self.all["u"])), self.all["v"])), self.all["w"])


@pattern("mlp, residual", X)
class Residual(Network):
    def make(self, k: int) -> None:
        self.a, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.us = nn.ModuleList([nn.Linear(8 * k, 12 * k) for _ in range(2)])
        self.vs = nn.ModuleList([nn.Linear(12 * k, 8 * k) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for u, v in zip(self.us, self.vs, strict=True):
            h = h + v(F.gelu(u(h)))
        return self.c(h)


class Gated(Network):
    """Gate and value come from one layer, taken apart in one of several ways."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.b, self.c = how, nn.Linear(5, 8 * k), nn.Linear(8 * k, 12 * k), nn.Linear(6 * k, 3)

    def apart(self, h: Tensor) -> tuple[Tensor, Tensor]:
        n = h.shape[-1] // 2
        pairs: dict[str, Any] = {
            "chunk": lambda: h.chunk(2, -1),
            "split": lambda: h.split(n, dim=-1),
            "slices": lambda: (h[..., :n], h[..., -n:]),
            "every second unit": lambda: (h[..., ::2], h[..., 1::2]),
            "view in pairs": lambda: h.view(-1, n, 2).unbind(-1),
            "view in halves": lambda: h.unflatten(-1, (2, n)).unbind(1),
            "narrow": lambda: (h.narrow(-1, n, n), h.narrow(-1, 0, n)),
            "tensor_split": lambda: torch.tensor_split(h, 2, dim=-1),
        }
        first, second = pairs[self.how]()
        return first, second

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.apart(self.b(torch.tanh(self.a(x))))
        return self.c(F.silu(g) * u)


for way in (
    "chunk",
    "split",
    "slices",
    "every second unit",
    "view in pairs",
    "view in halves",
    "narrow",
    "tensor_split",
):
    add(f"gate and value, {way}", partial(Gated, how=way), X)
add("gate and value, F.glu", lambda k: nn.Sequential(nn.Linear(5, 8 * k), nn.GLU(), nn.Linear(4 * k, 3)), X)


@pattern("gate and value, three pieces of which two differ in width", X)
class Pieces(Network):
    def make(self, k: int) -> None:
        self.n, self.a, self.b = [6 * k, 6 * k, 2 * k], nn.Linear(5, 14 * k), nn.Linear(6 * k, 3)
        self.c = nn.Linear(2 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        g, u, s = self.a(x).split(self.n, dim=-1)
        return self.b(torch.sigmoid(g) * u) + self.c(torch.relu(s))


class Factors(Network):
    """A matrix plus a product of two thin ones."""

    def make(self, k: int, rank: int, size: float = 1.0, product: bool = True) -> None:
        self.size, self.product = size, product
        self.a, self.w, self.c = nn.Linear(5, 8 * k), weight(8 * k, 8 * k), nn.Linear(8 * k, 3)
        self.u, self.v = weight(8 * k, rank), weight(rank, 8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.product:
            return self.c(torch.tanh(F.linear(h, self.w + self.size * (self.u @ self.v))))
        return self.c(torch.tanh(F.linear(h, self.w) + self.size * F.linear(F.linear(h, self.v), self.u)))


add("low rank added to a matrix, rank fixed", lambda k: Factors(k, 2), X)
add("low rank added to a matrix, rank grows", lambda k: Factors(k, 2 * k), X)
add("low rank added to a matrix, rank grows and divides", lambda k: Factors(k, 2 * k, 4 / (2 * k)), X)
add("low rank beside a matrix, rank fixed", lambda k: Factors(k, 2, 0.5, product=False), X)
add("low rank beside a matrix, rank grows and divides", lambda k: Factors(k, 2 * k, 4 / (2 * k), product=False), X)


class Masked(Network):
    """A square weight is multiplied by a pattern of zeros and ones, computed in forward or kept."""

    def make(self, k: int, how: str, keep: bool | None = None) -> None:
        self.how, self.keep = how, keep
        self.a, self.w, self.c = nn.Linear(5, 8 * k), weight(8 * k, 8 * k), nn.Linear(8 * k, 3)
        if keep is not None:
            self.register_buffer("held", self.zeros_and_ones(8 * k), persistent=keep)

    def zeros_and_ones(self, n: int) -> Tensor:
        i = torch.arange(n)
        same = i[:, None] // (n // 2) == i[None] // (n // 2)
        return same.float() if self.how == "blocks" else torch.ones(n, n).tril()

    def forward(self, x: Tensor) -> Tensor:
        mask = (self.zeros_and_ones(len(self.w)) if self.keep is None else self.held).to(x.dtype)
        return self.c(torch.relu(F.linear(torch.tanh(self.a(x)), self.w * mask)))


add("masked weight, two blocks, computed", lambda k: Masked(k, "blocks"), X)
add("masked weight, two blocks, a buffer", lambda k: Masked(k, "blocks", True), X)
add("masked weight, two blocks, a buffer that is not saved", lambda k: Masked(k, "blocks", False), X)
add("masked weight, triangle, computed", lambda k: Masked(k, "triangle"), X, refused="a wide triangle is no narrow one")
add(
    "masked weight, triangle, a buffer",
    lambda k: Masked(k, "triangle", True),
    X,
    either="exact where the buffer is copied",
)


@pattern("weight norm, on the first layer and between widths", X)
class Normed(Network):
    """Rows of the weights have a length that is a parameter, so sqrt(k) has to go there."""

    def make(self, k: int) -> None:
        self.a, self.b = weight_norm(nn.Linear(5, 8 * k)), weight_norm(nn.Linear(8 * k, 8 * k))
        self.c = nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pattern("weight standardised in forward", X)
class Standardised(Network):
    def make(self, k: int) -> None:
        self.a, self.w, self.g, self.c = nn.Linear(5, 8 * k), weight(8 * k, 8 * k), weight(8 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w - self.w.mean(1, keepdim=True)
        w = w / w.pow(2).mean(1, keepdim=True).sqrt() / w.shape[1]
        return self.c(torch.tanh(F.linear(torch.tanh(self.a(x)), w) * self.g))


@pattern("highway", X)
class Highway(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.t = nn.Linear(5, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 8 * k)
        self.c = nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        t = torch.sigmoid(self.t(h))
        return self.c(t * torch.relu(self.b(h)) + (1 - t) * h)


class Maxout(Network):
    """Each unit is the largest of three pieces."""

    def make(self, k: int, inner: bool) -> None:
        self.inner, self.a, self.b = inner, nn.Linear(5, 24 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.view(len(x), -1, 3).max(-1).values if self.inner else h.view(len(x), 3, -1).max(1)[0])


add("maxout, pieces next to each other", lambda k: Maxout(k, True), X)
add("maxout, pieces far apart", lambda k: Maxout(k, False), X)
