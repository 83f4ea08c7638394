"""OLMo2: LLaMA with norms after attention and feed-forward layers, and norms across all heads' queries and keys."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import LLAMA
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import vector

OLMO2 = register(
    replace(
        LLAMA,
        model_type="olmo2",
        divisible=False,
        tensors={
            "*.self_attn.q_norm.weight": vector("queries").in_norm("rms"),
            "*.self_attn.k_norm.weight": vector("keys").in_norm("rms"),
            **LLAMA.tensors,
        },
    )
)
