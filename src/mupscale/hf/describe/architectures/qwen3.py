"""Qwen3: Qwen2 with a norm of each head's queries and keys, which all heads share."""

from dataclasses import replace

from mupscale.hf.describe.architectures.qwen2 import QWEN2
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import same

QWEN3 = register(
    replace(
        QWEN2,
        model_type="qwen3",
        tensors={"*.self_attn.[qk]_norm.weight": same(), **QWEN2.tensors},
        defaults={**QWEN2.defaults, "head_dim": 128},
    )
)
