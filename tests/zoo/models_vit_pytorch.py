"""vit-pytorch: vision transformers of many papers, in einops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from third_party import add, images


def vit(k: int) -> dict[str, Any]:
    """Two heads of 8 for k = 1, and more heads of the same size for more."""
    return {
        "image_size": 16,
        "patch_size": 4,
        "num_classes": 3,
        "dim": 16 * k,
        "depth": 2,
        "heads": 2 * k,
        "mlp_dim": 32 * k,
        "dim_head": 8,
    }


def vit_pytorch(
    name: str, path: str, arguments: Callable[[int], dict[str, Any]] = vit, size: int = 16, **expected: str
) -> None:
    add("vit-pytorch", name, f"vit_pytorch.{path}", images(size), arguments, **expected)


def video() -> tuple[Tensor]:
    return (torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)),)


def series() -> tuple[Tensor]:
    return (torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(0)),)


def without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


vit_pytorch("ViT", "vit:ViT")
vit_pytorch("ViT, mean of the tokens", "vit:ViT", lambda k: vit(k) | {"pool": "mean"})
vit_pytorch(
    "SimpleViT",
    "simple_vit:SimpleViT",
    refused="add_ of .* no copies",
    why="fixed sinusoids of positions, others at another width",
)
vit_pytorch("DeepViT", "deepvit:DeepViT")
vit_pytorch("CaiT", "cait:CaiT", lambda k: vit(k) | {"cls_depth": 1})
vit_pytorch("parallel ViT", "parallel_vit:ViT")
vit_pytorch("ViT for small datasets", "vit_for_small_dataset:ViT")
vit_pytorch("RvT", "rvt:RvT")
vit_pytorch("patch merger", "vit_with_patch_merger:ViT", lambda k: vit(k) | {"patch_merge_num_tokens": 3})
vit_pytorch("ViT with learnable memory", "learnable_memory_vit:ViT")
vit_pytorch(
    "nViT",
    "normalized_vit:nViT",
    refused="lerp of .* no copies",
    why="divides weights by their length, which grows",
)
vit_pytorch("PiT", "pit:PiT", lambda k: vit(k) | {"depth": (1, 1)})
vit_pytorch("XCiT", "xcit:XCiT", lambda k: vit(k) | {"cls_depth": 1})
vit_pytorch(
    "NesT",
    "nest:NesT",
    lambda k: (
        without(vit(k), "depth", "mlp_dim")
        | {"num_hierarchies": 2, "block_repeats": (1, 1), "dim": 8 * k, "heads": 2 * k, "patch_size": 2, "mlp_mult": 2}
    ),
)
vit_pytorch(
    "CrossViT",
    "cross_vit:CrossViT",
    lambda k: {
        "image_size": 16,
        "num_classes": 3,
        "sm_dim": 8 * k,
        "lg_dim": 16 * k,
        "sm_patch_size": 4,
        "lg_patch_size": 8,
        "sm_enc_heads": 2 * k,
        "lg_enc_heads": 2 * k,
        "cross_attn_heads": 2 * k,
        "sm_enc_mlp_dim": 16 * k,
        "lg_enc_mlp_dim": 16 * k,
        "sm_enc_dim_head": 8,
        "lg_enc_dim_head": 8,
        "cross_attn_dim_head": 8,
        "lg_enc_depth": 1,
        "depth": 1,
        "cross_attn_depth": 1,
    },
)
vit_pytorch(
    "LeViT",
    "levit:LeViT",
    lambda k: {
        "image_size": 32,
        "num_classes": 3,
        "stages": 2,
        "dim": (32 * k, 32 * k),
        "depth": 1,
        "heads": (2 * k, 4 * k),
        "mlp_mult": 2,
        "dim_key": 8,
        "dim_value": 16,
    },
    size=32,
)
vit_pytorch(
    "CvT",
    "cvt:CvT",
    lambda k: {
        "num_classes": 3,
        **{f"s{i}_emb_dim": width * k for i, width in ((1, 8), (2, 16), (3, 16))},
        **{f"s{i}_heads": 2 * k for i in (1, 2, 3)},
        **{f"s{i}_depth": 1 for i in (1, 2, 3)},
        **{f"s{i}_mlp_mult": 2 for i in (1, 2, 3)},
    },
    size=32,
)
vit_pytorch(
    "Twins-SVT",
    "twins_svt:TwinsSVT",
    lambda k: {
        "num_classes": 3,
        **{f"s{i}_emb_dim": 8 * k for i in (1, 2, 3, 4)},
        **{f"s{i}_patch_size": size for i, size in ((1, 4), (2, 2), (3, 1), (4, 1))},
        **{f"s{i}_local_patch_size": size for i, size in ((1, 2), (2, 2), (3, 2), (4, 2))},
        **{f"s{i}_global_k": 2 for i in (1, 2, 3, 4)},
        **{f"s{i}_depth": 1 for i in (1, 2, 3, 4)},
    },
    size=32,
)
vit_pytorch(
    "MaxViT",
    "max_vit:MaxViT",
    lambda k: {
        "num_classes": 3,
        "dim": 16 * k,
        "dim_conv_stem": 8 * k,
        "depth": (1, 1),
        "dim_head": 8,
        "window_size": 2,
        "mbconv_expansion_rate": 2,
    },
    size=16,
)
vit_pytorch(
    "MobileViT",
    "mobile_vit:MobileViT",
    lambda k: {
        "image_size": (64, 64),
        "dims": [8 * k, 8 * k, 16 * k],
        "channels": [4 * k, 8 * k, 8 * k, 8 * k, 8 * k, 8 * k, 8 * k, 8 * k, 8 * k, 8 * k, 16 * k],
        "num_classes": 3,
        "expansion": 2,
        "patch_size": (1, 1),
        "depths": (1, 1, 1),
    },
    size=64,
)
add(
    "vit-pytorch",
    "ViT of videos",
    "vit_pytorch.vit_3d:ViT",
    video,
    lambda k: without(vit(k), "patch_size") | {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2},
)
add(
    "vit-pytorch",
    "ViT of series",
    "vit_pytorch.vit_1d:ViT",
    series,
    lambda k: without(vit(k), "image_size") | {"seq_len": 16},
)
