"""timm: image models of convolutions, of layers across patches, and of both with attention."""

from __future__ import annotations

from typing import Any

from models_timm import CLASSES, four, stages, timm, two
from third_party import find

timm("ConvNeXt", "convnext:ConvNeXt", 32, lambda k: {**CLASSES, "depths": (1, 1, 1, 1), "dims": four(k)})
timm(
    "ConvNeXt V2",
    "convnext:ConvNeXt",
    32,
    lambda k: {**CLASSES, "depths": (1, 1, 1, 1), "dims": four(k), "use_grn": True, "ls_init_value": None},
)
timm("InceptionNeXt", "inception_next:MetaNeXt", 32, lambda k: {**CLASSES, "depths": (1, 1, 1, 1), "dims": four(k)})
timm(
    "EdgeNeXt",
    "edgenext:EdgeNeXt",
    32,
    lambda k: {
        **CLASSES,
        "depths": (1, 2, 1, 1),
        "dims": four(k),
        "heads": stages(1, 2, 2, 4)(k),
        "global_block_counts": (0, 1, 0, 0),
    },
)
timm(
    "FocalNet",
    "focalnet:FocalNet",
    32,
    lambda k: (
        {**CLASSES, "embed_dim": 8 * k, "depths": (1, 1), "focal_levels": (2, 2), "focal_windows": (3, 3)}
        | {"drop_path_rate": 0.0}
    ),
    refused="not grow by a whole multiple",
    why="one layer gives out units and a fixed number of gates",
)
timm(
    "PoolFormer",
    "metaformer:MetaFormer",
    32,
    lambda k: (
        {**CLASSES, "depths": (1, 1), "dims": two(k), "use_mlp_head": False}
        | {"res_scale_init_values": (None, 1.0), "layer_scale_init_values": 0.1}
    ),
)
timm(
    "CAFormer",
    "metaformer:MetaFormer",
    32,
    lambda k: (
        {**CLASSES, "depths": (1, 1), "dims": stages(8, 32)(k), "res_scale_init_values": (None, 1.0)}
        | {"token_mixers": [find("timm.models.metaformer:SepConv"), find("timm.models.metaformer:Attention")]}
        | {"norm_layers": [find(f"timm.models.metaformer:LayerNorm{d}NoBias") for d in ("2d", "")]}
    ),
)
timm("MambaOut", "mambaout:MambaOut", 32, lambda k: {**CLASSES, "depths": (1, 1), "dims": two(k), "expansion_ratio": 2})
timm(
    "MLP-Mixer",
    "mlp_mixer:MlpMixer",
    16,
    lambda k: {**CLASSES, "img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": 16 * k},
)
for title, ratio, parts in (
    ("ResMLP", 2.0, {"block_layer": "models.mlp_mixer:ResBlock", "norm_layer": "models.mlp_mixer:Affine"}),
    ("gMLP", 4, {"block_layer": "models.mlp_mixer:SpatialGatingBlock", "mlp_layer": "layers:GatedMlp"}),
):
    timm(
        title,
        "mlp_mixer:MlpMixer",
        16,
        lambda k, ratio=ratio, parts=parts: (
            {**CLASSES, "img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": 16 * k, "mlp_ratio": ratio}
            | {name: find(f"timm.{path}") for name, path in parts.items()}
        ),
    )
timm(
    "Sequencer2D",
    "sequencer:Sequencer2d",
    16,
    lambda k: {
        **CLASSES,
        "img_size": 16,
        "layers": (1, 1),
        "patch_sizes": (4, 2),
        "embed_dims": two(k),
        "hidden_sizes": stages(4, 4)(k),
        "mlp_ratios": (2.0, 2.0),
    },
)
timm("ConvMixer", "convmixer:ConvMixer", 16, lambda k: {**CLASSES, "dim": 8 * k, "depth": 2, "kernel_size": 3})
for title, block, more in (
    ("ResNet, basic blocks", "BasicBlock", {}),
    ("ResNet, bottlenecks", "Bottleneck", {}),
    ("SE-ResNet", "Bottleneck", {"block_args": {"attn_layer": "se"}}),
):
    timm(
        title,
        "resnet:ResNet",
        32,
        lambda k, block=block, more=more: {
            **CLASSES,
            "block": find(f"timm.models.resnet:{block}"),
            "layers": (1, 1, 1, 1),
            "stem_width": 4 * k,
            "stem_type": "deep",
            "channels": stages(8, 8, 16, 16)(k),
            **more,
        },
    )
timm(
    "ECA-ResNet",
    "resnet:ResNet",
    32,
    lambda k: {
        **CLASSES,
        "block": find("timm.models.resnet:BasicBlock"),
        "layers": (1, 1, 1, 1),
        "stem_width": 4 * k,
        "stem_type": "deep",
        "channels": stages(8, 8, 16, 16)(k),
        "block_args": {"attn_layer": "eca"},
    },
    refused=r"se\.conv.* no copies",
    why="a convolution along the channels, which mixes neighbours",
)
timm(
    "ResNeXt",
    "resnet:ResNet",
    32,
    lambda k: {
        **CLASSES,
        "block": find("timm.models.resnet:Bottleneck"),
        "layers": (1, 1, 1, 1),
        "channels": stages(64, 64, 64, 64)(1),
        "cardinality": 2 * k,
        "base_width": 4,
    },
)
timm("VGG", "vgg:VGG", 32, lambda k: {**CLASSES, "cfg": [8 * k, "M", 8 * k, "M"], "mlp_ratio": k / 64})
timm("DenseNet", "densenet:DenseNet", 32, lambda k: {**CLASSES, "growth_rate": 8 * k, "block_config": (2, 2)})

# as in timm's own builders: kind of block, repeats, kernel, stride, expansion, outputs, squeeze and excitation
INVERTED = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r1_k3_s2_e2_c32_se0.25"], ["er_r1_k3_s1_e2_c32"]]


def inverted(k: int) -> dict[str, Any]:
    """Inverted residuals of k times these widths."""
    return {
        **CLASSES,
        "block_args": find("timm.models._efficientnet_builder:decode_arch_def")(INVERTED),
        "num_features": 32 * k,
        "stem_size": 16,
        "round_chs_fn": lambda channels: channels * k,
    }


timm("EfficientNet", "efficientnet:EfficientNet", 32, inverted)
timm("MobileNetV3", "mobilenetv3:MobileNetV3", 32, inverted)
timm(
    "RegNet",
    "regnet:RegNet",
    32,
    lambda k: {
        **CLASSES,
        "cfg": find("timm.models.regnet:RegNetCfg")(
            depth=4, w0=64 * k, wa=51.2 * k, wm=1.5, group_size=8, se_ratio=0.25, stem_width=8 * k
        ),
    },
)
timm(
    "NF-ResNet",
    "nfnet:NormFreeNet",
    32,
    lambda k: {
        **CLASSES,
        "cfg": find("timm.models.nfnet:NfCfg")(
            depths=(1, 1, 1, 1), channels=stages(16, 16, 32, 32)(k), stem_chs=8 * k, skipinit=True
        ),
    },
    refused="conv.* no copies",
    why="standardises weights over their inputs, and divides by the root of their number",
)
timm("StarNet", "starnet:StarNet", 32, lambda k: {**CLASSES, "base_dim": 8 * k, "depths": [1, 1], "mlp_ratio": 2})
timm("RepViT", "repvit:RepVit", 32, lambda k: {**CLASSES, "img_size": 32, "embed_dim": two(k), "depth": (1, 1)})
timm(
    "EfficientFormer",
    "efficientformer:EfficientFormer",
    56,
    lambda k: {**CLASSES, "depths": (1, 1), "embed_dims": two(k), "downsamples": (False, True), "num_vit": 1},
)
timm(
    "DLA",
    "dla:DLA",
    64,
    lambda k: {
        **CLASSES,
        "levels": (1, 1, 1, 1, 1, 1),
        "channels": stages(8, 8, 8, 8, 16, 16)(k),
        "block": find("timm.models.dla:DlaBasic"),
    },
)
timm(
    "Res2Net",
    "resnet:ResNet",
    32,
    lambda k: {
        **CLASSES,
        "block": find("timm.models.res2net:Bottle2neck"),
        "layers": (1, 1, 1, 1),
        "base_width": 16 * k,
        "channels": (64, 64, 64, 64),
        "block_args": {"scale": 4},
    },
)
timm(
    "CoAtNet",
    "maxxvit:MaxxVit",
    32,
    lambda k: {
        **CLASSES,
        "img_size": 32,
        "cfg": find("timm.models.maxxvit:MaxxVitCfg")(
            embed_dim=stages(16, 32)(k),
            depths=(1, 1),
            block_type=("C", "T"),
            stem_width=8 * k,
            transformer_cfg=find("timm.models.maxxvit:MaxxVitTransformerCfg")(dim_head=8, expand_ratio=2.0),
            conv_cfg=find("timm.models.maxxvit:MaxxVitConvCfg")(expand_ratio=2.0),
        ),
    },
)
