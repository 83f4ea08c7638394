"""Patterns: MLPs, bare weights, gates, factors; structured matrices, buffers, habits; experts, products of units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from patterns_kit import Network, add, floats, pattern, tokens, weight
from toys import of, toy

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


NOTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x @ W": lambda x, w: x @ w,
    "W @ x": lambda x, w: (w @ x.T).T,
    "F.linear": lambda x, w: F.linear(x, w),
    "F.linear, transposed": lambda x, w: F.linear(x, w.T),
    "matmul, transposed inside": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "mm": torch.mm,
    "addmm": lambda x, w: torch.addmm(torch.ones(w.shape[1], dtype=x.dtype), x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [0])),
    "sum of products": lambda x, w: (x[:, :, None] * w[None]).sum(1),
    "einsum bi,io": lambda x, w: torch.einsum("bi,io->bo", x, w),
    "einsum bi,oi": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "einsum oi,bi": lambda x, w: torch.einsum("oi,bi->bo", w, x),
    "einsum io,bi": lambda x, w: torch.einsum("io,bi->bo", w, x),
}
TURNED = ("W @ x", "F.linear", "einsum oi,bi", "einsum bi,oi", "matmul, transposed inside")


def bare(notation: str) -> None:
    """Bare matrices between bare biases, multiplied in one notation."""
    mix = NOTATIONS[notation]

    def matrix(ins: int, outs: int) -> nn.Parameter:
        return weight(outs, ins) if notation in TURNED else weight(ins, outs)

    @pattern(f"bare weights, {notation}", X)
    @toy(lambda k: of(a=matrix(5, 8 * k), b=matrix(8 * k, 6 * k), c=matrix(6 * k, 3), p=weight(8 * k), q=weight(6 * k)))
    def compute(m: Any, x: Tensor) -> Tensor:
        return mix(torch.tanh(mix(torch.relu(mix(x, m.a) + m.p), m.b) + m.q), m.c)


for each in NOTATIONS:
    bare(each)


@pattern("bare weights, square and used both ways round", X)
@toy(lambda k: of(a=weight(5, 8 * k), b=weight(8 * k, 8 * k), c=weight(8 * k, 3)))
def both_ways(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ m.a)
    h = torch.tanh(h @ m.b)
    return torch.tanh(h @ m.b.T) @ m.c


@pattern("stacked weights, bmm", X)
@toy(lambda k: of(a=weight(4, 5, 8 * k), b=weight(4, 8 * k, 3), p=weight(4, 1, 8 * k)))
def stacked(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(torch.baddbmm(m.p, x.expand(4, -1, -1), m.a))
    return torch.bmm(h, m.b).mean(0)


@pattern("stacked weights, the layers of one depth", X)
@toy(lambda k: of(a=(5, 8 * k), w=weight(3, 8 * k, 8 * k, size=0.3), p=weight(3, 8 * k), c=(8 * k, 2)))
def depth(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    for w, p in zip(m.w, m.p, strict=True):
        h = h + torch.tanh(h @ w + p)
    return m.c(h)


@pattern("slices of one big parameter, along the output", X)
@toy(lambda k: of(d=8 * k, a=(5, 8 * k), w=weight(8 * k, 16 * k), c=weight(8 * k, 3)))
def sliced_out(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return (torch.sigmoid(h @ m.w[:, : m.d]) * (h @ m.w[:, m.d :])) @ m.c


@pattern("slices of one big parameter, along the input", X)
@toy(lambda k: of(a=(5, 8 * k), b=(5, 4 * k), w=weight(6 * k, 12 * k), c=(6 * k, 3)))
def sliced_in(m: Any, x: Tensor) -> Tensor:
    n = m.a.out_features
    return m.c(torch.tanh(F.linear(torch.relu(m.a(x)), m.w[:, :n]) + F.linear(torch.tanh(m.b(x)), m.w[:, n:])))


@pattern("a flat vector of all weights", X, refused="weights of one axis need different factors")
@toy(lambda k: of(d=8 * k, w=weight(8 * k * (5 + 1 + 3))))
def flat(m: Any, x: Tensor) -> Tensor:
    a, p, c = m.w.split([5 * m.d, m.d, 3 * m.d])
    return torch.tanh(x @ a.view(5, m.d) + p) @ c.view(m.d, 3)


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
@toy(lambda k: of(all=nn.ParameterDict({"u": weight(8 * k, 5), "v": weight(8 * k, 8 * k), "w": weight(3, 8 * k)})))
def named(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(F.silu(F.linear(x, m.all["u"])), m.all["v"])), m.all["w"])


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
@toy(lambda k: of(n=[6 * k, 6 * k, 2 * k], a=(5, 14 * k), b=(6 * k, 3), c=(2 * k, 3)))
def pieces(m: Any, x: Tensor) -> Tensor:
    g, u, s = m.a(x).split(m.n, dim=-1)
    return m.b(torch.sigmoid(g) * u) + m.c(torch.relu(s))


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
@toy(lambda k: of(a=weight_norm(nn.Linear(5, 8 * k)), b=weight_norm(nn.Linear(8 * k, 8 * k)), c=(8 * k, 3)))
def normed(m: Any, x: Tensor) -> Tensor:
    """Rows of the weights have a length that is a parameter, so sqrt(k) has to go there."""
    return m.c(torch.tanh(m.b(torch.tanh(m.a(x)))))


@pattern("weight standardised in forward", X)
@toy(lambda k: of(a=(5, 8 * k), w=weight(8 * k, 8 * k), g=weight(8 * k), c=(8 * k, 3)))
def standardised(m: Any, x: Tensor) -> Tensor:
    w = m.w - m.w.mean(1, keepdim=True)
    w = w / w.pow(2).mean(1, keepdim=True).sqrt() / w.shape[1]
    return m.c(torch.tanh(F.linear(torch.tanh(m.a(x)), w) * m.g))


@pattern("highway", X)
@toy(lambda k: of(a=(5, 8 * k), b=(8 * k, 8 * k), t=(8 * k, 8 * k), c=(8 * k, 3)))
def highway(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    t = torch.sigmoid(m.t(h))
    return m.c(t * torch.relu(m.b(h)) + (1 - t) * h)


@pattern("maxout, pieces next to each other", X)
@toy(lambda k: of(a=(5, 24 * k), b=(8 * k, 3)))
def maxout_inside(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).view(len(x), -1, 3).max(-1).values)


@pattern("maxout, pieces far apart", X)
@toy(lambda k: of(a=(5, 24 * k), b=(8 * k, 3)))
def maxout_outside(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).view(len(x), 3, -1).max(1)[0])


UNEQUAL = "units that grow and inputs that do not lie on one axis of a weight"


# --- structured matrices
def square(k: int) -> tuple[int, ...]:
    """The shape of a weight that reads units and gives them."""
    return 8 * k, 8 * k


def matrix(
    name: str,
    made: Callable[..., Tensor],
    shape: Callable[[int], tuple[int, ...]] = square,
    small: tuple[int, ...] = (),
    **reason: str,
) -> None:
    """A square matrix made of one weight, or of one that grows and a small one."""

    @pattern(f"matrix, {name}", X, **reason)
    @toy(lambda k: of(a=(5, 8 * k), c=(8 * k, 3), w=weight(*shape(k), size=0.3), s=weight(*small) if small else None))
    def compute(m: Any, x: Tensor) -> Tensor:
        return m.c(torch.tanh(torch.tanh(m.a(x)) @ (made(m.w, m.s) if small else made(m.w))))


def on_a_ring(w: Tensor) -> Tensor:
    """Entries by the distance."""
    i = torch.arange(len(w))
    return w[(i[:, None] - i[None]) % len(w)]


def one(w: Tensor) -> Tensor:
    """The identity."""
    return torch.eye(len(w), dtype=w.dtype)


ITSELF = "a unit would have to leave out all its copies, and leaves out itself"
matrix("depends on the distance on a ring", on_a_ring, lambda k: (8 * k,))
matrix("diagonal", torch.diag, lambda k: (8 * k,))
matrix("two blocks on the diagonal", lambda w: torch.block_diag(*w), lambda k: (2, 4 * k, 4 * k))
matrix("small blocks on the diagonal, their number grows", lambda w: torch.block_diag(*w), lambda k: (2 * k, 4, 4))
matrix("Kronecker product with a small one inside", torch.kron, lambda k: (4 * k, 4 * k), (2, 2))
matrix("Kronecker product with a small one outside", lambda w, s: torch.kron(s, w), lambda k: (4 * k, 4 * k), (2, 2))
matrix("symmetric by sum", lambda w: w + w.T)
matrix("square of a weight", lambda w: w @ w)
matrix("identity plus a weight", lambda w: one(w) + w)
matrix("exponential of a skew weight", lambda w: torch.linalg.matrix_exp(w - w.T))
matrix("Cayley transform of a skew weight", lambda w: torch.linalg.solve(one(w) + w - w.T, one(w) - w + w.T))
matrix("reflection", lambda w: one(w) - 2 * torch.outer(w, w) / w.dot(w), lambda k: (8 * k,))
matrix("without its diagonal", lambda w: w * (1 - one(w)), refused=ITSELF)
matrix("lower triangle", torch.tril, refused="a wide triangle is no narrow one")


@pattern("two products with small matrices and a transpose between", X)
@toy(lambda k: of(a=(5, 8 * k), u=weight(2, 4 * k, 4 * k), v=weight(4 * k, 2, 2), c=(8 * k, 3)))
def monarch(m: Any, x: Tensor) -> Tensor:
    h = torch.einsum("bnc,nco->bno", torch.tanh(m.a(x)).view(len(x), 2, -1), m.u)
    return m.c(torch.tanh(torch.einsum("bnc,nco->bno", h.transpose(1, 2), m.v)).flatten(1))


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


@pattern("skip, raw coordinates beside units", X, warned=UNEQUAL)
@toy(lambda k: of(a=(5, 8 * k), b=(8 * k + 5, 8 * k), m=(5, 8 * k), c=(8 * k, 3)))
def raw_skip(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.relu(m.b(torch.cat((torch.relu(m.a(x)), x), -1))) + torch.sin(m.m(x)))


@pattern("skip, embedded coordinates beside units", X)
@toy(lambda k: of(a=(5, 8 * k), b=(16 * k, 8 * k), m=(5, 8 * k), c=(8 * k, 3)))
def embedded_skip(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.relu(m.b(torch.cat((torch.relu(m.a(x)), torch.sin(m.m(x))), -1))))


@pattern("waves of learned frequencies", X)
@toy(lambda k: of(f=weight(5, 4 * k), a=(8 * k, 6 * k), c=(6 * k, 3)))
def waves(m: Any, x: Tensor) -> Tensor:
    y = x @ m.f
    return m.c(torch.relu(m.a(torch.cat((y.sin(), y.cos()), -1))))


@pattern("mean and spread of a latent of fixed size", X)
@toy(lambda k: of(a=(5, 8 * k), m=(8 * k, 4), b=(2, 8 * k), c=(8 * k, 5)))
def latent(m: Any, x: Tensor) -> Tensor:
    mean, s = m.m(torch.relu(m.a(x))).chunk(2, -1)
    return m.c(torch.relu(m.b(mean))) + (mean.square() + s.exp() - s).mean(-1, keepdim=True)


@pattern("several readouts of several layers", tokens(6, 3), X)
@toy(lambda k: of(e=nn.Embedding(6, 8 * k), a=(5, 8 * k), b=(8 * k, 6 * k), u=(8 * k, 3), v=(6 * k, 3), w=weight(2)))
def readouts(m: Any, t: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(m.e(t) + m.a(x))
    p = m.w.softmax(0)
    return p[0] * m.u(h) + p[1] * m.v(torch.tanh(m.b(h)))


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
@toy(lambda k: of(a=(5, 8 * k), b=(5, 6 * k), w=weight(3, 8 * k, 6 * k)))
def bare3(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,oij,bj->bo", torch.tanh(m.a(x)), m.w, torch.tanh(m.b(y)))


@pattern("bilinear, nn.Bilinear between widths", X, X)
@toy(lambda k: of(a=(5, 4 * k), b=(5, 6 * k), m=nn.Bilinear(4 * k, 6 * k, 8 * k), c=(8 * k, 2)))
def bi(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.c(torch.tanh(m.m(torch.tanh(m.a(x)), torch.tanh(m.b(y)))))


@pattern("bilinear, nn.Bilinear with a raw input", X)
@toy(lambda k: of(a=(5, 6 * k), m=nn.Bilinear(6 * k, 5, 3)))
def bi_raw(m: Any, x: Tensor) -> Tensor:
    return m.m(torch.relu(m.a(x)), x)


@pattern("a matrix written by another network", X, floats(3, 4))
@toy(lambda k: of(d=6 * k, a=(5, 6 * k), m=(4, 36 * k * k), c=(6 * k, 3)))
def written(m: Any, x: Tensor, z: Tensor) -> Tensor:
    """A linear layer writes a (width, width) matrix per example, so 1/k goes into the writer."""
    w = m.m(z).view(-1, m.d, m.d)
    return m.c(torch.tanh(torch.bmm(w, torch.tanh(m.a(x))[..., None])[..., 0]))


@pattern("a scale written by another network", X, floats(3, 4))
@toy(lambda k: of(a=(5, 8 * k), m=(4, 16 * k), b=(8 * k, 8 * k), c=(8 * k, 3)))
def film(m: Any, x: Tensor, z: Tensor) -> Tensor:
    s, t = m.m(z).chunk(2, 1)
    return m.c(torch.relu(m.b(m.a(x)) * (1 + s) + t))


@pattern("one gate for all units", X)
@toy(lambda k: of(a=(5, 8 * k), g=(8 * k, 1), c=(8 * k, 3)))
def one_gate(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h * torch.sigmoid(m.g(h)))


@pattern("one layer used three times", X)
@toy(lambda k: of(a=(5, 8 * k), b=(8 * k, 8 * k), c=(8 * k, 3)))
def reused(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    for _ in range(3):
        h = h + torch.tanh(m.b(h))
    return m.c(h)


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
@toy(lambda k: of(a=(5, 4 * k), c=(16 * k * k, 3)))
def outer(m: Any, x: Tensor) -> Tensor:
    """A readout of all products of two units: its input axis grows by k * k."""
    h = torch.tanh(m.a(x))
    return m.c((h[:, :, None] * h[:, None, :]).flatten(1))


@pattern("outer product of units with a raw input, flattened", X)
@toy(lambda k: of(a=(5, 6 * k), c=(30 * k, 3)))
def outer_raw(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.einsum("bi,bj->bij", x, torch.tanh(m.a(x))).reshape(len(x), -1))


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
@toy(lambda k: of(a=(5, 8 * k), w=weight(3, 8 * k), s=weight(1, size=2.0)))
def cosine(m: Any, x: Tensor) -> Tensor:
    return m.s * F.linear(F.normalize(torch.tanh(m.a(x))), F.normalize(m.w))


@pattern("dot product of two tables", tokens(7, 4), tokens(9, 4))
@toy(lambda k: of(a=nn.Embedding(7, 8 * k), b=nn.Embedding(9, 8 * k)))
def tables(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The score of a pair is the product of its two embeddings, so 1/k goes into one of them."""
    return (m.a(x) * m.b(y)).sum(-1)


@pattern("dot product of one table with itself", tokens(7, 4), tokens(7, 4))
@toy(lambda k: of(a=weight(7, 8 * k)))
def one_table(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The score of a pair is the product of two rows of one table, so 1/sqrt(k) goes into it."""
    return torch.einsum("bd,bd->b", F.embedding(x, m.a), F.embedding(y, m.a))


@pattern("prototypes, products", X)
@toy(lambda k: of(a=(5, 8 * k), q=weight(8 * k), p=weight(8 * k, 3)))
def prototypes(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return (h @ m.p) * torch.sigmoid(h @ m.q)[:, None]
