"""What a study needs to know beside a training recipe: where to tune, over what, and who takes part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import DEFAULT_NAMES, check_contenders
from mupscale.system import MupscaleError

RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SMALL = (8, 4)  # how many times narrower than the base model the small ones are, where no widths are given


@dataclass(frozen=True)
class StudySettings:
    """The section `study` of a recipe, for `mupscale run`.

    The recipe itself says the rest: the base model's width and steps, and the width and steps after its growth event.

    Args:
        widths: small widths, of which the first is tuned at and all are forecast from, e.g. [64, 128]; none takes an
            eighth and a quarter of the base model's
        lrs: learning rates that every contender tries at the small width; none takes the optimizer's own times 1/4 to 4
        noises: noise levels that copies try there, 1 being as much as a fresh initialisation has
        prune: under wsd, candidates that lie so far behind the best after the first budget go no further (0.1: 10 %),
            unless they are the next learning rates to the best; 0 tries all to the end
        budgets: parts of the full budget at which every contender is measured
        seeds: how many seeds the large models train with
        small_seeds: how many seeds the small models of the forecast train with
        schedule: of every contender: wsd (constant, then linear to zero over the last quarter of its budget), cosine,
            or recipe (the recipe's own)
        contenders: who takes part; beside the usual four: copies-without-noise, paired-noise, net2net,
            naive-widening, from-scratch-all-steps
        measure: the loss that counts: held-out (the mean over the whole held-out set), or train
        base_steps: with --from, how many steps the checkpoint has trained, where it does not tell itself
        engine: auto trains many models as one where that works, vectorised nowhere else, serial one at a time

    Example:
        >>> StudySettings(seeds=2).small_widths(256, 1024)
        [32, 64]
    """

    widths: list[WholeWidth] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0])
    prune: float = 0.1
    budgets: list[float] = field(default_factory=lambda: [0.25, 0.5, 1.0])
    seeds: int = 3
    small_seeds: int = 3
    schedule: Literal["wsd", "cosine", "recipe"] = "wsd"
    contenders: list[str] = field(default_factory=lambda: list(DEFAULT_NAMES))
    measure: Literal["held-out", "train"] = "held-out"
    base_steps: int | None = None
    engine: Literal["auto", "vectorised", "serial"] = "auto"

    def __post_init__(self) -> None:
        for name in ("seeds", "small_seeds"):
            if getattr(self, name) < 1:
                raise MupscaleError(f"study.{name} is {getattr(self, name)}, but must be at least 1")
        self._check_words()
        if not (isinstance(self.prune, int | float) and math.isfinite(self.prune) and self.prune >= 0):
            raise MupscaleError(f"study.prune is {self.prune!r}, but must be a number of at least 0")
        self._check_numbers("lrs", self.lrs)
        self._check_numbers("noises", self.noises)
        self._check_numbers("budgets", self.budgets)
        if max(self.budgets, default=0) != 1 or sorted(set(self.budgets)) != self.budgets:
            raise MupscaleError(
                f"study.budgets is {self.budgets}, but they are parts of the full budget that rise to 1, such as "
                f"[0.25, 0.5, 1]"
            )
        check_contenders(self.contenders, "study.contenders")

    def _check_words(self) -> None:
        hints = get_type_hints(StudySettings)
        for name in ("schedule", "measure", "engine"):
            if getattr(self, name) not in get_args(hints[name]):
                raise MupscaleError(
                    f"study.{name}: {getattr(self, name)!r} is none of {', '.join(get_args(hints[name]))}"
                )

    def _check_numbers(self, name: str, values: Sequence[float]) -> None:
        for value in values:
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise MupscaleError(f"study.{name} holds {value!r}, but they are numbers above 0")

    def rates(self, lr: float) -> list[float]:
        """The learning rates to try, rising; lr: the optimizer's own."""
        return sorted(set(self.lrs)) or [lr * factor for factor in RATE_FACTORS]

    def small_widths(self, narrow: WholeWidth, wide: WholeWidth) -> list[WholeWidth]:
        """The small widths, narrowest first."""
        base = Width.of(narrow)
        if self.widths:
            for width in self.widths:
                Width.of(width, "study.widths", whole=True).check_form(base, "the small width", "the recipe's width")
            return sorted(self.widths, key=lambda width: Width.of(width).size)
        growing = base.growing(Width.of(wide))
        smaller = [
            Width({name: size // part if name in growing else size for name, size in base.sizes.items()}, base.is_plain)
            for part in _SMALL
            if all(base.sizes[name] % part == 0 for name in growing)
        ]
        if not smaller:
            raise MupscaleError(
                f"width {narrow} has no eighth and no quarter to tune at: give study.widths, such as [64]"
            )
        return [width.whole for width in smaller]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
