"""Llama 4, the language model: a choice of experts beside a shared one, or plain layers of a size of their own.

Experts are stored (in, out), gate and up projection one after the other. `ffn` is the size of an expert; the plain
layers grow with it.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION, LLAMA
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, conv1d, linear, readout


def _wires(wires: Wires, config: Config) -> Wires:
    plain = Wire(LLAMA4_TEXT.number(config, "intermediate_size_mlp"), wires["ffn"].times)
    return {"gate_up": wires["ffn"] | wires["ffn"], "plain_ffn": plain}


def _also(config: Config, times: Times) -> Config:
    return {"intermediate_size_mlp": grown(LLAMA4_TEXT.number(config, "intermediate_size_mlp"), times.ffn)}


LLAMA4_TEXT = register(
    replace(
        LLAMA,
        model_type="llama4_text",
        divisible=False,
        tensors={
            **ATTENTION,
            "*.feed_forward.router.weight": readout("hidden"),
            "*.feed_forward.experts.gate_up_proj": conv1d("hidden", "gate_up"),
            "*.feed_forward.experts.down_proj": conv1d("ffn", "hidden"),
            "*.feed_forward.shared_expert.gate_proj.weight": linear("ffn", "hidden"),
            "*.feed_forward.shared_expert.up_proj.weight": linear("ffn", "hidden"),
            "*.feed_forward.shared_expert.down_proj.weight": linear("hidden", "ffn"),
            "*.feed_forward.gate_proj.weight": linear("plain_ffn", "hidden"),
            "*.feed_forward.up_proj.weight": linear("plain_ffn", "hidden"),
            "*.feed_forward.down_proj.weight": linear("hidden", "plain_ffn"),
            **AROUND,
        },
        defaults={
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
    )
)
