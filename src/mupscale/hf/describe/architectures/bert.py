"""BERT: LayerNorm after each layer; the readout of masked words has a layer and a norm of its own."""

from mupscale.hf.describe.architecture import Architecture, Tied
from mupscale.hf.describe.architectures.llama import HEADS
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector

AFTER_THE_SUM = "its norms come after the residual sum, and new units cannot know the mean of that sum"

LAYER = {
    "*.attention.output.dense.weight": linear("hidden", "queries"),
    "*.attention.output.dense.bias": vector("hidden"),
    "*.intermediate.dense.weight": linear("ffn", "hidden"),
    "*.intermediate.dense.bias": vector("ffn"),
    "*.output.dense.weight": linear("hidden", "ffn"),
    "*.output.dense.bias": vector("hidden"),
}

BERT = register(
    Architecture(
        "bert",
        tensors={
            "*.attention.self.query.weight": linear("queries", "hidden"),
            "*.attention.self.query.bias": vector("queries"),
            "*.attention.self.key.weight": linear("keys", "hidden"),
            "*.attention.self.key.bias": vector("keys"),
            "*.attention.self.value.weight": linear("keys", "hidden"),
            "*.attention.self.value.bias": vector("keys"),
            **LAYER,
            "*embeddings.*_embeddings.weight": table("hidden"),
            "*LayerNorm.[wg]*": vector("hidden").in_norm("layer"),  # weight; gamma in old files
            "*LayerNorm.b*": vector("hidden").in_norm("bias"),  # bias, beta
            "*pooler.dense.weight": linear("hidden", "hidden"),
            "*pooler.dense.bias": vector("hidden"),
            "*embeddings.position_ids": same(),
            "*embeddings.token_type_ids": same(),
            "cls.predictions.transform.dense.weight": linear("hidden", "hidden"),
            "cls.predictions.transform.dense.bias": vector("hidden"),
            "cls.predictions.decoder.weight": readout("hidden"),
            "cls.predictions.decoder.bias": same(),
            "cls.predictions.bias": same(),
            "cls.seq_relationship.weight": readout("hidden"),
            "cls.seq_relationship.bias": same(),
            **HEADS,
        },
        tied=Tied(
            embedding="*embeddings.word_embeddings.weight",
            readouts=("cls.predictions.decoder.weight",),
            norm=("cls.predictions.transform.LayerNorm.*",),
            models=("ForMaskedLM", "ForPreTraining", "LMHeadModel"),
            default=True,
            aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        ),
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "initializer_range": 0.02,
        },
        not_lossless=lambda config, times: AFTER_THE_SUM if times.hidden != 1 else "",
    )
)
