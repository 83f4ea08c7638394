"""LLaMA, and what is built like it: RMSNorm, rotary embeddings, gated feed-forward layers, grouped queries."""

from mupscale.hf.describe.architecture import Architecture, Tied
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector

ATTENTION = {
    "*.self_attn.q_proj.weight": linear("queries", "hidden"),
    "*.self_attn.q_proj.bias": vector("queries"),
    "*.self_attn.[kv]_proj.weight": linear("keys", "hidden"),
    "*.self_attn.[kv]_proj.bias": vector("keys"),
    "*.self_attn.o_proj.weight": linear("hidden", "queries"),
    "*.self_attn.o_proj.bias": vector("hidden"),
    "*rotary_emb.inv_freq": same(),  # a buffer that old files hold
}

FEED_FORWARD = {
    "*.mlp.gate_proj.weight": linear("ffn", "hidden"),
    "*.mlp.up_proj.weight": linear("ffn", "hidden"),
    "*.mlp.gate_proj.bias": vector("ffn"),
    "*.mlp.up_proj.bias": vector("ffn"),
    "*.mlp.down_proj.weight": linear("hidden", "ffn"),
    "*.mlp.down_proj.bias": vector("hidden"),
}

HEADS = {
    "lm_head.weight": readout("hidden"),
    "score.weight": readout("hidden"),  # …ForSequenceClassification, …ForTokenClassification
    "score.bias": same(),
    "classifier.weight": readout("hidden"),
    "classifier.bias": same(),
    "qa_outputs.weight": readout("hidden"),
    "qa_outputs.bias": same(),
}

OTHERS = tuple(name for name, layout in HEADS.items() if layout.in_ and name != "lm_head.weight")
"""Heads that a tied model may be given in place of its readout: they, too, read the norm that has its 1/k."""

AROUND = {
    "*embed_tokens.weight": table("hidden"),
    "*norm.weight": vector("hidden").in_norm("rms"),
    **HEADS,
}

TIED = Tied(
    embedding="*embed_tokens.weight",
    readouts=("lm_head.weight",),
    norm=("model.norm.weight", "norm.weight"),
    others=OTHERS,
)

LLAMA = register(
    Architecture(
        "llama",
        tensors={**ATTENTION, **FEED_FORWARD, **AROUND},
        tied=TIED,
        kv="num_key_value_heads",
        head_dim="head_dim",
        divisible=True,
        defaults={
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "initializer_range": 0.02,
        },
    )
)
