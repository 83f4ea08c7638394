"""What a study needs to know beside a training recipe: where to tune, over what, and who takes part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import contender_named
from mupscale.system import MupscaleError, checks_arguments

RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_TRIED = 64  # sizes near an eighth or a quarter
_SMALL = (8, 4)  # how many times narrower than the base model the small ones are, where no widths are given


@checks_arguments
@dataclass(frozen=True)
class StudySettings:
    """The section `study` of a recipe, for run, sweep and transfer-check.

    The recipe itself says the rest: the base model's width and steps, and the width and steps after its growth event.

    Args:
        widths: small widths to tune at, e.g. [64, 128]: does growing pay tunes at the first and forecasts from all; the
            paper's comparison tunes at all and extrapolates. None takes an eighth and a quarter of the base model's,
            or the sizes nearest to them that the model can have
        lrs: learning rates to try at the small width; none takes the optimizer's own times 1/4 to 4
        grown_lrs: learning rates of the paper's Sweep 2, after growing; none takes lrs
        noises: noise levels that copies try there, in the growth event's unit (with --from its own, or noise_unit):
            under init, the default, 1 is as much as a fresh initialisation has
        prune: under wsd, candidates that lie so far behind the best after the first budget go no further (0.1: 10 %),
            unless they are the next learning rates to the best; 0 tries all to the end
        budgets: parts of the full budget at which every contender is measured
        seeds: how many seeds the large models train with
        small_seeds: how many seeds the small models train with, those of sweeps among them
        schedule: of every contender: wsd (constant, then linear to zero over the last quarter of its budget), cosine,
            or recipe (the recipe's own, as in the paper's comparison)
        contenders: who takes part; none takes the usual ones, to which contenders+ adds. Does growing pay:
            from-scratch, continued, copies, fresh, and on request copies-without-noise, paired-noise, net2net,
            naive-widening, from-scratch-all-steps; where depth alone grows, identity-blocks and copied-blocks take the
            place of copies and fresh
        measure: the loss that counts: held-out (the mean over the whole held-out set), or train; none takes held-out,
            and train in the paper's comparison
        base_steps: with --from, how many steps the checkpoint has trained, where it does not tell itself
        engine: auto trains many models as one where that works, vectorised nowhere else, serial one at a time
        sampler: of sweeps: grid (every cell), random, or tpe
        trials: how many trials random and tpe take
        pruner: of sweeps: none, median, or halving (successive halving): stop trials that fall behind
        storage: where sweeps are kept: none for a SQLite file in the study's folder, journal:PATH, or a database URL
        retries: how often a trial whose worker died is trained again: none for without limit

    Example:
        >>> StudySettings(seeds=2).small_widths(256, 1024)
        [32, 64]
    """

    widths: list[WholeWidth] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    grown_lrs: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0])
    prune: float = 0.1
    budgets: list[float] = field(default_factory=lambda: [0.25, 0.5, 1.0])
    seeds: int = 3
    small_seeds: int = 3
    schedule: Literal["wsd", "cosine", "recipe"] = "wsd"
    contenders: list[str] = field(default_factory=list)
    measure: Literal["held-out", "train"] | None = None
    base_steps: int | None = None
    engine: Literal["auto", "vectorised", "serial"] = "auto"
    sampler: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = None
    pruner: Literal["none", "median", "halving"] = "none"
    storage: str | None = None
    retries: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("small_seeds", 1), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise MupscaleError(f"study.{name} is {value}, but must be at least {least}")
        if not 0 <= self.prune < math.inf:
            raise MupscaleError(f"study.prune is {self.prune!r}, but must be a number of at least 0")
        for name in ("lrs", "grown_lrs", "budgets", "noises"):
            for value in getattr(self, name):
                if not 0 <= value < math.inf or (value == 0 and name != "noises"):
                    lowest = "0 or more" if name == "noises" else "above 0"
                    raise MupscaleError(f"study.{name} holds {value!r}, but they are numbers {lowest}")
        if max(self.budgets, default=0) != 1 or sorted(set(self.budgets)) != self.budgets:
            raise MupscaleError(
                f"study.budgets is {self.budgets}, but they are parts of the full budget that rise to 1, such as "
                f"[0.25, 0.5, 1]"
            )
        for name in self.contenders:
            contender_named(name)
        if self.sampler != "grid" and (self.trials is None or self.trials < 1):
            raise MupscaleError(f"study.sampler {self.sampler} needs study.trials, how many to take")

    def resolved(self, usual: Sequence[str], measure: Literal["held-out", "train"]) -> StudySettings:
        """The same with a preset's own contenders and measure, where none are given."""
        return replace(self, contenders=self.contenders or list(usual), measure=self.measure or measure)

    def rates(self, lr: float) -> list[float]:
        """The learning rates to try, rising; lr: the optimizer's own."""
        return sorted(set(self.lrs)) or [lr * factor for factor in RATE_FACTORS]

    def small_widths(
        self, narrow: WholeWidth, wide: WholeWidth, fits: Callable[[WholeWidth], bool] | None = None
    ) -> list[WholeWidth]:
        """The small widths, narrowest first.

        fits: whether the model can have a width. Where it cannot have the usual ones, those nearest to them are taken.
        """
        base = Width.of(narrow)
        if self.widths:
            for width in self.widths:
                Width.of(width, "study.widths", whole=True).check_form(base, "the small width", "the recipe's width")
            return sorted(self.widths, key=lambda width: Width.of(width).size)
        growing = base.growing(Width.of(wide))
        steps = math.gcd(*(int(base.sizes[name]) for name in growing))

        def part(k: int) -> WholeWidth:
            """The width with k of its equal steps."""
            sizes = {name: size // steps * k if name in growing else size for name, size in base.sizes.items()}
            return Width(sizes, base.is_plain).whole

        smaller = [part(steps // times) for times in _SMALL if steps % times == 0]
        if fits is not None and not (len(smaller) == len(_SMALL) and all(map(fits, smaller))):
            smaller = []
            for times in _SMALL:
                near = sorted(range(1, steps // 2 + 1), key=partial(_distance, steps / times))[:_TRIED]
                found = (width for k in near if (width := part(k)) not in smaller and fits(width))
                smaller += itertools.islice(found, 1)
            smaller.sort(key=lambda width: Width.of(width).size)
        if not smaller:
            raise MupscaleError(
                f"width {narrow} has no eighth and no quarter to tune at, nor a size near them: give study.widths, as "
                f"in [64]"
            )
        return smaller

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _distance(wanted: float, k: int) -> float:
    """How far a size is from the one that is wanted, as a ratio."""
    return abs(math.log(k / wanted))
