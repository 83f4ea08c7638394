"""vit-pytorch: vision transformers of many papers, in einops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from third_party import add, by, images

VIT: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_classes": 3, "depth": 2, "dim_head": 8}
VIT |= {"dim": by(16), "heads": by(2), "mlp_dim": by(32)}
"""Two heads of 8 for k = 1, and more heads of the same size for more."""


def vit_pytorch(name: str, path: str, size: int = 16, *, vit: dict[str, Any] = VIT, **given: Any) -> None:
    add("vit-pytorch", name, f"vit_pytorch.{path}", images(size), **{**vit, **given})


def video() -> tuple[Tensor]:
    return (torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)),)


def series() -> tuple[Tensor]:
    return (torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(0)),)


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in VIT.items() if name not in names}


vit_pytorch("ViT", "vit:ViT")
vit_pytorch("ViT, mean of the tokens", "vit:ViT", pool="mean")
SINUSOIDS = "fixed sinusoids of positions, others at another width"
vit_pytorch("SimpleViT", "simple_vit:SimpleViT", refused="add_ of .* no copies", why=SINUSOIDS)
vit_pytorch("DeepViT", "deepvit:DeepViT")
vit_pytorch("CaiT", "cait:CaiT", cls_depth=1)
vit_pytorch("parallel ViT", "parallel_vit:ViT")
vit_pytorch("ViT for small datasets", "vit_for_small_dataset:ViT")
vit_pytorch("RvT", "rvt:RvT")
vit_pytorch("patch merger", "vit_with_patch_merger:ViT", patch_merge_num_tokens=3)
vit_pytorch("ViT with learnable memory", "learnable_memory_vit:ViT")
LENGTHS = "divides weights by their length, which grows"
vit_pytorch("nViT", "normalized_vit:nViT", refused="lerp of .* no copies", why=LENGTHS)
vit_pytorch("PiT", "pit:PiT", depth=(1, 1))
vit_pytorch("XCiT", "xcit:XCiT", cls_depth=1)
NEST: dict[str, Any] = {"num_hierarchies": 2, "block_repeats": (1, 1), "dim": by(8), "patch_size": 2, "mlp_mult": 2}
vit_pytorch("NesT", "nest:NesT", vit=without("depth", "mlp_dim"), **NEST)
CROSS: dict[str, Any] = {"image_size": 16, "sm_patch_size": 4, "lg_patch_size": 8, "sm_dim": by(8), "lg_dim": by(16)}
CROSS |= dict.fromkeys(("sm_enc_heads", "lg_enc_heads", "cross_attn_heads"), by(2)) | {"sm_enc_mlp_dim": by(16)}
CROSS |= dict.fromkeys(("sm_enc_dim_head", "lg_enc_dim_head", "cross_attn_dim_head"), 8) | {"lg_enc_mlp_dim": by(16)}
vit_pytorch("CrossViT", "cross_vit:CrossViT", vit=CROSS, num_classes=3, lg_enc_depth=1, depth=1, cross_attn_depth=1)
LEVIT = {"stages": 2, "dim": by(32, 32), "depth": 1, "heads": by(2, 4), "mlp_mult": 2, "dim_key": 8, "dim_value": 16}
vit_pytorch("LeViT", "levit:LeViT", 32, vit={"image_size": 32, "num_classes": 3}, **LEVIT)
CVT = {f"s{i}_{name}": value for i in (1, 2, 3) for name, value in (("heads", by(2)), ("depth", 1), ("mlp_mult", 2))}
CVT |= {f"s{i}_emb_dim": by(width) for i, width in ((1, 8), (2, 16), (3, 16))}
vit_pytorch("CvT", "cvt:CvT", 32, vit=CVT, num_classes=3)
EACH = {"emb_dim": by(8), "local_patch_size": 2, "global_k": 2, "depth": 1}
TWINS = {f"s{i}_{name}": value for i in (1, 2, 3, 4) for name, value in EACH.items()}
TWINS |= {f"s{i}_patch_size": size for i, size in enumerate((4, 2, 1, 1), start=1)}
vit_pytorch("Twins-SVT", "twins_svt:TwinsSVT", 32, vit=TWINS, num_classes=3)
MAX = {"dim": by(16), "dim_conv_stem": by(8), "depth": (1, 1), "dim_head": 8, "window_size": 2}
vit_pytorch("MaxViT", "max_vit:MaxViT", vit=MAX, num_classes=3, mbconv_expansion_rate=2)
MOBILE: dict[str, Any] = {"dims": lambda k: [8 * k, 8 * k, 16 * k], "channels": lambda k: [4 * k, *[8 * k] * 9, 16 * k]}
MOBILE |= {"image_size": (64, 64), "num_classes": 3, "expansion": 2, "patch_size": (1, 1), "depths": (1, 1, 1)}
vit_pytorch("MobileViT", "mobile_vit:MobileViT", 64, vit=MOBILE)
FRAMES = {**without("patch_size"), "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
add("vit-pytorch", "ViT of videos", "vit_pytorch.vit_3d:ViT", video, **FRAMES)
add("vit-pytorch", "ViT of series", "vit_pytorch.vit_1d:ViT", series, **without("image_size"), seq_len=16)
