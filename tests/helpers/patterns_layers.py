"""Patterns: MLPs, bare weights, gates, factors; structured matrices, buffers, habits; experts, products of units."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from patterns_kit import Network, add, floats, pattern, tokens, weight

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


UNEQUAL = "units that grow and inputs that do not lie on one axis of a weight"


# --- structured matrices
class Matrix(Network):
    """A square matrix made of parameters in one of several ways."""

    def make(self, k: int, how: str) -> None:
        n, self.how = 8 * k, how
        self.a, self.c = nn.Linear(5, n), nn.Linear(n, 3)
        shapes = {"ring": (n,), "diagonal": (n,), "blocks": (2, n // 2, n // 2), "reflection": (n,)}
        shapes |= {
            "small blocks": (n // 4, 4, 4),
            "outer of small": (n // 2, n // 2),
            "inner of small": (n // 2, n // 2),
        }
        self.w, self.s = weight(*shapes.get(how, (n, n)), size=0.3), weight(2, 2) if how.endswith("of small") else None

    def matrix(self, n: int) -> Tensor:
        w, one, i = self.w, torch.eye(n, dtype=self.w.dtype), torch.arange(n)
        match self.how, self.s:
            case "ring", _:
                return w[(i[:, None] - i[None]) % n]
            case "diagonal", _:
                return torch.diag(w)
            case (("blocks" | "small blocks"), _):
                return torch.block_diag(*w)
            case "outer of small", Tensor() as s:
                return torch.kron(w, s)
            case "inner of small", Tensor() as s:
                return torch.kron(s, w)
            case "symmetric", _:
                return w + w.T
            case "square", _:
                return w @ w
            case "identity", _:
                return one + w
            case "exponential", _:
                return torch.linalg.matrix_exp(w - w.T)
            case "inverse", _:
                return torch.linalg.solve(one + w - w.T, one - w + w.T)
            case "no self", _:
                return w * (1 - one)
            case "triangle", _:
                return w.tril()
            case _:
                return one - 2 * torch.outer(w, w) / w.dot(w)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(torch.tanh(h @ self.matrix(h.shape[1])))


def matrix(name: str, how: str, refused: str = "") -> None:
    """One way."""
    add(f"matrix, {name}", partial(Matrix, how=how), X, refused=refused)


matrix("depends on the distance on a ring", "ring")
matrix("diagonal", "diagonal")
matrix("two blocks on the diagonal", "blocks")
matrix("small blocks on the diagonal, their number grows", "small blocks")
matrix("Kronecker product with a small one inside", "outer of small")
matrix("Kronecker product with a small one outside", "inner of small")
matrix("symmetric by sum", "symmetric")
matrix("square of a weight", "square")
matrix("identity plus a weight", "identity")
matrix("exponential of a skew weight", "exponential")
matrix("Cayley transform of a skew weight", "inverse")
matrix("reflection", "reflection")
matrix("without its diagonal", "no self", "a unit would have to leave out all its copies, and leaves out itself")
matrix("lower triangle", "triangle", "a wide triangle is no narrow one")


@pattern("two products with small matrices and a transpose between", X)
class Monarch(Network):
    def make(self, k: int) -> None:
        self.a, self.u, self.v = nn.Linear(5, 8 * k), weight(2, 4 * k, 4 * k), weight(4 * k, 2, 2)
        self.c = nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bnc,nco->bno", torch.tanh(self.a(x)).view(len(x), 2, -1), self.u)
        return self.c(torch.tanh(torch.einsum("bnc,nco->bno", h.transpose(1, 2), self.v)).flatten(1))


# --- buffers, modes and habits
class Held(Network):
    """Buffers that grow with the width."""

    def make(self, k: int, how: str) -> None:
        n, self.how = 8 * k, how
        self.a, self.b, self.c = nn.Linear(5, n), nn.Linear(n, n), nn.Linear(n, 3)
        square = how in ("square", "echo")
        self.register_buffer("p", torch.randn(n, n) / 4 if square else torch.rand(n) + 0.5, persistent=how != "unsaved")
        self.register_buffer("q", torch.zeros(()))
        if how == "ones":
            self.p.fill_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "echo":
            for _ in range(3):
                h = torch.tanh(h @ self.p + self.a(x))
        elif self.how == "square":
            h = torch.relu(F.linear(h, self.p))
        else:
            h = h * self.p + self.q
        return self.c(torch.tanh(self.b(h)))


add("buffer, a random square matrix", lambda k: Held(k, "square"), X)
add("buffer, a random square matrix used again and again", lambda k: Held(k, "echo"), X)
add("buffer, one number per unit", lambda k: Held(k, "vector"), X)
add("buffer, the same number for each unit", lambda k: Held(k, "ones"), X)
add(
    "buffer, one random number per unit, not saved",
    lambda k: Held(k, "unsaved"),
    X,
    either="exact until it is loaded again",
)


@pattern("running mean of units, updated in forward", X)
class Running(Network):
    def make(self, k: int) -> None:
        self.a, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.register_buffer("m", torch.zeros(8 * k))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.training:
            self.m.lerp_(h.detach().mean(0), 0.1)
        return self.c(h - self.m)


def frozen(k: int, which: int) -> nn.Module:
    """A layer that is not trained."""
    made = nn.Sequential(nn.Linear(5, 8 * k), nn.Tanh(), nn.Linear(8 * k, 8 * k), nn.Tanh(), nn.Linear(8 * k, 3))
    made[which].requires_grad_(False)
    return made


add("frozen, the first layer", lambda k: frozen(k, 0), X)
add("frozen, the middle layer", lambda k: frozen(k, 2), X)
add(
    "dropout",
    lambda k: nn.Sequential(nn.Linear(5, 8 * k), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8 * k, 3)),
    X,
    either="exact without: copies are dropped one by one",
)
add("a unit's own slope", lambda k: nn.Sequential(nn.Linear(5, 8 * k), nn.PReLU(8 * k), nn.Linear(8 * k, 3)), X)
add("one slope for all units", lambda k: nn.Sequential(nn.Linear(5, 8 * k), nn.PReLU(), nn.Linear(8 * k, 3)), X)


class Habit(Network):
    """A residual network written with one habit."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.c = how, nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.u, self.v = nn.Linear(8 * k, 12 * k), nn.Linear(12 * k, 8 * k)

    def block(self, h: Tensor) -> Tensor:
        return self.v(torch.relu(self.u(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        n = h.shape[-1] // 2
        match self.how:
            case "in place":
                h = h.clone().mul_(0.5).add_(self.v(self.u(h).relu_())).clamp_(-3, 3)
            case "slice assignment":
                y = torch.zeros_like(h)
                y[:, :n] = h[:, n:]
                y[:, n:] += self.block(h)[:, n:]
                h = y
            case "even and odd assignment":
                y = torch.empty_like(h)
                y[:, ::2], y[:, 1::2] = h[:, ::2] * 2, self.block(h)[:, 1::2]
                h = y
            case "where":
                h = torch.where(h > 0, h, self.block(h))
            case "masked assignment":
                y = self.block(h)
                y[y > 1] = 1.0
                h = h + y
            case "checkpoint":
                h = h + checkpoint(self.block, h, use_reentrant=False)
            case "detach":
                y = self.block(h)
                h = h * h.detach() + y + (y.sign() - y).detach()
            case "half precision and back":
                h = h + self.block(h).to(torch.float64).to(h.dtype)
            case "stack and sum":
                h = torch.stack((h, self.block(h), h * h), -1).sum(-1)
            case "python loop over units":
                h = torch.stack([h[:, i] * (1 + h[:, i - n]) for i in range(2 * n)], 1) + self.block(h)
            case "gradient":
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    y = torch.tanh(self.a(x))
                    (g,) = torch.autograd.grad(self.c(torch.tanh(y + self.block(y))).sum(), x, create_graph=True)
                return torch.cat((g, self.c(h)), -1)
        return self.c(h)


def habit(how: str, name: str) -> None:
    """One habit."""
    add(f"habit, {name}", partial(Habit, how=how), X)


habit("in place", "operations in place")
habit("slice assignment", "halves assigned into zeros")
habit("even and odd assignment", "even and odd units assigned into an empty tensor")
habit("where", "torch.where")
habit("masked assignment", "assignment by a mask")
habit("checkpoint", "recomputed in backward")
habit("detach", "parts detached")
habit("half precision and back", "another precision and back")
habit("stack and sum", "stacked and summed")
habit("python loop over units", "a loop over units")
habit("gradient", "the output is a gradient")


class Skip(Network):
    """Coordinates come in again after some layers."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.b = how, nn.Linear(5, 8 * k), nn.Linear(8 * k + (5 if how == "raw" else 8 * k), 8 * k)
        self.m, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, y = torch.relu(self.a(x)), torch.sin(self.m(x))
        if self.how == "raw":
            return self.c(torch.relu(self.b(torch.cat((h, x), -1))) + y)
        return self.c(torch.relu(self.b(torch.cat((h, y), -1))))


add("skip, raw coordinates beside units", lambda k: Skip(k, "raw"), X, refused=UNEQUAL)
add("skip, embedded coordinates beside units", lambda k: Skip(k, "embedded"), X)


@pattern("waves of learned frequencies", X)
class Waves(Network):
    def make(self, k: int) -> None:
        self.f, self.a, self.c = weight(5, 4 * k), nn.Linear(8 * k, 6 * k), nn.Linear(6 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.f
        return self.c(torch.relu(self.a(torch.cat((y.sin(), y.cos()), -1))))


@pattern("mean and spread of a latent of fixed size", X)
class Latent(Network):
    def make(self, k: int) -> None:
        self.a, self.m, self.b = nn.Linear(5, 8 * k), nn.Linear(8 * k, 4), nn.Linear(2, 8 * k)
        self.c = nn.Linear(8 * k, 5)

    def forward(self, x: Tensor) -> Tensor:
        m, s = self.m(torch.relu(self.a(x))).chunk(2, -1)
        return self.c(torch.relu(self.b(m))) + (m.square() + s.exp() - s).mean(-1, keepdim=True)


@pattern("several readouts of several layers", tokens(6, 3), X)
class Readouts(Network):
    def make(self, k: int) -> None:
        self.e, self.a, self.b = nn.Embedding(6, 8 * k), nn.Linear(5, 8 * k), nn.Linear(8 * k, 6 * k)
        self.u, self.v, self.w = nn.Linear(8 * k, 3), nn.Linear(6 * k, 3), weight(2)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(self.e(t) + self.a(x))
        p = self.w.softmax(0)
        return p[0] * self.u(h) + p[1] * self.v(torch.tanh(self.b(h)))


# --- experts, products of units, weights used twice, comparisons
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


@pattern("experts, rows of the batch sent to modules by index", floats(12, 5))
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
