"""A Llama of torchtitan at any size, for `mupscale upscale --model titan_llama.build --inputs titan_llama.tokens`.

torchtitan's language models attend with FlexAttention, which is for GPUs; this one takes its own class for plain causal
attention, which runs on any machine. With experts its feed-forward parts are the mixture of torchtitan's Qwen3.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
)
from torchtitan.models.qwen3 import _EXPERTS_INIT, _LINEAR_INIT
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from mupscale import clip_grad_norm_

VOCABULARY = 256


def build(dim: int = 64, heads: int = 4, layers: int = 2, experts: int = 0, top_k: int = 2) -> nn.Module:
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
    for number, layer in enumerate(config.layers):
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if experts:
            config.layers[number] = Qwen3TransformerBlock.Config(
                attention=layer.attention,
                attention_norm=layer.attention_norm,
                ffn_norm=layer.ffn_norm,
                moe=_mixture(dim, experts, top_k),
            )
    model = config.build()
    model.init_states()
    return model


def _mixture(dim: int, experts: int, top_k: int) -> object:
    """As torchtitan has it for Qwen3: the weights of the active experts sum to 1."""
    gate = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init=_LINEAR_INIT,
        top_k=top_k,
        score_func=os.environ.get("TITAN_SCORES", "softmax"),
        route_norm="TITAN_SCORES" not in os.environ,
    )
    sizes = {"dim": dim, "hidden_dim": 3 * dim, "num_experts": experts, "param_init": _EXPERTS_INIT}
    routed = make_routed_experts_config(**sizes, top_k=top_k, comm_backend="standard")
    if "TITAN_FLOAT32" in os.environ:
        routed.inner_experts = PlainExperts.Config(**sizes)
    balance = 0.01 / experts  # as large as what scores differ by, which a softmax divides among more experts
    return make_moe_config(num_experts=experts, router=gate, routed_experts=routed, load_balance_coeff=balance)


class PlainExperts(GroupedExperts):
    """torchtitan's experts compute in bfloat16, whatever their weights are; these in the weights' own precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The same."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """What torchtitan's do, without rounding."""
        until = torch.cumsum(counts, dim=0, dtype=torch.int32)

        def product(a: Tensor, weight: Tensor) -> Tensor:
            return self._grouped_mm(A=a, B_t=weight.transpose(-2, -1), offs=until)

        return product(nn.functional.silu(product(x, self.w1_EFD)) * product(x, self.w3_EFD), self.w2_EDF)


def clip_before_steps(max_norm: float) -> Callable[..., None]:
    """For ModelSpec.post_optimizer_build_fn: gradients are clipped by the norm that no width changes."""

    def register(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        (optimizer,), (model,) = optimizers.optimizers, model_parts  # of one kind, and no pipeline

        def clip(*_: Any) -> None:
            clip_grad_norm_(model, max_norm, optimizer)

        optimizer.register_step_pre_hook(clip)

    return register


def tokens() -> Tensor:
    """A batch on which small models are tried."""
    return torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
