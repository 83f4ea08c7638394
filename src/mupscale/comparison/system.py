"""One base model, one wide width, and the training runs of every contender there, as ordinary recipes.

A contender's budget is cut into legs. Under the schedule `wsd` they share the constant phase: from it a decay branches
off for every budget, so that three budgets cost little more than one.

    constant ──┬───────────┬──────────────────────┐
               └ decay ¼   └── decay ½            └────── decay, full budget
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mupscale.comparison.contenders import Contender
from mupscale.comparison.settings import ComparisonSettings
from mupscale.core import WholeWidth, Width
from mupscale.system import MupscaleError
from mupscale.train import Evaluation, LoadedRecipe, Recipe, Schedule, Seeds, build_operator

_POINTS = 40  # of a run's curve at least, where it has so many steps
_OTHER_DATA = 10_000  # between the data seeds of two legs, so that each goes on with batches of its own
DECAY = 4  # the decay is one part in so many of a contender's budget


@dataclass(frozen=True)
class Leg:
    """A part of a contender's training. after: the leg it goes on from; None where the contender begins.

    budget: which budget is spent at its end; None for a part of the constant phase.
    """

    name: str
    steps: int
    after: str | None
    schedule: Schedule
    budget: float | None = None
    order: int = 1  # of its data


def whole_leg(steps: int, kind: str, own: Schedule) -> Leg:
    """The full budget in one go, with the decay that a branch would have."""
    if kind != "wsd":
        return plan_legs(steps, [1.0], kind, own)[0]
    schedule = Schedule("wsd", warmup=own.warmup, decay=max(1, steps // DECAY), floor=own.floor)
    return Leg("whole", steps, None, schedule, 1.0)


class TuningLegs(NamedTuple):
    """How far a candidate is trained before it is judged for the first time, and the rest.

    start, first: the constant phase of the first budget, and its decay; both None where nothing is stopped early.
    """

    start: Leg | None
    first: Leg | None
    rest: Leg

    @property
    def steps(self) -> int:
        """Of a candidate that goes on to the end."""
        return sum(leg.steps for leg in self if leg is not None)


def plan_tuning_legs(steps: int, first: float, kind: str, own: Schedule) -> TuningLegs:
    """The legs of a candidate that is judged after the part `first` of its budget; 1: only at the end.

    Under schedules without a constant phase a shorter run is no part of a longer one, and nothing is judged early.

    >>> for leg in plan_tuning_legs(80, 0.5, "wsd", Schedule()):
    ...     print(leg.name, leg.steps, leg.after, leg.budget)
    constant-0.5 30 None None
    budget-0.5 10 constant-0.5 0.5
    rest 50 constant-0.5 1.0
    """
    if kind != "wsd" or first == 1:
        return TuningLegs(None, None, whole_leg(steps, kind, own))
    start, branch = plan_legs(steps, [first], kind, own)
    schedule = Schedule("wsd", decay=max(1, steps // DECAY), floor=own.floor)
    return TuningLegs(start, branch, Leg("rest", steps - start.steps, start.name, schedule, 1.0, 3))


def plan_legs(steps: int, budgets: Sequence[float], kind: str, own: Schedule) -> list[Leg]:
    """The legs of a run of so many steps at its full budget. kind: as in the settings; own: the recipe's schedule.

    >>> for leg in plan_legs(80, [0.5, 1.0], "wsd", Schedule()):
    ...     print(leg.name, leg.steps, leg.after, leg.budget)
    constant-0.5 30 None None
    budget-0.5 10 constant-0.5 0.5
    constant-1 30 constant-0.5 None
    budget-1 20 constant-1 1.0
    """
    if kind != "wsd":
        schedule = own if kind == "recipe" else Schedule("cosine", warmup=own.warmup, floor=own.floor)
        return [Leg(f"budget-{part:g}", round(part * steps), None, schedule, part) for part in budgets]
    legs: list[Leg] = []
    done, last = 0, None
    for part in budgets:
        total = round(part * steps)
        decay = total // DECAY
        constant = total - decay - done
        warmup = own.warmup if last is None else 0
        if decay < 1 or constant < 1 or warmup >= constant:
            raise MupscaleError(
                f"a budget of {part:g} is {total} steps, too few for warm-up ({own.warmup}), a constant phase and a "
                f"decay over the last quarter: give more steps, larger budgets or fewer steps of warm-up"
            )
        legs.append(Leg(f"constant-{part:g}", constant, last, Schedule(warmup=warmup), None, 1 + len(legs)))
        last, done = legs[-1].name, done + constant
        branch = Schedule("wsd", decay=decay, floor=own.floor)
        legs.append(Leg(f"budget-{part:g}", decay, last, branch, part, 1 + len(legs)))
    return legs


@dataclass(frozen=True)
class Costs(LoadedRecipe):
    """What a step costs at every width, in FLOPs; in steps where a model's FLOPs cannot be counted."""

    def of(self, width: WholeWidth) -> float:
        """Of one step."""
        flops = self.flops_per_step(width)
        return 1.0 if self.unit == "steps" or flops is None else flops

    @property
    def unit(self) -> str:
        """FLOPs, or steps."""
        return "FLOPs" if self.flops_per_step(self.recipe.width) is not None else "steps"


@dataclass(frozen=True)
class System:
    """Where contenders are compared: two widths, the steps before and after growth, and a folder.

    base: the user's checkpoint that all contenders begin from; None where base models are trained here. base_steps:
    None where it is not known how long that checkpoint has trained.
    """

    recipe: Recipe
    settings: ComparisonSettings
    costs: Costs
    narrow: WholeWidth
    wide: WholeWidth
    base_steps: int | None
    grown_steps: int
    folder: Path
    base: str | None = None

    def smaller(self, width: WholeWidth, base_steps: int) -> System:
        """The same at a small width, with a base model that is trained here."""
        wide = Width.of(width).scaled_as(Width.of(self.narrow), Width.of(self.wide)).whole
        folder = self.folder.parent / f"width-{Width.of(width).label}"
        return replace(self, narrow=width, wide=wide, base=None, base_steps=base_steps, folder=folder)

    @property
    def base_cost(self) -> float | None:
        """Of training the base model; None where that is not known."""
        return None if self.base_steps is None else self.base_steps * self.costs.of(self.narrow)

    def steps(self, contender: Contender) -> int:
        """The contender's steps at its full budget: all cost the same, the base model's training included."""
        before = self.base_steps or 0
        if contender.full_steps:
            return before + self.grown_steps
        spent = self.grown_steps * self.costs.of(self.wide)
        if not contender.from_base:
            spent += before * self.costs.of(self.narrow)
        return max(1, round(spent / self.costs.of(self.wide if contender.is_wide else self.narrow)))

    def legs(self, contender: Contender) -> list[Leg]:
        """The parts of its training, for all budgets."""
        kind, own = self.settings.schedule, self.recipe.schedule
        return plan_legs(self.steps(contender), self.settings.budgets, kind, own)

    def tuning_legs(self, contender: Contender) -> TuningLegs:
        """Its full budget alone, in one go or judged after the first budget."""
        first = self.settings.budgets[0] if self.settings.prune else 1.0
        return plan_tuning_legs(self.steps(contender), first, self.settings.schedule, self.recipe.schedule)

    def check_growth(self, contender: Contender) -> None:
        """Refuse a contender that cannot grow this model."""
        if not contender.is_grown:
            return
        operator = build_operator(contender.how, 0.0, "init")
        try:
            operator.check(self.recipe.family().widening(self.narrow, self.wide, grow=operator))
        except MupscaleError as error:
            raise MupscaleError(f"{error}: leave {contender.name} out of comparison.contenders") from None

    # ------------------------------------------------------------------------------------------- recipes

    def base_recipe(self, lr: float, seed: int) -> Recipe:
        """A base model, trained at a constant learning rate."""
        own = self.recipe.schedule
        schedule = own if self.settings.schedule == "recipe" else Schedule(warmup=own.warmup)
        assert self.base_steps is not None
        return self._make(self.narrow, lr, self.base_steps, seed, 0, schedule, self.base_folder(lr, seed))

    def decayed_base(self, lr: float, seed: int) -> Recipe:
        """The same with a decay behind it, a quarter of the whole: what its learning rate is judged by."""
        assert self.base_steps is not None
        steps = max(1, math.ceil(self.base_steps / (DECAY - 1)))
        start, out = self.base_folder(lr, seed), self.folder / "base-decayed" / f"lr-{lr:g}" / f"seed-{seed}"
        return replace(self._make(self.narrow, lr, steps, seed, 1, Schedule("wsd", decay=steps), out), start=str(start))

    def base_folder(self, lr: float, seed: int) -> Path:
        """Where a base model is trained."""
        return self.folder / "base" / f"lr-{lr:g}" / f"seed-{seed}"

    def leg_recipe(self, one: Contender, leg: Leg, base_lr: float, lr: float, noise: float, seed: int) -> Recipe:
        """A leg of a contender with these values, from the leg before it or from where the contender begins."""
        runs = self.folder / one.name / f"lr-{lr:g}-noise-{noise:g}" / f"seed-{seed}"
        width = self.wide if one.is_wide else self.narrow
        recipe = self._make(width, lr, leg.steps, seed, leg.order, leg.schedule, runs / leg.name)
        if one.keeps_rates:  # those of the narrow width then belong to the wide one
            base = Width.of(recipe.base).scaled_as(Width.of(self.narrow), Width.of(self.wide)).whole
            recipe = replace(recipe, base=base, init_at=Width.of(self.recipe.family().init_at).whole)
        if leg.after is not None:
            return replace(recipe, start=str(runs / leg.after))
        if not one.from_base:
            return recipe
        start = self.base or str(self.base_folder(base_lr, seed))
        width_there = self.recipe.start_width if self.base else None
        growing = {"how": one.how, "noise": noise} if one.is_grown else {}
        return replace(recipe, start=start, start_width=width_there, **growing)  # type: ignore[arg-type]

    def _make(
        self, width: WholeWidth, lr: float, steps: int, seed: int, order: int, schedule: Schedule, out: Path
    ) -> Recipe:
        recipe, first = self.recipe, self.recipe.seeds
        data = first.data + seed + order * _OTHER_DATA
        changes: dict[str, Any] = {
            "optimizer": replace(recipe.optimizer, init_args={**recipe.optimizer.init_args, "lr": lr}),
            "evaluation": Evaluation(0, recipe.evaluation.batch),
            "seeds": Seeds(first.init + seed, data, first.noise + seed, first.dropout + seed),
            "log_every": max(1, min(recipe.log_every, steps // _POINTS)),
        }
        return replace(
            recipe,
            width=width,
            steps=steps,
            schedule=schedule,
            out=str(out),
            grow=[],
            start=None,
            start_width=None,
            noise=0.0,
            how="copies",
            **changes,
        )
