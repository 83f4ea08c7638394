"""Where contenders are compared: two sizes, equal budgets, and the tree of every contender between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mupscale.core import WholeWidth, Width
from mupscale.growth import OPERATORS, NoiseLevel
from mupscale.study.contenders import Contender, contender_named
from mupscale.study.training import Ground
from mupscale.study.tree import DECAY, Candidate, Stretch, branch_off, plan_candidate
from mupscale.system import Diverged, MupscaleError, checks_arguments, not_advising, recipe_entry
from mupscale.train import Growth, Recipe, Schedule, sizes_like

NoiseUnit = Literal["init", "theory", "signal"]


@dataclass(frozen=True)
class System:
    """Where contenders are compared: two sizes, and the steps before and after growth.

    ground: tells what a step costs at every width; all have the warm-up and the floor of its recipe's schedule. start:
    the checkpoint that all contenders begin from; None where base models are trained here. base_steps: None where it is
    not known how long that checkpoint has trained. noise_unit: of noise. event_settings:
    what the recipe's growth event says, of which a contender takes its operator's settings, but for the noise.
    """

    settings: StudySettings
    ground: Ground
    narrow: WholeWidth
    wide: WholeWidth
    base_steps: int | None
    grown_steps: int
    start: str | None = None
    noise_unit: NoiseUnit = "init"
    event_settings: Mapping[str, Any] = field(default_factory=dict)

    def smaller(self, width: WholeWidth) -> System:
        """The same at a small width, with a base model that is trained here; it grows as many times."""
        width = sizes_like(width, self.narrow)
        small, base = Width.of(width, "the small width", whole=True), Width.of(self.narrow)
        small.check_form(base, "the small width", "the recipe's width")
        return replace(self, narrow=width, wide=small.scaled_as(base, Width.of(self.wide)).whole, start=None)

    @property
    def own(self) -> Schedule:
        return self.ground.recipe.schedule

    @property
    def label(self) -> str:
        return f"{Width.of(self.narrow)} → {Width.of(self.wide)}"

    @property
    def base_cost(self) -> float | None:
        return None if self.base_steps is None else self.base_steps * self.ground.cost_per_step(self.narrow)

    def width_of(self, one: Contender) -> WholeWidth:
        return self.wide if one.is_wide else self.narrow

    def steps(self, one: Contender) -> int:
        """The contender's steps at its full budget: all cost the same, the base model's training included."""
        before = self.base_steps or 0
        if one.full_steps:
            return before + self.grown_steps
        spent = self.grown_steps * self.ground.cost_per_step(self.wide)
        if not one.from_base:
            spent += before * self.ground.cost_per_step(self.narrow)
        return max(1, round(spent / self.ground.cost_per_step(self.width_of(one))))

    # ------------------------------------------------------------------------------------------- trees

    def base_model(self, lr: float, seed: int) -> Stretch:
        """A base model, trained at a constant learning rate; or the checkpoint that is one."""
        if self.start is not None:
            return Stretch(width=self.narrow, steps=0, lr=0.0, start=self.start)
        own = self.own
        schedule = own if self.settings.schedule == "recipe" else Schedule(warmup=own.warmup)
        assert self.base_steps is not None
        return Stretch(width=self.narrow, steps=self.base_steps, lr=lr, schedule=schedule, seed=seed)

    def decayed_base(self, lr: float, seed: int) -> Stretch:
        """The same with a decay behind it, a quarter of the whole: what its learning rate is judged by."""
        base = self.base_model(lr, seed)
        return base.decayed(max(1, math.ceil(base.steps / (DECAY - 1))))

    def beginning(self, one: Contender, base_lr: float, lr: float, noise: NoiseLevel, seed: int) -> Stretch:
        """Where a contender begins; how long and under which schedule is not said yet."""
        base = None
        if one.keeps_rates:
            base = Width.of(self.ground.recipe.base).scaled_as(Width.of(self.narrow), Width.of(self.wide)).whole
        first = Stretch(width=self.width_of(one), steps=0, lr=lr, seed=seed, order=1, base=base)
        if not one.from_base:
            return first
        unit = "theory" if isinstance(noise, dict) else self.noise_unit  # constants by name are the paper's
        growing: dict[str, Any] = {"how": one.how, "noise": noise, "noise_unit": unit} if one.is_grown else {}
        if one.is_grown and one.how in OPERATORS:
            takes = OPERATORS[one.how].takes - {"noise", "noise_unit"}
            growing |= {name: value for name, value in self.event_settings.items() if name in takes}
            growing |= one.settings
        return replace(first, parent=self.base_model(base_lr, seed), **growing)

    def leaves(self, one: Contender, base_lr: float, lr: float, noise: NoiseLevel, seed: int) -> dict[float, Stretch]:
        first = self.beginning(one, base_lr, lr, noise, seed)
        return branch_off(first, self.steps(one), self.settings.budgets, self.settings.schedule, self.own)

    def leaf(self, one: Contender, base_lr: float, lr: float, noise: NoiseLevel, seed: int) -> Stretch:
        return self.leaves(one, base_lr, lr, noise, seed)[1.0]

    def candidate(self, one: Contender, base_lr: float, lr: float, noise: float, seed: int) -> Candidate:
        """A contender's full budget with values that are tried: in one go, or judged after the first budget."""
        part = self.settings.budgets[0] if self.settings.prune else 1.0
        first = self.beginning(one, base_lr, lr, noise, seed)
        return plan_candidate(first, self.steps(one), part, self.settings.schedule, self.own)


# ---------------------------------------------------------------------------------------------- what can be compared


def read_system(recipe: Recipe, settings: StudySettings, ground: Ground, what: str, otherwise: str = "") -> System:
    """The two widths of a recipe's one growth event, and how long each model trains. what: is to be done with them."""
    if len(recipe.grow) != 1:
        raise MupscaleError(
            f"{what} needs one growth event, but this recipe has {len(recipe.grow)}: set grow: "
            f"[{{at: STEPS OF THE BASE MODEL, width: WIDE}}]{otherwise}"
        )
    (growth,) = recipe.grow
    if Width.of(growth.width) == Width.of(recipe.width):
        raise MupscaleError(f"the recipe's growth event keeps the width at {recipe.width}: give a larger one")
    sizes = recipe.width, growth.width, growth.at, recipe.steps - growth.at
    return System(settings, ground, *sizes, noise_unit=growth.noise_unit, event_settings=growth.growth_settings)


def check_builds(recipe: Recipe, system: System, if_small: str = "") -> None:
    """Refuse widths at which the model cannot be built. if_small: what to do about small ones."""
    for width in (system.narrow, system.wide):
        try:
            recipe.family().sketch(width)
        except MupscaleError as error:
            if not if_small:
                raise
            raise MupscaleError(
                f"{error}; a small model grows as the large one does, here from {system.label}{if_small}"
            ) from None
        except Exception as error:  # the model's own
            raise MupscaleError(
                f"the model cannot be built at {Width.of(width).phrase}: {type(error).__name__}: "
                f"{' '.join(str(error).split())}{if_small}"
            ) from None


def check_operators(recipe: Recipe, system: System, contenders: Sequence[Contender], otherwise: str = "") -> None:
    """Refuse contenders that cannot grow this model; otherwise: what there is to do beside leaving them out."""
    for one in contenders:
        if one.is_grown:
            growth = Growth(at=1, width=system.wide, how=one.how)
            try:
                with not_advising("fresh"):  # the contenders say how
                    recipe.family().check_growth(system.narrow, system.wide, growth.build_operators())
            except MupscaleError as error:
                why = f"{error}: {otherwise and f'{otherwise}, or '}leave {one.name} out of"
                sizes = f"{Width.of(system.narrow).phrase} cannot grow to {Width.of(system.wide)}"
                small = f"the small model of {sizes} with {one.name}: " if otherwise else ""
                raise MupscaleError(f"{small}{why} {recipe_entry('study.contenders')}") from None


def find_alive(system: System, lr: float, finished: Sequence[bool]) -> list[int]:
    """Seeds with which the base model came to its end; with another it cannot be grown."""
    alive = [seed for seed, is_finished in enumerate(finished) if is_finished]
    if not alive:
        raise Diverged(
            f"the base model of {Width.of(system.narrow).phrase} diverged with every seed at learning rate {lr:g}: "
            f"give smaller ones ({recipe_entry('study.lrs')})"
        )
    return alive


# ---------------------------------------------------------------------------------------------- what can be said

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
            continued, copies, fresh. More: fresh-trained (spread: trained), copies-shrunk (shrink: 0.7),
            copies-without-noise, paired-noise, net2net, naive-widening, from-scratch-all-steps. If only the depth
            grows: identity-blocks and copied-blocks replace copies and fresh
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
