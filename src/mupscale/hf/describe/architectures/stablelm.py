"""StableLM: LLaMA with LayerNorm and rotary embeddings of a part of each head.

With `qk_layernorm` every head has norms in tensors of their own, whose number a growth of heads would change.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.architectures.llama import ATTENTION, FEED_FORWARD, HEADS, LLAMA, TIED
from mupscale.hf.describe.multipliers import Times
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import same, table, vector
from mupscale.system import setting


def _refuse(config: Config, times: Times) -> str:
    if config.get("qk_layernorm") and times.heads != 1:
        return (
            "this StableLM model has a separate tensor for each head's norm (qk_layernorm in config.json), and more "
            "heads would need tensors that the files lack: let only the feed-forward layers grow, as in "
            f"{setting('times', 'ffn=2')}"
        )
    return ""


STABLELM = register(
    replace(
        LLAMA,
        model_type="stablelm",
        head_dim=None,
        divisible=False,
        tensors={
            **ATTENTION,
            **FEED_FORWARD,
            "*.self_attn.[qk]_layernorm.norms.*.weight": same(),
            "*embed_tokens.weight": table("hidden"),
            "*norm.weight": vector("hidden").in_norm("layer"),
            "*norm.bias": vector("hidden").in_norm("bias"),
            **HEADS,
        },
        tied=replace(TIED, norm=("model.norm.*", "norm.*")),
        defaults={
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "initializer_range": 0.02,
        },
        refuse=_refuse,
    )
)
