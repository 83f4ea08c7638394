"""Growth of the model in the middle of a run, and the noise that comes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mupscale.core import WholeWidth
from mupscale.growth import GaussianNoise, Noise, SignalNoise

NoiseLevel = float | dict[str, float]


@dataclass(frozen=True)
class Growth:
    """One growth of the model in the middle of the run.

    Args:
        at: after how many steps
        width: the new width, a multiple of the one before
        noise: how much symmetry-breaking noise; 0 goes on exactly as before; or constants by parameter name
        unit: what noise is measured in: a fresh initialisation ('init'), the paper's constants ('theory'),
            or the spectral norm of each weight ('signal')
        lr: learning rate from here on, at the base width; the same as before if not given

    Example:
        >>> Growth(at=2000, width=512, noise=0.3).lr is None
        True
    """

    at: int
    width: WholeWidth
    noise: NoiseLevel = 0.0
    unit: Literal["init", "theory", "signal"] = "init"
    lr: float | None = None

    def build_noise(self) -> Noise:
        """The noise to upscale with."""
        return build_noise(self.noise, self.unit)


def build_noise(level: NoiseLevel, unit: str) -> Noise:
    """Noise of this level; none at all for 0, whatever the unit. Constants by name are never relative to a signal.

    >>> build_noise(0, "init")
    0.0
    >>> type(build_noise(0.3, "signal")).__name__
    'SignalNoise'
    """
    if level == 0:
        return 0.0
    if isinstance(level, dict):
        return GaussianNoise(level, unit="theory" if unit == "signal" else unit)  # type: ignore[arg-type]
    return SignalNoise(level) if unit == "signal" else GaussianNoise(level, unit=unit)  # type: ignore[arg-type]
