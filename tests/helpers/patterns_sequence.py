"""Patterns: sequences: recurrence, tables and tied readouts, places, states, long filters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patterns_kit import Network, add, floats, pattern, tokens, weight
from toys import of, toy

X = floats(2, 5, 4)
T = tokens(7, 2, 5)


class Torch(Network):
    """One of torch's recurrent modules, and a readout of its last or its mean output."""

    def make(self, m: nn.Module, outs: int, last: bool = True) -> None:
        self.m, self.c, self.last = m, nn.Linear(outs, 3), last

    def forward(self, x: Tensor) -> Tensor:
        y = self.m(x)[0]
        return self.c(y[:, -1] if self.last else y.mean(1))


def both(kind: type[nn.RNNBase], k: int, layers: int = 1) -> nn.Module:
    """In both directions."""
    return kind(4, 6 * k, layers, batch_first=True, bidirectional=True)


add("nn.LSTM", lambda k: Torch(nn.LSTM(4, 6 * k, batch_first=True), 6 * k), X)
add("nn.LSTM, two layers", lambda k: Torch(nn.LSTM(4, 6 * k, 2, batch_first=True), 6 * k), X)
add("nn.LSTM, both directions", lambda k: Torch(both(nn.LSTM, k, 2), 12 * k, False), X)
add("nn.GRU", lambda k: Torch(nn.GRU(4, 6 * k, batch_first=True), 6 * k), X)
add("nn.GRU, both directions", lambda k: Torch(both(nn.GRU, k), 12 * k, False), X)
add("nn.RNN", lambda k: Torch(nn.RNN(4, 6 * k, batch_first=True, nonlinearity="relu"), 6 * k), X)


class Cells(Network):
    """One of torch's cells in a loop, from a learned start."""

    def make(self, k: int, kind: str) -> None:
        self.kind, self.s, self.c = kind, weight(2, 6 * k), nn.Linear(6 * k, 3)
        self.m: nn.Module = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}[kind](4, 6 * k)

    def forward(self, x: Tensor) -> Tensor:
        h, s = (one.expand(len(x), -1) for one in self.s)
        for y in x.unbind(1):
            if self.kind == "LSTM":
                h, s = self.m(y, (h, s))
            else:
                h = self.m(y, h) + 0.1 * s
        return self.c(h)


add("nn.LSTMCell, a loop", lambda k: Cells(k, "LSTM"), X)
add("nn.GRUCell, a loop", lambda k: Cells(k, "GRU"), X)
add("nn.RNNCell, a loop", lambda k: Cells(k, "RNN"), X)


class ByHand(Network):
    """Gates of a recurrent network from bare parameters, in one of several layouts."""

    def make(self, k: int, how: str) -> None:
        n, self.how = 6 * k, how
        self.n, self.c = n, nn.Linear(n, 3)
        self.u, self.w, self.b = weight(4, 4 * n), weight(n, 4 * n), weight(4 * n)
        self.p = weight(3, n)

    def forward(self, x: Tensor) -> Tensor:
        h = s = x.new_zeros(len(x), self.n)
        for y in x.unbind(1):
            z = y @ self.u + h @ self.w + self.b
            gates = z.chunk(4, 1) if self.how == "chunk" else z.view(len(x), self.n, 4).unbind(2)
            i, f, o, g = gates
            s = torch.sigmoid(f + self.p[0] * s) * s + torch.sigmoid(i + self.p[1] * s) * torch.tanh(g)
            h = torch.sigmoid(o + self.p[2] * s) * torch.tanh(s)
        return self.c(h)


add("recurrence by hand, four gates one after another", lambda k: ByHand(k, "chunk"), X)
add("recurrence by hand, four gates of each unit together", lambda k: ByHand(k, "view"), X)


@pattern("recurrence by hand, concatenated input and state", X)
@toy(lambda k: of(n=6 * k, a=(4, 6 * k), g=(12 * k, 12 * k), h=(12 * k, 6 * k), c=(6 * k, 3)))
def joined(m: Any, x: Tensor) -> Tensor:
    s = x.new_zeros(len(x), m.n)
    for y in torch.tanh(m.a(x)).unbind(1):
        z, r = torch.sigmoid(m.g(torch.cat((y, s), 1))).split(m.n, 1)
        s = torch.lerp(s, torch.tanh(m.h(torch.cat((y, r * s), 1))), z)
    return m.c(s)


@pattern("recurrence by hand, raw input beside the state", X, warned="units and inputs lie on one axis")
@toy(lambda k: of(n=6 * k, h=(6 * k + 4, 6 * k), c=(6 * k, 3)))
def beside(m: Any, x: Tensor) -> Tensor:
    s = x.new_zeros(len(x), m.n)
    for y in x.unbind(1):
        s = torch.tanh(m.h(torch.cat((y, s), 1)))
    return m.c(s)


class Tied(Network):
    """A table of tokens is also the readout."""

    def make(self, k: int, norm: bool, scale: str = "", skip: bool = True) -> None:
        self.scale, self.skip = scale, skip
        self.e, self.u, self.v = nn.Embedding(7, 8 * k), nn.Linear(8 * k, 12 * k), nn.Linear(12 * k, 8 * k)
        self.n = nn.LayerNorm(8 * k) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        d = h.shape[-1]
        if "in" in self.scale.split():
            h = h * math.sqrt(d)
        y = self.v(torch.tanh(self.u(h)))
        y = self.n(h + y if self.skip else y)
        if "out" in self.scale.split():
            y = y / math.sqrt(d)
        return F.linear(y, self.e.weight)


add("tied readout behind a norm", lambda k: Tied(k, True), T)
add("tied readout behind a norm, divided by sqrt(width)", lambda k: Tied(k, True, "out"), T)
add("tied readout behind a norm, table times sqrt(width)", lambda k: Tied(k, True, "in"), T)
add("tied readout behind a norm, both scaled", lambda k: Tied(k, True, "in out"), T)
add("tied readout behind a layer", lambda k: Tied(k, False, skip=False), T)
add("tied readout without a norm", lambda k: Tied(k, False), T, either="exact with 1/sqrt(k) in what writes the stream")


class Table(Network):
    """A table of tokens, scaled or with places added, a small network, a separate readout."""

    def make(self, k: int, how: str, keep: bool | None = None) -> None:
        self.how, self.e, self.u, self.c = how, nn.Embedding(7, 8 * k), nn.Linear(8 * k, 12 * k), nn.Linear(12 * k, 3)
        if how == "learned":
            self.p: Tensor = weight(1, 5, 8 * k)
        elif keep is not None:
            self.register_buffer("p", self.waves(8 * k), persistent=keep)
            self.how = "held"

    def waves(self, n: int) -> Tensor:
        turn = torch.arange(5)[:, None] * torch.exp(torch.arange(0, n, 2) * (-math.log(100.0) / n))
        return torch.stack((turn.sin(), turn.cos()), -1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        match self.how:
            case "times":
                h = h * math.sqrt(h.shape[-1])
            case "learned" | "held":
                h = h + self.p
            case "waves":
                h = h + self.waves(h.shape[-1]).to(h.dtype)
        return self.c(torch.tanh(self.u(h))).mean(1)


add("table times sqrt(width)", lambda k: Table(k, "times"), T)
add("table and learned places", lambda k: Table(k, "learned"), T)
add("table and waves, computed", lambda k: Table(k, "waves"), T, refused="it has other frequencies")
add("table and waves, a buffer", lambda k: Table(k, "waves", True), T, either="exact where the buffer is copied")
add(
    "table and waves, a buffer that is not saved",
    lambda k: Table(k, "waves", False),
    T,
    either="exact until loaded again",
)


@pattern("table in two factors", T)
@toy(lambda k: of(e=nn.Embedding(7, 4), p=nn.Linear(4, 8 * k, bias=False), n=nn.LayerNorm(8 * k), u=(8 * k, 8 * k)))
def factored(m: Any, x: Tensor) -> Tensor:
    h = m.p(m.e(x))
    h = m.n(h + torch.tanh(m.u(h)))
    return h @ m.p.weight @ m.e.weight.T


@pattern("several tables, concatenated", T, tokens(3, 2, 5))
@toy(lambda k: of(a=nn.Embedding(7, 6 * k), b=nn.Embedding(3, 2 * k), c=(8 * k, 3)))
def two_tables(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.c(torch.tanh(torch.cat((m.a(x), m.b(y)), -1)))


@pattern("nn.EmbeddingBag", tokens(7, 3, 4))
@toy(lambda k: of(a=nn.EmbeddingBag(7, 8 * k, mode="mean"), b=nn.Embedding(7, 8 * k), c=(8 * k, 3)))
def bag(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    return m.c(torch.tanh(m.a(x))) + 0.5 * (y.sum(1).square() - y.square().sum(1)).mean(-1, keepdim=True)


@pattern("time as waves of fixed size", floats(3, 5), floats(3))
class Time(Network):
    def make(self, k: int) -> None:
        self.a, self.b, self.c = nn.Linear(5, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 3)
        self.t = nn.Sequential(nn.Linear(8, 4 * k), nn.SiLU(), nn.Linear(4 * k, 16 * k))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        turn = t[:, None] * 10.0 ** (-torch.arange(4, dtype=t.dtype) / 4)
        s, m = self.t(torch.cat((turn.sin(), turn.cos()), -1)).chunk(2, -1)
        return self.c(F.silu(self.b(F.silu(self.a(x))) * (s + 1) + m))


@pattern("time as waves of the width", floats(3, 5), floats(3), refused="it has other frequencies")
@toy(lambda k: of(a=(5, 8 * k), c=(8 * k, 3)))
def wide_time(m: Any, x: Tensor, t: Tensor) -> Tensor:
    h = m.a(x)
    n = h.shape[-1] // 2
    turn = t[:, None] * 10.0 ** (-torch.arange(n, dtype=t.dtype) / n)
    return m.c(torch.tanh(h + torch.cat((turn.sin(), turn.cos()), -1)))


class State(Network):
    """A diagonal state for each channel, from bare parameters."""

    def make(self, k: int, n: int) -> None:
        self.a, self.c = nn.Linear(4, 8 * k), nn.Linear(8 * k, 3)
        self.l, self.b, self.o, self.d = weight(8 * k, n), weight(8 * k, n), weight(8 * k, n), weight(8 * k)
        self.t = weight(8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        decay = torch.exp(-F.softplus(self.t)[:, None] * self.l.exp())
        s, out = h.new_zeros(len(h), *self.l.shape), []
        for y in h.unbind(1):
            s = decay * s + self.b * y[..., None]
            out.append((s * self.o).sum(-1) + self.d * y)
        return self.c(F.gelu(torch.stack(out, 1)))


add("diagonal states, their number fixed", lambda k: State(k, 4), X)
add("diagonal states, their number grows", lambda k: State(k, 4 * k), X)


class Selective(Network):
    """A state whose rates, inputs and outputs are read from the input, by one layer split in three."""

    def make(self, k: int, rank: int) -> None:
        self.sizes, self.a, self.c = [rank, 3, 3], nn.Linear(4, 16 * k), nn.Linear(8 * k, 3)
        self.f, self.m, self.t = weight(8 * k, 1, 3), nn.Linear(8 * k, rank + 6, bias=False), nn.Linear(rank, 8 * k)
        self.l, self.d = weight(8 * k, 3), weight(8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.a(x).chunk(2, -1)
        h = F.silu(F.conv1d(F.pad(h.mT, (2, 0)), self.f, groups=len(self.f))).mT
        r, u, v = self.m(h).split(self.sizes, -1)
        step = F.softplus(self.t(r))
        s, out = h.new_zeros(len(h), *self.l.shape), []
        for i in range(h.shape[1]):
            s = torch.exp(-step[:, i, :, None] * self.l.exp()) * s + (step[:, i] * h[:, i])[..., None] * u[:, i, None]
            out.append(torch.einsum("bdn,bn->bd", s, v[:, i]) + self.d * h[:, i])
        return self.c(torch.stack(out, 1) * F.silu(z))


add("selective states, small parts of fixed size", lambda k: Selective(k, 2), X)
add(
    "selective states, one small part grows",
    lambda k: Selective(k, 2 * k),
    X,
    refused="rows that grow and others lie on one axis",
)


class Filters(Network):
    """One long causal filter for each channel, by Fourier transforms along positions."""

    def make(self, k: int, how: str) -> None:
        self.how, self.a, self.c, self.d = how, nn.Linear(4, 24 * k), nn.Linear(8 * k, 3), weight(8 * k)
        self.f: nn.Module = (
            nn.Sequential(nn.Linear(3, 6 * k), nn.Tanh(), nn.Linear(6 * k, 8 * k)) if how != "bare" else nn.Identity()
        )
        self.w = weight(8 * k, 5) if how == "bare" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).mT.chunk(3, 1)
        n = x.shape[1]
        t = torch.arange(n, dtype=x.dtype) / n
        w = self.w if self.w is not None else self.f(torch.stack((t, torch.sin(6 * t), torch.cos(6 * t)), -1)).mT
        if self.how == "decay":
            w = w * torch.exp(-t * torch.linspace(0.5, 5, len(w), dtype=x.dtype)[:, None])
        y = torch.fft.irfft(torch.fft.rfft(k * v, 2 * n) * torch.fft.rfft(w, 2 * n), 2 * n)[..., :n]
        return self.c((q * (y + self.d[:, None] * v)).mT)


add("long filters, bare", lambda k: Filters(k, "bare"), X)
add("long filters, written by a network", lambda k: Filters(k, "network"), X)
add(
    "long filters, with rates of decay by channel",
    lambda k: Filters(k, "decay"),
    X,
    refused="spread rates are no copies",
)


@pattern("short causal filter for each channel", X)
@toy(lambda k: of(a=(4, 8 * k), c=(8 * k, 3), f=nn.Conv1d(8 * k, 8 * k, 3, padding=2, groups=8 * k)))
def short(m: Any, x: Tensor) -> Tensor:
    return m.c(F.silu(m.f(m.a(x).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2))


@pattern("dilated filters with gates", X)
class Dilated(Network):
    def make(self, k: int) -> None:
        self.a, self.c = nn.Conv1d(4, 6 * k, 1), nn.Conv1d(8 * k, 3, 1)
        self.us = nn.ModuleList([nn.Conv1d(6 * k, 12 * k, 2, dilation=2**i) for i in range(2)])
        self.vs = nn.ModuleList([nn.Conv1d(6 * k, 14 * k, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.a(x.mT), []
        for i, (u, v) in enumerate(zip(self.us, self.vs, strict=True)):
            f, g = u(F.pad(h, (2**i, 0))).chunk(2, 1)
            r, s = v(torch.tanh(f) * torch.sigmoid(g)).split([h.shape[1], h.shape[1] // 3 * 4], 1)
            h = h + r
            skips.append(s)
        return self.c(torch.relu(sum(skips, torch.zeros_like(skips[0]))))


@pattern("shift by one position, mixed per channel", X)
class Shifted(Network):
    def make(self, k: int) -> None:
        self.a, self.c, self.m, self.w = nn.Linear(4, 8 * k), nn.Linear(8 * k, 3), weight(2, 1, 1, 8 * k), weight(8 * k)
        self.k, self.v, self.r = (nn.Linear(8 * k, 8 * k, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        old = F.pad(h, (0, 0, 1, -1))
        y, z = h * self.m + old * (1 - self.m)
        k, v = self.k(y), self.v(z)
        top = bottom = torch.zeros_like(v[:, 0])
        out = []
        for i in range(x.shape[1]):
            top = top * torch.exp(-self.w.exp()) + k[:, i].exp() * v[:, i]
            bottom = bottom * torch.exp(-self.w.exp()) + k[:, i].exp()
            out.append(top / bottom)
        return self.c(torch.sigmoid(self.r(y)) * torch.stack(out, 1))


class Retention(Network):
    """A matrix-valued state for each head, with a decay."""

    def make(self, k: int, learned: bool) -> None:
        self.n, self.a, self.m, self.c = 2 * k, nn.Linear(4, 8 * k), nn.Linear(8 * k, 24 * k), nn.Linear(8 * k, 3)
        self.g, self.w = nn.GroupNorm(2 * k, 8 * k), weight(2 * k) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.m(self.a(x)).unflatten(-1, (3, self.n, -1)).unbind(2)
        spread = torch.linspace(1, 3, self.n, dtype=x.dtype) if self.w is None else self.w
        s, out, decay = x.new_zeros(len(x), self.n, 4, 4), [], torch.sigmoid(spread)[:, None, None]
        for i in range(x.shape[1]):
            s = s * decay + k[:, i, :, :, None] * v[:, i, :, None]
            out.append(self.g((q[:, i, :, None] @ s).flatten(1)))
        return self.c(torch.stack(out, 1))


add("matrix states, a learned decay per head", lambda k: Retention(k, True), X)
add(
    "matrix states, decays spread over the heads",
    lambda k: Retention(k, False),
    X,
    refused="spread decays are no copies",
)


class Fourier(Network):
    """A Fourier transform along positions, or along both axes."""

    def make(self, k: int, both: bool) -> None:
        self.both, self.a, self.u, self.c = both, nn.Linear(4, 8 * k), nn.Linear(8 * k, 8 * k), nn.Linear(8 * k, 3)
        self.n = nn.LayerNorm(8 * k)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = torch.fft.fft(torch.fft.fft(h, dim=-1), dim=1) if self.both else torch.fft.fft(h, dim=1)
        return self.c(torch.tanh(self.u(self.n(h + y.real))))


add("Fourier transform along positions", lambda k: Fourier(k, False), X)
add("Fourier transform along positions and units", lambda k: Fourier(k, True), X, refused="it has other frequencies")


@pattern("complex weights for low frequencies", X)
@toy(lambda k: of(a=(4, 8 * k), w=weight(8 * k, 8 * k, 2, 2), s=nn.Conv1d(8 * k, 8 * k, 1), c=(8 * k, 3)))
def spectral(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).mT
    low = torch.einsum("bif,iof->bof", torch.fft.rfft(h)[..., :2], torch.view_as_complex(m.w))
    return m.c(F.gelu(torch.fft.irfft(low, n=h.shape[-1]) + m.s(h)).mT)
