"""Cohere (Command R): attention and feed-forward layers side by side, LayerNorm without a bias.

With `use_qk_norm` each head's queries and keys have a norm with a gain of their own.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Wires
from mupscale.hf.describe.architectures.llama import ATTENTION, FEED_FORWARD, HEADS, LLAMA, TIED
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import column, table, vector


def _heads(wires: Wires, config: Config) -> Wires:
    size = COHERE.head_size(config)
    return {"query_heads": wires["queries"] // size, "key_heads": wires["keys"] // size}


COHERE = register(
    replace(
        LLAMA,
        model_type="cohere",
        divisible=False,
        tensors={
            **ATTENTION,
            **FEED_FORWARD,
            "*.self_attn.q_norm.weight": column("query_heads").in_norm("head"),
            "*.self_attn.k_norm.weight": column("key_heads").in_norm("head"),
            "*embed_tokens.weight": table("hidden"),
            "*norm.weight": vector("hidden").in_norm("layer"),
            **HEADS,
        },
        tied=replace(TIED, default=True),
        defaults={
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_attention_heads": 64,
            "initializer_range": 0.02,
        },
        wires=_heads,
    )
)
