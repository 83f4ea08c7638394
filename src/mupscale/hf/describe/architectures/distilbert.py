"""DistilBERT: BERT's layers under other names, without token types."""

from mupscale.hf.describe.architecture import Architecture, Tied
from mupscale.hf.describe.architectures.bert import AFTER_THE_SUM
from mupscale.hf.describe.architectures.llama import HEADS
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, table, vector

DISTILBERT = register(
    Architecture(
        "distilbert",
        tensors={
            "*.attention.q_lin.weight": linear("queries", "hidden"),
            "*.attention.q_lin.bias": vector("queries"),
            "*.attention.[kv]_lin.weight": linear("keys", "hidden"),
            "*.attention.[kv]_lin.bias": vector("keys"),
            "*.attention.out_lin.weight": linear("hidden", "queries"),
            "*.attention.out_lin.bias": vector("hidden"),
            "*.ffn.lin1.weight": linear("ffn", "hidden"),
            "*.ffn.lin1.bias": vector("ffn"),
            "*.ffn.lin2.weight": linear("hidden", "ffn"),
            "*.ffn.lin2.bias": vector("hidden"),
            "*embeddings.*_embeddings.weight": table("hidden"),
            "*embeddings.position_ids": same(),
            "*LayerNorm.weight": vector("hidden").in_norm("layer"),
            "*LayerNorm.bias": vector("hidden").in_norm("bias"),
            "*layer_norm.weight": vector("hidden").in_norm("layer"),
            "*layer_norm.bias": vector("hidden").in_norm("bias"),
            "vocab_transform.weight": linear("hidden", "hidden"),
            "vocab_transform.bias": vector("hidden"),
            "vocab_projector.weight": readout("hidden"),
            "vocab_projector.bias": same(),
            "pre_classifier.weight": linear("hidden", "hidden"),
            "pre_classifier.bias": vector("hidden"),
            **HEADS,
        },
        tied=Tied(
            embedding="*embeddings.word_embeddings.weight",
            readouts=("vocab_projector.weight",),
            norm=("vocab_layer_norm.*",),
            models=("ForMaskedLM",),
            default=True,
        ),
        hidden="dim",
        ffn="hidden_dim",
        heads="n_heads",
        defaults={"dim": 768, "hidden_dim": 3072, "n_heads": 12, "initializer_range": 0.02},
        not_lossless=lambda config, times: AFTER_THE_SUM if times.hidden != 1 else "",
    )
)
