"""T5: encoder and decoder with RMSNorm and biases by distance and head, which are copied with their heads.

The model divides by √d_model before its readout, which is the embedding.
"""

from mupscale.hf.describe.architecture import Architecture, Config, Tied, Wires
from mupscale.hf.describe.multipliers import Times
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector
from mupscale.system import setting


def _of_hidden(config: Config) -> float:
    return float(T5.number(config, "d_model") ** -0.5)


def _of_queries(config: Config) -> float:
    return float((T5.number(config, "d_model") * T5.number(config, "d_kv")) ** -0.5)


def _of_heads(config: Config) -> float:
    return float((T5.number(config, "num_heads") * T5.number(config, "d_kv")) ** -0.5)


def _of_ffn(config: Config) -> float:
    return float(T5.number(config, "d_ff") ** -0.5)


def _heads(wires: Wires, config: Config) -> Wires:
    return {"each_head": wires["queries"] // T5.number(config, "d_kv")}


def _refuse(config: Config, times: Times) -> str:
    if config.get("tie_word_embeddings", True) is False and times.hidden != 1:
        return (
            "this T5 model has a readout beside its embedding by config.json (tie_word_embeddings, as T5 1.1 has it), "
            "but transformers 5 ties the two anyway, without T5's scale. Keep hidden, as in "
            f"{setting('times', 'ffn=2,heads=2')}"
        )
    return ""


T5 = register(
    Architecture(
        "t5",
        tensors={
            "*Attention.q.weight": linear("queries", "hidden"),
            "*Attention.[kv].weight": linear("keys", "hidden"),
            "*Attention.o.weight": linear("hidden", "queries"),
            "*Attention.relative_attention_bias.weight": table("each_head"),
            "*.DenseReluDense.wi*.weight": linear("ffn", "hidden"),
            "*.DenseReluDense.wo.weight": linear("hidden", "ffn"),
            "*layer_norm.weight": vector("hidden").in_norm("rms"),
            "*shared.weight": table("hidden"),
            "*embed_tokens.weight": table("hidden"),
            "lm_head.weight": readout("hidden"),
            "qa_outputs.weight": readout("hidden"),
            "qa_outputs.bias": same(),
            "classification_head.dense.weight": linear("hidden", "hidden"),
            "classification_head.dense.bias": vector("hidden"),
            "classification_head.out_proj.weight": readout("hidden"),
            "classification_head.out_proj.bias": same(),
            "classifier.weight": readout("hidden"),
            "classifier.bias": same(),
        },
        tied=Tied(
            embedding="*shared.weight",
            readouts=("lm_head.weight",),
            norm=("*decoder.final_layer_norm.weight",),
            others=("qa_outputs.weight", "classification_head.dense.weight"),
            models=("ForConditionalGeneration",),
            default=True,
            scaled=True,
        ),
        hidden="d_model",
        ffn="d_ff",
        heads="num_heads",
        head_dim="d_kv",
        std="initializer_factor",
        defaults={"d_model": 512, "d_ff": 2048, "num_heads": 8, "d_kv": 64, "initializer_factor": 1.0},
        wires=_heads,
        refuse=_refuse,
        aliases={"*encoder.embed_tokens.weight": "*shared.weight", "*decoder.embed_tokens.weight": "*shared.weight"},
        init={
            "*Attention.q.weight": _of_queries,
            "*Attention.[kv].weight": _of_hidden,
            "*Attention.o.weight": _of_heads,
            "*Attention.relative_attention_bias.weight": _of_hidden,
            "*.DenseReluDense.wi*.weight": _of_hidden,
            "*.DenseReluDense.wo.weight": _of_ffn,
            "qa_outputs.weight": _of_hidden,
            "classification_head.*.weight": _of_hidden,
        },
    )
)
