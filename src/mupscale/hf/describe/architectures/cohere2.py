"""Cohere 2 (Command R7B): Cohere with a sliding window in some layers. transformers takes head_dim from the sizes."""

from dataclasses import replace

from mupscale.hf.describe.architectures.cohere import COHERE
from mupscale.hf.describe.registry import register

COHERE2 = register(replace(COHERE, model_type="cohere2", head_dim=None, wires=lambda wires, config: {}))
