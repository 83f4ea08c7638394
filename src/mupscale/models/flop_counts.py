"""What training costs: the FLOP formulas and the accounting of the paper's Appendix F.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mupscale.system import MupscaleError, warn

# A multiply-accumulate is two FLOPs forward and four backward (input gradient and weight gradient).
FLOPS_PER_MAC = 6


def mlp_flops(d_in: int, width: int | Sequence[int], d_out: int, depth: int = 4) -> int:
    """Training FLOPs per sample of an `MLP`: six per weight, biases left out (Appendix F.4).

    >>> mlp_flops(54, 64, 7)  # 6 * (54 * 64 + 64 * 64 + 64 * 64 + 64 * 7)
    72576
    """
    hidden = [width] * (depth - 1) if isinstance(width, int) else list(width)
    sizes = [d_in, *hidden, d_out]
    return FLOPS_PER_MAC * sum(fan_in * fan_out for fan_in, fan_out in pairwise(sizes))


def resnet18_flops(width: int, classes: int = 100, image: int = 32, in_channels: int = 3) -> int:
    """Training FLOPs per image of a `ResNet18`: six per MAC of convolutions and readout (Appendix F.4).

    >>> f"{resnet18_flops(64):.3g}"
    '3.33e+09'
    """
    side, channels = image, width
    macs = in_channels * width * 9 * side**2
    for stage in range(4):
        before, channels = channels, width * 2**stage
        shortcut = 0
        if stage > 0:
            side = (side + 1) // 2
            shortcut = before * channels
        macs += (9 * before * channels + 3 * 9 * channels**2 + shortcut) * side**2
    return FLOPS_PER_MAC * (macs + channels * classes)


def gpt2_flops(layers: int, heads: int, head_dim: int, vocab: int, context: int) -> int:
    """Training FLOPs per token of a tied `GPT2`, 6N + 12 L H Q T (Appendix F.4).

    The paper's figures follow if N is all parameters, biases and LayerNorms too, but the position embeddings.

    >>> f"{gpt2_flops(layers=12, heads=12, head_dim=64, vocab=50257, context=1024):.3g}"
    '8.55e+08'
    """
    d_model = heads * head_dim
    parameters = layers * (12 * d_model**2 + 13 * d_model) + 2 * d_model + vocab * d_model
    return 6 * parameters + 12 * layers * heads * head_dim * context


def count_flops(module: nn.Module, *inputs: object, **named: object) -> int:
    """Training FLOPs (forward and backward) of one call of any module, counted as in Appendix F.4.

    Counts the matrix products and convolutions of a forward pass in eval mode without gradients, times three:
    a backward pass costs twice the forward one. Leaves modes, buffers and gradients as they were. On the meta
    device it costs nothing, however large the model. Nothing else counts; a model that runs FFTs is warned of, once.

    >>> count_flops(nn.Linear(1000, 1000, device="meta"), torch.empty(1, 1000, device="meta"))
    6000000
    """
    parts = list(module.modules())
    if any(isinstance(part, nn.RNNBase) and not part.all_weights[0][0].is_meta for part in parts):
        raise MupscaleError("recurrent layers can only be counted on the meta device; move module and inputs there")
    modes, fastpath = [part.training for part in parts], torch.backends.mha.get_fastpath_enabled()
    module.eval()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the counter sees nothing inside some of the fused kernels
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, _NoteFFTs() as ffts:  # type: ignore[no-untyped-call]
            module(*inputs, **named)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for part, training in zip(parts, modes, strict=True):
            part.training = training
    counted = 3 * int(counter.get_total_flops())
    if ffts.seen or not counted:
        _warn_uncounted(bool(counted))
    return counted


class _NoteFFTs(TorchDispatchMode):
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or "_fft_" in str(func)
        return func(*args, **(kwargs or {}))


@cache
def _warn_uncounted(some: bool) -> None:
    """Once in a process: a study counts the same model at every size."""
    what = (
        "FFTs of the model are left out" if some else "none of the model's operations are counted, and its FLOPs are 0"
    )
    warn(f"{what}: FLOPs are those of matrix products and convolutions. Costs that are compared may be off")


@dataclass(frozen=True)
class Cost:
    """The cost of a training run: FLOPs per sample (or token) and how many samples it sees (Appendix F.4).

    >>> Cost(per_sample=mlp_flops(54, 64, 7), samples=1e9).tflops
    72.576
    """

    per_sample: float
    samples: float

    @property
    def total(self) -> float:
        """All FLOPs of the run."""
        return self.per_sample * self.samples

    @property
    def tflops(self) -> float:
        """All FLOPs of the run in units of 10^12, the paper's unit."""
        return self.total / 1e12
