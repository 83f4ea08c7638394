"""Mistral: LLaMA with a sliding window, which is no matter of width."""

from dataclasses import replace

from mupscale.hf.architecture import register
from mupscale.hf.architectures.llama import LLAMA

MISTRAL = register(
    replace(
        LLAMA,
        model_type="mistral",
        divisible=False,
        defaults={**LLAMA.defaults, "intermediate_size": 14336, "num_key_value_heads": 8},
    )
)
