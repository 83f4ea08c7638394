"""Qwen2: LLaMA with biases of queries, keys and values."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import LLAMA
from mupscale.hf.describe.registry import register

QWEN2 = register(
    replace(
        LLAMA,
        model_type="qwen2",
        divisible=False,
        defaults={**LLAMA.defaults, "intermediate_size": 22016, "num_key_value_heads": 32},
    )
)
