"""timm: image models of many families, built small through their own constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from third_party import add, images

CLASSES = {"num_classes": 3}
TRANSFORMER = {"img_size": 16, "patch_size": 4, "depth": 2, **CLASSES}


def timm(name: str, path: str, size: int, arguments: Callable[[int], dict[str, Any]], **expected: str) -> None:
    add("timm", name, f"timm.models.{path}", images(size), arguments, **expected)


def stages(*widths: int) -> Callable[[int], tuple[int, ...]]:
    """The widths of the stages, k times each."""
    return lambda k: tuple(k * width for width in widths)


def heads(k: int) -> dict[str, Any]:
    """Two heads of 8 for k = 1, and more heads of the same size for more."""
    return {"embed_dim": 16 * k, "num_heads": 2 * k, "mlp_ratio": 2.0}


two, four = stages(8, 16), stages(8, 16, 16, 32)

timm("ViT", "vision_transformer:VisionTransformer", 16, lambda k: TRANSFORMER | heads(k))
timm(
    "ViT, class token, query-key norm, layer scale, registers",
    "vision_transformer:VisionTransformer",
    16,
    lambda k: TRANSFORMER | heads(k) | {"qk_norm": True, "init_values": 0.1, "reg_tokens": 2},
)
timm(
    "ViT, pooled by attention",
    "vision_transformer:VisionTransformer",
    16,
    lambda k: TRANSFORMER | heads(k) | {"global_pool": "map", "class_token": False},
)
timm("DeiT, distilled", "deit:VisionTransformerDistilled", 16, lambda k: TRANSFORMER | heads(k))
timm("BEiT", "beit:Beit", 16, lambda k: TRANSFORMER | heads(k) | {"use_rel_pos_bias": True, "init_values": 0.1})
timm("CaiT", "cait:Cait", 16, lambda k: TRANSFORMER | heads(k) | {"init_values": 0.1, "depth_token_only": 1})
timm("EVA-02", "eva:Eva", 16, lambda k: TRANSFORMER | heads(k) | {"use_rot_pos_emb": True, "swiglu_mlp": True})
timm("XCiT", "xcit:Xcit", 16, lambda k: TRANSFORMER | heads(k) | {"patch_size": 8, "cls_attn_layers": 1})
timm("ConViT", "convit:ConVit", 16, lambda k: TRANSFORMER | heads(k) | {"local_up_to_layer": 1})
timm(
    "TNT",
    "tnt:TNT",
    16,
    lambda k: (
        {**TRANSFORMER, "patch_size": 8, "embed_dim": 16 * k, "inner_dim": 8 * k, "depth": 1}
        | {"num_heads_inner": 2 * k, "num_heads_outer": 2 * k, "mlp_ratio": 2.0}
    ),
)
timm(
    "PiT",
    "pit:PoolingVisionTransformer",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "patch_size": 4,
        "stride": 4,
        "base_dims": (8, 8),
        "depth": (1, 1),
        "heads": (k, 2 * k),
        "mlp_ratio": 2,
    },
)
timm(
    "Swin",
    "swin_transformer:SwinTransformer",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "patch_size": 2,
        "window_size": 2,
        "embed_dim": 8 * k,
        "depths": (2, 1),
        "num_heads": (k, 2 * k),
        "drop_path_rate": 0.0,
    },
)
timm(
    "Swin V2",
    "swin_transformer_v2:SwinTransformerV2",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "patch_size": 2,
        "window_size": 2,
        "embed_dim": 8 * k,
        "depths": (2, 1),
        "num_heads": (k, 2 * k),
        "drop_path_rate": 0.0,
    },
)
timm(
    "PVT v2",
    "pvt_v2:PyramidVisionTransformerV2",
    32,
    lambda k: {
        **CLASSES,
        "depths": (1, 1, 1, 1),
        "embed_dims": four(k),
        "num_heads": stages(1, 2, 2, 4)(k),
        "sr_ratios": (4, 2, 1, 1),
        "mlp_ratios": (2, 2, 2, 2),
    },
)
timm(
    "Twins",
    "twins:Twins",
    32,
    lambda k: {
        **CLASSES,
        "img_size": 32,
        "depths": (1, 1, 1, 1),
        "embed_dims": four(k),
        "num_heads": stages(1, 2, 2, 4)(k),
        "sr_ratios": (4, 2, 1, 1),
    },
)
timm(
    "CrossViT",
    "crossvit:CrossVit",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "patch_size": (4, 8),
        "embed_dim": two(k),
        "num_heads": (k, 2 * k),
        "depth": ((1, 1, 0),),
        "mlp_ratio": (2, 2, 1),
    },
)
timm(
    "Visformer",
    "visformer:Visformer",
    32,
    lambda k: {
        **CLASSES,
        "img_size": 32,
        "patch_size": 8,
        "init_channels": 8 * k,
        "embed_dim": 16 * k,
        "depth": (1, 1, 1),
        "num_heads": 2 * k,
        "mlp_ratio": 2.0,
        "group": 2,
    },
)
timm(
    "LeViT",
    "levit:Levit",
    32,
    lambda k: {
        **CLASSES,
        "img_size": 32,
        "embed_dim": stages(16, 32)(k),
        "key_dim": 8,
        "depth": (1, 1),
        "num_heads": stages(1, 2)(k),
        "stem_type": "s8",
    },
)
timm(
    "VOLO",
    "volo:VOLO",
    32,
    lambda k: {
        **CLASSES,
        "layers": [1, 1],
        "img_size": 32,
        "stem_hidden_dim": 8 * k,
        "embed_dims": list(stages(16, 32)(k)),
        "num_heads": list(stages(2, 4)(k)),
        "downsamples": (True, False),
        "outlook_attention": (True, False),
        "use_aux_head": False,
    },
)
timm(
    "DaViT",
    "davit:DaVit",
    32,
    lambda k: {
        **CLASSES,
        "depths": (1, 1),
        "embed_dims": two(k),
        "num_heads": stages(1, 2)(k),
        "window_size": 4,
        "mlp_ratio": 2,
    },
)
timm(
    "Hiera",
    "hiera:Hiera",
    32,
    lambda k: {
        **CLASSES,
        "img_size": (32, 32),
        "embed_dim": 8 * k,
        "num_heads": k,
        "stages": (1, 1),
        "q_pool": 1,
        "mask_unit_size": (4, 4),
        "mask_unit_attn": (True, False),
        "mlp_ratio": 2.0,
    },
)
timm(
    "NesT",
    "nest:Nest",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "patch_size": 2,
        "num_levels": 2,
        "embed_dims": two(k),
        "num_heads": stages(1, 2)(k),
        "depths": (1, 1),
        "drop_path_rate": 0.0,
    },
)
timm(
    "TinyViT",
    "tiny_vit:TinyVit",
    32,
    lambda k: {
        **CLASSES,
        "depths": (1, 1, 1, 1),
        "embed_dims": four(k),
        "num_heads": stages(1, 2, 2, 4)(k),
        "window_sizes": (4, 4, 2, 1),
        "drop_path_rate": 0.0,
    },
)
