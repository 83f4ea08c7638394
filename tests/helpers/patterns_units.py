"""Patterns: what a network may do across its units: norms, sums, extremes, orders, neighbours, transforms."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, weight
from toys import of, toy

X = floats(3, 5)
Act = Callable[[Tensor], Tensor]
same = nn.Identity()


class Between(Network):
    """A function of all units between two layers, behind a tanh that no factor passes; or n features of them."""

    def make(self, k: int, f: Act, n: int = 0) -> None:
        self.f, self.a, self.c = f, nn.Linear(5, 8 * k), nn.Linear(n or 8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.f(torch.tanh(self.a(x))))


class Last(Network):
    """One number from all units is the output."""

    def make(self, k: int, f: Act, act: Act = same, bias: bool = True) -> None:
        self.f, self.act, self.a = f, act, nn.Linear(5, 8 * k, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.act(self.a(x)))


def between(name: str, f: Act, refused: str = "") -> None:
    """One function."""
    add(f"across units, {name}", partial(Between, f=f), X, refused=refused)


def feature(name: str, f: Act, refused: str = "", n: int = 1) -> None:
    """One number, or a few, that a layer reads."""
    add(f"read by a layer, {name}", partial(Between, f=f, n=n), X, refused=refused)


def last(name: str, f: Act, act: Act = same, bias: bool = True, refused: str = "") -> None:
    """One output."""
    add(f"as the output, {name}", partial(Last, f=f, act=act, bias=bias), X, refused=refused)


def centred(h: Tensor) -> Tensor:
    """Without its mean."""
    return h - h.mean(-1, keepdim=True)


def shuffled(h: Tensor) -> Tensor:
    """The two halves, riffled."""
    return h.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


def permuted(h: Tensor) -> Tensor:
    """In an order that is drawn once for each width."""
    n = h.shape[-1]
    return h[:, random.Random(n).sample(range(n), n)]


def toeplitz(h: Tensor) -> Tensor:
    """A smoothing whose matrix depends on the distance of units."""
    i = torch.arange(h.shape[-1])
    return h @ (0.5 ** (i[:, None] - i[None]).abs()).to(h.dtype)


def circular(h: Tensor) -> Tensor:
    """A difference of neighbours on a ring."""
    return h - 0.5 * (h.roll(1, -1) + h.roll(-1, -1))


# --- norms without weights
between("layer norm as a function", lambda h: F.layer_norm(h, h.shape[-1:]))
between("divided by the root mean square", lambda h: h / (h.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt())
between("divided by the length", lambda h: h / h.norm(dim=-1, keepdim=True))
between("divided by the length, times sqrt(width)", lambda h: h / h.norm(dim=-1, keepdim=True) * h.shape[-1] ** 0.5)
between(
    "divided by the length and a little",
    lambda h: h / (h.norm(dim=-1, keepdim=True) + 0.1),
    "the constant does not grow",
)
between("F.normalize", lambda h: F.normalize(h, dim=-1))
between("F.normalize, sums of absolute values", lambda h: F.normalize(h, p=1.0, dim=-1))
between("F.normalize, largest absolute value", lambda h: h / h.abs().amax(-1, keepdim=True))
between("standardised, biased", lambda h: centred(h) / (h.std(-1, correction=0, keepdim=True) + 0.1))
between("standardised, unbiased", lambda h: centred(h) / h.std(-1, keepdim=True))
between(
    "standardised, unbiased and a little",
    lambda h: centred(h) / (h.std(-1, keepdim=True) + 0.1),
    "the constant does not grow",
)
between("each half normed alone", lambda h: torch.cat([F.layer_norm(y, y.shape[-1:]) for y in h.chunk(2, -1)], -1))
between("divided by the width", lambda h: h / h.shape[-1])
between("divided by sqrt(width)", lambda h: h / h.shape[-1] ** 0.5)
between("times the variance, unbiased", lambda h: h * h.var(-1, keepdim=True))
# --- exponentials
between("softmax", lambda h: h.softmax(-1))
between("times its softmax", lambda h: h * (3 * h).softmax(-1))
between("log_softmax", lambda h: h.log_softmax(-1), "every unit is shifted by log k")
between("softmax of halves", lambda h: h.unflatten(-1, (2, -1)).softmax(-1).flatten(1))
between("softmax of pairs", lambda h: h.unflatten(-1, (-1, 2)).softmax(-1).flatten(1))
between("softmax, times the width, with a threshold", lambda h: F.relu(h.softmax(-1) * h.shape[-1] - 0.9))
between("softmax with a threshold", lambda h: F.relu(h.softmax(-1) - 0.05), "1/k each, and the threshold stays")
# --- sums and extremes
between("less its mean", centred)
between("less its sum", lambda h: h - h.sum(-1, keepdim=True), "the sum grows by k and the unit does not")
between("times its sum", lambda h: h * h.sum(-1, keepdim=True))
between("times its largest, amax", lambda h: h * h.amax(-1, keepdim=True))
between("times its largest, max", lambda h: h * h.max(-1, keepdim=True).values, "the gradient goes to one copy alone")
between("those above the mean", lambda h: torch.where(h > h.mean(-1, keepdim=True), h, 0.1 * h))
between("the best half stays", lambda h: h * (h >= h.topk(h.shape[-1] // 2).values[:, -1:]))
between("the best three stay", lambda h: h * (h >= h.topk(3).values[:, -1:]), "copies of one unit take several places")
between("cumsum", lambda h: h.cumsum(-1), "they differ before copies")
between("cumulative mean", lambda h: h.cumsum(-1) / torch.arange(1, h.shape[-1] + 1), "they differ before copies")
# --- order and neighbours
between("sorted", lambda h: h.sort(-1).values)
between("sorted, downwards, and centred", lambda h: centred(h.sort(-1, descending=True)[0]))
between("the upper half, sorted, twice", lambda h: h.topk(h.shape[-1] // 2).values.repeat(1, 2))
between("flipped", lambda h: h.flip(-1))
between("times its flip", lambda h: h * h.flip(-1))
between("rolled by half the width, added", lambda h: h + 0.5 * h.roll(h.shape[-1] // 2, -1))
between("rolled by one", lambda h: h.roll(1, -1))
between("rolled by one, added", lambda h: h + 0.5 * h.roll(1, -1))
between("difference of neighbours on a ring", circular)
between("riffled", shuffled)
between("riffled, added", lambda h: h + 0.5 * shuffled(h), "no layout is the same before and behind it")
between("a drawn order", permuted)
between("mean of pairs, twice", lambda h: F.avg_pool1d(h[:, None], 2)[:, 0].repeat_interleave(2, -1))
between("mean of three neighbours", lambda h: F.avg_pool1d(h[:, None], 3, 1, 1)[:, 0], "copies have other neighbours")
between("a matrix by distance", toeplitz, "distances between copies are not those of their originals")
between("Fourier transform", lambda h: torch.fft.fft(h).real, "the wide one has other frequencies")
between(
    "scaled by place", lambda h: h * torch.linspace(0.1, 1, h.shape[-1], dtype=h.dtype), "constants that are no copies"
)
between("scaled by half", lambda h: h * torch.cat((torch.full((h.shape[-1] // 2,), 0.3), torch.ones(h.shape[-1] // 2))))
# --- features
feature("mean", lambda h: h.mean(-1, keepdim=True))
feature("sum", lambda h: h.sum(-1, keepdim=True))
feature("length", lambda h: h.norm(dim=-1, keepdim=True))
feature("mean, largest, deviation", lambda h: torch.stack((h.mean(-1), h.amax(-1), h.std(-1, correction=0)), -1), n=3)
feature("mean and sum", lambda h: torch.stack((h.mean(-1), h.sum(-1)), -1), "one of two columns has a factor", n=2)
feature("deviation, unbiased", lambda h: h.std(-1, keepdim=True))
feature("two best", lambda h: h.topk(2).values, "both are copies of the best", n=2)
feature("logsumexp", lambda h: h.logsumexp(-1, keepdim=True).sin(), "it grows by log k")
feature("entropy", lambda h: -(h.softmax(-1) * h.log_softmax(-1)).sum(-1, keepdim=True).sin(), "it grows by log k")
feature("product", lambda h: (1 + h / 4).prod(-1, keepdim=True), "it is raised to the power k")
feature(
    "windows of three", lambda h: h.unfold(-1, 3, 1).prod(-1).mean(-1, keepdim=True), "they hold copies of one unit"
)
feature("windows of two, apart", lambda h: h.unfold(-1, 2, 2).prod(-1).mean(-1, keepdim=True))
feature("median", lambda h: h.median(-1, keepdim=True).values, "its gradient goes to one copy alone")
feature("product of halves", lambda h: (h.chunk(2, -1)[0] * h.chunk(2, -1)[1]).sum(-1, keepdim=True))
# --- outputs
last("mean of tanh", lambda h: h.mean(-1), torch.tanh)
last("sum of tanh", lambda h: h.sum(-1), torch.tanh, refused="it grows by k, and nothing takes 1/k through the tanh")
last("sum of softplus", lambda h: h.sum(-1), F.softplus, refused="it grows by k, and nothing takes 1/k")
last("sum of relu", lambda h: h.sum(-1), F.relu)
last("sum of squares", lambda h: h.pow(2).sum(-1))
last("sum of squares of relu, without a bias", lambda h: h.pow(2).sum(-1), F.relu, bias=False)
last("mean of squares", lambda h: h.pow(2).mean(-1), torch.tanh)
last("length", lambda h: h.norm(dim=-1))
last("largest, amax", lambda h: h.amax(-1))
last("largest, max", lambda h: h.max(-1)[0], refused="the gradient goes to one copy alone")
last("deviation, biased", lambda h: h.std(-1, correction=0), torch.tanh)
last("deviation, unbiased", lambda h: h.std(-1), torch.tanh, refused="no weight can take its factor")
last("logsumexp", lambda h: h.logsumexp(-1), bias=False, refused="it grows by log k")
last("log of the mean of exp", lambda h: h.logsumexp(-1) - math.log(h.shape[-1]), bias=False)


@pattern("as an index, argmax", X, either="exact while ties go to the first copy: its row alone is read and trained")
@toy(lambda k: of(a=(5, 8 * k), t=weight(8 * k, 3), c=(8 * k, 3)))
def index(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h) + F.embedding(h.argmax(-1), m.t)


class Gain(Network):
    """A norm with a gain, written by hand, in a residual network with two layers."""

    def make(self, k: int, how: str, scalar: bool = False) -> None:
        self.how, self.a, self.c = how, nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.u, self.v = nn.Linear(8 * k, 12 * k), nn.Linear(12 * k, 8 * k)
        self.g, self.s = (weight(1 if scalar else 8 * k) for _ in "gs")

    def norm(self, h: Tensor, g: Tensor) -> Tensor:
        match self.how:
            case "mean":
                return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * g
            case "1 + w":
                return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3) * (1 + g)
            case "length":
                return h / h.norm(2, dim=-1, keepdim=True) * g
            case "length, 1 + w":
                return h / h.norm(2, dim=-1, keepdim=True) * (1 + g)
            case "deviation":
                return g * centred(h) / (h.std(-1, keepdim=True) + 1e-2)
            case "tanh":
                return torch.tanh(0.7 * h) * g
            case _:
                return F.normalize(h, dim=-1) * h.shape[-1] ** 0.5 * g

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + self.v(torch.relu(self.u(self.norm(h, self.g))))
        return self.c(self.norm(h, self.s))


def gain(name: str, how: str, either: str = "", scalar: bool = False) -> None:
    """One norm."""
    add(f"norm by hand, {name}", partial(Gain, how=how, scalar=scalar), X, either=either)


gain("root mean square", "mean")
gain("root mean square, gain 1 + w", "1 + w")
gain("length", "length")
gain("length, gain 1 + w", "length, 1 + w")
gain("length, one gain for all", "length", scalar=True)
gain("F.normalize times sqrt(width)", "normalize")
gain("tanh in its place", "tanh")
gain("unbiased deviation plus a constant", "deviation", "exact with a factor in what writes the stream")


def normed(name: str, norm: Callable[[int], nn.Module], refused: str = "") -> None:
    """One of torch's norms, in a small image network."""

    def build(k: int) -> nn.Module:
        first, second = nn.Conv2d(3, 8 * k, 3, padding=1), nn.Conv2d(8 * k, 8 * k, 1)
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * k, 3))
        return nn.Sequential(first, norm(k), nn.Tanh(), second, norm(k), nn.Tanh(), *pooled)

    add(f"torch's norm, {name}", build, floats(3, 3, 4, 4), refused=refused)


normed("BatchNorm2d", lambda k: nn.BatchNorm2d(8 * k))
normed("BatchNorm2d without gains", lambda k: nn.BatchNorm2d(8 * k, affine=False))
normed("BatchNorm2d without statistics", lambda k: nn.BatchNorm2d(8 * k, track_running_stats=False))
normed("InstanceNorm2d", lambda k: nn.InstanceNorm2d(8 * k, affine=True))
normed("GroupNorm, number of groups fixed", lambda k: nn.GroupNorm(2, 8 * k))
normed("GroupNorm, size of groups fixed", lambda k: nn.GroupNorm(2 * k, 8 * k))
normed("GroupNorm, one group", lambda k: nn.GroupNorm(1, 8 * k))
normed("GroupNorm, a group for each channel", lambda k: nn.GroupNorm(8 * k, 8 * k))
normed("LayerNorm over channels and places", lambda k: nn.LayerNorm([8 * k, 4, 4]))
normed("LocalResponseNorm", lambda k: nn.LocalResponseNorm(3, 0.5), "neighbours, zeros at the ends")


def normed_units(name: str, norms: Callable[[int], tuple[nn.Module, ...]], after: type[nn.Module] = nn.ReLU) -> None:
    """Norms of units, in a small network."""

    def build(k: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8 * k), *norms(k), after(), nn.Linear(8 * k, 3))

    add(f"torch's norm, {name}", build, floats(4, 5) if name == "BatchNorm1d" else X)


normed_units("BatchNorm1d", lambda k: (nn.BatchNorm1d(8 * k),))
normed_units("LayerNorm", lambda k: (nn.LayerNorm(8 * k),))
normed_units("RMSNorm", lambda k: (nn.RMSNorm(8 * k),))
normed_units("LayerNorm of groups of four", lambda k: (nn.Unflatten(1, (2 * k, 4)), nn.LayerNorm(4)), nn.Flatten)
