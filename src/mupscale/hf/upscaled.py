"""What an upscaling wrote, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mupscale.growth import Deepen, Fresh
from mupscale.hf.describe import Times
from mupscale.hf.files import shorten_number, size_in_words
from mupscale.hf.verification import Comparison

__all__ = ["Upscaled"]

_OF_OPTIMIZER = "optimizer.pt: the saved optimizer, grown too; mupscale.hf.resume_optimizer reads it"


@dataclass(frozen=True)
class Upscaled:
    """What was written. `comparison`: of the two models, where they were compared; else `unverified` says why not.

    optimizer: whether a saved optimizer went along.
    """

    path: Path
    times: Times
    numbers: tuple[int, int]
    bytes: int
    files: int
    comparison: Comparison | None = None
    unverified: str = ""
    fresh: Fresh | None = None
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    deepen: Deepen | None = None
    optimizer: bool = False

    @property
    def layers(self) -> tuple[int, int] | None:
        """How many there are, before and after; None if the number stays."""
        return self.sizes.get("layers")

    @property
    def difference(self) -> float | None:
        """The largest relative difference of any output; None if the models were not compared."""
        if self.comparison is None:
            return None
        return max(row.difference for row in self.comparison.rows if not row.what.endswith("in the files"))

    def __str__(self) -> str:
        before, after = map(shorten_number, self.numbers)
        size = f"{size_in_words(self.bytes)} in {self.files} file{'s' * (self.files != 1)}"
        checked = f"not verified: {self.unverified}" if self.comparison is None else self.comparison.verdict
        wider = [
            f"{part} {a} → {b}" for part, (a, b) in self.sizes.items() if a != b and part not in ("layers", "experts")
        ]
        how = f"{'copies' if self.fresh is None else 'fresh units'} ({', '.join(wider) or 'of the same sizes'})"
        if self.deepen is not None:
            layers = f"{' → '.join(map(str, self.sizes['layers']))} layers ({self.deepen})"
            how = f"{how} and {layers}" if wider else layers
        if "experts" in self.sizes:
            experts = f"{' → '.join(map(str, self.sizes['experts']))} experts"
            how = f"{how} and {experts}" if wider else experts
        optimizer = f"{_OF_OPTIMIZER}\n" if self.optimizer else ""
        return f"{self.path}: {before} → {after} parameters with {how}, {size}\n{optimizer}{checked}"
