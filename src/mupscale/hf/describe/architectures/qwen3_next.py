"""Qwen3-Next: linear attention (a gated delta rule) in most layers, gated attention in the others, experts in all.

A linear layer has keys of its own for each group of value heads; whole groups are copied. Its projection holds query,
key, values and gates of a group side by side. The gate of attention lies beside the query of each head.
"""

from mupscale.core import Number
from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, ATTENTION, TIED
from mupscale.hf.describe.architectures.qwen2_moe import SHARED
from mupscale.hf.describe.architectures.qwen3_moe import EXPERTS, PLAIN
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Layout, Wire, linear, same, vector

_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_FFN = ("intermediate_size", "shared_expert_intermediate_size")


def _linear_wires(config: Config, times: Number) -> Wires:
    keys, values = (QWEN3_NEXT.number(config, name) for name in _HEADS)
    key, value = (QWEN3_NEXT.number(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    each = values // keys  # value heads of a group
    one = Wire(keys * key, times, key)
    written = Wire(values * value, times, each * value)
    group = 2 * key + 2 * each * value
    return {
        "linear_values": written,
        "linear_mixed": one | one | written,
        "linear_all": Wire(keys * group, times, group),
        "linear_gates": Wire(2 * values, times, 2 * each),
        "linear_heads": Wire(values, times, each),
    }


def _wires(wires: Wires, config: Config) -> Wires:
    plain, shared = (Wire(QWEN3_NEXT.number(config, name), wires["ffn"].times) for name in _FFN)
    return {
        "gate_up": wires["ffn"] | wires["ffn"],
        "plain_ffn": plain,
        "shared_ffn": shared,
        "gated": wires["queries"] * 2,
        **_linear_wires(config, wires["queries"].times),
    }


def _also(config: Config, times: Times) -> Config:
    sizes = {name: grown(QWEN3_NEXT.number(config, name), times.ffn) for name in _FFN}
    return sizes | {name: grown(QWEN3_NEXT.number(config, name), times.heads) for name in _HEADS}


def _of_decays(config: Config) -> float:
    """The std of log U(0.01, 16), whose mean is 1.77, by the config's."""
    return 1.0 / (QWEN3_NEXT.initial_std(config) or 0.02)


QWEN3_NEXT = register(
    Architecture(
        "qwen3_next",
        tensors={
            "*.linear_attn.in_proj_qkvz.weight": linear("linear_all", "hidden"),
            "*.linear_attn.in_proj_ba.weight": linear("linear_gates", "hidden"),
            "*.linear_attn.conv1d.weight": Layout({-3: "linear_mixed"}, {}),
            "*.linear_attn.A_log": vector("linear_heads"),
            "*.linear_attn.dt_bias": vector("linear_heads"),
            "*.linear_attn.norm.weight": same(),
            "*.linear_attn.out_proj.weight": linear("hidden", "linear_values"),
            "*.self_attn.[qk]_norm.weight": same(),
            **ATTENTION,
            "*.self_attn.q_proj.weight": linear("gated", "hidden"),
            "*.self_attn.q_proj.bias": vector("gated"),
            **EXPERTS,
            **SHARED,
            **PLAIN,
            **AROUND,
            "*norm.weight": vector("hidden").with_offset(1).in_norm("rms"),
        },
        tied=TIED,
        ffn="moe_intermediate_size",
        kv="num_key_value_heads",
        head_dim="head_dim",
        defaults={
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
        init={"*.A_log": _of_decays},
        start={
            "*.dt_bias": lambda config: 1.0,
            "*.A_log": lambda config: 1.77,
            "*.linear_attn.norm.weight": lambda config: 1.0,
            "*norm.weight": lambda config: 0.0,
        },
    )
)
