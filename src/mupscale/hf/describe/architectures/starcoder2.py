"""StarCoder2: grouped queries and rotary embeddings, with LayerNorm, biases and plain feed-forward layers."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import ATTENTION, HEADS, LLAMA, TIED
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, table, vector

STARCODER2 = register(
    replace(
        LLAMA,
        model_type="starcoder2",
        divisible=False,
        tensors={
            **ATTENTION,
            "*.mlp.c_fc.weight": linear("ffn", "hidden"),
            "*.mlp.c_fc.bias": vector("ffn"),
            "*.mlp.c_proj.weight": linear("hidden", "ffn"),
            "*.mlp.c_proj.bias": vector("hidden"),
            "*embed_tokens.weight": table("hidden"),
            "*norm.weight": vector("hidden").in_norm("layer"),
            "*norm.bias": vector("hidden").in_norm("bias"),
            **HEADS,
        },
        tied=replace(TIED, norm=("model.norm.*", "norm.*"), default=True),
        defaults={
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "initializer_range": 0.018042,
        },
    )
)
