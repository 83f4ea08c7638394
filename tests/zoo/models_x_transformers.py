"""x-transformers: one wrapper, and many options of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from third_party import MODELS, Model, at, by, find, images

TOKENS, LENGTH = 11, 8


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(0)),)


def layers(k: int, kind: str = "Decoder", **options: Any) -> nn.Module:
    """Two layers with heads of 8, twice k of them."""
    usual: dict[str, Any] = {"dim": by(16), "depth": 2, "heads": by(2), "attn_dim_head": 8, "ff_mult": 2}
    return find(f"x_transformers:{kind}")(**at(k, {**usual, **options}))


def language(
    name: str, *, refused: str = "", why: str = "", wrapper: dict[str, Any] | None = None, **options: Any
) -> None:
    """A language model: the wrapper around layers with these options."""
    wrapped(
        "TransformerWrapper",
        name,
        tokens,
        options,
        refused,
        why,
        num_tokens=TOKENS,
        max_seq_len=LENGTH,
        **(wrapper or {}),
    )


def wrapped(
    kind: str, name: str, inputs: Any, options: dict[str, Any], refused: str = "", why: str = "", **given: Any
) -> None:
    def build(k: int, depth: int = 2) -> nn.Module:
        return find(f"x_transformers:{kind}")(**given, attn_layers=layers(k, depth=depth, **options))

    MODELS.append(Model("x-transformers", name, build, inputs, refused, why, lambda: build(1, depth=4)))


language("Decoder")
language("Encoder", kind="Encoder")
language("rotary positions", rotary_pos_emb=True)
language("relative positions of T5", rel_pos_bias=True)
language("ALiBi", alibi_pos_bias=True, refused="attend.* no copies", why="every head has a slope of its own")
language("dynamic position bias", dynamic_pos_bias=True)
language("RMSNorm, SwiGLU, no biases", use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True)
language("ScaleNorm", use_scalenorm=True)
language("grouped queries", attn_kv_heads=by(2), heads=by(4), attn_dim_head=4)
language("one head of keys and values", attn_one_kv_head=True)
language("query-key norm", attn_qk_norm=True)
language("query-key norm, learned scales", attn_qk_norm=True, attn_qk_norm_dim_scale=True)
language("talking heads", attn_pre_talking_heads=True, attn_post_talking_heads=True)
language("gated values", attn_gate_values=True)
language("memory of keys and values", attn_num_mem_kv=3)
language("residual attention", residual_attn=True)
language("sandwich norm", sandwich_norm=True)
language("post-norm", pre_norm=False)
language("gated residuals", gate_residual=True)
language("scaled residuals", scale_residual=True)
language("shifted tokens", shift_tokens=1)
language("macaron", macaron=True)
language("memory tokens", wrapper={"num_memory_tokens": 3})
language(
    "tied readout",
    wrapper={"tie_embedding": True},
    refused="still uses 'token_emb.emb.weight' of the original",
    why="the readout refers to the model, so that copies of it use the original's table",
)
language(
    "sinusoids of positions",
    wrapper={"scaled_sinu_pos_emb": True},
    refused="add of .* no copies",
    why="fixed sinusoids, others at another width",
)
language("relu squared", ff_relu_squared=True)
language("attention on attention", kind="Encoder", attn_on_attn=True)


def values() -> tuple[Tensor]:
    return (torch.randn(3, LENGTH, 5, generator=torch.Generator().manual_seed(0)),)


ENCODER = {"kind": "Encoder"}
wrapped("ViTransformerWrapper", "images", images(16), ENCODER, image_size=16, patch_size=4, num_classes=3)
CONTINUOUS = {"dim_in": 5, "dim_out": 2, "max_seq_len": LENGTH}
wrapped("ContinuousTransformerWrapper", "values instead of tokens", values, ENCODER, **CONTINUOUS)
