"""timm: image models of many families, built small through their own constructors."""

from __future__ import annotations

from typing import Any

from third_party import add, by, images, made, named

TRANSFORMER: dict[str, Any] = {"img_size": 16, "patch_size": 4, "depth": 2}
HEADS: dict[str, Any] = {"embed_dim": by(16), "num_heads": by(2), "mlp_ratio": 2.0}
VIT = TRANSFORMER | HEADS
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": by(8), "depths": (2, 1), "drop_path_rate": 0.0}
TWO: dict[str, Any] = {"depths": (1, 1), "dims": by(8, 16)}
FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": by(8, 16, 16, 32)}
TWO_HEADED: dict[str, Any] = {"depths": (1, 1), "embed_dims": by(8, 16), "num_heads": by(1, 2)}
FOUR_HEADED: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": by(8, 16, 16, 32), "num_heads": by(1, 2, 2, 4)}


def timm(name: str, path: str, size: int, **given: Any) -> None:
    add("timm", name, f"timm.models.{path}", images(size), num_classes=3, **given)


timm("ViT", "vision_transformer:VisionTransformer", 16, **VIT)
MORE = {"qk_norm": True, "init_values": 0.1, "reg_tokens": 2}
timm(
    "ViT, class token, query-key norm, layer scale, registers",
    "vision_transformer:VisionTransformer",
    16,
    **VIT,
    **MORE,
)
POOLED = {"global_pool": "map", "class_token": False}
timm("ViT, pooled by attention", "vision_transformer:VisionTransformer", 16, **VIT, **POOLED)
timm("DeiT, distilled", "deit:VisionTransformerDistilled", 16, **VIT)
timm("BEiT", "beit:Beit", 16, **VIT, use_rel_pos_bias=True, init_values=0.1)
timm("CaiT", "cait:Cait", 16, **VIT, init_values=0.1, depth_token_only=1)
timm("EVA-02", "eva:Eva", 16, **VIT, use_rot_pos_emb=True, swiglu_mlp=True)
timm("XCiT", "xcit:Xcit", 16, **{**VIT, "patch_size": 8}, cls_attn_layers=1)
timm("ConViT", "convit:ConVit", 16, **VIT, local_up_to_layer=1)
INNER: dict[str, Any] = {"inner_dim": by(8), "num_heads_inner": by(2), "num_heads_outer": by(2)}
timm("TNT", "tnt:TNT", 16, img_size=16, patch_size=8, embed_dim=by(16), depth=1, mlp_ratio=2.0, **INNER)
PIT: dict[str, Any] = {"base_dims": (8, 8), "depth": (1, 1), "heads": by(1, 2), "mlp_ratio": 2}
timm("PiT", "pit:PoolingVisionTransformer", 16, img_size=16, patch_size=4, stride=4, **PIT)
timm("Swin", "swin_transformer:SwinTransformer", 16, **SWIN, num_heads=by(1, 2))
timm("Swin V2", "swin_transformer_v2:SwinTransformerV2", 16, **SWIN, num_heads=by(1, 2))
REDUCED = FOUR_HEADED | {"sr_ratios": (4, 2, 1, 1)}
timm("PVT v2", "pvt_v2:PyramidVisionTransformerV2", 32, **REDUCED, mlp_ratios=(2, 2, 2, 2))
timm("Twins", "twins:Twins", 32, img_size=32, **REDUCED)
CROSS: dict[str, Any] = {"embed_dim": by(8, 16), "num_heads": by(1, 2), "depth": ((1, 1, 0),), "mlp_ratio": (2, 2, 1)}
timm("CrossViT", "crossvit:CrossVit", 16, img_size=16, patch_size=(4, 8), **CROSS)
VISFORMER = {**HEADS, "init_channels": by(8), "depth": (1, 1, 1), "group": 2}
timm("Visformer", "visformer:Visformer", 32, img_size=32, patch_size=8, **VISFORMER)
LEVIT: dict[str, Any] = {"embed_dim": by(16, 32), "key_dim": 8, "depth": (1, 1), "num_heads": by(1, 2)}
timm("LeViT", "levit:Levit", 32, img_size=32, **LEVIT, stem_type="s8")
timm(
    "VOLO",
    "volo:VOLO",
    32,
    layers=[1, 1],
    img_size=32,
    stem_hidden_dim=by(8),
    embed_dims=lambda k: [16 * k, 32 * k],
    num_heads=lambda k: [2 * k, 4 * k],
    downsamples=(True, False),
    outlook_attention=(True, False),
    use_aux_head=False,
)
timm("DaViT", "davit:DaVit", 32, **TWO_HEADED, window_size=4, mlp_ratio=2)
HIERA = {"q_pool": 1, "mask_unit_size": (4, 4), "mask_unit_attn": (True, False), "mlp_ratio": 2.0}
timm("Hiera", "hiera:Hiera", 32, img_size=(32, 32), embed_dim=by(8), num_heads=by(1), stages=(1, 1), **HIERA)
timm("NesT", "nest:Nest", 16, img_size=16, patch_size=2, num_levels=2, **TWO_HEADED, drop_path_rate=0.0)
timm("TinyViT", "tiny_vit:TinyVit", 32, **FOUR_HEADED, window_sizes=(4, 4, 2, 1), drop_path_rate=0.0)

# of convolutions, of layers across patches, and of both with attention
timm("ConvNeXt", "convnext:ConvNeXt", 32, **FOUR)
timm("ConvNeXt V2", "convnext:ConvNeXt", 32, **FOUR, use_grn=True, ls_init_value=None)
timm("InceptionNeXt", "inception_next:MetaNeXt", 32, **FOUR)
EDGE = FOUR | {"depths": (1, 2, 1, 1), "heads": by(1, 2, 2, 4), "global_block_counts": (0, 1, 0, 0)}
timm("EdgeNeXt", "edgenext:EdgeNeXt", 32, **EDGE)
FOCAL: dict[str, Any] = {"embed_dim": by(8), "depths": (1, 1), "focal_levels": (2, 2), "focal_windows": (3, 3)}
timm(
    "FocalNet",
    "focalnet:FocalNet",
    32,
    **FOCAL,
    drop_path_rate=0.0,
    refused="not grow by a whole multiple",
    why="one layer gives out units and a fixed number of gates",
)
RESIDUAL = {"res_scale_init_values": (None, 1.0)}
timm("PoolFormer", "metaformer:MetaFormer", 32, **TWO, **RESIDUAL, use_mlp_head=False, layer_scale_init_values=0.1)
timm(
    "CAFormer",
    "metaformer:MetaFormer",
    32,
    **TWO | {"dims": by(8, 32)},
    **RESIDUAL,
    token_mixers=lambda k: [named(f"timm.models.metaformer:{mixer}")(k) for mixer in ("SepConv", "Attention")],
    norm_layers=lambda k: [named(f"timm.models.metaformer:LayerNorm{d}NoBias")(k) for d in ("2d", "")],
)
timm("MambaOut", "mambaout:MambaOut", 32, **TWO, expansion_ratio=2)
MIXER: dict[str, Any] = {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": by(16)}
timm("MLP-Mixer", "mlp_mixer:MlpMixer", 16, **MIXER)
for title, ratio, parts in (
    ("ResMLP", 2.0, {"block_layer": "models.mlp_mixer:ResBlock", "norm_layer": "models.mlp_mixer:Affine"}),
    ("gMLP", 4, {"block_layer": "models.mlp_mixer:SpatialGatingBlock", "mlp_layer": "layers:GatedMlp"}),
):
    own = {name: named(f"timm.{path}") for name, path in parts.items()}
    timm(title, "mlp_mixer:MlpMixer", 16, **MIXER, mlp_ratio=ratio, **own)
SEQUENCER = {"embed_dims": by(8, 16), "hidden_sizes": by(4, 4), "mlp_ratios": (2.0, 2.0)}
timm("Sequencer2D", "sequencer:Sequencer2d", 16, img_size=16, layers=(1, 1), patch_sizes=(4, 2), **SEQUENCER)
timm("ConvMixer", "convmixer:ConvMixer", 16, dim=by(8), depth=2, kernel_size=3)
BASIC, BOTTLENECK = (named(f"timm.models.resnet:{block}") for block in ("BasicBlock", "Bottleneck"))
DEEP: dict[str, Any] = {"stem_width": by(4), "stem_type": "deep", "channels": by(8, 8, 16, 16)}


def resnet(name: str, block: Any, **given: Any) -> None:
    timm(name, "resnet:ResNet", 32, block=block, layers=(1, 1, 1, 1), **given)


resnet("ResNet, basic blocks", BASIC, **DEEP)
resnet("ResNet, bottlenecks", BOTTLENECK, **DEEP)
resnet("SE-ResNet", BOTTLENECK, **DEEP, block_args={"attn_layer": "se"})
resnet(
    "ECA-ResNet",
    BASIC,
    **DEEP,
    block_args={"attn_layer": "eca"},
    refused=r"se\.conv.* no copies",
    why="a convolution along the channels, which mixes neighbours",
)
resnet("ResNeXt", BOTTLENECK, channels=(64, 64, 64, 64), cardinality=by(2), base_width=4)
timm("VGG", "vgg:VGG", 32, cfg=lambda k: [8 * k, "M", 8 * k, "M"], mlp_ratio=lambda k: k / 64)
timm("DenseNet", "densenet:DenseNet", 32, growth_rate=by(8), block_config=(2, 2))

# as in timm's own builders: kind of block, repeats, kernel, stride, expansion, outputs, squeeze and excitation
BLOCKS = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r1_k3_s2_e2_c32_se0.25"], ["er_r1_k3_s1_e2_c32"]]
INVERTED: dict[str, Any] = {
    "block_args": lambda k: named("timm.models._efficientnet_builder:decode_arch_def")(k)(BLOCKS),
    "num_features": by(32),
    "stem_size": 16,
    "round_chs_fn": lambda k: lambda channels: channels * k,
}
timm("EfficientNet", "efficientnet:EfficientNet", 32, **INVERTED)
timm("MobileNetV3", "mobilenetv3:MobileNetV3", 32, **INVERTED)
WIDTHS: dict[str, Any] = {"depth": 4, "w0": by(64), "wa": lambda k: 51.2 * k, "wm": 1.5, "stem_width": by(8)}
timm("RegNet", "regnet:RegNet", 32, cfg=made("timm.models.regnet:RegNetCfg", **WIDTHS, group_size=8, se_ratio=0.25))
NORM_FREE: dict[str, Any] = {
    "depths": (1, 1, 1, 1),
    "channels": by(16, 16, 32, 32),
    "stem_chs": by(8),
    "skipinit": True,
}
timm(
    "NF-ResNet",
    "nfnet:NormFreeNet",
    32,
    cfg=made("timm.models.nfnet:NfCfg", **NORM_FREE),
    refused="conv.* no copies",
    why="standardises weights over their inputs, and divides by the root of their number",
)
timm("StarNet", "starnet:StarNet", 32, base_dim=by(8), depths=[1, 1], mlp_ratio=2)
timm("RepViT", "repvit:RepVit", 32, img_size=32, embed_dim=by(8, 16), depth=(1, 1))
FORMER: dict[str, Any] = {"depths": (1, 1), "embed_dims": by(8, 16), "downsamples": (False, True), "num_vit": 1}
timm("EfficientFormer", "efficientformer:EfficientFormer", 56, **FORMER)
DLA = {"channels": by(8, 8, 8, 8, 16, 16), "block": named("timm.models.dla:DlaBasic")}
timm("DLA", "dla:DLA", 64, levels=(1, 1, 1, 1, 1, 1), **DLA)
RES2: dict[str, Any] = {"base_width": by(16), "channels": (64, 64, 64, 64), "block_args": {"scale": 4}}
resnet("Res2Net", named("timm.models.res2net:Bottle2neck"), **RES2)
COAT: dict[str, Any] = {"embed_dim": by(16, 32), "depths": (1, 1), "block_type": ("C", "T"), "stem_width": by(8)}
COAT["transformer_cfg"] = made("timm.models.maxxvit:MaxxVitTransformerCfg", dim_head=8, expand_ratio=2.0)
COAT["conv_cfg"] = made("timm.models.maxxvit:MaxxVitConvCfg", expand_ratio=2.0)
timm("CoAtNet", "maxxvit:MaxxVit", 32, img_size=32, cfg=made("timm.models.maxxvit:MaxxVitCfg", **COAT))
