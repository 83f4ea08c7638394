"""Gemma 3, the language model: Gemma 2 with a norm of each head's queries and keys, which all heads share."""

from dataclasses import replace

from mupscale.hf.describe.architectures.gemma import GEMMA2
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import same

GEMMA3_TEXT = register(
    replace(GEMMA2, model_type="gemma3_text", tensors={"*.self_attn.[qk]_norm.weight": same(), **GEMMA2.tensors})
)
