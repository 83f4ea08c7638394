"""Qwen3-MoE: Qwen3 with a choice of experts for each token, and plain feed-forward layers where the config says so.

Files keep each expert apart; the model holds all of them in one tensor, gate and up projection one after the other.
`ffn` is the size of an expert; the plain layers grow with it.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION
from mupscale.hf.describe.architectures.qwen3 import QWEN3
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, readout, same

EXPERTS = {
    "*.mlp.gate.weight": readout("hidden"),
    "*.mlp.experts.*.gate_proj.weight": linear("ffn", "hidden"),
    "*.mlp.experts.*.up_proj.weight": linear("ffn", "hidden"),
    "*.mlp.experts.*.down_proj.weight": linear("hidden", "ffn"),
    "*.mlp.experts.gate_up_proj": linear("gate_up", "hidden"),
    "*.mlp.experts.down_proj": linear("hidden", "ffn"),
}

PLAIN = {
    "*.mlp.gate_proj.weight": linear("plain_ffn", "hidden"),
    "*.mlp.up_proj.weight": linear("plain_ffn", "hidden"),
    "*.mlp.down_proj.weight": linear("hidden", "plain_ffn"),
}


def _wires(wires: Wires, config: Config) -> Wires:
    plain = Wire(QWEN3_MOE.number(config, "intermediate_size"), wires["ffn"].times)
    return {"gate_up": wires["ffn"] | wires["ffn"], "plain_ffn": plain}


def _also(config: Config, times: Times) -> Config:
    return {"intermediate_size": grown(QWEN3_MOE.number(config, "intermediate_size"), times.ffn)}


QWEN3_MOE = register(
    replace(
        QWEN3,
        model_type="qwen3_moe",
        tensors={"*.self_attn.[qk]_norm.weight": same(), **ATTENTION, **EXPERTS, **PLAIN, **AROUND},
        ffn="moe_intermediate_size",
        defaults={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
    )
)
