"""Granite: LLaMA with multipliers of embeddings, residuals, attention and logits, which know nothing of the width."""

from dataclasses import replace

from mupscale.hf.describe.architectures.llama import LLAMA
from mupscale.hf.describe.registry import register

GRANITE = register(replace(LLAMA, model_type="granite", divisible=False))
