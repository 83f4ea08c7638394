"""SmolLM3: LLaMA without rotary embeddings in some layers, which is no matter of width."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import LLAMA, TIED
from mupscale.hf.describe.registry import register

SMOLLM3 = register(
    replace(
        LLAMA,
        model_type="smollm3",
        divisible=False,
        tied=replace(TIED, default=True),
        defaults={
            **LLAMA.defaults,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    )
)
