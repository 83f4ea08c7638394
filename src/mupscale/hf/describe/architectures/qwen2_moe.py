"""Qwen2-MoE: Qwen2 with a choice of experts for each token, and one expert that all tokens share.

`ffn` is the size of an expert; the shared expert and the plain layers grow with it.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION
from mupscale.hf.describe.architectures.qwen2 import QWEN2
from mupscale.hf.describe.architectures.qwen3_moe import EXPERTS, PLAIN
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, readout

SHARED = {
    "*.mlp.shared_expert_gate.weight": readout("hidden"),
    "*.mlp.shared_expert.gate_proj.weight": linear("shared_ffn", "hidden"),
    "*.mlp.shared_expert.up_proj.weight": linear("shared_ffn", "hidden"),
    "*.mlp.shared_expert.down_proj.weight": linear("hidden", "shared_ffn"),
}


def _wires(wires: Wires, config: Config) -> Wires:
    plain, shared = (
        Wire(QWEN2_MOE.number(config, name), wires["ffn"].times)
        for name in ("intermediate_size", "shared_expert_intermediate_size")
    )
    return {"gate_up": wires["ffn"] | wires["ffn"], "plain_ffn": plain, "shared_ffn": shared}


def _also(config: Config, times: Times) -> Config:
    names = ("intermediate_size", "shared_expert_intermediate_size")
    return {name: grown(QWEN2_MOE.number(config, name), times.ffn) for name in names}


QWEN2_MOE = register(
    replace(
        QWEN2,
        model_type="qwen2_moe",
        tensors={**ATTENTION, **EXPERTS, **SHARED, **PLAIN, **AROUND},
        ffn="moe_intermediate_size",
        defaults={
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
    )
)
