"""Where contenders are compared: two sizes, equal budgets, and the tree of every contender between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mupscale.core import WholeWidth, Width
from mupscale.growth import OPERATORS
from mupscale.study.contenders import Contender
from mupscale.study.settings import StudySettings
from mupscale.study.training import Ground
from mupscale.study.tree import DECAY, Candidate, Stretch, branch_off, plan_candidate
from mupscale.system import MupscaleError, not_advising, recipe_entry
from mupscale.train import Growth, NoiseLevel, Recipe, Schedule, sizes_like

NoiseUnit = Literal["init", "theory", "signal"]


@dataclass(frozen=True)
class System:
    """Where contenders are compared: two sizes, and the steps before and after growth.

    costs: tells what a step costs at every width. own: the recipe's schedule, whose warm-up and floor all have. base:
    the width at which rates are meant. start: the checkpoint that all contenders begin from; None where base models are
    trained here. base_steps: None where it is not known how long that checkpoint has trained. noise_unit, outgoing: as
    the recipe's growth event says.
    """

    settings: StudySettings
    costs: Ground
    own: Schedule
    base: WholeWidth
    narrow: WholeWidth
    wide: WholeWidth
    base_steps: int | None
    grown_steps: int
    start: str | None = None
    noise_unit: NoiseUnit = "init"
    outgoing: float = 1.0

    def smaller(self, width: WholeWidth) -> System:
        """The same at a small width, with a base model that is trained here; it grows as many times."""
        width = sizes_like(width, self.narrow)
        small, base = Width.of(width, "the small width", whole=True), Width.of(self.narrow)
        small.check_form(base, "the small width", "the recipe's width")
        return replace(self, narrow=width, wide=small.scaled_as(base, Width.of(self.wide)).whole, start=None)

    @property
    def label(self) -> str:
        """Its two sizes, for a line that says what is trained."""
        return f"{Width.of(self.narrow)} → {Width.of(self.wide)}"

    @property
    def base_cost(self) -> float | None:
        """Of training the base model; None where that is not known."""
        return None if self.base_steps is None else self.base_steps * self.costs.cost_per_step(self.narrow)

    def width_of(self, one: Contender) -> WholeWidth:
        """The size that a contender ends with."""
        return self.wide if one.is_wide else self.narrow

    def steps(self, one: Contender) -> int:
        """The contender's steps at its full budget: all cost the same, the base model's training included."""
        before = self.base_steps or 0
        if one.full_steps:
            return before + self.grown_steps
        spent = self.grown_steps * self.costs.cost_per_step(self.wide)
        if not one.from_base:
            spent += before * self.costs.cost_per_step(self.narrow)
        return max(1, round(spent / self.costs.cost_per_step(self.width_of(one))))

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
        base = Width.of(self.base).scaled_as(Width.of(self.narrow), Width.of(self.wide)) if one.keeps_rates else None
        first = Stretch(
            width=self.width_of(one), steps=0, lr=lr, seed=seed, order=1, base=None if base is None else base.whole
        )
        if not one.from_base:
            return first
        unit = "theory" if isinstance(noise, dict) else self.noise_unit  # constants by name are the paper's
        growing: dict[str, Any] = {"how": one.how, "noise": noise, "noise_unit": unit} if one.is_grown else {}
        if one.is_grown and one.how in OPERATORS and "outgoing" in OPERATORS[one.how].takes:
            growing["outgoing"] = self.outgoing
        return replace(first, parent=self.base_model(base_lr, seed), **growing)

    def leaves(self, one: Contender, base_lr: float, lr: float, noise: NoiseLevel, seed: int) -> dict[float, Stretch]:
        """A contender at every budget."""
        first = self.beginning(one, base_lr, lr, noise, seed)
        return branch_off(first, self.steps(one), self.settings.budgets, self.settings.schedule, self.own)

    def leaf(self, one: Contender, base_lr: float, lr: float, noise: NoiseLevel, seed: int) -> Stretch:
        """A contender at its full budget."""
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
    own = settings, ground, recipe.schedule, recipe.base
    return System(*own, *sizes, noise_unit=growth.noise_unit, outgoing=growth.outgoing)


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
        raise MupscaleError(
            f"the base model of {Width.of(system.narrow).phrase} diverged with every seed at learning rate {lr:g}: "
            f"give smaller ones ({recipe_entry('study.lrs')})"
        )
    return alive
