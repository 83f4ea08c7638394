"""Mistral: LLaMA with a sliding window, which is no matter of width."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import LLAMA
from mupscale.hf.describe.registry import register

MISTRAL = register(
    replace(
        LLAMA,
        model_type="mistral",
        divisible=False,
        defaults={**LLAMA.defaults, "intermediate_size": 14336, "num_key_value_heads": 8},
    )
)
