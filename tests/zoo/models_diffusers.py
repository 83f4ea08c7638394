"""diffusers: denoising networks and autoencoders, without their pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from third_party import add, by

SIZES: dict[str, Any] = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
SIZES |= {"block_out_channels": by(16, 32)}
UNET = {
    **SIZES,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CONDITIONED = {**SIZES, "cross_attention_dim": 6, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
CONDITIONED |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
DIT: dict[str, Any] = {"attention_head_dim": 8, "num_layers": 1, "in_channels": 4, "patch_size": 2, "sample_size": 8}
DIT |= {"num_attention_heads": by(2)}

TIME = "the number of sinusoids of time is the first width"
POSITIONS = "sinusoids of positions, computed for the width and not saved"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def called_with(**arguments: Any) -> Callable[[], dict[str, Any]]:
    """These keywords; outputs as a tuple, which is what tensors are looked for in."""
    return lambda: {**arguments, "return_dict": False}


steps = torch.tensor([3, 40])
noisy = called_with(sample=normal(2, 3, 8, 8), timestep=steps)
texts = called_with(sample=normal(2, 4, 8, 8), timestep=steps, encoder_hidden_states=normal(2, 5, 6))
classes = called_with(hidden_states=normal(2, 4, 8, 8), timestep=steps, class_labels=torch.tensor([1, 2]))
prompt = {"encoder_hidden_states": normal(2, 5, 6), "pooled_projections": normal(2, 7)}


def diffusers(name: str, path: str, inputs: Callable[[], Any], **given: Any) -> None:
    add("diffusers", name, f"diffusers:{path}", inputs, **given)


FOURIER = {"time_embedding_type": "fourier"}
LEARNED = {"time_embedding_type": "learned", "num_train_timesteps": 50}
diffusers("UNet2D", "UNet2DModel", noisy, **UNET, refused="time_proj.* no copies", why=TIME)
diffusers("UNet2D, Fourier features of time", "UNet2DModel", noisy, **UNET, **FOURIER)
diffusers("UNet2D, learned table of times", "UNet2DModel", noisy, **UNET, **LEARNED)
SHIFTED = {**UNET, **FOURIER, "resnet_time_scale_shift": "scale_shift"}
diffusers("UNet2D, time scales and shifts", "UNet2DModel", noisy, **SHIFTED)
diffusers("UNet2DCondition", "UNet2DConditionModel", texts, **CONDITIONED, refused="time_proj.* no copies", why=TIME)
OF_TIME = {**CONDITIONED, **FOURIER, "time_embedding_dim": 32}
diffusers("UNet2DCondition, Fourier features of time", "UNet2DConditionModel", texts, **OF_TIME)
PLACED = DIT | {"norm_num_groups": 4, "refused": "pos_embed.* no copies", "why": POSITIONS}
diffusers("DiT", "DiTTransformer2DModel", classes, **PLACED, num_embeds_ada_norm=10)
diffusers(
    "PixArt",
    "PixArtTransformer2DModel",
    called_with(
        hidden_states=normal(2, 4, 8, 8),
        timestep=steps,
        encoder_hidden_states=normal(2, 5, 6),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ),
    **PLACED,
    caption_channels=6,
    cross_attention_dim=by(16),
    use_additional_conditions=False,
)
SD3: dict[str, Any] = {**DIT, "num_layers": 2, "joint_attention_dim": 6, "caption_projection_dim": by(16)}
SD3 |= {"pooled_projection_dim": 7, "out_channels": 4, "pos_embed_max_size": 8}
pictures = called_with(hidden_states=normal(2, 4, 8, 8), timestep=steps, **prompt)
diffusers("SD3", "SD3Transformer2DModel", pictures, **SD3)
DUAL = {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
diffusers("SD3.5, query-key norm, dual attention", "SD3Transformer2DModel", pictures, **SD3, **DUAL)
FLUX: dict[str, Any] = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8}
FLUX |= {"num_attention_heads": by(2), "joint_attention_dim": 6, "pooled_projection_dim": 7, "guidance_embeds": True}
diffusers(
    "Flux",
    "FluxTransformer2DModel",
    called_with(
        hidden_states=normal(2, 9, 4),
        timestep=torch.tensor([0.3, 0.7]),
        guidance=torch.tensor([1.0, 2.0]),
        img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(3.0), torch.arange(3.0)),
        txt_ids=torch.zeros(5, 3),
        **prompt,
    ),
    **FLUX,
    axes_dims_rope=(2, 2, 4),
)
CODED: dict[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CODED |= {"block_out_channels": by(8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 2}
diffusers("AutoencoderKL", "AutoencoderKL", called_with(sample=normal(2, 3, 8, 8)), **CODED)
