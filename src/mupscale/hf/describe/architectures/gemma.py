"""Gemma 1 and 2: norms with gain 1 + w, embeddings times √hidden, more norms in the second.

Gemma 2's query_pre_attn_scalar is a constant of the attention's scale, and stays as head_dim does.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Architecture
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION, FEED_FORWARD, TIED
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import vector

GEMMA = register(
    Architecture(
        "gemma",
        tensors={**ATTENTION, **FEED_FORWARD, **AROUND, "*norm.weight": vector("hidden").with_offset(1).in_norm("rms")},
        tied=replace(TIED, default=True),
        kv="num_key_value_heads",
        head_dim="head_dim",
        scaled_embedding=True,
        defaults={
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "initializer_range": 0.02,
        },
    )
)

GEMMA2 = register(
    replace(
        GEMMA,
        model_type="gemma2",
        divisible=True,
        defaults={
            **GEMMA.defaults,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    )
)
