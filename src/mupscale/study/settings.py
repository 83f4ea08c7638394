"""What a study needs to know beside a training recipe: where to tune, over what, and who takes part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import contender_named
from mupscale.system import MupscaleError, checks_arguments, recipe_entry
from mupscale.train import sizes_like

RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_TRIED = 64  # sizes near the wanted ones
NARROW = 8  # a model narrower than that is a poor guide to a large one
_SMALL, _LESS_SMALL = (8, 4), (4, 2)  # how many times narrower the small models are, where no widths are given


@checks_arguments
@dataclass(frozen=True)
class StudySettings:
    """The section `study` of a recipe, for run, sweep and transfer-check.

    The recipe itself says the rest: the base model's width and steps, and the width and steps after its growth event.

    Args:
        widths: small widths to tune at, e.g. [64, 128]. The study tunes at the first and forecasts from all; --paper
            tunes at all and extrapolates (default: about 1/8 and 1/4 of the base model's width)
        lrs: learning rates to try at the small width (default: the optimizer's, times 1/4 to 4)
        embeddings: factors of the embeddings' learning rate to try, each with every one of lrs, in the paper's Sweep 1;
            the large models have the best one, too (default: the rules' own)
        grown_lrs: learning rates to try after growing, in the paper's Sweep 2 (default: lrs)
        noises: noise levels to try for copies, in the unit of the growth event (noise_unit if there is none); in init,
            the default, 1 is the size of a fresh initialisation
        prune: stop a setting early if its loss is this far above the best after the first budget (0.1 is 10 %; wsd
            only). Neighbours of the best learning rate always train to the end. 0 stops none
        budgets: fractions of the full budget at which every contender is measured
        seeds: number of seeds of the large models
        small_seeds: number of seeds of the small models, sweeps included
        schedule: learning rate schedule of every contender: wsd (constant, then linear to zero over the last quarter of
            the budget), cosine, or recipe (the recipe's own; always used by --paper)
        contenders: the ways to train that are compared; contenders+ adds one to the usual ones. Usual: from-scratch,
            continued, copies, fresh. More: copies-without-noise, paired-noise, net2net, naive-widening,
            from-scratch-all-steps. If only the depth grows: identity-blocks and copied-blocks replace copies and fresh
        measure: the loss to compare: held-out (mean over the whole held-out set) or train (default: held-out; train
            with --paper)
        base_steps: with --from, how many steps the checkpoint has trained, if it does not record it
        engine: auto trains many models together if it can, vectorised requires it, serial trains one at a time
        sampler: how sweeps choose settings: grid (all of them), random, or tpe
        trials: number of trials for random and tpe
        pruner: how sweeps stop trials that fall behind: none, median, or halving (successive halving)
        storage: where sweeps are stored: journal:PATH or a database URL (default: a SQLite file in the study's folder)
        retries: how often to repeat a trial whose worker died (default: no limit)

    Example:
        >>> StudySettings(seeds=2).small_widths(256, 1024)
        [32, 64]
    """

    widths: list[WholeWidth] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    embeddings: list[float] = field(default_factory=list)
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
                raise MupscaleError(f"{recipe_entry(f'study.{name}')} is {value}, but must be at least {least}")
        if not 0 <= self.prune < math.inf:
            raise MupscaleError(f"{recipe_entry('study.prune')} is {self.prune!r}, but must be a number of at least 0")
        for name in ("lrs", "embeddings", "grown_lrs", "budgets", "noises"):
            for value in getattr(self, name):
                if not 0 <= value < math.inf or (value == 0 and name != "noises"):
                    lowest = "0 or more" if name == "noises" else "above 0"
                    told = f"{recipe_entry(f'study.{name}')} holds {value!r}"
                    raise MupscaleError(f"{told}, but must be numbers {lowest}")
        if max(self.budgets, default=0) != 1 or sorted(set(self.budgets)) != self.budgets:
            raise MupscaleError(
                f"{recipe_entry('study.budgets')} is {self.budgets}, but must be fractions of the full budget "
                f"that rise to 1, such as [0.25, 0.5, 1]"
            )
        for name in self.contenders:
            contender_named(name)
        if self.sampler != "grid" and (self.trials is None or self.trials < 1):
            raise MupscaleError(
                f"{recipe_entry('study.sampler')} {self.sampler} needs a number of trials: give "
                f"{recipe_entry('study.trials')}"
            )

    def resolved(self, usual: Sequence[str], measure: Literal["held-out", "train"]) -> StudySettings:
        """The same with a preset's own contenders and measure, where none are given."""
        return replace(self, contenders=self.contenders or list(usual), measure=self.measure or measure)

    def rates(self, lr: float) -> list[float]:
        """The learning rates to try, rising; lr: the optimizer's own."""
        return sorted(set(self.lrs)) or [lr * factor for factor in RATE_FACTORS]

    def small_widths(
        self, narrow: WholeWidth, wide: WholeWidth, why_not: Callable[[WholeWidth], str] | None = None
    ) -> list[WholeWidth]:
        """The small widths, narrowest first; one that is given and larger than the narrow width is refused.

        why_not: says why the model cannot have a width, nothing if it can. Where it cannot have the usual ones, those
        nearest to them are taken, or else simple fractions of the width.
        """
        base = Width.of(narrow)
        if self.widths:
            given = [sizes_like(width, narrow) for width in self.widths]
            for width in given:
                Width.of(width, recipe_entry("study.widths"), whole=True).check_form(
                    base, "the small width", "the recipe's width"
                )
                ratios = Width.of(width).ratio_to(base).values()
                if min(ratios) >= 1 < max(ratios):
                    raise MupscaleError(
                        f"{recipe_entry('study.widths')} has {width}, but is for widths smaller than the base model's, "
                        f"{narrow}, where tuning is cheap"
                    )
            return sorted(given, key=lambda width: Width.of(width).size)
        growing = base.growing(Width.of(wide))
        steps = math.gcd(*(int(base.sizes[name]) for name in growing))

        def part(k: int) -> WholeWidth:
            """The width with k of its equal steps."""
            sizes = {name: size // steps * k if name in growing else size for name, size in base.sizes.items()}
            return Width(sizes, base.is_plain).whole

        many_times = _SMALL if all(base.sizes[name] >= NARROW * _SMALL[0] for name in growing) else _LESS_SMALL
        smaller = [part(steps // times) for times in many_times if steps % times == 0]
        if why_not is not None and (len(smaller) < len(many_times) or any(map(why_not, smaller))):
            smaller = []
            for times in many_times:
                by_ratio = {k: abs(math.log(k / (steps / times))) for k in range(1, steps // 2 + 1)}
                near = sorted(by_ratio, key=by_ratio.__getitem__)
                simple = [k for k in near[_TRIED:] if not smaller and steps // math.gcd(k, steps) <= _TRIED]
                tried = (width for width in map(part, near[:_TRIED] + simple) if width not in smaller)
                smaller += itertools.islice((width for width in tried if not why_not(width)), 1)
            smaller.sort(key=lambda width: Width.of(width).size)
        if not smaller:
            why = why_not(part(steps // 2)) if why_not is not None and steps > 1 else ""
            usual = " and ".join(f"1/{times}" for times in many_times)
            usual += f" of {base.phrase} are not whole. Give smaller widths in {recipe_entry('study.widths')}"
            raise MupscaleError(f"no small width to tune at was found: {why or usual}")
        return smaller


def describe_own_width(widths: Sequence[WholeWidth], narrow: WholeWidth) -> list[str]:
    """What to keep in mind where one of the small widths is the base model's own."""
    if Width.of(narrow) not in map(Width.of, widths):
        return []
    said = f"{recipe_entry('study.widths')} has the base model's own width, {Width.of(narrow)}"
    return [f"{said}: tuning there costs as much per model as the large models do"]
