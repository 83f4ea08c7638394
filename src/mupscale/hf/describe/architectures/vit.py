"""ViT: patches of an image as tokens. Files and the model have different names for its layers."""

from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.bert import LAYER
from mupscale.hf.describe.architectures.llama import HEADS
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, patches, pixels, same, table, vector


def _pooled_size(config: Config) -> int:
    return VIT.number(config, "pooler_output_size")


def _pools_hidden(config: Config) -> bool:
    return _pooled_size(config) == VIT.number(config, "hidden_size")


def _pooled(wires: Wires, config: Config) -> Wires:
    """The pooler's output grows with the hidden layers unless config.json gives it another size."""
    return {"pooled": wires["hidden"] if _pools_hidden(config) else Wire(_pooled_size(config), width=False)}


def _also(config: Config, times: Times) -> Config:
    return {"pooler_output_size": grown(_pooled_size(config), times.hidden if _pools_hidden(config) else 1)}


VIT = register(
    Architecture(
        "vit",
        tensors={
            "*.attention.attention.query.weight": linear("queries", "hidden"),
            "*.attention.attention.query.bias": vector("queries"),
            "*.attention.attention.key.weight": linear("keys", "hidden"),
            "*.attention.attention.key.bias": vector("keys"),
            "*.attention.attention.value.weight": linear("keys", "hidden"),
            "*.attention.attention.value.bias": vector("keys"),
            **LAYER,
            "*.attention.q_proj.weight": linear("queries", "hidden"),
            "*.attention.q_proj.bias": vector("queries"),
            "*.attention.[kv]_proj.weight": linear("keys", "hidden"),
            "*.attention.[kv]_proj.bias": vector("keys"),
            "*.attention.o_proj.weight": linear("hidden", "queries"),
            "*.attention.o_proj.bias": vector("hidden"),
            "*.mlp.fc1.weight": linear("ffn", "hidden"),
            "*.mlp.fc1.bias": vector("ffn"),
            "*.mlp.fc2.weight": linear("hidden", "ffn"),
            "*.mlp.fc2.bias": vector("hidden"),
            "*embeddings.cls_token": vector("hidden"),
            "*embeddings.mask_token": vector("hidden"),
            "*embeddings.position_embeddings": table("hidden"),
            "*patch_embeddings.projection.weight": patches("hidden"),
            "*patch_embeddings.projection.bias": vector("hidden"),
            "*layernorm*.weight": vector("hidden").in_norm("layer"),
            "*layernorm*.bias": vector("hidden").in_norm("bias"),
            "*pooler.dense.weight": linear("pooled", "hidden"),
            "*pooler.dense.bias": vector("pooled"),
            "decoder.0.weight": pixels("hidden"),
            "decoder.0.bias": same(),
            **HEADS,
        },
        head_dim="head_dim",
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "initializer_range": 0.02,
            "pooler_output_size": lambda config: config.get("hidden_size", 768),
        },
        wires=_pooled,
        also=_also,
        init={"*mask_token": lambda config: 0.0},
    )
)
