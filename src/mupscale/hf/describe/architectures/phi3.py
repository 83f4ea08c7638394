"""Phi-3: LLaMA with queries, keys and values in one projection, and gate and up projection in another."""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.architectures.llama import LLAMA
from mupscale.hf.describe.multipliers import Times, how_to_grow_alike
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear


def _refuse(config: Config, times: Times) -> str:
    """transformers counts the factors of long contexts by hidden_size and num_attention_heads, not by head_dim."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if times.hidden != times.heads and rope.get("short_factor"):
        hidden, heads = (PHI3.number(config, name) for name in ("hidden_size", "num_attention_heads"))
        advice = how_to_grow_alike(hidden, heads, times)
        return f"a Phi-3 model with factors for long contexts keeps its head_dim only if both grow alike: {advice}"
    return ""


PHI3 = register(
    replace(
        LLAMA,
        model_type="phi3",
        divisible=False,
        tensors={
            "*.self_attn.qkv_proj.weight": linear("qkv", "hidden"),
            "*.mlp.gate_up_proj.weight": linear("gate_up", "hidden"),
            **LLAMA.tensors,
        },
        defaults={**LLAMA.defaults, "hidden_size": 3072, "intermediate_size": 8192},
        wires=lambda wires, config: {
            "qkv": wires["queries"] | wires["keys"] | wires["keys"],
            "gate_up": wires["ffn"] | wires["ffn"],
        },
        refuse=_refuse,
    )
)
