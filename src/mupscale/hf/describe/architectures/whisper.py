"""Whisper: two convolutions of a spectrogram, then encoder and decoder as in BART with their norms before each layer.

The encoder's positions are a table of sinusoids that is saved with the model, so that it is copied as it is.
"""

from dataclasses import replace

from mupscale.hf.describe.architecture import Config, Tied
from mupscale.hf.describe.architectures.bart import BART
from mupscale.hf.describe.multipliers import Times
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Layout, readout, same, vector
from mupscale.system import setting


def _refuse(config: Config, times: Times) -> str:
    if config.get("scale_embedding") and times.hidden != 1:
        return (
            "this Whisper model says that it multiplies its embeddings by √d_model (scale_embedding in config.json), "
            f"which no published one does. Keep hidden, as in {setting('times', 'ffn=2')}"
        )
    return ""


WHISPER = register(
    replace(
        BART,
        model_type="whisper",
        tensors={
            **BART.tensors,
            "*encoder.conv1.weight": Layout({-3: "hidden"}, {}),
            "*encoder.conv2.weight": Layout({-3: "hidden"}, {-2: "hidden"}),
            "*encoder.conv[12].bias": vector("hidden"),
            "proj_out.weight": readout("hidden"),
            "projector.weight": readout("hidden"),
            "projector.bias": same(),
            "classifier.*": same(),
            "layer_weights": same(),
        },
        tied=Tied(
            embedding="*decoder.embed_tokens.weight",
            readouts=("proj_out.weight",),
            norm=("*decoder.layer_norm.weight", "*decoder.layer_norm.bias"),
            models=("ForConditionalGeneration", "ForCausalLM"),
            default=True,
        ),
        defaults={
            "d_model": 384,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "init_std": 0.02,
        },
        init={"*encoder.embed_positions.weight": lambda config: 0.0},
        refuse=_refuse,
        not_lossless=lambda config, times: (
            "new units of its convolutions reach all of its encoder" if times.hidden != 1 else ""
        ),
    )
)
