"""x-transformers: one wrapper, and many options of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from third_party import MODELS, Model, find, images

TOKENS, LENGTH = 11, 8


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(0)),)


def layers(k: int, kind: str = "Decoder", **options: Any) -> nn.Module:
    """Two layers with heads of 8, twice k of them."""
    options = {key: value(k) if callable(value) else value for key, value in options.items()}
    return find(f"x_transformers:{kind}")(
        **{"dim": 16 * k, "depth": 2, "heads": 2 * k, "attn_dim_head": 8, "ff_mult": 2, **options}
    )


def language(
    name: str, *, refused: str = "", why: str = "", wrapper: dict[str, Any] | None = None, **options: Any
) -> None:
    """A language model: the wrapper around layers with these options."""

    def build(k: int, depth: int = 2) -> nn.Module:
        return find("x_transformers:TransformerWrapper")(
            num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers(k, depth=depth, **options), **(wrapper or {})
        )

    MODELS.append(Model("x-transformers", name, build, tokens, refused, why, lambda: build(1, depth=4)))


language("Decoder")
language("Encoder", kind="Encoder")
language("rotary positions", rotary_pos_emb=True)
language("relative positions of T5", rel_pos_bias=True)
language("ALiBi", alibi_pos_bias=True, refused="attend.* no copies", why="every head has a slope of its own")
language("dynamic position bias", dynamic_pos_bias=True)
language("RMSNorm, SwiGLU, no biases", use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True)
language("ScaleNorm", use_scalenorm=True)
language("grouped queries", attn_kv_heads=lambda k: 2 * k, heads=lambda k: 4 * k, attn_dim_head=4)
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


def image_model(k: int, depth: int = 2) -> nn.Module:
    return find("x_transformers:ViTransformerWrapper")(
        image_size=16, patch_size=4, num_classes=3, attn_layers=layers(k, kind="Encoder", depth=depth)
    )


def continuous_model(k: int, depth: int = 2) -> nn.Module:
    return find("x_transformers:ContinuousTransformerWrapper")(
        dim_in=5, dim_out=2, max_seq_len=LENGTH, attn_layers=layers(k, kind="Encoder", depth=depth)
    )


def values() -> tuple[Tensor]:
    return (torch.randn(3, LENGTH, 5, generator=torch.Generator().manual_seed(0)),)


for title, model, batch in (
    ("images", image_model, images(16)),
    ("values instead of tokens", continuous_model, values),
):
    MODELS.append(Model("x-transformers", title, model, batch, deeper=lambda model=model: model(1, depth=4)))
