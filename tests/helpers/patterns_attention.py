"""Patterns: attention, by how its heads lie, what grows, and what scales the scores; in blocks; torch's own modules."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, tokens, weight
from toys import of, toy

X = floats(2, 4, 5)
FOLD_IN_SLICE = (
    "the factor belongs to the queries alone, a part of a fused weight (or k**-0.25 to all, and back behind)"
)


class Stream(Network):
    """Positions with 8 * k units, to which `mix` is added."""

    def make(self, k: int) -> None:
        self.a, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)

    def mix(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(torch.tanh(h + self.mix(h)).mean(1))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax attention over the last two axes."""
    return (q @ k.transpose(-2, -1) * scale).softmax(-1) @ v


def linear(k: int, outs: int, bias: bool = True) -> nn.Linear:
    """A layer that reads the stream."""
    return nn.Linear(8 * k, outs, bias)


class Fused(Stream):
    """One layer writes queries, keys and values, with its axis viewed in one of several orders."""

    def make(self, k: int, order: str, back: str, heads: int, dim: int, power: float = -0.5) -> None:
        super().make(k)
        self.order, self.back, self.power = order, back, power
        self.sizes = {"h": heads, "d": dim, "3": 3}
        self.m, self.o = linear(k, 3 * heads * dim), nn.Linear(heads * dim, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        b, t, _ = h.shape
        y = self.m(h).view(b, t, *(self.sizes[s] for s in self.order))
        q, k, v = y.permute(2 + self.order.index("3"), 0, 2 + self.order.index("h"), 1, 2 + self.order.index("d"))
        z = attend(q, k, v, self.sizes["d"] ** self.power)
        return self.o((z.transpose(1, 2) if self.back == "hd" else z.permute(0, 2, 3, 1)).reshape(b, t, -1))


for order, back in zip(("3hd", "h3d", "hd3", "d3h", "3dh", "dh3", "3dh", "d3h"), 6 * ["hd"] + 2 * ["dh"], strict=True):
    name = ", ".join({"3": "3", "h": "heads", "d": "dim"}[s] for s in order)
    add(f"fused heads grow, ({name}), back as {back}", lambda k, o=order, b=back: Fused(k, o, b, 2 * k, 4), X)
add("fused heads, dim grows, scale 1/d", lambda k: Fused(k, "3hd", "hd", 2, 4 * k, -1.0), X)
add("fused heads, dim grows, scale 1/d, interleaved", lambda k: Fused(k, "hd3", "hd", 2, 4 * k, -1.0), X)
add("fused heads, dim grows, 1/sqrt(d)", lambda k: Fused(k, "3hd", "hd", 2, 4 * k), X, either=FOLD_IN_SLICE)
add("fused heads, dim and number grow, 1/d", lambda k: Fused(k, "h3d", "hd", 2 * k, 2 * k, -1.0), X)


class Apart(Stream):
    """Separate layers write queries, keys and values."""

    def make(self, k: int, heads: int, dim: int, scale: float, bias: bool = True) -> None:
        super().make(k)
        self.n, self.scale = heads, scale
        self.p, self.r, self.s = (linear(k, heads * dim, bias) for _ in range(3))
        self.o = nn.Linear(heads * dim, 8 * k, bias)

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (w(h).unflatten(-1, (self.n, -1)).transpose(1, 2) for w in (self.p, self.r, self.s))
        return q, k, v

    def mix(self, h: Tensor) -> Tensor:
        return self.o(attend(*self.heads(h), scale=self.scale).transpose(1, 2).flatten(2))


add("separate heads grow", lambda k: Apart(k, 2 * k, 4, 0.5), X)
add("separate heads, dim grows, scale 1/d", lambda k: Apart(k, 2, 4 * k, 1 / (4 * k)), X)
add("separate heads, dim grows, scale 1/sqrt(d)", lambda k: Apart(k, 2, 4 * k, (4 * k) ** -0.5), X)
add("separate heads, dim grows, no scale", lambda k: Apart(k, 2, 2 * k, 1.0), X)
add("separate heads, dim grows, no biases", lambda k: Apart(k, 2, 4 * k, (4 * k) ** -0.5, bias=False), X)
add("separate heads grow, scaled by the whole width", lambda k: Apart(k, 2 * k, 4, (8 * k) ** -0.5), X)
add("one head of fixed size", lambda k: Apart(k, 1, 4, 0.5), X)
add("one head that is the whole width", lambda k: Apart(k, 1, 8 * k, (8 * k) ** -0.5), X)
add("heads and their size both grow", lambda k: Apart(k, 2 * k, 2 * k, (2 * k) ** -0.5), X)


@pattern("heads in the batch", X)
class InBatch(Apart):
    def make(self, k: int) -> None:
        super().make(k, 2 * k, 4, 0.5)

    def mix(self, h: Tensor) -> Tensor:
        b, t, n = h.shape
        q, k, v = (
            w(h).view(b, t, self.n, n // self.n).transpose(1, 2).reshape(b * self.n, t, -1)
            for w in (self.p, self.r, self.s)
        )
        y = torch.bmm(torch.baddbmm(q.new_zeros(()), q, k.mT, alpha=0.5).softmax(-1), v)
        return self.o(y.view(b, self.n, t, -1).transpose(1, 2).reshape(b, t, n))


@pattern("attention and feed-forward side by side, joined and read by one layer", X)
class Joined(Apart):
    def make(self, k: int) -> None:
        super().make(k, 2 * k, 4, 0.5)
        self.u, self.o = linear(k, 30 * k), nn.Linear(38 * k, 8 * k)  # heads of 4 units, of which 30 are no multiple

    def mix(self, h: Tensor) -> Tensor:
        joined = attend(*self.heads(h), scale=self.scale).transpose(1, 2).flatten(2)
        return self.o(torch.cat([joined, F.gelu(self.u(h))], 2))


@pattern("heads split and stacked along the batch", X)
class StackedHeads(Apart):
    def make(self, k: int) -> None:
        super().make(k, 2 * k, 4, 0.5)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (torch.cat(w(h).split(4, dim=2), dim=0) for w in (self.p, self.r, self.s))
        return self.o(torch.cat(attend(q, k, v, 0.5).split(len(h), dim=0), dim=2))


class Einsum(Stream):
    """Heads are an axis of three-dimensional weights, in one of several orders."""

    def make(self, k: int, order: str, dim: int = 4, heads: int = 2) -> None:
        super().make(k)
        size = {"m": 8 * k, "h": heads, "d": dim}
        self.order, (self.p, self.r, self.s, self.o) = order, (weight(*(size[s] for s in order)) for _ in range(4))

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (torch.einsum(f"btm,{self.order}->bhtd", h, w) for w in (self.p, self.r, self.s))
        y = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
        return torch.einsum(f"bhts,bhsd,{self.order}->btm", y, v, self.o)


add("einsum heads grow, (heads, model, dim)", lambda k: Einsum(k, "hmd", heads=2 * k), X)
add("einsum heads grow, (model, heads, dim)", lambda k: Einsum(k, "mhd", heads=2 * k), X)
add("einsum heads grow, (model, dim, heads)", lambda k: Einsum(k, "mdh", heads=2 * k), X)
add("einsum heads, dim grows without a scale", lambda k: Einsum(k, "hmd", dim=2 * k), X)


@pattern("einsum heads grow, four-dimensional weight", X)
class Einsum4(Stream):
    def make(self, k: int) -> None:
        super().make(k)
        self.w, self.b, self.o = weight(3, 2 * k, 8 * k, 4), weight(3, 1, 2 * k, 1, 4), weight(2 * k, 4, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = torch.einsum("btm,nhmd->nbhtd", h, self.w) + self.b
        return torch.einsum("bhtd,hdm->btm", attend(q, k, v, 0.5), self.o)


class Shared(Stream):
    """Several queries share keys and values."""

    def make(self, k: int, q: int, kv: int, how: str) -> None:
        super().make(k)
        self.q, self.kv, self.how = q, kv, how
        self.p, self.r, self.s, self.o = linear(k, 4 * q), linear(k, 4 * kv), linear(k, 4 * kv), nn.Linear(4 * q, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        b, t, _ = h.shape
        n = self.q // self.kv
        q = self.p(h).view(b, t, self.q, 4).transpose(1, 2)
        k, v = (w(h).view(b, t, self.kv, 4).transpose(1, 2) for w in (self.r, self.s))
        if self.how == "groups":
            z = attend(q.reshape(b, self.kv, n, t, 4), k[:, :, None], v[:, :, None], 0.5).reshape(b, self.q, t, 4)
        elif self.how == "enable_gqa":
            z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            if self.how == "repeat_interleave":
                k, v = (y.repeat_interleave(n, dim=1) for y in (k, v))
            elif self.how == "expand":
                k, v = (y[:, :, None].expand(-1, -1, n, -1, -1).reshape(b, self.q, t, 4) for y in (k, v))
            elif self.how == "repeat":
                k, v = (y.repeat(1, n, 1, 1) for y in (k, v))
            z = attend(q, k, v, 0.5)
        return self.o(z.transpose(1, 2).reshape(b, t, -1))


for way in ("repeat_interleave", "expand", "groups", "repeat", "enable_gqa"):
    add(f"grouped heads, {way}, groups grow", lambda k, way=way: Shared(k, 4 * k, 2 * k, way), X)
    add(f"grouped heads, {way}, queries grow in fixed groups", lambda k, way=way: Shared(k, 4 * k, 2, way), X)
add("one key for all heads, broadcast", lambda k: Shared(k, 2 * k, 1, "broadcast"), X)


@pattern("cross attention", X, floats(2, 3, 4))
@toy(lambda k: of(a=(5, 8 * k), b=(4, 6 * k), m=(6 * k, 16 * k), c=(8 * k, 3)))
def cross(m: Any, x: Tensor, y: Tensor) -> Tensor:
    q = m.a(x).unflatten(-1, (-1, 4)).transpose(1, 2)
    k, v = m.m(torch.relu(m.b(y))).unflatten(-1, (2, -1, 4)).permute(2, 0, 3, 1, 4)
    return m.c(attend(q, k, v, 0.5).transpose(1, 2).flatten(2))


def rotated(q: Tensor) -> Tensor:
    """Halves of the last axis turned by angles that depend on the position, with frequencies from the axis' size."""
    n = q.shape[-1] // 2
    turn = torch.arange(q.shape[-2], dtype=q.dtype)[:, None] * 100.0 ** (-torch.arange(n, dtype=q.dtype) / n)
    u, v = q.chunk(2, -1)
    return torch.cat((u * turn.cos() - v * turn.sin(), u * turn.sin() + v * turn.cos()), -1)


class Rotary(Apart):
    """Queries and keys are turned by their position."""

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        return self.o(attend(rotated(q), rotated(k), v, self.scale).transpose(1, 2).flatten(2))


add("rotary, heads grow", lambda k: Rotary(k, 2 * k, 4, 0.5), X)
add("rotary, dim grows", lambda k: Rotary(k, 2, 4 * k, 1 / (4 * k)), X, refused="it has other frequencies")


class PerHead(Apart):
    """Something more happens to the scores of each head."""

    def make(self, k: int, how: str) -> None:
        super().make(k, 2 * k, 4, 0.5)
        n, self.how = 2 * k, how
        match how:
            case "far":
                self.far = weight(n, 4, 4)
            case "table":
                self.table = nn.Embedding(7, n)
            case "slope":
                self.slope = weight(n)
            case "temper" | "difference":
                self.temper = nn.Parameter(torch.rand(n, 1, 1) + 0.5)
            case "talk":
                self.u, self.v = nn.Linear(n, n, bias=False), nn.Linear(n, n)
            case "gate" | "choose":
                self.g = linear(k, n)

    def scores(self, y: Tensor) -> Tensor:
        i = torch.arange(y.shape[-1])
        ago = (i[:, None] - i[None]).abs()
        match self.how:
            case "far":
                y = y + self.far
            case "table":
                y = y + self.table(i[:, None] - i[None] + 3).permute(2, 0, 1)
            case "slope":
                y = y - ago * self.slope[:, None, None].exp()
            case "fixed slope":
                y = y - ago * 2.0 ** (-8.0 * torch.arange(1, self.n + 1, dtype=y.dtype) / self.n)[:, None, None]
            case "temper" | "difference":
                y = y / self.temper
            case "talk":
                return self.v(self.u(y.permute(0, 2, 3, 1)).softmax(2)).permute(0, 3, 1, 2)
            case "sigmoid":
                return torch.sigmoid(y) / y.shape[-1]
            case "window":
                y = y.masked_fill((ago > 1) | (i[None] > i[:, None]), -math.inf)
        return y.softmax(-1)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        z = self.scores(q @ k.mT * self.scale) @ v
        if self.how == "difference":
            z = z - 0.3 * self.scores(k @ q.mT) @ v
        if self.how in ("gate", "choose"):
            g = self.g(h)
            z = z * (g.sigmoid() if self.how == "gate" else g.softmax(-1)).transpose(1, 2)[..., None]
        return self.o(z.transpose(1, 2).flatten(2))


def per_head(how: str, what: str, refused: str = "") -> None:
    """One more thing."""
    add(f"heads grow, {what}", partial(PerHead, how=how), X, refused=refused)


per_head("far", "a bias parameter (heads, positions, positions)")
per_head("table", "a bias from a table (distances, heads)")
per_head("slope", "a learned slope per head")
per_head("fixed slope", "a slope per head from their number", "it has slopes of its own")
per_head("temper", "a temperature per head")
per_head("talk", "mixed across heads before and after the softmax")
per_head("gate", "a gate per head")
per_head("choose", "a softmax over heads chooses among them")
per_head("sigmoid", "sigmoids in place of the softmax")
per_head("window", "a causal window")
per_head("difference", "the difference of two maps")


class Normed(Apart):
    """Queries and keys are normalised within each head."""

    def make(self, k: int, heads: int, dim: int, how: str) -> None:
        super().make(k, heads, dim, dim**-0.5 if how != "cosine" else 1.0)
        self.how = how
        if how == "cosine":
            self.t = weight(heads, 1, 1)
        else:
            self.u, self.v = (
                nn.LayerNorm(dim) if how == "layer" else nn.RMSNorm(dim, elementwise_affine=how == "rms") for _ in "qk"
            )

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        q, k = (
            (F.normalize(q, dim=-1) * self.t.exp(), F.normalize(k, dim=-1))
            if self.how == "cosine"
            else (self.u(q), self.v(k))
        )
        return self.o(attend(q, k, v, self.scale).transpose(1, 2).flatten(2))


add("normed queries and keys, heads grow", lambda k: Normed(k, 2 * k, 4, "layer"), X)
add("normed queries and keys, dim grows", lambda k: Normed(k, 2, 4 * k, "rms"), X)
add("cosine attention, heads grow", lambda k: Normed(k, 2 * k, 4, "cosine"), X)
add("cosine attention, dim grows", lambda k: Normed(k, 2, 4 * k, "cosine"), X)
add(
    "normed queries and keys without gains, dim grows",
    lambda k: Normed(k, 2, 4 * k, "bare"),
    X,
    refused="the scores grow by sqrt(k), and no weight comes between",
)


class Kernel(Apart):
    """Attention without a softmax: positive features, and a division by their sum."""

    def make(self, k: int, heads: int, dim: int, eps: float = 0.0) -> None:
        super().make(k, heads, dim, 1.0)
        self.eps = eps

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        y = q @ (k.mT @ v) / (torch.einsum("bhtd,bhd->bht", q, k.sum(2))[..., None] + self.eps)
        return self.o(y.transpose(1, 2).flatten(2))


add("linear attention, heads grow", lambda k: Kernel(k, 2 * k, 4, 1e-3), X)
add("linear attention, dim grows", lambda k: Kernel(k, 2, 4 * k), X)
add(
    "linear attention, dim grows, with a number added to the sum",
    lambda k: Kernel(k, 2, 4 * k, 1e-2),
    X,
    refused="the sum grows by k and the number does not",
)


@pattern("a learned scalar scales the scores, dim grows", X)
class Scalar(Apart):
    """One number stands where 1/sqrt(d) used to be, so 1/k can go there."""

    def make(self, k: int) -> None:
        super().make(k, 2, 4 * k, 1.0)
        self.t = nn.Parameter(torch.rand(()) + 0.2)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        return self.o(attend(q * self.t, k, v).transpose(1, 2).flatten(2))


@pattern("attention among units", X)
class Units(Apart):
    """The map of a head is (dim, dim), with a softmax over units whose 1/k makes up for the k copies."""

    def make(self, k: int) -> None:
        super().make(k, 2, 4 * k, 1.0)
        self.t = weight(2, 1, 1)

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (F.normalize(y, dim=2) if i < 2 else y for i, y in enumerate(self.heads(h)))
        return self.o((v @ (k.mT @ q * self.t).softmax(-2)).transpose(1, 2).flatten(2))


# --- in blocks that pool, gate, mask and remember, and torch's own modules for it
@pattern("queries and keys from one layer, dim grows", X)
class SameLayer(Stream):
    """One weight writes both queries and keys, so k**-0.25 goes into it."""

    def make(self, k: int) -> None:
        super().make(k)
        self.p, self.v, self.o = linear(k, 8 * k, False), linear(k, 8 * k), linear(k, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        q, v = (w(h).unflatten(-1, (2, -1)).transpose(1, 2) for w in (self.p, self.v))
        return self.o(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))


@pattern("keys and values through a narrow layer", X)
class Latent(Stream):
    def make(self, k: int) -> None:
        super().make(k)
        self.d, self.u = linear(k, 4 * k), nn.Linear(4 * k, 16 * k)
        self.q, self.o, self.n = linear(k, 8 * k), linear(k, 8 * k), nn.LayerNorm(4 * k)

    def mix(self, h: Tensor) -> Tensor:
        k, v = self.u(self.n(self.d(h))).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, dim=-1)
        q = self.q(h).unflatten(-1, (-1, 4)).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pattern("pooling by a learned query", X)
@toy(lambda k: of(a=(5, 8 * k), q=weight(8 * k), c=(8 * k, 3)))
def pool(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(((h @ m.q / math.sqrt(h.shape[-1])).softmax(1)[:, None] @ h)[:, 0])


@pattern("latent vectors read the input", X)
class Latents(Network):
    def make(self, k: int) -> None:
        self.z, self.a, self.c = weight(1, 3, 8 * k), nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.u = nn.MultiheadAttention(8 * k, 2 * k, batch_first=True)
        self.v = nn.MultiheadAttention(8 * k, 2 * k, batch_first=True)
        self.n = nn.LayerNorm(8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = self.z.expand(len(x), -1, -1)
        z = z + self.u(z, h, h, need_weights=False)[0]
        return self.c(z + self.v(self.n(z), self.n(z), self.n(z))[0]).mean(1)


@pattern("sets: inducing points and pooling by seeds", X)
class Sets(Network):
    def make(self, k: int) -> None:
        self.a, self.i, self.s, self.c = nn.Linear(5, 8 * k), weight(2, 8 * k), weight(1, 8 * k), nn.Linear(8 * k, 3)
        self.ws = nn.ModuleList([nn.Linear(8 * k, 8 * k) for _ in range(12)])

    def block(self, x: Tensor, y: Tensor, at: int) -> Tensor:
        q, k, v = (
            w(t).unflatten(-1, (-1, 4)).transpose(1, 2) for w, t in zip(self.ws[at : at + 3], (x, y, y), strict=True)
        )
        h = (q + attend(q, k, v, 0.5)).transpose(1, 2).flatten(2)
        return h + torch.relu(self.ws[at + 3](h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = self.block(self.i.expand(len(x), -1, -1), h, 0)
        h = self.block(h, z, 4)
        return self.c(self.block(self.s.expand(len(x), -1, -1), h, 8))[:, 0]


@pattern("gated attention unit", X)
class Unit(Stream):
    def make(self, k: int) -> None:
        super().make(k)
        self.m, self.s, self.o = linear(k, 24 * k), linear(k, 4), nn.Linear(12 * k, 8 * k)
        self.g, self.b = weight(2, 4), weight(2, 4)

    def mix(self, h: Tensor) -> Tensor:
        u, v = F.silu(self.m(h)).chunk(2, -1)
        q, k = (F.silu(self.s(h))[..., None, :] * self.g + self.b).unbind(-2)
        return self.o(u * (torch.relu(q @ k.mT / 4).square() @ v))


@pattern("additive attention", X)
class Additive(Stream):
    def make(self, k: int) -> None:
        super().make(k)
        self.u, self.v, self.w = linear(k, 6 * k), linear(k, 6 * k, False), weight(6 * k)

    def mix(self, h: Tensor) -> Tensor:
        return (torch.tanh(self.u(h)[:, :, None] + self.v(h)[:, None]) @ self.w).softmax(-1) @ h


@pattern("a memory of slots, their number grows", X)
class Slots(Stream):
    """A softmax over slots reads a bare table: copies of slots have 1/k each."""

    def make(self, k: int) -> None:
        super().make(k)
        self.u, self.v = linear(k, 6 * k), weight(6 * k, 8 * k)

    def mix(self, h: Tensor) -> Tensor:
        return self.u(h).softmax(-1) @ self.v


@pattern("padding is masked by the input", tokens(4, 3, 5))
class Padded(Network):
    def make(self, k: int) -> None:
        self.a = nn.Embedding(4, 8 * k, padding_idx=0)
        self.m, self.c = nn.MultiheadAttention(8 * k, 2 * k, batch_first=True), nn.Linear(8 * k, 3)
        self.p = weight(5, 8 * k)

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).index_fill(1, torch.zeros(1, dtype=torch.long), True)
        h = self.a(x) + self.p
        h = h + self.m(h, h, h, key_padding_mask=~there)[0]
        return self.c((h * there[..., None]).sum(1) / there.sum(1, keepdim=True))


class Torch(Stream):
    """torch's own attention."""

    def make(self, k: int, heads: int, **more: bool) -> None:
        super().make(k)
        self.m = nn.MultiheadAttention(8 * k, heads, batch_first=True, **more)

    def mix(self, h: Tensor) -> Tensor:
        return self.m(h, h, h)[0]


class TorchCross(Network):
    """torch's own attention, with keys and values of other sizes."""

    def make(self, k: int, heads: int, bias: bool) -> None:
        self.a, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.m = nn.MultiheadAttention(8 * k, heads, kdim=4, vdim=5, batch_first=True, bias=bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(self.m(self.a(x), y, x)[0])


add("nn.MultiheadAttention, heads grow", lambda k: Torch(k, 2 * k), X)
add(
    "nn.MultiheadAttention, heads grow, extra key and zeros",
    lambda k: Torch(k, 2 * k, add_bias_kv=True, add_zero_attn=True),
    X,
)
add("nn.MultiheadAttention, dim grows", lambda k: Torch(k, 2), X, either=FOLD_IN_SLICE)
add("nn.MultiheadAttention, other sizes, heads grow", lambda k: TorchCross(k, 2 * k, True), X, floats(2, 4, 4))
add("nn.MultiheadAttention, other sizes, dim grows", lambda k: TorchCross(k, 2, False), X, floats(2, 4, 4))


class Layer(Network):
    """torch's own encoder layer, twice."""

    def make(self, k: int, first: bool) -> None:
        make = nn.TransformerEncoderLayer(8 * k, 2 * k, 12 * k, 0.0, F.gelu, batch_first=True, norm_first=first)
        self.a, self.m = nn.Linear(5, 8 * k), nn.TransformerEncoder(make, 2, enable_nested_tensor=False)
        self.c = nn.Linear(8 * k, 3)
        for p in self.m.parameters():
            nn.init.normal_(p, std=0.4)  # the layers of an encoder are copies of one

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.m(self.a(x)))


add("nn.TransformerEncoder, norms behind", lambda k: Layer(k, False), X)
add("nn.TransformerEncoder, norms before", lambda k: Layer(k, True), X)


@pattern("nn.TransformerDecoderLayer", X, floats(2, 3, 5))
class Decoder(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.c = nn.Linear(5, 8 * k), nn.Linear(5, 8 * k), nn.Linear(8 * k, 3)
        self.m = nn.TransformerDecoderLayer(8 * k, 2 * k, 12 * k, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.c(self.m(self.a(x), self.b(y), tgt_mask=mask))
