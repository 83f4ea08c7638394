"""wav2vec 2.0: convolutions of sound, which stay as they are, then a transformer with positions by a convolution.

That convolution has groups, whose number stays, and a weight of a given norm, which copies keep.
"""

from collections.abc import Callable
from typing import Any

from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.bert import AFTER_THE_SUM
from mupscale.hf.describe.multipliers import Ratios, Times
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Layout, Wire, column, linear, readout, same, vector
from mupscale.system import setting

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_conv_pos_embeddings": 128,
    "num_conv_pos_embedding_groups": 16,
    "conv_dim": (512,) * 7,
    "initializer_range": 0.02,
}


def _relative(std: Callable[[Config], float]) -> Callable[[Config], float]:
    """A std of its own, by the config's."""
    return lambda config: std({**_DEFAULTS, **config}) / (WAV2VEC2.initial_std(config) or 0.02)


def _of_positions(config: Config) -> float:
    """torch's own of a convolution with groups."""
    inputs = config["num_conv_pos_embeddings"] * config["hidden_size"] // config["num_conv_pos_embedding_groups"]
    return float((3 * inputs) ** -0.5)


def _classified(wires: Wires, config: Config) -> Wire:
    """What the classifier reads: hidden units of each frame, or, for a whole recording, a projection that stays."""
    kind = (config.get("architectures") or [""])[0]
    if kind.endswith("ForAudioFrameClassification"):
        return wires["hidden"]
    size = "xvector_output_dim" if kind.endswith("ForXVector") else "classifier_proj_size"
    return Wire(config.get(size, 512 if kind.endswith("ForXVector") else 256), width=False)


def _wires(wires: Wires, config: Config) -> Wires:
    hidden, groups = wires["hidden"], WAV2VEC2.number(config, "num_conv_pos_embedding_groups")
    return {"in_group": Wire(hidden.size // groups, hidden.times), "classified": _classified(wires, config)}


def _refuse(config: Config, times: Times) -> str:
    if config.get("add_adapter") and times.hidden != 1:
        return (
            "this wav2vec2 model has an adapter after its encoder (add_adapter in config.json), whose size is not "
            f"described: let only the feed-forward layers grow, as in {setting('times', 'ffn=2')}"
        )
    if isinstance(times, Ratios) and times.hidden != 1:
        return (
            "the positions of wav2vec2 come from a convolution whose weight has a given norm, so new hidden units "
            f"would take from the old ones. Grow hidden by copies, as in {setting('times', 2)}, or keep it"
        )
    return ""


WAV2VEC2 = register(
    Architecture(
        "wav2vec2",
        tensors={
            "*encoder.layers.*.attention.[qkv]_proj.weight": linear("queries", "hidden"),
            "*encoder.layers.*.attention.[qkv]_proj.bias": vector("queries"),
            "*encoder.layers.*.attention.out_proj.weight": linear("hidden", "queries"),
            "*encoder.layers.*.attention.out_proj.bias": vector("hidden"),
            "*.feed_forward.intermediate_dense.weight": linear("ffn", "hidden"),
            "*.feed_forward.intermediate_dense.bias": vector("ffn"),
            "*.feed_forward.output_dense.weight": linear("hidden", "ffn"),
            "*.feed_forward.output_dense.bias": vector("hidden"),
            "*.adapter_layer.norm.weight": vector("hidden").in_norm("layer"),
            "*.adapter_layer.norm.bias": vector("hidden").in_norm("bias"),
            "*.adapter_layer.linear_1.weight": readout("hidden"),
            "*.adapter_layer.linear_1.bias": same(),
            "*.adapter_layer.linear_2.weight": column("hidden"),
            "*.adapter_layer.linear_2.bias": vector("hidden"),
            "*encoder*layer_norm.weight": vector("hidden").in_norm("layer"),
            "*encoder*layer_norm.bias": vector("hidden").in_norm("bias"),
            "*pos_conv_embed.conv.bias": vector("hidden"),
            "*pos_conv_embed.conv.weight_g": same(),
            "*pos_conv_embed.conv.weight_v": Layout({-3: "hidden"}, {-2: "in_group"}),
            "*pos_conv_embed.conv.parametrizations.weight.original0": same(),
            "*pos_conv_embed.conv.parametrizations.weight.original1": Layout({-3: "hidden"}, {-2: "in_group"}),
            "*masked_spec_embed": vector("hidden"),
            "*adapter.*": same(),
            "*feature_projection.projection.weight": column("hidden"),
            "*feature_projection.projection.bias": vector("hidden"),
            "*feature_projection.layer_norm.*": same(),
            "*feature_extractor.*": same(),
            "quantizer.*": same(),
            "project_q.*": same(),
            "project_hid.weight": readout("hidden"),
            "project_hid.bias": same(),
            "projector.weight": readout("hidden"),
            "projector.bias": same(),
            "tdnn.*": same(),
            "objective.weight": same(),
            "layer_weights": same(),
            "lm_head.weight": readout("hidden"),
            "lm_head.bias": same(),
            "classifier.weight": readout("classified"),
            "classifier.bias": same(),
        },
        defaults=_DEFAULTS,
        wires=_wires,
        init={
            "*masked_spec_embed": _relative(lambda config: 12**-0.5),
            "*feature_projection.projection.*": _relative(lambda config: (3 * config["conv_dim"][-1]) ** -0.5),
            "*pos_conv_embed.conv.weight_v": _relative(_of_positions),
            "*pos_conv_embed.conv.parametrizations.weight.original1": _relative(_of_positions),
        },
        refuse=_refuse,
        not_lossless=lambda config, times: AFTER_THE_SUM if times.hidden != 1 else "",
    )
)
