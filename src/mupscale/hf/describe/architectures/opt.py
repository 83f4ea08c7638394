"""OPT: learned positions, LayerNorm before or after each layer, word embeddings that may have a size of their own."""

from mupscale.hf.describe.architecture import Architecture, Config, Tied, Wires
from mupscale.hf.describe.architectures.bert import AFTER_THE_SUM
from mupscale.hf.describe.architectures.llama import ATTENTION, OTHERS
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, readout, same, table, vector
from mupscale.system import setting


def _word_size(config: Config) -> int:
    return OPT.number(config, "word_embed_proj_dim")


def _projected(config: Config) -> bool:
    """Whether the word embeddings have a size of their own (opt-350m)."""
    return _word_size(config) != OPT.number(config, "hidden_size")


def _words(wires: Wires, config: Config) -> Wires:
    """Behind a projection the word embeddings stay as they are."""
    return {"words": Wire(_word_size(config), width=False) if _projected(config) else wires["hidden"]}


def _also(config: Config, times: Times) -> Config:
    return {"word_embed_proj_dim": grown(_word_size(config), 1 if _projected(config) else times.hidden)}


def _refuse(config: Config, times: Times) -> str:
    if times.hidden == 1:
        return ""
    if _projected(config):
        if OPT.number(config, "hidden_size") * times.hidden == _word_size(config):
            return (
                f"OPT projects its words of {_word_size(config)} units to the hidden layers unless both have the same "
                f"size, as they would after growing {times.hidden} times. Grow by a different factor"
            )
        return ""
    last = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    gain = config.get("layer_norm_elementwise_affine", True)
    if OPT.is_tied(config) and not (last and gain):
        return (
            "this OPT model uses its embedding as the readout, with no norm with a gain before it "
            "(do_layer_norm_before, _remove_final_layer_norm or layer_norm_elementwise_affine in config.json), so "
            f"nothing can take the readout's 1/k. Untie the readout, or keep hidden, as in {setting('times', 'ffn=2')}"
        )
    return ""


def _not_lossless(config: Config, times: Times) -> str:
    if times.hidden == 1:
        return ""
    if not config.get("layer_norm_elementwise_affine", True):
        return "its norms have no gain that could be rescaled"
    return "" if config.get("do_layer_norm_before", True) else AFTER_THE_SUM


OPT = register(
    Architecture(
        "opt",
        tensors={
            **ATTENTION,
            "*.self_attn.out_proj.weight": linear("hidden", "queries"),
            "*.self_attn.out_proj.bias": vector("hidden"),
            "*.fc1.weight": linear("ffn", "hidden"),
            "*.fc1.bias": vector("ffn"),
            "*.fc2.weight": linear("hidden", "ffn"),
            "*.fc2.bias": vector("hidden"),
            "*layer_norm.weight": vector("hidden").in_norm("layer"),
            "*layer_norm.bias": vector("hidden").in_norm("bias"),
            "*embed_tokens.weight": table("words"),
            "*embed_positions.weight": table("hidden"),
            "*project_in.weight": linear("hidden", "words"),
            "*project_out.weight": linear("words", "hidden"),
            "lm_head.weight": readout("words"),
            "score.weight": readout("words"),
            "qa_outputs.weight": readout("words"),
            "qa_outputs.bias": same(),
        },
        tied=Tied(
            embedding="*embed_tokens.weight",
            readouts=("lm_head.weight",),
            norm=("*decoder.final_layer_norm.weight", "*decoder.final_layer_norm.bias"),
            others=OTHERS,
            default=True,
            wire="words",
        ),
        ffn="ffn_dim",
        std="init_std",
        defaults={
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_attention_heads": 12,
            "init_std": 0.02,
            "word_embed_proj_dim": lambda config: config.get("hidden_size", 768),
        },
        wires=_words,
        also=_also,
        refuse=_refuse,
        not_lossless=_not_lossless,
    )
)
