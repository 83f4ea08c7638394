"""A residual network without norms, for the learning rates over depth in docs/results/depth-rates.md."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualMLP(nn.Module):
    """x ← x + W₂ relu(W₁ x), so many times; what writes into the stream starts at zero, as is usual without norms."""

    def __init__(self, width: int, layers: int, d_in: int = 54, d_out: int = 7) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(d_in, width), nn.Linear(width, d_out)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        for block in self.blocks:
            nn.init.zeros_(block[2].weight)
            nn.init.zeros_(block[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)
