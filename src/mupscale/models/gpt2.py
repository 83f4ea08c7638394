"""GPT-2 with a head dimension to vary: the language model of the paper's Appendix F.3."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mupscale.system import MupscaleError


class Attention(nn.Module):
    """Causal multi-head self-attention; the rows of `c_attn` are queries, keys, values, each head by head."""

    def __init__(self, n_head: int, head_dim: int, *, bias: bool, dropout: float, scale: float) -> None:
        super().__init__()
        d_model = n_head * head_dim
        self.n_head = n_head
        self.head_dim = head_dim
        self.scale = scale
        self.dropout = dropout
        self.c_attn = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.c_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, d_model) to (B, T, d_model), each position seeing only itself and earlier ones."""
        qkv = self.c_attn(x).unflatten(-1, (3, self.n_head, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=self.scale)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """The block's MLP, four times as wide as the residual stream."""

    def __init__(self, d_model: int, *, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(d_model, 4 * d_model, bias=bias)
        self.c_proj = nn.Linear(4 * d_model, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """A pre-LayerNorm transformer block: attention, then MLP, each added to the residual stream."""

    def __init__(self, n_head: int, head_dim: int, *, bias: bool, dropout: float, scale: float) -> None:
        super().__init__()
        d_model = n_head * head_dim
        self.ln_1 = nn.LayerNorm(d_model, bias=bias)
        self.attn = Attention(n_head, head_dim, bias=bias, dropout=dropout, scale=scale)
        self.ln_2 = nn.LayerNorm(d_model, bias=bias)
        self.mlp = FeedForward(d_model, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        out: Tensor = x + self.drop(self.mlp(self.ln_2(x)))
        return out


class GPT2(nn.Module):
    """GPT-2 of width heads * head_dim (Appendix F.3: 12 layers, 12 heads, head_dim 16, 32, 160 and 320).

    Of width, heads and head_dim any two say the third; a family that grows by `width` alone then grows its number of
    heads (head_dim given) or the heads themselves (heads given). By default there are 12 heads of dimension 64.
    An `attention_multiplier` a scales attention by a / head_dim, which muP needs where head_dim grows; the default
    is GPT-2's 1 / sqrt(head_dim). The two agree where a = sqrt(head_dim).

    >>> model = GPT2(vocab=11, context=8, width=32, layers=2, head_dim=8)
    >>> model.h[0].attn.n_head
    4
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).shape
    torch.Size([1, 8, 11])
    """

    def __init__(
        self,
        vocab: int,
        context: int,
        *,
        width: int | None = None,
        layers: int = 12,
        heads: int | None = None,
        head_dim: int | None = None,
        tied: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        attention_multiplier: float | None = None,
    ) -> None:
        super().__init__()
        heads, head_dim = _heads(width, heads, head_dim)
        if min(vocab, context, layers, heads, head_dim) < 1:
            raise MupscaleError(
                "a GPT2 needs positive sizes, but vocab, context, layers, heads and head_dim are "
                f"{vocab}, {context}, {layers}, {heads} and {head_dim}"
            )
        scale = head_dim**-0.5 if attention_multiplier is None else attention_multiplier / head_dim
        d_model = heads * head_dim
        self.context = context
        self.wte = nn.Embedding(vocab, d_model)
        self.wpe = nn.Embedding(context, d_model)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(heads, head_dim, bias=bias, dropout=dropout, scale=scale) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d_model, bias=bias)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        # as GPT-2 starts: N(0, 0.02), projections into the residual stream smaller with depth
        residual_std = 0.02 / math.sqrt(2 * len(self.h))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to next-token logits (B, T, vocab)."""
        length = tokens.shape[1]
        if length > self.context:
            raise MupscaleError(f"the sequence has {length} tokens, but the model's context is {self.context}")
        positions = torch.arange(length, device=tokens.device)
        x: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def _heads(width: int | None, heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Number of heads and their dimension, from the two of the three numbers that are given."""
    if width is None:
        return heads if heads is not None else 12, head_dim if head_dim is not None else 64
    if heads is None:
        head_dim = head_dim if head_dim is not None else 64
        heads = width // max(1, head_dim)
    elif head_dim is None:
        head_dim = width // max(1, heads)
    if heads * head_dim != width:
        raise MupscaleError(f"a GPT2 of width {width} cannot have {heads} heads of dimension {head_dim}")
    return heads, head_dim
