"""Falcon: queries, keys and values of each group in one projection.

The first models (`multi_query`) have one key/value head for all, which is one group of the later layout: more heads
make more groups, and the wide config says so. With ALiBi each head's slope follows from the number of heads, which
then has to stay. So has their size, by whose root Falcon divides the slopes, too: heads cannot become wider as BLOOM's.
"""

from mupscale.hf.describe.architecture import Architecture, Config, Tied, Wires
from mupscale.hf.describe.architectures.llama import HEADS, OTHERS
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, same, table, vector
from mupscale.system import setting


def _groups(config: Config) -> int:
    """Key/value heads, each with its heads beside it."""
    if not config.get("new_decoder_architecture", False):
        return 1 if config.get("multi_query", True) else FALCON.number(config, "num_attention_heads")
    return FALCON.number(config, "num_kv_heads")


def _wires(wires: Wires, config: Config) -> Wires:
    groups, size, times = _groups(config), FALCON.head_size(config), wires["queries"].times
    of_each = FALCON.number(config, "num_attention_heads") // groups
    return {
        "queries": Wire(groups * of_each * size, times, of_each * size),
        "qkv": Wire(groups * (of_each + 2) * size, times, (of_each + 2) * size),
    }


def _also(config: Config, times: Times) -> Config:
    if config.get("new_decoder_architecture", False):
        return {"num_kv_heads": grown(_groups(config), times.heads)}
    if times.heads == 1 or not config.get("multi_query", True):
        return (
            {} if config.get("num_kv_heads") is None else {"num_kv_heads": grown(config["num_kv_heads"], times.heads)}
        )
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": grown(1, times.heads)}


def _refuse(config: Config, times: Times) -> str:
    if times.heads != 1 and config.get("alibi", False):
        return (
            "the slopes of ALiBi follow from the number of heads (alibi in config.json), so heads cannot keep their "
            "slopes when some are copied or added: let only the feed-forward layers grow, as in "
            f"{setting('times', 'ffn=2')}"
        )
    old = not config.get("new_decoder_architecture", False) and config.get("multi_query", True)
    if times.heads != 1 and old and not config.get("parallel_attn", True):
        return (
            "this Falcon model has one key/value head for all its heads in one tensor, which transformers cannot hold "
            f"in groups without parallel_attn: let only the feed-forward layers grow, as in {setting('times', 'ffn=2')}"
        )
    if isinstance(times.heads, int) or not old:
        return ""
    return (
        "all heads of this Falcon model are one group, and fresh units add whole groups. Choose a multiple of its heads"
    )


FALCON = register(
    Architecture(
        "falcon",
        tensors={
            "*.self_attention.query_key_value.weight": linear("qkv", "hidden"),
            "*.self_attention.query_key_value.bias": vector("qkv"),
            "*.self_attention.dense.weight": linear("hidden", "queries"),
            "*.self_attention.dense.bias": vector("hidden"),
            "*rotary*.inv_freq": same(),
            "*.mlp.dense_h_to_4h.weight": linear("ffn", "hidden"),
            "*.mlp.dense_h_to_4h.bias": vector("ffn"),
            "*.mlp.dense_4h_to_h.weight": linear("hidden", "ffn"),
            "*.mlp.dense_4h_to_h.bias": vector("hidden"),
            "*word_embeddings.weight": table("hidden"),
            "*.ln_*.weight": vector("hidden").in_norm("layer"),
            "*.ln_*.bias": vector("hidden").in_norm("bias"),
            "*layernorm.weight": vector("hidden").in_norm("layer"),
            "*layernorm.bias": vector("hidden").in_norm("bias"),
            "ln_f.weight": vector("hidden").in_norm("layer"),
            "ln_f.bias": vector("hidden").in_norm("bias"),
            **HEADS,
        },
        tied=Tied(
            embedding="*word_embeddings.weight",
            readouts=("lm_head.weight",),
            norm=("*ln_f.weight", "*ln_f.bias"),
            others=OTHERS,
            default=True,
        ),
        ffn="ffn_hidden_size",
        defaults={
            "hidden_size": 4544,
            "ffn_hidden_size": lambda config: 4 * config.get("hidden_size", 4544),
            "num_attention_heads": 71,
            "num_kv_heads": lambda config: config.get("num_attention_heads", 71),
            "initializer_range": 0.02,
        },
        wires=_wires,
        also=_also,
        refuse=_refuse,
    )
)
