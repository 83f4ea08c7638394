"""diffusers: denoising networks and autoencoders, without their pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from third_party import add

UNET: dict[str, Any] = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
CONDITIONED = UNET | {
    "cross_attention_dim": 6,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
DIT: dict[str, Any] = {"attention_head_dim": 8, "num_layers": 1, "in_channels": 4, "patch_size": 2, "sample_size": 8}

TIME = "the number of sinusoids of time is the first width"
POSITIONS = "sinusoids of positions, computed for the width and not saved"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def called_with(**arguments: Any) -> Callable[[], dict[str, Any]]:
    """These keywords; outputs as a tuple, which is what tensors are looked for in."""
    return lambda: {**arguments, "return_dict": False}


noisy = called_with(sample=normal(2, 3, 8, 8), timestep=torch.tensor([3, 40]))
texts = called_with(sample=normal(2, 4, 8, 8), timestep=torch.tensor([3, 40]), encoder_hidden_states=normal(2, 5, 6))
classes = called_with(
    hidden_states=normal(2, 4, 8, 8), timestep=torch.tensor([3, 40]), class_labels=torch.tensor([1, 2])
)


def diffusers(
    name: str, path: str, inputs: Callable[[], Any], arguments: Callable[[int], dict[str, Any]], **expected: str
) -> None:
    add("diffusers", name, f"diffusers:{path}", inputs, arguments, **expected)


def unet(k: int) -> dict[str, Any]:
    return UNET | {
        "block_out_channels": (16 * k, 32 * k),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }


def conditioned(k: int) -> dict[str, Any]:
    return CONDITIONED | {"block_out_channels": (16 * k, 32 * k)}


diffusers("UNet2D", "UNet2DModel", noisy, unet, refused="time_proj.* no copies", why=TIME)
diffusers(
    "UNet2D, Fourier features of time", "UNet2DModel", noisy, lambda k: unet(k) | {"time_embedding_type": "fourier"}
)
diffusers(
    "UNet2D, learned table of times",
    "UNet2DModel",
    noisy,
    lambda k: unet(k) | {"time_embedding_type": "learned", "num_train_timesteps": 50},
)
diffusers(
    "UNet2D, time scales and shifts",
    "UNet2DModel",
    noisy,
    lambda k: unet(k) | {"time_embedding_type": "fourier", "resnet_time_scale_shift": "scale_shift"},
)
diffusers("UNet2DCondition", "UNet2DConditionModel", texts, conditioned, refused="time_proj.* no copies", why=TIME)
diffusers(
    "UNet2DCondition, Fourier features of time",
    "UNet2DConditionModel",
    texts,
    lambda k: conditioned(k) | {"time_embedding_type": "fourier", "time_embedding_dim": 32},
)
diffusers(
    "DiT",
    "DiTTransformer2DModel",
    classes,
    lambda k: DIT | {"num_attention_heads": 2 * k, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
    refused="pos_embed.* no copies",
    why=POSITIONS,
)
diffusers(
    "PixArt",
    "PixArtTransformer2DModel",
    lambda: {
        "hidden_states": normal(2, 4, 8, 8),
        "timestep": torch.tensor([3, 40]),
        "encoder_hidden_states": normal(2, 5, 6),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    },
    lambda k: (
        DIT
        | {
            "num_attention_heads": 2 * k,
            "norm_num_groups": 4,
            "caption_channels": 6,
            "cross_attention_dim": 16 * k,
            "use_additional_conditions": False,
        }
    ),
    refused="pos_embed.* no copies",
    why=POSITIONS,
)
diffusers(
    "SD3",
    "SD3Transformer2DModel",
    called_with(
        hidden_states=normal(2, 4, 8, 8),
        encoder_hidden_states=normal(2, 5, 6),
        pooled_projections=normal(2, 7),
        timestep=torch.tensor([3, 40]),
    ),
    lambda k: (
        DIT
        | {
            "num_layers": 2,
            "num_attention_heads": 2 * k,
            "joint_attention_dim": 6,
            "caption_projection_dim": 16 * k,
            "pooled_projection_dim": 7,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        }
    ),
)
diffusers(
    "SD3.5, query-key norm, dual attention",
    "SD3Transformer2DModel",
    called_with(
        hidden_states=normal(2, 4, 8, 8),
        encoder_hidden_states=normal(2, 5, 6),
        pooled_projections=normal(2, 7),
        timestep=torch.tensor([3, 40]),
    ),
    lambda k: (
        DIT
        | {
            "num_layers": 2,
            "num_attention_heads": 2 * k,
            "joint_attention_dim": 6,
            "caption_projection_dim": 16 * k,
            "pooled_projection_dim": 7,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        }
    ),
)
diffusers(
    "Flux",
    "FluxTransformer2DModel",
    called_with(
        hidden_states=normal(2, 9, 4),
        encoder_hidden_states=normal(2, 5, 6),
        pooled_projections=normal(2, 7),
        timestep=torch.tensor([0.3, 0.7]),
        guidance=torch.tensor([1.0, 2.0]),
        img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(3.0)),
        txt_ids=torch.zeros(5, 3),
    ),
    lambda k: {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2 * k,
        "joint_attention_dim": 6,
        "pooled_projection_dim": 7,
        "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4),
    },
)
diffusers(
    "AutoencoderKL",
    "AutoencoderKL",
    called_with(sample=normal(2, 3, 8, 8)),
    lambda k: {
        "block_out_channels": (8 * k, 16 * k),
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 2,
    },
)
