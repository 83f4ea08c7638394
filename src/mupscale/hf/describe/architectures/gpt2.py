"""GPT-2: Conv1D layers that store (in, out), and queries, keys and values one after the other in one of them."""

from mupscale.hf.describe.architecture import Architecture, Config, Tied
from mupscale.hf.describe.architectures.llama import HEADS, OTHERS
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import conv1d, readout, same, table, vector


def _residual(config: Config) -> float:
    """What is added to the residual stream starts smaller the more layers there are."""
    return float((2 * GPT2.number(config, "n_layer")) ** -0.5)


GPT2 = register(
    Architecture(
        "gpt2",
        tensors={
            "*wte.weight": table("hidden"),
            "*wpe.weight": table("hidden"),
            "*ln_[12f].weight": vector("hidden").in_norm("layer"),
            "*ln_[12f].bias": vector("hidden").in_norm("bias"),
            "*.attn.c_attn.weight": conv1d("hidden", "qkv"),
            "*.attn.c_attn.bias": vector("qkv"),
            "*.attn.c_proj.weight": conv1d("queries", "hidden"),
            "*.attn.c_proj.bias": vector("hidden"),
            "*.attn.bias": same(),  # masks that old files hold
            "*.attn.masked_bias": same(),
            "*.mlp.c_fc.weight": conv1d("hidden", "ffn"),
            "*.mlp.c_fc.bias": vector("ffn"),
            "*.mlp.c_proj.weight": conv1d("ffn", "hidden"),
            "*.mlp.c_proj.bias": vector("hidden"),
            "multiple_choice_head.summary.weight": readout("hidden"),
            "multiple_choice_head.summary.bias": same(),
            **HEADS,
        },
        tied=Tied(
            embedding="*wte.weight",
            readouts=("lm_head.weight",),
            norm=("*ln_f.weight", "*ln_f.bias"),
            others=("multiple_choice_head.summary.weight", *OTHERS),
            default=True,
        ),
        hidden="n_embd",
        ffn="n_inner",
        heads="n_head",
        defaults={
            "n_embd": 768,
            "n_inner": lambda config: 4 * config.get("n_embd", 768),
            "n_head": 12,
            "n_layer": 12,
            "initializer_range": 0.02,
        },
        wires=lambda wires, config: {"qkv": wires["queries"] | wires["keys"] | wires["keys"]},
        init={"*.c_proj.weight": _residual},
    )
)
