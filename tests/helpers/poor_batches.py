"""Batches that show less than real data do: each made of a real one, or chosen for a model with a branch of its own."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
VOCAB = 13


def _filled(value: int) -> Callable[[Batch], Batch]:
    return lambda real: tuple(torch.full_like(x, value) for x in real)


def _rows(count: int) -> Callable[[Batch], Batch]:
    """The first rows of tensors that have as many as the first one."""
    return lambda real: tuple(x[:count] if x.dim() and len(x) == len(real[0]) else x for x in real)


def _positions(count: int) -> Callable[[Batch], Batch]:
    """The first positions: of images along both sides, of anything else along the second dimension."""

    def cut(x: Tensor) -> Tensor:
        return x[..., :count, :count] if x.dim() > 3 else x[:, :count] if x.dim() > 1 else x

    return lambda real: tuple(map(cut, real))


def _alike(dim: int) -> Callable[[Batch], Batch]:
    """Every entry along a dimension is the first one."""
    return lambda real: tuple(
        x.narrow(dim, 0, 1).expand_as(x).clone() if x.dim() > dim and len(x) == len(real[0]) else x for x in real
    )


def _first_alone(real: Batch) -> Batch:
    """Zeros in all but the first argument, as for a recurrent state."""
    return (real[0], *(torch.zeros_like(x) if x.is_floating_point() else x for x in real[1:]))


POOR: dict[str, Callable[[Batch], Batch]] = {
    "zeros": _filled(0),
    "ones": _filled(1),
    "one row": _rows(1),
    "one row of zeros": lambda real: _filled(0)(_rows(1)(real)),
    "one position": _positions(1),
    "one token": lambda real: _positions(1)(_rows(1)(real)),
    "two positions": _positions(2),
    "equal rows": _alike(0),
    "equal positions": _alike(1),
    "zeros beside the first argument": _first_alone,
}


def poor_batches(real: Batch) -> dict[str, Batch]:
    """Those that differ from the real one, and from one another."""
    made: dict[str, Batch] = {}
    for name, make in POOR.items():
        batch = make(real)
        if not any(_equal(batch, other) for other in (real, *made.values())):
            made[name] = batch
    return made


def _equal(ours: Batch, theirs: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def attend(h: Tensor, fused: nn.Linear, mask: Tensor | None = None, turned: bool = False) -> Tensor:
    """Heads of four, which no attribute tells, of one layer that writes queries, keys and values."""
    b, t, n = h.shape
    q, k, v = (part.view(b, t, -1, 4).transpose(1, 2) for part in fused(h).chunk(3, -1))
    if turned:
        angle = torch.arange(t, dtype=h.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=h.dtype)
        q, k = (torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), -1) for x, y in
                (part.chunk(2, -1) for part in (q, k)))  # fmt: skip
    scores = q @ k.mT / 2
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, n)


class GPT(nn.Module):
    """Tokens, one block with heads of four (or that grow), and places by turning or by slopes."""

    def __init__(self, k: int, places: str) -> None:
        super().__init__()
        n, self.places, self.k = 8 * k, places, k
        self.e, self.m, self.o, self.c = nn.Embedding(VOCAB, n), nn.Linear(n, 3 * n), nn.Linear(n, n), nn.Linear(n, 3)
        self.n = nn.LayerNorm(n)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x, t = self.e(tokens), tokens.shape[1]
        later = torch.full((t, t), -math.inf, dtype=x.dtype).triu(1)
        if self.places == "slopes":
            far = (torch.arange(t)[:, None] - torch.arange(t)).to(x.dtype)
            later = later - far * 2.0 ** -torch.arange(1, 2 * self.k + 1, dtype=x.dtype)[:, None, None]
        if mask is not None:
            later = later.masked_fill(~mask.bool()[:, None, None], -1e9)
        return self.c(self.n(x + self.o(attend(x, self.m, later, self.places == "turned"))))


class TurnedDim(nn.Module):
    """Two heads whose size grows, turned by frequencies that depend on it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        n = 8 * k
        self.e, self.q, self.k, self.c = nn.Embedding(VOCAB, n), nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.e(tokens)
        b, t, n = x.shape
        angle = torch.arange(t, dtype=x.dtype)[:, None] * 100.0 ** (-4 / n * torch.arange(n // 4, dtype=x.dtype))
        turned = []
        for y in (self.q(x), self.k(x)):
            a, c = y.view(b, t, 2, -1).transpose(1, 2).chunk(2, -1)
            turned.append(torch.cat((a * angle.cos() - c * angle.sin(), a * angle.sin() + c * angle.cos()), -1))
        scores = (turned[0] @ turned[1].mT / (n / 2)).softmax(-1)
        return self.c((scores @ x.view(b, t, 2, -1).transpose(1, 2)).transpose(1, 2).flatten(2))


class Branch(nn.Module):
    """A part of the model that is used in some cases alone: a vector that is summed over, a layer, or heads."""

    def __init__(self, k: int, when: str, part: str) -> None:
        super().__init__()
        n, self.when, self.part = 8 * k, when, part
        self.a, self.c = nn.Linear(5, n), nn.Linear(n, 3)
        if part == "vector":
            self.q = nn.Parameter(torch.randn(n))
        else:
            self.m, self.o = nn.Linear(n, 3 * n if part == "heads" else n), nn.Linear(n, n)

    def is_used(self, x: Tensor, more: Tensor | None) -> bool:
        return {
            "in training": self.training,
            "in evaluation": not self.training,
            "from length 13 on": x.shape[1] > 12,
            "from length 200 on": x.shape[1] > 199,
            "of large numbers": bool(x.abs().max() > 5),
            "with an argument": more is not None,
        }[self.when]

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.is_used(x, more):
            if self.part == "vector":
                h = h + (h @ self.q)[..., None] * h
            else:
                h = h + self.o(attend(h, self.m) if self.part == "heads" else torch.tanh(self.m(h)))
        return self.c(h)


class Started(nn.Module):
    """A recurrence from a state that is given, (layers, rows, 4), and lengths beyond which nothing is read."""

    def __init__(self, k: int) -> None:
        super().__init__()
        n = 6 * k
        self.e, self.s, self.g = nn.Embedding(VOCAB, n), nn.Linear(4, 2 * n), nn.GRU(n, n, batch_first=True)
        self.c = nn.Linear(n, 3)

    def forward(self, tokens: Tensor, state: Tensor, lengths: Tensor | None = None) -> Tensor:
        gate, value = self.s(state).chunk(2, -1)
        h = self.g(self.e(tokens), torch.tanh(gate) * value)[0]
        if lengths is not None:
            h = h * (torch.arange(h.shape[1]) < lengths[:, None])[..., None]
        return self.c(h)


class LookedUp(nn.Module):
    """Whole numbers that become rows of a table in one of several ways, and heads of four behind it."""

    def __init__(self, k: int, how: str) -> None:
        super().__init__()
        n, self.how = 8 * k, how
        self.w, self.m, self.c = nn.Parameter(torch.randn(VOCAB, n)), nn.Linear(n, 3 * n), nn.Linear(n, 3)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        match self.how:
            case "one-hot":
                h = F.one_hot(ids, VOCAB).to(self.w.dtype) @ self.w
            case "fields":
                h = self.w[ids + 4 * torch.arange(ids.shape[1])]
            case _:
                h = self.w[ids.clamp(max=9)]
        mask = None
        if lengths is not None:
            mask = torch.where(torch.arange(h.shape[1]) < lengths[:, None], 0.0, -1e9)[:, None, None].to(h.dtype)
        return self.c(h + attend(h, self.m, mask))


@dataclass(frozen=True)
class Case:
    """A model, a poor batch and the mode in which a plan is made; and real data in training, which judge it.

    expected: "exact", "refused" or "warned".
    """

    name: str
    build: Callable[[int], nn.Module]
    poor: Batch
    real: Batch
    expected: str
    training: bool = True
    judged_in_training: bool = True


def _cases() -> list[Case]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (3, 6), generator=generator)
    zeros = torch.zeros(1, 8, dtype=torch.long)
    made = []
    poor_tokens = {"zeros": zeros, "one token": zeros[:, :1] + 5, "equal tokens": torch.full((2, 4), 3)}
    for name, poor in poor_tokens.items():
        for places, expected in (("turned", "exact"), ("slopes", "refused")):
            made.append(Case(f"{places}, {name}", lambda k, p=places: GPT(k, p), (poor,), (tokens,), expected))
        made.append(Case(f"turned, dim grows, {name}", TurnedDim, (poor,), (tokens,), "refused"))
    ones = torch.ones(1, 8, dtype=torch.long)
    made.append(
        Case("zeros and a mask", lambda k: GPT(k, "turned"), (zeros, ones), (tokens, torch.ones(3, 6).bool()), "exact")
    )

    x, long = (torch.randn(shape, generator=generator) for shape in ((2, 4, 5), (2, 220, 5)))
    for part in ("vector", "layer", "heads"):
        for when, poor, real, expected in (
            ("in training", (x,), (long[:, :20],), "warned"),
            ("in evaluation", (x,), (long[:, :20],), "warned"),
            ("from length 13 on", (x,), (long[:, :20],), "exact"),
            ("from length 200 on", (x,), (long,), "warned"),
            ("of large numbers", (x / x.abs().max(),), (10 * x,), "warned"),
            ("with an argument", (x,), (x, torch.ones(1)), "warned"),
        ):
            in_evaluation = when == "in evaluation"
            made.append(
                Case(
                    f"{part} {when}",
                    lambda k, w=when, p=part: Branch(k, w, p),
                    poor,
                    real,
                    expected,
                    training=when != "in training",
                    judged_in_training=not in_evaluation,
                )
            )

    state = torch.randn(1, 3, 4, generator=generator)
    nothing = torch.zeros(1, 1, 4)
    lengths = torch.tensor([2, 6, 4])
    made += [
        Case("a state of zeros", Started, (tokens, torch.zeros(1, 3, 4)), (tokens, state), "exact"),
        Case("a state of zeros, one token", Started, (zeros[:, :1], nothing), (tokens, state), "exact"),
        Case("a state of zeros, length one", Started, (zeros[:, :1], nothing, ones[0, :1]), (tokens, state, lengths),
             "exact"),
        Case("attention, length one", lambda k: LookedUp(k, "rows"), (zeros, ones[0, :1]), (tokens, lengths), "warned"),
    ]  # fmt: skip
    for how in ("one-hot", "fields", "rows"):
        for name, poor in {"zeros": zeros[:, :3], "one": zeros[:, :1]}.items():
            real = (tokens[:, :3] % 4,)
            made.append(Case(f"{how}, {name}", lambda k, h=how: LookedUp(k, h), (poor,), real, "exact"))
    return made


CASES: list[Case] = _cases()
