"""Patterns: graphs, sets, capsules, and comparisons by distances and products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, weight
from toys import of, toy

X = floats(3, 5)
G = floats(5, 4)
UNEQUAL = "units that grow and inputs that do not lie on one axis of a weight"


def ring(x: Tensor) -> Tensor:
    """Neighbours of a small fixed graph: a ring with one chord."""
    n = torch.eye(len(x), dtype=x.dtype)
    a = n.roll(1, 0) + n.roll(-1, 0)
    a[0, 2] = a[2, 0] = 1.0
    return a


def edges() -> Tensor:
    """The same graph, as pairs."""
    return torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 4, 0, 1, 2, 3, 2, 0]])


@pattern("graph, averages of neighbours and bare weights", G)
@toy(lambda k: of(u=weight(4, 8 * k), v=weight(8 * k, 6 * k), b=weight(8 * k), c=weight(6 * k, 3)))
def averages(m: Any, x: Tensor) -> Tensor:
    a = ring(x)
    a = a / a.sum(1, keepdim=True)
    h = torch.relu(a @ x @ m.u + m.b)
    return torch.relu(a @ (h @ m.v)) @ m.c


@pattern("graph, attention by two vectors, heads grow", G)
@toy(lambda k: of(w=nn.Linear(4, 8 * k, bias=False), s=weight(2 * k, 4), t=weight(2 * k, 4), c=(8 * k, 3)))
def vectors(m: Any, x: Tensor) -> Tensor:
    h = m.w(x).unflatten(-1, (-1, 4))
    e = F.leaky_relu((h * m.s).sum(-1)[:, None] + (h * m.t).sum(-1)[None], 0.2)
    p = e.masked_fill(ring(x)[..., None] == 0, float("-inf")).softmax(1)
    return m.c(F.elu(torch.einsum("ijh,jhd->ihd", p, h).flatten(1)))


@pattern("graph, attention by two vectors, one head", G)
@toy(lambda k: of(w=weight(4, 8 * k), s=weight(8 * k, 1), t=weight(8 * k, 1), c=(8 * k, 3)))
def one_vector(m: Any, x: Tensor) -> Tensor:
    h = torch.mm(x, m.w)
    e = F.leaky_relu(h @ m.s + (h @ m.t).T, 0.2)
    p = torch.where(ring(x) > 0, e, torch.full_like(e, -9e15)).softmax(1)
    return m.c(torch.tanh(torch.matmul(p, h)))


class Messages(Network):
    """Messages along edges from both ends, summed by index_add, and an update of the sum and the node."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.c = how, nn.Linear(4, 8 * k), nn.Linear(8 * k, 3)
        self.m = nn.Linear(16 * k + (2 if how == "raw" else 0), 6 * k)
        self.u, self.e = nn.Linear(14 * k, 8 * k), nn.Linear(2, 8 * k) if how == "embedded" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h, (i, j) = torch.tanh(self.a(x)), edges()
        far = torch.stack((x[i, 0] - x[j, 0], x[i, 1] * x[j, 1]), -1)
        ends = torch.cat((h[i], h[j]), -1)
        if self.how == "raw":
            ends = torch.cat((ends, far), -1)
        elif self.how == "embedded":
            ends = torch.cat((h[i] + self.e(far), h[j]), -1)
        m = torch.zeros(len(x), self.m.out_features, dtype=x.dtype).index_add_(0, j, torch.relu(self.m(ends)))
        return self.c(torch.tanh(self.u(torch.cat((h, m), -1))))


add("graph, messages from both ends", lambda k: Messages(k, "ends"), G)
add("graph, messages from both ends and embedded features", lambda k: Messages(k, "embedded"), G)
add("graph, messages from both ends and raw features", lambda k: Messages(k, "raw"), G, warned=UNEQUAL)


@pattern("graph, sums with a learned weight of the node itself", G)
class Sums(Network):
    def make(self, k: int) -> None:
        self.e, self.a, self.c = weight(1), nn.Linear(4, 8 * k), nn.Linear(8 * k, 3)
        self.m = nn.Sequential(nn.Linear(8 * k, 8 * k), nn.BatchNorm1d(8 * k), nn.ReLU(), nn.Linear(8 * k, 8 * k))

    def forward(self, x: Tensor) -> Tensor:
        h, (i, j) = self.a(x), edges()
        near = torch.zeros_like(h).scatter_add(0, j[:, None].expand(-1, h.shape[1]), h[i])
        return self.c(self.m((1 + self.e) * h + near).sum(0))


@pattern("graph, several aggregates side by side", G)
@toy(lambda k: of(a=(4, 6 * k), u=(36 * k, 6 * k), c=(6 * k, 3)))
def aggregates(m: Any, x: Tensor) -> Tensor:
    h, a = m.a(x), ring(x)
    there = a[..., None] > 0
    parts = [a @ h / a.sum(1, keepdim=True), h.where(there, -9.0).amax(1), h.where(there, 9.0).amin(1)]
    y = torch.cat(parts, -1)
    return m.c(torch.tanh(m.u(torch.cat((y, y * a.sum(1, keepdim=True).log()), -1))))


@pattern("graph, attention with products of ends", G)
class Products(Network):
    def make(self, k: int) -> None:
        self.q, self.k, self.v, self.s = (nn.Linear(4, 8 * k) for _ in range(4))
        self.b, self.c = nn.Linear(24 * k, 1), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        i, j = edges()
        score = (self.q(x)[j] * self.k(x)[i]).unflatten(-1, (-1, 4)).sum(-1) / 2
        up = score.exp()
        p = up / torch.zeros(len(x), up.shape[1], dtype=x.dtype).index_add(0, j, up)[j]
        y = (p[..., None] * self.v(x)[i].unflatten(-1, (-1, 4))).flatten(1)
        out, skip = torch.zeros(len(x), y.shape[1], dtype=x.dtype).index_add(0, j, y), self.s(x)
        g = torch.sigmoid(self.b(torch.cat((out, skip, out - skip), -1)))
        return self.c(g * skip + (1 - g) * out)


@pattern("sets, layers around a sum", floats(3, 5, 4))
class DeepSet(Network):
    def make(self, k: int) -> None:
        self.a, self.u, self.v = nn.Linear(4, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 8 * k, bias=False)
        self.r = nn.Sequential(nn.Linear(8 * k, 6 * k), nn.Tanh(), nn.Linear(6 * k, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.r(torch.relu(self.u(h) - self.v(h.mean(1, keepdim=True))).sum(1))


class Capsules(Network):
    """Small vectors vote for three others, and are routed by agreement."""

    def make(self, k: int, ins: int, dim: int, rounds: int) -> None:
        self.ins, self.rounds = ins, rounds
        self.a, self.w, self.c = nn.Linear(5, 4 * ins), weight(ins, 3, dim, 4), weight(3, dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,ijed->bije", torch.tanh(self.a(x)).view(len(x), self.ins, 4), self.w)
        b = torch.zeros_like(votes[..., 0])
        for _ in range(self.rounds):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            size = s.square().sum(-1, keepdim=True)
            v = size / (1 + size) * s / size.sqrt()
            b = b + (votes * v[:, None]).sum(-1)
        return torch.einsum("bje,jeo->bo", v, self.c)


add("capsules, one round, their number grows", lambda k: Capsules(k, 4 * k, 4, 1), X)
add(
    "capsules, routed, their number grows",
    lambda k: Capsules(k, 4 * k, 4, 2),
    X,
    refused="1/k for the sum, and none for the agreement",
)
add("capsules, routed, their size grows", lambda k: Capsules(k, 4, 4 * k, 2), X)


# --- distances and comparisons
class Pair(Network):
    """Two inputs through the same layers, compared."""

    def make(self, k: int, f: Callable[[Tensor, Tensor], Tensor], act: Callable[[Tensor], Tensor]) -> None:
        self.f, self.act, self.a, self.b = f, act, nn.Linear(5, 8 * k), nn.Linear(8 * k, 6 * k)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = (self.act(self.b(torch.tanh(self.a(one)))) for one in (x, y))
        return self.f(u, v)


same = nn.Identity()
TOO_MUCH = "the distance grows with k, and no weight can take a factor through the tanh"


def pair(name: str, f: Callable[[Tensor, Tensor], Tensor], act: Callable[[Tensor], Tensor], refused: str = "") -> None:
    """One comparison."""
    add(f"pair, {name}", partial(Pair, f=f, act=act), X, X, refused=refused)


pair("squared distance", lambda u, v: (u - v).pow(2).sum(-1), same)
pair("mean squared distance of tanh", lambda u, v: (u - v).pow(2).mean(-1), torch.tanh)
pair("squared distance of tanh", lambda u, v: (u - v).pow(2).sum(-1), torch.tanh, TOO_MUCH)
pair("distance of all to all", torch.cdist, same)
pair("sum of absolute differences of relu", lambda u, v: (u - v).abs().sum(-1), F.relu)
pair("F.pairwise_distance", partial(F.pairwise_distance, eps=0.0), same)
pair("F.cosine_similarity of tanh", F.cosine_similarity, torch.tanh)
pair("products of all with all, normed", lambda u, v: F.normalize(u) @ F.normalize(v).T, torch.tanh)
pair("products of all with all, tanh", lambda u, v: u @ v.T, torch.tanh, TOO_MUCH)
pair("products of all with all, divided by the width", lambda u, v: u @ v.T / u.shape[1], torch.tanh)


class Form(Network):
    """A difference of units measured by a learned matrix."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a = how, nn.Linear(5, 8 * k)
        self.m = weight(8 * k, {"full": 8, "factor, grows": 6}.get(how, 0) * k or 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        d = torch.tanh(self.a(x)) - torch.tanh(self.a(y))
        return torch.einsum("bi,ij,bj->b", d, self.m, d) if self.how == "full" else (d @ self.m).square().sum(-1)


add("pair, a learned quadratic form", lambda k: Form(k, "full"), X, X)
add("pair, a learned form in factors, rank fixed", lambda k: Form(k, "factor"), X, X)
add("pair, a learned form in factors, rank grows", lambda k: Form(k, "factor, grows"), X, X)


class Centres(Network):
    """Units are compared with learned centres by distance."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.p, self.c = how, nn.Linear(5, 8 * k), weight(4, 8 * k), nn.Linear(4, 3)
        self.g = weight(4) if how in ("rate", "exp rate") else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.how == "linear" else torch.tanh(self.a(x))
        d = (h[:, None] - self.p).pow(2).sum(-1)
        if self.how == "mean":
            d = d / h.shape[-1]
        elif self.g is not None:
            d = d * (self.g.exp() if self.how == "exp rate" else self.g.abs())
        return self.c(torch.exp(-d / 4))


add("centres, mean squared distance", lambda k: Centres(k, "mean"), X)
add("centres, squared distance times a rate", lambda k: Centres(k, "rate"), X)
add(
    "centres, squared distance times exp of a rate",
    lambda k: Centres(k, "exp rate"),
    X,
    refused="1/k shifts the rate by log k",
)
add("centres, squared distance of tanh", lambda k: Centres(k, "sum"), X, refused=TOO_MUCH)
add(
    "centres, squared distance without a nonlinearity",
    lambda k: Centres(k, "linear"),
    X,
    either="exact with 1/sqrt(k) in all",
)


@pattern("nearest of a list of codes", X)
@toy(lambda k: of(a=(5, 8 * k), e=weight(6, 8 * k), c=(8 * k, 3)))
def codes(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    q = m.e[torch.cdist(h.detach(), m.e.detach()).argmin(-1)]
    return m.c(q + h - h.detach())
