"""OLMoE: LLaMA with a choice of experts for each token, and norms across all heads' queries and keys.

transformers takes the size of these norms from hidden_size, so that head_dim follows from the sizes.
"""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION
from mupscale.hf.describe.architectures.olmo2 import OLMO2
from mupscale.hf.describe.architectures.qwen3_moe import EXPERTS
from mupscale.hf.describe.registry import register

OLMOE = register(
    replace(
        OLMO2,
        model_type="olmoe",
        head_dim=None,
        tensors={
            "*.self_attn.q_norm.weight": OLMO2.tensors["*.self_attn.q_norm.weight"],
            "*.self_attn.k_norm.weight": OLMO2.tensors["*.self_attn.k_norm.weight"],
            **ATTENTION,
            **EXPERTS,
            **AROUND,
        },
        defaults={
            **OLMO2.defaults,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_attention_heads": 16,
        },
        wires=lambda wires, config: {"gate_up": wires["ffn"] | wires["ffn"]},
    )
)
