"""ModernBERT: norms before each layer but the first, whose input the norm at the embedding has seen to."""

import math

from mupscale.hf.describe.architecture import Architecture, Config, Tied
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector


def _cut_off(config: Config) -> float:
    """The std of a normal distribution whose tails are cut off at so many of its own."""
    cut = MODERNBERT.value(config, "initializer_cutoff_factor") or 3.0
    within = math.erf(cut / math.sqrt(2))
    return math.sqrt(1 - 2 * cut * math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi) / within)


def _residual(config: Config) -> float:
    """What is added to the residual stream starts smaller the more layers there are."""
    return float(_cut_off(config) * (2 * MODERNBERT.number(config, "num_hidden_layers")) ** -0.5)


def _classifier(config: Config) -> float:
    std = MODERNBERT.initial_std(config) or 0.02
    return float(_cut_off(config) * MODERNBERT.number(config, "hidden_size") ** -0.5 / std)


MODERNBERT = register(
    Architecture(
        "modernbert",
        tensors={
            "*embeddings.tok_embeddings.weight": table("hidden"),
            "*.attn.Wqkv.weight": linear("qkv", "hidden"),
            "*.attn.Wqkv.bias": vector("qkv"),
            "*.attn.Wo.weight": linear("hidden", "queries"),
            "*.attn.Wo.bias": vector("hidden"),
            "*.mlp.Wi.weight": linear("gated", "hidden"),
            "*.mlp.Wi.bias": vector("gated"),
            "*.mlp.Wo.weight": linear("hidden", "ffn"),
            "*.mlp.Wo.bias": vector("hidden"),
            "*norm.weight": vector("hidden").in_norm("layer"),
            "*norm.bias": vector("hidden").in_norm("bias"),
            "head.dense.weight": linear("hidden", "hidden"),
            "head.dense.bias": vector("hidden"),
            "decoder.weight": readout("hidden"),
            "decoder.bias": same(),
            "classifier.weight": readout("hidden"),
            "classifier.bias": same(),
        },
        tied=Tied(
            embedding="*embeddings.tok_embeddings.weight",
            readouts=("decoder.weight",),
            norm=("head.norm.*",),
            models=("ForMaskedLM",),
            default=True,
            others=("classifier.weight",),
        ),
        defaults={
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "initializer_range": 0.02,
            "initializer_cutoff_factor": 2.0,
        },
        wires=lambda wires, config: {
            "qkv": wires["queries"] | wires["keys"] | wires["keys"],
            "gated": wires["ffn"] | wires["ffn"],
        },
        init={
            "*embeddings.tok_embeddings.weight": _cut_off,
            "*.attn.Wqkv.weight": _cut_off,
            "*.mlp.Wi.weight": _cut_off,
            **dict.fromkeys(("*.Wo.weight", "head.dense.weight", "decoder.weight"), _residual),
            "classifier.weight": _classifier,
        },
        not_lossless=lambda config, times: "a norm comes at the embedding" if times.hidden != 1 else "",
    )
)
