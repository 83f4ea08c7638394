"""ELECTRA: BERT with embeddings that may have a size of their own, as generator and as discriminator."""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Tied, Wires
from mupscale.hf.describe.architectures.bert import BERT
from mupscale.hf.describe.architectures.roberta import DENSE_CLASSIFIER
from mupscale.hf.describe.multipliers import Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Wire, linear, readout, same, table, vector


def _word_size(config: Config) -> int:
    return ELECTRA.number(config, "embedding_size")


def _projected(config: Config) -> bool:
    """Whether the embeddings have a size of their own, which stays."""
    return _word_size(config) != ELECTRA.number(config, "hidden_size")


def _words(wires: Wires, config: Config) -> Wires:
    return {"words": Wire(_word_size(config), width=False) if _projected(config) else wires["hidden"]}


def _also(config: Config, times: Times) -> Config:
    return {"embedding_size": grown(_word_size(config), 1 if _projected(config) else times.hidden)}


def _refuse(config: Config, times: Times) -> str:
    if _projected(config) and ELECTRA.number(config, "hidden_size") * times.hidden == _word_size(config):
        return (
            f"ELECTRA projects its embeddings of {_word_size(config)} units to the hidden layers unless both have the "
            f"same size, as they would after growing {times.hidden} times. Grow by a different factor"
        )
    return ""


ELECTRA = register(
    replace(
        BERT,
        model_type="electra",
        tensors={
            "*embeddings.*_embeddings.weight": table("words"),
            "*embeddings.LayerNorm.weight": vector("words").in_norm("layer"),
            "*embeddings.LayerNorm.bias": vector("words").in_norm("bias"),
            "*embeddings_project.weight": linear("hidden", "words"),
            "*embeddings_project.bias": vector("hidden"),
            "generator_predictions.dense.weight": linear("words", "hidden"),
            "generator_predictions.dense.bias": vector("words"),
            "generator_predictions.LayerNorm.weight": vector("words").in_norm("layer"),
            "generator_predictions.LayerNorm.bias": vector("words").in_norm("bias"),
            "generator_lm_head.weight": readout("words"),
            "generator_lm_head.bias": same(),
            "discriminator_predictions.dense.weight": linear("hidden", "hidden"),
            "discriminator_predictions.dense.bias": vector("hidden"),
            "discriminator_predictions.dense_prediction.weight": readout("hidden"),
            "discriminator_predictions.dense_prediction.bias": same(),
            "sequence_summary.summary.weight": linear("hidden", "hidden"),
            "sequence_summary.summary.bias": vector("hidden"),
            **DENSE_CLASSIFIER,
            **{name: layout for name, layout in BERT.tensors.items() if name != "*embeddings.*_embeddings.weight"},
        },
        tied=Tied(
            embedding="*embeddings.word_embeddings.weight",
            readouts=("generator_lm_head.weight",),
            norm=("generator_predictions.LayerNorm.*",),
            models=("ForMaskedLM", "ForCausalLM"),
            default=True,
            wire="words",
        ),
        defaults={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "embedding_size": 128,
            "initializer_range": 0.02,
        },
        wires=_words,
        also=_also,
        refuse=_refuse,
    )
)
