"""Patterns: structured matrices, buffers, what is frozen or dropped, and habits of code."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patterns_kit import Network, add, floats, pattern, tokens, weight

X = floats(3, 5)
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
