"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with other heads."""

from dataclasses import replace

from mupscale.hf.describe.architecture import Tied
from mupscale.hf.describe.architectures.bert import BERT
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import linear, readout, same, vector

DENSE_CLASSIFIER = {
    "classifier.dense.weight": linear("hidden", "hidden"),
    "classifier.dense.bias": vector("hidden"),
    "classifier.out_proj.weight": readout("hidden"),
    "classifier.out_proj.bias": same(),
}

ROBERTA = register(
    replace(
        BERT,
        model_type="roberta",
        tensors={
            "lm_head.dense.weight": linear("hidden", "hidden"),
            "lm_head.dense.bias": vector("hidden"),
            "lm_head.layer_norm.weight": vector("hidden").in_norm("layer"),
            "lm_head.layer_norm.bias": vector("hidden").in_norm("bias"),
            "lm_head.decoder.weight": readout("hidden"),
            "lm_head.decoder.bias": same(),
            "lm_head.bias": same(),
            **DENSE_CLASSIFIER,
            **BERT.tensors,
        },
        tied=Tied(
            embedding="*embeddings.word_embeddings.weight",
            readouts=("lm_head.decoder.weight",),
            norm=("lm_head.layer_norm.*",),
            models=("ForMaskedLM", "ForCausalLM"),
            default=True,
            aliases={"lm_head.decoder.bias": "lm_head.bias"},
        ),
    )
)

XLM_ROBERTA = register(replace(ROBERTA, model_type="xlm-roberta"))
CAMEMBERT = register(replace(ROBERTA, model_type="camembert"))
