"""The multilayer perceptron of the paper's Section 2.1 and Appendix F.1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from mupscale.system import MupscaleError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "linear": nn.Identity}


class MLP(nn.Module):
    """`depth` Linear layers with an activation between them, not after the last (Appendix F.1: 4 and ReLU).

    `width` is one width for all hidden layers, or the list of their widths, whose length then sets the depth.

    >>> [tuple(layer.weight.shape) for layer in MLP(54, 16, 7, depth=3).layers]
    [(16, 54), (16, 16), (7, 16)]
    """

    def __init__(
        self,
        d_in: int,
        width: int | Sequence[int],
        d_out: int,
        *,
        depth: int = 4,
        bias: bool = True,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if depth < 1:
            raise MupscaleError(f"an MLP needs at least one layer, but depth is {depth}")
        if activation not in ACTIVATIONS:
            raise MupscaleError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        hidden = [width] * (depth - 1) if isinstance(width, int) else list(width)
        sizes = [d_in, *hidden, d_out]
        if min(sizes) < 1:
            raise MupscaleError(f"every layer of an MLP needs at least one unit, but the sizes are {sizes}")
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out, bias=bias) for fan_in, fan_out in pairwise(sizes))
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (..., d_in) to outputs (..., d_out)."""
        for index, layer in enumerate(self.layers):
            x = layer(self.activation(x) if index else x)
        return x
