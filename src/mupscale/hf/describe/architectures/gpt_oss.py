"""gpt-oss: LLaMA with a choice of experts, biases, and a sink for each head that attention may go to.

Experts are stored (in, out), each unit's gate and up projection side by side.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION, LLAMA
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import conv1d, readout, same, vector


def _wires(wires: Wires, config: Config) -> Wires:
    return {"gates_and_ups": wires["ffn"] * 2, "query_heads": wires["queries"] // GPT_OSS.head_size(config)}


GPT_OSS = register(
    replace(
        LLAMA,
        model_type="gpt_oss",
        divisible=False,
        tensors={
            **ATTENTION,
            "*.self_attn.sinks": vector("query_heads"),
            "*.mlp.router.weight": readout("hidden"),
            "*.mlp.router.bias": same(),
            "*.mlp.experts.gate_up_proj": conv1d("hidden", "gates_and_ups"),
            "*.mlp.experts.gate_up_proj_bias": vector("gates_and_ups"),
            "*.mlp.experts.down_proj": conv1d("ffn", "hidden"),
            "*.mlp.experts.down_proj_bias": vector("hidden"),
            **AROUND,
        },
        defaults={
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "initializer_range": 0.02,
        },
        wires=_wires,
        init={
            "*_proj_bias": lambda config: 0.0,
            "*.sinks": lambda config: 1.0,
            "*.router.bias": lambda config: 1.0,
        },
    )
)
