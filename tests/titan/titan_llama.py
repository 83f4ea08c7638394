"""A Llama of torchtitan at any size, for `mupscale upscale --model titan_llama.build --inputs titan_llama.tokens`.

torchtitan's language models attend with FlexAttention, which is for GPUs; this one takes its own class for plain causal
attention, which runs on any machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
)

VOCABULARY = 256


def build(dim: int = 64, heads: int = 4, layers: int = 2) -> nn.Module:
    """The model as torchtitan builds and initialises it; heads of one size, two of them for each of keys and values."""
    config = Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=_output_linear_init(dim)),
        layers=_build_llama3_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=heads // 2,
            hidden_dim=3 * dim,
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=500000, scaling="llama"),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model


def tokens() -> Tensor:
    """A batch on which small models are tried."""
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
