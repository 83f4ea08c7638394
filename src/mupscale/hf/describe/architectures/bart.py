"""BART: encoder and decoder with LayerNorm after each layer and learned positions.

The norm before the readout is that of the decoder's last layer.
"""

from mupscale.hf.describe.architecture import Architecture, Config, Tied, Wires
from mupscale.hf.describe.architectures.bert import AFTER_THE_SUM
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, readout, same, table, vector
from mupscale.system import setting


def _last_norm(config: Config) -> tuple[str, ...]:
    return (f"*decoder.layers.{BART.number(config, 'decoder_layers') - 1}.final_layer_norm.*",)


def _wires(wires: Wires, config: Config) -> Wires:
    hidden, heads = wires["hidden"].size, BART.number(config, "decoder_attention_heads")
    return {
        "decoder_heads": Wire(hidden, wires["queries"].times, hidden // heads),
        "decoder_ffn": Wire(BART.number(config, "decoder_ffn_dim"), wires["ffn"].times),
    }


def _also(config: Config, times: Times) -> Config:
    return {
        "decoder_ffn_dim": grown(BART.number(config, "decoder_ffn_dim"), times.ffn),
        "decoder_attention_heads": grown(BART.number(config, "decoder_attention_heads"), times.heads),
    }


def _refuse(config: Config, times: Times) -> str:
    if config.get("scale_embedding") and times.hidden != 1:
        return (
            "this BART model multiplies its embeddings by √d_model (scale_embedding in config.json), and its readout "
            f"is the same tensor, unscaled: let only the feed-forward layers grow, as in {setting('times', 'ffn=2')}"
        )
    return ""


BART = register(
    Architecture(
        "bart",
        tensors={
            "*decoder.layers.*_attn.[qkv]_proj.weight": linear("decoder_heads", "hidden"),
            "*decoder.layers.*_attn.[qkv]_proj.bias": vector("decoder_heads"),
            "*decoder.layers.*_attn.out_proj.weight": linear("hidden", "decoder_heads"),
            "*decoder.layers.*.fc1.weight": linear("decoder_ffn", "hidden"),
            "*decoder.layers.*.fc1.bias": vector("decoder_ffn"),
            "*decoder.layers.*.fc2.weight": linear("hidden", "decoder_ffn"),
            "*.self_attn.[qkv]_proj.weight": linear("queries", "hidden"),
            "*.self_attn.[qkv]_proj.bias": vector("queries"),
            "*.self_attn.out_proj.weight": linear("hidden", "queries"),
            "*_attn.out_proj.bias": vector("hidden"),
            "*.fc1.weight": linear("ffn", "hidden"),
            "*.fc1.bias": vector("ffn"),
            "*.fc2.weight": linear("hidden", "ffn"),
            "*.fc2.bias": vector("hidden"),
            "*layer_norm.weight": vector("hidden").in_norm("layer"),
            "*layer_norm.bias": vector("hidden").in_norm("bias"),
            "*layernorm_embedding.weight": vector("hidden").in_norm("layer"),
            "*layernorm_embedding.bias": vector("hidden").in_norm("bias"),
            "*shared.weight": table("hidden"),
            "*embed_tokens.weight": table("hidden"),
            "*embed_positions.weight": table("hidden"),
            "lm_head.weight": readout("hidden"),
            "final_logits_bias": same(),
            "qa_outputs.weight": readout("hidden"),
            "qa_outputs.bias": same(),
            "classification_head.dense.weight": linear("hidden", "hidden"),
            "classification_head.dense.bias": vector("hidden"),
            "classification_head.out_proj.weight": readout("hidden"),
            "classification_head.out_proj.bias": same(),
        },
        tied=Tied(
            embedding="*shared.weight",
            readouts=("lm_head.weight",),
            norm=_last_norm,
            others=("qa_outputs.weight", "classification_head.dense.weight"),
            models=("ForConditionalGeneration",),
            default=True,
            aliases={
                "*encoder.embed_tokens.weight": "*shared.weight",
                "*decoder.embed_tokens.weight": "*shared.weight",
            },
        ),
        hidden="d_model",
        ffn="encoder_ffn_dim",
        heads="encoder_attention_heads",
        std="init_std",
        defaults={
            "d_model": 1024,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "decoder_layers": 12,
            "init_std": 0.02,
        },
        wires=_wires,
        also=_also,
        refuse=_refuse,
        not_lossless=lambda config, times: AFTER_THE_SUM if times.hidden != 1 else "",
    )
)
