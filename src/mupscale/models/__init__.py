"""The three architectures of the paper's experiments (Section 4, Appendix F), as ordinary PyTorch modules."""

from __future__ import annotations

from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

__all__ = ["GPT2", "MLP", "ResNet18"]
