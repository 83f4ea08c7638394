"""Residual models of every habit, with a number of blocks to vary; and some that cannot be deepened."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mupscale.models import GPT2
from mupscale.models.resnet import BasicBlock
from toys import of, toy
from zoo import CLASSES, CONTEXT, VOCAB, GroupedQueryAttention

D = 8


class Residual(nn.Module):
    """A pre-norm MLP block whose branch ends in what `tail` is."""

    def __init__(self, tail: str = "linear") -> None:
        super().__init__()
        self.norm, self.up, self.down, self.tail = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D), tail
        if tail == "scale":
            self.gamma = nn.Parameter(0.1 * torch.ones(D))
        elif tail == "norm":
            self.after = nn.LayerNorm(D)
        elif tail == "one-plus":
            self.gain = nn.Parameter(0.1 * torch.randn(D))

    def branch(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        if self.tail == "scale":
            return y * self.gamma
        if self.tail == "norm":
            return self.after(y)
        if self.tail == "one-plus":
            return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.gain)
        if self.tail == "relu":
            return torch.relu(y)
        return F.dropout(y, 0.1, self.training) if self.tail == "dropout" else y

    def forward(self, x: Tensor) -> Tensor:
        if self.tail == "in-place":
            y, x = self.branch(x), x.clone()
            x += y
            return x
        return x + self.branch(x)


@toy(lambda: of(up=(D, 12), down=(12, D), scale=nn.Parameter(1 + 0.1 * torch.randn(D))))
def scaled_stream(m: Any, x: Tensor) -> Tensor:
    """A block that multiplies the stream by a scale per channel before it adds to it, as PoolFormer's."""
    return m.scale.view(1, 1, -1) * x + m.down(F.gelu(m.up(x)))


@toy(lambda: of(f=(D, D), norm=nn.LayerNorm(D)))
def post_norm(m: Any, x: Tensor) -> Tensor:
    """The stream itself is normalised."""
    return m.norm(x + torch.tanh(m.f(x)))


class PlainBlock(nn.Module):
    """No residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.f(x))


class Grouped(nn.Module):
    """Grouped-query attention and a gated MLP, added at once (as Phi and GPT-NeoX do)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(D), GroupedQueryAttention(D, 4, 2, 2)
        self.gate_up, self.down = nn.Linear(D, 24, bias=False), nn.Linear(12, D, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = self.norm(x)
        gate, up = self.gate_up(h).chunk(2, -1)
        return x + (self.attention(h) + self.down(F.silu(gate) * up)), None


class Stream(nn.Module):
    """Tokens, blocks in a ModuleList, a readout."""

    def __init__(self, layers: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Any = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.norm(x))


class Pairs(nn.Module):
    """Blocks that are ModuleLists of parts, which the model adds to the stream itself."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), nn.Sequential(nn.Linear(D, D))])
            for _ in range(layers)
        )
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in self.layers:  # type: ignore[misc]
            x = first(x) + x
            x = x + second(torch.tanh(x))
        return self.head(x)


class Numbered(nn.Module):
    """Blocks as attributes block0, block1, …, in no list."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(VOCAB, D), layers, nn.Linear(D, VOCAB)
        for number in range(layers):
            setattr(self, f"block{number}", Residual())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in range(self.layers):
            x = getattr(self, f"block{number}")(x)
        return self.head(x)


@toy(lambda: of(first=(D // 2, D), second=(D, D // 2)))
def two_streams(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A block that carries two streams on, and reads each for the other."""
    x = torch.cat([x[:, :1], x[:, 1:] + m.first(torch.tanh(y[:, 1:]))], 1)
    return x, y + m.second(torch.tanh(x))


class Turns(nn.Module):
    """Blocks of two kinds in turn, a second stream, or a constant for each block."""

    def __init__(self, layers: int, kind: str) -> None:
        super().__init__()
        self.embed, self.kind, self.head = nn.Embedding(VOCAB, D), kind, nn.Linear(D, VOCAB)
        self.aside = nn.Embedding(VOCAB, D // 2)
        self.blocks = nn.ModuleList(
            two_streams()
            if kind == "streams"
            else nn.Sequential(nn.Tanh(), nn.Linear(D, D, kind == "constants" or n % 2 == 0))
            for n in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = self.embed(tokens), self.aside(tokens)
        for number, block in enumerate(self.blocks):
            if self.kind == "streams":
                x, y = block(x, y)
            else:
                x = x + block(x) / (1 + number if self.kind == "constants" else 1)
        return self.head(x) + y.sum()


class Stages(nn.Module):
    """A ResNet of two stages, whose first blocks change the shape."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.one = nn.Sequential(*(BasicBlock(4, 4, 1) for _ in range(layers)))
        self.two = nn.Sequential(*(BasicBlock(4 if n == 0 else 6, 6, 2 if n == 0 else 1) for n in range(layers)))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(torch.relu(self.stem(x)))).mean((2, 3)))


class OneList(nn.Module):
    """Two stages in one list, whose middle block changes the width: the deep model has other shapes at its place."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        half = layers // 2
        kinds = [*[(D, D)] * half, (D, 2 * D), *[(2 * D, 2 * D)] * (layers - half)]
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(2 * D, VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b)) for a, b in kinds)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = torch.tanh(block(x))
            x = (x if x.shape == y.shape else torch.cat([x, x], -1)) + y
        return self.head(x)


class TiedByFunction(Stream):
    """A readout that is a function of the model itself, which a copy of the model keeps."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers, Residual)
        self.head = nn.Identity()
        self.read = lambda x: x @ self.embed.weight.t()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(super().forward(tokens))


def _sequential(layers: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, D), *(Residual() for _ in range(layers)), nn.Linear(D, VOCAB))


def _encoder(layers: int, first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, norm_first=first)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for p in encoder.parameters():
        nn.init.normal_(p, std=0.4)  # the layers of an encoder are copies of one
    return nn.Sequential(nn.Embedding(VOCAB, D), encoder, nn.Linear(D, VOCAB))


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Deepening:
    """A model by its number of blocks, and a batch for it."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[], Tensor] = tokens
    blocks: str | None = None


RESIDUAL: dict[str, Deepening] = {
    "gpt2": Deepening(lambda n: GPT2(VOCAB, CONTEXT, width=8, head_dim=4, layers=n)),
    "gpt2-untied": Deepening(lambda n: GPT2(VOCAB, CONTEXT, width=8, head_dim=4, layers=n, tied=False, bias=False)),
    "resnet": Deepening(Stages, images),
    "stages-in-one-list": Deepening(OneList),
    "resnet-of-one-block": Deepening(lambda n: Stages(max(1, n - 2)), images),
    "two-streams": Deepening(lambda n: Turns(n, "streams")),
    "kinds-in-turn": Deepening(lambda n: Turns(n, "turns")),
    "encoder-pre-norm": Deepening(_encoder),
    "grouped-parallel": Deepening(lambda n: Stream(n, Grouped)),
    "scale-per-channel": Deepening(lambda n: Stream(n, lambda: Residual("scale"))),
    "scaled-stream": Deepening(lambda n: Stream(n, scaled_stream)),
    "norm-in-branch": Deepening(lambda n: Stream(n, lambda: Residual("norm"))),
    "gain-without-its-one": Deepening(lambda n: Stream(n, lambda: Residual("one-plus"))),
    "dropout": Deepening(lambda n: Stream(n, lambda: Residual("dropout"))),
    "in-place": Deepening(lambda n: Stream(n, lambda: Residual("in-place"))),
    "sequential": Deepening(_sequential),
    "pairs": Deepening(Pairs),
    "numbered": Deepening(Numbered, blocks="block*"),
}

REFUSED: dict[str, tuple[Deepening, str]] = {
    "encoder-post-norm": (Deepening(lambda n: _encoder(n, first=False)), "post-norm"),
    "post-norm": (Deepening(lambda n: Stream(n, post_norm)), "post-norm"),
    "no-residuals": (Deepening(lambda n: Stream(n, PlainBlock)), "no residual connection"),
    "relu-at-the-end": (Deepening(lambda n: Stream(n, lambda: Residual("relu"))), "relu"),
    "constants-by-number": (Deepening(lambda n: Turns(n, "constants")), "depends on the number of blocks"),
    "not-found": (Deepening(Numbered), "blocks='path"),
}


class ResidualTable(nn.Module):
    """A residual MLP for rows of a table, with a width and a number of blocks to vary: what small runs train."""

    def __init__(self, d_in: int, d_out: int, width: int, layers: int, hidden: int | None = None) -> None:
        super().__init__()
        inner = hidden or width
        self.stem = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, d_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
