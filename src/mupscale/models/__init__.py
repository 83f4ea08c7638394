"""The three architectures of the paper (Section 4, Appendix F) as ordinary PyTorch modules, and what they cost."""

from mupscale.models.flop_counts import Cost, count_flops, gpt2_flops, mlp_flops, resnet18_flops
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

__all__ = ["GPT2", "MLP", "Cost", "ResNet18", "count_flops", "gpt2_flops", "mlp_flops", "resnet18_flops"]
