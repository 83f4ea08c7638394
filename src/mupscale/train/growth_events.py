"""Growth of the model in the middle of a run or at its start: how new units are filled, and what new blocks are."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal

from mupscale.core import WholeWidth
from mupscale.growth import (
    DEPTH_OPERATORS,
    OPERATORS,
    Deepen,
    DepthOperator,
    GaussianNoise,
    Noise,
    Operator,
    OperatorWord,
    SignalNoise,
    choose_operator,
    is_replica,
    word_in_table,
)
from mupscale.system import MupscaleError

NoiseLevel = float | dict[str, float]
DEPTH_SIZES = ("depth", "layers", "n_layer", "n_layers", "num_layers", "num_hidden_layers")
"""What a model's argument may be called that is its number of blocks, for a growth event to say `depth`."""


def sizes_like(width: WholeWidth, other: WholeWidth) -> WholeWidth:
    """A width with the names of another: a number is its one size that is no depth, and the depth stays."""
    names = [name for name in other if name not in DEPTH_SIZES] if isinstance(other, dict) else []
    return width if isinstance(width, dict) or len(names) != 1 else {**other, names[0]: width}  # type: ignore[dict-item]


@dataclass(frozen=True, kw_only=True)
class Filling:
    """What new units and new blocks are filled with, in a growth event and in a recipe that starts from a checkpoint.

    Args:
        how: how to fill new units (outside `grow`, when the checkpoint `from` is upscaled): fresh (add newly
            initialised units; the default), lossless (fresh units that leave the outputs unchanged at first), copies
            (copy every unit and add noise; the default if you give noise) or paired (copies whose noise cancels at
            first). For comparison: net2net (random copies) and naive (copies), both without the optimizer state
        noise: how much noise copies get so that they differ. With 0 the copies stay equal, and the wide model stays a
            replica of the small one. Or one value per parameter name
        noise_unit: unit of noise: init (a fresh initialisation), theory (the paper's constants) or signal (each
            weight's spectral norm)
        outgoing: for fresh units, the scale of their weights into old units, from 0 (old units do not see them yet) to
            1 (as initialised)
        deepen: what new blocks are: identity (they change nothing at first), stack (copies appended after all blocks)
            or interleaved (each copy follows its original). If only the depth grows, you can give this as `how`
    """

    how: str | None = None
    noise: NoiseLevel = 0.0
    noise_unit: Literal["init", "theory", "signal"] = "init"
    outgoing: float = 1.0
    deepen: Deepen = "identity"

    @property
    def filling(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Filling)}

    @property
    def _wider(self) -> OperatorWord:
        """What new units are filled by; where `how` is about new blocks alone, by copies."""
        how = self.how or usual_how(self.noise)
        return word_in_table("copies" if how in DEPTH_OPERATORS else how)

    @property
    def takes_noise(self) -> bool:
        """Whether new units are copies, which noise makes differ."""
        return "noise" in self._wider.takes

    def build_operator(self) -> Operator:
        """The operator to grow in width with; an error where there are settings that are another one's."""
        how, has_noise = self.how or usual_how(self.noise), self.noise != 0
        if how in DEPTH_OPERATORS and has_noise:
            raise MupscaleError(
                f"how: {how} is for new blocks and takes no noise: use deepen: {how}, and how for new units"
            )
        make, takes = self._wider
        if has_noise and "noise" not in takes:
            raise MupscaleError(f"how: {how} takes no noise: leave noise out, or use how: copies")
        if self.outgoing != 1 and "outgoing" not in takes:
            raise MupscaleError(f"how: {how} does not use outgoing: leave it out, or use how: fresh")
        settings = {"noise": build_noise(self.noise, self.noise_unit), "outgoing": self.outgoing}
        return make(**{name: settings[name] for name in takes})

    def build_operators(self) -> tuple[Operator, DepthOperator]:
        """The operators to grow with, in width and in depth; where depth alone grows, `how` may name its own."""
        return self.build_operator(), DEPTH_OPERATORS[self.how if self.how in DEPTH_OPERATORS else self.deepen]


@dataclass(frozen=True)
class Growth(Filling):
    """One growth of the model in the middle of the run; beside these fields it has those of `Filling`.

    Args:
        at: grow after this many steps
        width: the new width; copies need a multiple of the old one, fresh units take any larger one
        lr: learning rate from here on, for the base width (default: unchanged)
        depth: the new number of residual blocks (default: unchanged); the model's width must name a depth

    Example:
        >>> Growth(at=2000, width=512, noise=0.3).lr is None
        True
        >>> Growth(at=2000, width=640).build_operator()
        Fresh(outgoing=1.0, lossless=False)
    """

    at: int
    width: WholeWidth = 0
    _: KW_ONLY
    lr: float | None = None
    depth: int | None = None

    def resolved(self, before: WholeWidth) -> Growth:
        """The event with its whole width, and with how it grows if it leaves that out; before: the model's so far."""
        width = sizes_like(self.width, before) if self.width != 0 else before
        if self.depth is None and self.width != 0:
            how = "copies" if width == before else usual_how(self.noise)  # of a new rate alone nothing is filled
            return replace(self, width=width, how=self.how or how)
        if self.depth is None:
            raise MupscaleError(f"growth at step {self.at}: give the new width, the new depth, or both")
        name = next((n for n in DEPTH_SIZES if isinstance(before, dict) and n in before), None)
        if name is None:
            raise MupscaleError(
                f"growth at step {self.at}: to grow the depth, the recipe's width must name it, such as width: "
                f"{{width: 64, layers: 4}}, not {before}"
            )
        assert isinstance(before, dict)
        if not isinstance(width, dict):
            others = ", ".join(n for n in before if n != name)
            raise MupscaleError(f"growth at step {self.at}: width {width} must name {others}")
        how = self.how or usual_how(self.noise)
        return replace(self, width={**before, **width, name: self.depth}, depth=None, how=how)

    @property
    def words(self) -> str:
        """How it grows, for the line that says so."""
        if self.how in DEPTH_OPERATORS:
            return f"new blocks: {self.how}"
        if self.how in OPERATORS and "noise" not in OPERATORS[self.how].takes:
            return f"{self.how} units"
        if is_replica(self.build_operator()):
            return f"{self.how} without noise, which stay equal: the wide model remains a replica"
        noise = "by parameter" if isinstance(self.noise, dict) else f"{self.noise:g}"
        return f"{'' if self.how == 'copies' else f'{self.how} '}noise {noise}"

    def record(self, lr: float) -> dict[str, Any]:
        """What the metrics say of it; lr: the learning rate from here on."""
        return {"width": self.width, **self.filling, "lr": lr}


def usual_how(noise: NoiseLevel) -> str:
    """What `how` is where a recipe leaves it out."""
    return "copies" if choose_operator(None, 1.0 if noise else None).needs_multiples else "fresh"


def build_noise(level: NoiseLevel, unit: str) -> Noise:
    """Noise of this level; none at all for 0, whatever the unit. Constants by name are never relative to a signal."""
    if level == 0:
        return 0.0
    if isinstance(level, dict):
        return GaussianNoise(level, unit="theory" if unit == "signal" else unit)  # type: ignore[arg-type]
    return SignalNoise(level) if unit == "signal" else GaussianNoise(level, unit=unit)  # type: ignore[arg-type]
