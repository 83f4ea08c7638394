"""Patterns: attention in blocks that pool, gate, mask and remember, and torch's own modules for it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_attention import FOLD_IN_SLICE, Stream, attend, linear
from patterns_kit import Network, add, floats, pattern, tokens, weight

X = floats(2, 4, 5)


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
class Pool(Network):
    def make(self, k: int) -> None:
        self.a, self.q, self.c = nn.Linear(5, 8 * k), weight(8 * k), nn.Linear(8 * k, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(((h @ self.q / math.sqrt(h.shape[-1])).softmax(1)[:, None] @ h)[:, 0])


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
