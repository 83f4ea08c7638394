"""Phi: attention and feed-forward layers side by side, LayerNorm, biases, rotary embeddings of a part of each head."""

from mupscale.hf.describe.architecture import Architecture, Config, Tied
from mupscale.hf.describe.architectures.llama import ATTENTION, HEADS, OTHERS
from mupscale.hf.describe.multipliers import Times, how_to_grow_alike
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, same, table, vector


def _refuse(config: Config, times: Times) -> str:
    """transformers takes the size of these norms from hidden_size and num_attention_heads, not from head_dim."""
    if config.get("qk_layernorm") and times.hidden != times.heads:
        hidden, heads = (PHI.number(config, name) for name in ("hidden_size", "num_attention_heads"))
        advice = how_to_grow_alike(hidden, heads, times)
        return f"a Phi model with qk_layernorm keeps its head_dim only if hidden and heads grow alike: {advice}"
    return ""


PHI = register(
    Architecture(
        "phi",
        tensors={
            **ATTENTION,
            "*.self_attn.dense.weight": linear("hidden", "queries"),
            "*.self_attn.dense.bias": vector("hidden"),
            "*.self_attn.[qk]_layernorm.*": same(),  # of each head, the same in all
            "*.mlp.fc1.weight": linear("ffn", "hidden"),
            "*.mlp.fc1.bias": vector("ffn"),
            "*.mlp.fc2.weight": linear("hidden", "ffn"),
            "*.mlp.fc2.bias": vector("hidden"),
            "*embed_tokens.weight": table("hidden"),
            "*layernorm.weight": vector("hidden").in_norm("layer"),
            "*layernorm.bias": vector("hidden").in_norm("bias"),
            "lm_head.bias": same(),
            **HEADS,
        },
        tied=Tied(
            embedding="*embed_tokens.weight",
            readouts=("lm_head.weight",),
            norm=("*final_layernorm.weight", "*final_layernorm.bias"),
            others=OTHERS,
        ),
        kv="num_key_value_heads",
        head_dim="head_dim",
        defaults={
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "initializer_range": 0.02,
        },
        refuse=_refuse,
    )
)
