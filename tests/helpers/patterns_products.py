"""Patterns: experts, products of units, weights used twice, comparisons."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, tokens, weight

X = floats(3, 5)


class Experts(Network):
    """Experts in three-dimensional tensors, mixed by a softmax."""

    def make(self, k: int, n: int, best: int = 0) -> None:
        self.best, self.a, self.g, self.c = best, nn.Linear(5, 8 * k), nn.Linear(8 * k, n), nn.Linear(8 * k, 3)
        self.u, self.v = weight(n, 8 * k, 6 * k), weight(n, 6 * k, 8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        p = self.g(h).softmax(-1)
        if self.best:
            p = p * (p >= p.topk(self.best).values[:, -1:])
        y = torch.einsum("beh,ehd->bed", torch.relu(torch.einsum("bd,edh->beh", h, self.u)), self.v)
        return self.c(h + torch.einsum("bed,be->bd", y, p))


add("experts, dense gate", lambda k: Experts(k, 3), X)
add("experts, the best two of four", lambda k: Experts(k, 4, 2), X)
add("experts, dense gate, their number grows", lambda k: Experts(k, 3 * k), X)
add(
    "experts, the best two of a growing number",
    lambda k: Experts(k, 4 * k, 2),
    X,
    refused="copies of one take both places",
)


@pattern("experts, rows of the batch sent to modules by index", X)
class Routed(Network):
    def make(self, k: int) -> None:
        self.a, self.g, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3), nn.Linear(8 * k, 3)
        self.es = nn.ModuleList(
            [nn.Sequential(nn.Linear(8 * k, 6 * k), nn.GELU(), nn.Linear(6 * k, 8 * k)) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        p, where = self.g(h).softmax(-1).max(-1)
        y = torch.zeros_like(h)
        for i, e in enumerate(self.es):
            (rows,) = torch.where(where == i)
            y.index_add_(0, rows, e(h[rows]) * p[rows, None])
        return self.c(h + y)


@pattern("bilinear, a bare three-dimensional weight", X, X)
class Bare3(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.w = nn.Linear(5, 8 * k), nn.Linear(5, 6 * k), weight(3, 8 * k, 6 * k)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bi,oij,bj->bo", torch.tanh(self.a(x)), self.w, torch.tanh(self.b(y)))


@pattern("bilinear, nn.Bilinear between widths", X, X)
class Bi(Network):
    def make(self, k: int) -> None:
        self.a, self.b = nn.Linear(5, 4 * k), nn.Linear(5, 6 * k)
        self.m, self.c = nn.Bilinear(4 * k, 6 * k, 8 * k), nn.Linear(8 * k, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(torch.tanh(self.m(torch.tanh(self.a(x)), torch.tanh(self.b(y)))))


@pattern("bilinear, nn.Bilinear with a raw input", X)
class BiRaw(Network):
    def make(self, k: int) -> None:
        self.a, self.m = nn.Linear(5, 6 * k), nn.Bilinear(6 * k, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(torch.relu(self.a(x)), x)


@pattern("a matrix written by another network", X, floats(3, 4))
class Written(Network):
    """A linear layer writes a (width, width) matrix per example, so 1/k goes into the writer."""

    def make(self, k: int) -> None:
        self.d, self.a, self.m, self.c = 6 * k, nn.Linear(5, 6 * k), nn.Linear(4, 36 * k * k), nn.Linear(6 * k, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        w = self.m(z).view(-1, self.d, self.d)
        return self.c(torch.tanh(torch.bmm(w, torch.tanh(self.a(x))[..., None])[..., 0]))


@pattern("a scale written by another network", X, floats(3, 4))
class Film(Network):
    def make(self, k: int) -> None:
        self.a, self.m, self.b = nn.Linear(5, 8 * k), nn.Linear(4, 16 * k), nn.Linear(8 * k, 8 * k)
        self.c = nn.Linear(8 * k, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        s, t = self.m(z).chunk(2, 1)
        return self.c(torch.relu(self.b(self.a(x)) * (1 + s) + t))


@pattern("one gate for all units", X)
class OneGate(Network):
    def make(self, k: int) -> None:
        self.a, self.g, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 1), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h * torch.sigmoid(self.g(h)))


@pattern("one layer used three times", X)
class Reused(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(3):
            h = h + torch.tanh(self.b(h))
        return self.c(h)


@pattern("one layer under two names", X)
class Twice(Network):
    """Two attributes are one module, and a third shares its weight alone."""

    def make(self, k: int) -> None:
        self.a, self.b, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 3)
        self.mix, self.other = self.b, nn.Linear(8 * k, 8 * k)
        self.other.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.other(torch.tanh(self.mix(torch.tanh(self.b(torch.tanh(self.a(x)))))))))


class Mirror(Network):
    """An autoencoder whose decoder is the transposed encoder."""

    def make(self, k: int, act: Any, bias: bool, layers: int = 1) -> None:
        self.act, self.w = act, weight(8 * k, 5)
        self.b = weight(8 * k) if bias else None
        self.m = (
            nn.Sequential(nn.Linear(8 * k, 8 * k), nn.Tanh(), nn.Linear(8 * k, 8 * k)) if layers > 1 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.m(self.act(F.linear(x, self.w, self.b))), self.w.t())


add("tied autoencoder, relu, without biases", lambda k: Mirror(k, F.relu, False), X)
add("tied autoencoder, linear, without biases", lambda k: Mirror(k, nn.Identity(), False), X)
add("tied autoencoder, layers between", lambda k: Mirror(k, torch.tanh, True, 3), X)
add("tied autoencoder, relu", lambda k: Mirror(k, F.relu, True), X, either="exact with 1/sqrt(k) in both")
add("tied autoencoder, tanh", lambda k: Mirror(k, torch.tanh, True), X, refused="1/k in the decoder alone")


@pattern("outer product of units with themselves, flattened", X)
class Outer(Network):
    """A readout of all products of two units: its input axis grows by k * k."""

    def make(self, k: int) -> None:
        self.a, self.c = nn.Linear(5, 4 * k), nn.Linear(16 * k * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c((h[:, :, None] * h[:, None, :]).flatten(1))


@pattern("outer product of units with a raw input, flattened", X)
class OuterRaw(Network):
    def make(self, k: int) -> None:
        self.a, self.c = nn.Linear(5, 6 * k), nn.Linear(30 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.einsum("bi,bj->bij", x, torch.tanh(self.a(x))).reshape(len(x), -1))


class Basis(Network):
    """Each edge has its own curve: coefficients of a few cosines per pair of units."""

    def make(self, k: int, letters: str) -> None:
        self.letters, (i, o) = letters, (5, 8 * k)
        size = {"i": i, "o": o, "n": 3}
        self.a, self.b = weight(*(size[s] for s in letters)), weight(*(({"i": o, "o": 3, "n": 3})[s] for s in letters))

    def forward(self, x: Tensor) -> Tensor:
        for w in (self.a, self.b):
            x = torch.einsum(f"bin,{self.letters}->bo", torch.cos(x[..., None] * torch.arange(1, 4, dtype=x.dtype)), w)
        return x


add("curves on edges, (out, in, basis)", lambda k: Basis(k, "oin"), X)
add("curves on edges, (in, basis, out)", lambda k: Basis(k, "ino"), X)
add("curves on edges, (basis, out, in)", lambda k: Basis(k, "noi"), X)


@pattern("cosine head", X)
class Cosine(Network):
    def make(self, k: int) -> None:
        self.a, self.w, self.s = nn.Linear(5, 8 * k), weight(3, 8 * k), weight(1, size=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.s * F.linear(F.normalize(torch.tanh(self.a(x))), F.normalize(self.w))


@pattern("dot product of two tables", tokens(7, 4), tokens(9, 4))
class Tables(Network):
    """The score of a pair is the product of its two embeddings, so 1/k goes into one of them."""

    def make(self, k: int) -> None:
        self.a, self.b = nn.Embedding(7, 8 * k), nn.Embedding(9, 8 * k)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.a(x) * self.b(y)).sum(-1)


@pattern("dot product of one table with itself", tokens(7, 4), tokens(7, 4))
class OneTable(Network):
    """The score of a pair is the product of two rows of one table, so 1/sqrt(k) goes into it."""

    def make(self, k: int) -> None:
        self.a = weight(7, 8 * k)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bd,bd->b", F.embedding(x, self.a), F.embedding(y, self.a))


@pattern("prototypes, products", X)
class Prototypes(Network):
    def make(self, k: int) -> None:
        self.a, self.q, self.p = nn.Linear(5, 8 * k), weight(8 * k), weight(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return (h @ self.p) * torch.sigmoid(h @ self.q)[:, None]
