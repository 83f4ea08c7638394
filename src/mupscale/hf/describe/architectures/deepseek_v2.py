"""DeepSeek-V2 and V3: latent attention, a choice of experts beside shared ones, plain layers at first.

The ranks of latent attention stay, as do the sizes of a head, so that a wider model has more heads of the same
latents. `ffn` is the size of an expert; shared experts and plain layers grow with it.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.llama import AROUND, LLAMA
from mupscale.hf.describe.architectures.qwen3_moe import EXPERTS, PLAIN
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, column, linear, readout, same, vector

LATENT_ATTENTION = {
    "*.self_attn.q_proj.weight": linear("queries_of_heads", "hidden"),
    "*.self_attn.q_a_proj.weight": readout("hidden"),
    "*.self_attn.q_a_proj.bias": same(),
    "*.self_attn.q_a_layernorm.weight": same(),
    "*.self_attn.q_b_proj.weight": column("queries_of_heads"),
    "*.self_attn.kv_a_proj_with_mqa.weight": readout("hidden"),
    "*.self_attn.kv_a_proj_with_mqa.bias": same(),
    "*.self_attn.kv_a_layernorm.weight": same(),
    "*.self_attn.kv_b_proj.weight": column("keys_and_values"),
    "*.self_attn.o_proj.weight": linear("hidden", "queries"),
    "*.self_attn.o_proj.bias": vector("hidden"),
}

SHARED_EXPERTS = {
    "*.mlp.gate.e_score_correction_bias": same(),
    "*.mlp.shared_experts.gate_proj.weight": linear("shared_ffn", "hidden"),
    "*.mlp.shared_experts.up_proj.weight": linear("shared_ffn", "hidden"),
    "*.mlp.shared_experts.down_proj.weight": linear("hidden", "shared_ffn"),
}


def _described(config: Config) -> Architecture:
    """V2 or V3, whose defaults differ."""
    return DEEPSEEK_V3 if config.get("model_type") == "deepseek_v3" else DEEPSEEK_V2


def _wires(wires: Wires, config: Config) -> Wires:
    described = _described(config)
    of = {name: described.number(config, name) for name in ("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")}
    heads = wires["queries"] // of["v_head_dim"]
    return {
        "queries_of_heads": heads * (of["qk_nope_head_dim"] + of["qk_rope_head_dim"]),
        "keys_and_values": heads * (of["qk_nope_head_dim"] + of["v_head_dim"]),
        "gate_up": wires["ffn"] | wires["ffn"],
        "plain_ffn": Wire(described.number(config, "intermediate_size"), wires["ffn"].times),
        "shared_ffn": wires["ffn"] * (described.value(config, "n_shared_experts") or 1),
    }


def _also(config: Config, times: Times) -> Config:
    """Every head has keys of its own, which transformers counts once more."""
    heads = grown(_described(config).number(config, "num_attention_heads"), times.heads)
    plain = grown(_described(config).number(config, "intermediate_size"), times.ffn)
    return {"intermediate_size": plain, "num_key_value_heads": heads}


DEEPSEEK_V2 = register(
    replace(
        LLAMA,
        model_type="deepseek_v2",
        divisible=False,
        tensors={**LATENT_ATTENTION, **EXPERTS, **SHARED_EXPERTS, **PLAIN, **AROUND},
        ffn="moe_intermediate_size",
        kv=None,
        head_dim="v_head_dim",
        defaults={
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "moe_intermediate_size": 1407,
            "num_attention_heads": 32,
            "n_shared_experts": 2,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
    )
)

DEEPSEEK_V3 = register(
    replace(
        DEEPSEEK_V2,
        model_type="deepseek_v3",
        defaults={
            **DEEPSEEK_V2.defaults,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
        },
    )
)
