"""Mixtral: Mistral with a choice of experts for each token.

Files keep each expert apart; the model holds all of them in one tensor, gate and up projection one after the other.
"""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION
from mupscale.hf.describe.architectures.mistral import MISTRAL
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout

EXPERTS = {
    "*.block_sparse_moe.gate.weight": readout("hidden"),
    "*.block_sparse_moe.experts.*.w[13].weight": linear("ffn", "hidden"),
    "*.block_sparse_moe.experts.*.w2.weight": linear("hidden", "ffn"),
    "*.mlp.gate.weight": readout("hidden"),
    "*.mlp.experts.gate_up_proj": linear("gate_up", "hidden"),
    "*.mlp.experts.down_proj": linear("hidden", "ffn"),
}

MIXTRAL = register(
    replace(
        MISTRAL,
        model_type="mixtral",
        tensors={**ATTENTION, **EXPERTS, **AROUND},
        wires=lambda wires, config: {"gate_up": wires["ffn"] | wires["ffn"]},
    )
)
