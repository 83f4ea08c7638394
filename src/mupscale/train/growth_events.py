"""Growth of the model in the middle of a run or at its start, and how the new units are filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mupscale.core import WholeWidth
from mupscale.growth import Copies, Fresh, GaussianNoise, NaiveCopies, Net2Net, Noise, Operator, SignalNoise
from mupscale.system import MupscaleError

NoiseLevel = float | dict[str, float]
How = Literal["copies", "paired", "fresh", "lossless", "net2net", "naive"]
"""How new units are filled: copies with noise, copies with noise that cancels, fresh ones, fresh ones that keep the
function; for comparison Net2Net's random copies, and copies without the optimizer's state."""


@dataclass(frozen=True)
class Growth:
    """One growth of the model in the middle of the run.

    Args:
        at: after how many steps
        width: the new width, a multiple of the one before, or any wider one for fresh units
        how: copies (of every unit, with noise), paired (copies, with noise that cancels at first), fresh (new units
            drawn beside the old ones) or lossless (fresh, but the function stays at first); for comparison net2net
            (random copies) and naive (copies), both without the optimizer's state
        noise: how much symmetry-breaking noise; 0 goes on exactly as before; or constants by parameter name
        unit: what noise is measured in: a fresh initialisation ('init'), the paper's constants ('theory'),
            or the spectral norm of each weight ('signal')
        outgoing: for fresh units, from 0 to 1, how much of their fresh weight they have towards old ones
        lr: learning rate from here on, at the base width; the same as before if not given

    Example:
        >>> Growth(at=2000, width=512, noise=0.3).lr is None
        True
        >>> Growth(at=2000, width=640, how="fresh").build_operator()
        Fresh(outgoing=1.0, lossless=False)
    """

    at: int
    width: WholeWidth
    noise: NoiseLevel = 0.0
    unit: Literal["init", "theory", "signal"] = "init"
    lr: float | None = None
    how: How = "copies"
    outgoing: float = 1.0

    @property
    def words(self) -> str:
        """How it grows, for the line that says so."""
        if self.how in ("fresh", "lossless"):
            return f"{self.how} units"
        noise = "by parameter" if isinstance(self.noise, dict) else f"{self.noise:g}"
        return f"{'' if self.how == 'copies' else f'{self.how} '}noise {noise}"

    def record(self, lr: float) -> dict[str, Any]:
        """What the metrics say of it; lr: the learning rate from here on.

        >>> Growth(at=10, width=64, how="fresh").record(lr=0.1)
        {'width': 64, 'noise': 0.0, 'unit': 'init', 'how': 'fresh', 'lr': 0.1}
        """
        said = {"width": self.width, "noise": self.noise, "unit": self.unit, "how": self.how}
        return without_defaults({**said, "outgoing": self.outgoing, "lr": lr})

    def build_operator(self) -> Operator:
        """The operator to grow with."""
        return build_operator(self.how, self.noise, self.unit, self.outgoing)


def build_operator(how: How, noise: NoiseLevel, unit: str, outgoing: float = 1.0) -> Operator:
    """The operator that a recipe names; an error where it has settings that are another one's.

    >>> build_operator("copies", 0.5, "init")
    Copies(noise=GaussianNoise(std=0.5, unit='init'), paired=False)
    >>> build_operator("fresh", 0.5, "init")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: how is fresh, which takes no noise; leave it out, or grow by copies
    """
    if how in ("fresh", "lossless"):
        if noise != 0:
            raise MupscaleError(f"how is {how}, which takes no noise; leave it out, or grow by copies")
        if how == "lossless" and outgoing != 1:
            raise MupscaleError("how is lossless, which sets outgoing weights itself; leave out outgoing")
        return Fresh(outgoing=outgoing, lossless=how == "lossless")
    if outgoing != 1:
        raise MupscaleError(f"how is {how}, which has no new units with outgoing weights of their own; take how: fresh")
    kinds = {"net2net": Net2Net, "naive": NaiveCopies}
    return kinds.get(how, Copies)(build_noise(noise, unit), paired=how == "paired")


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a growth or a recipe, without how new units are filled where that is by copies.

    >>> without_defaults({"at": 10, "width": 64, "how": "copies", "outgoing": 1.0})
    {'at': 10, 'width': 64}
    """
    usual = {"how": "copies", "outgoing": 1.0, "on_nonfinite": "stop"}
    return {name: value for name, value in values.items() if name not in usual or value != usual[name]}


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
