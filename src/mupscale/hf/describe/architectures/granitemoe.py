"""GraniteMoE: Granite with a choice of experts, stacked in files as in the model, under other names."""

from dataclasses import replace

from mupscale.hf.describe.architectures.granite import GRANITE
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout

GRANITEMOE = register(
    replace(
        GRANITE,
        model_type="granitemoe",
        tensors={
            **ATTENTION,
            "*.block_sparse_moe.router*.weight": readout("hidden"),
            "*.block_sparse_moe.input_linear.weight": linear("gate_up", "hidden"),
            "*.block_sparse_moe.output_linear.weight": linear("hidden", "ffn"),
            "*.block_sparse_moe.experts.gate_up_proj": linear("gate_up", "hidden"),
            "*.block_sparse_moe.experts.down_proj": linear("hidden", "ffn"),
            **AROUND,
        },
        wires=lambda wires, config: {"gate_up": wires["ffn"] | wires["ffn"]},
    )
)
