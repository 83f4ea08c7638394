"""GPT-NeoX and Pythia: each head's query, key and value lie side by side in one projection.

The readout is `embed_out` in files and `lm_head` in the model.
"""

from mupscale.hf.describe.architecture import Architecture, Tied
from mupscale.hf.describe.architectures.llama import HEADS, OTHERS
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector

GPT_NEOX = register(
    Architecture(
        "gpt_neox",
        tensors={
            "*.attention.query_key_value.weight": linear("heads", "hidden"),
            "*.attention.query_key_value.bias": vector("heads"),
            "*.attention.dense.weight": linear("hidden", "queries"),
            "*.attention.dense.bias": vector("hidden"),
            "*.attention.bias": same(),  # masks and frequencies that old files hold
            "*.attention.masked_bias": same(),
            "*rotary_emb.inv_freq": same(),
            "*.mlp.dense_h_to_4h.weight": linear("ffn", "hidden"),
            "*.mlp.dense_h_to_4h.bias": vector("ffn"),
            "*.mlp.dense_4h_to_h.weight": linear("hidden", "ffn"),
            "*.mlp.dense_4h_to_h.bias": vector("hidden"),
            "*embed_in.weight": table("hidden"),
            "*norm.weight": vector("hidden").in_norm("layer"),
            "*norm.bias": vector("hidden").in_norm("bias"),
            "embed_out.weight": readout("hidden"),
            **HEADS,
        },
        tied=Tied(
            embedding="*embed_in.weight",
            readouts=("embed_out.weight", "lm_head.weight"),
            norm=("*final_layer_norm.weight", "*final_layer_norm.bias"),
            others=OTHERS,
        ),
        defaults={
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "initializer_range": 0.02,
        },
        wires=lambda wires, config: {"heads": wires["queries"] * 3},
    )
)
