"""Where contenders are compared: two sizes, equal budgets, and the tree of every contender between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import Contender
from mupscale.study.results import BudgetPoint, ContenderRuns, SystemRuns, Tuning
from mupscale.study.settings import StudySettings
from mupscale.study.tree import DECAY, Candidate, Stretch, branch_off, plan_candidate
from mupscale.system import MupscaleError
from mupscale.train import Schedule


class Costs(Protocol):
    """What a step costs at every width."""

    def cost_per_step(self, width: WholeWidth) -> float:
        """In the system's unit."""
        ...


@dataclass(frozen=True)
class System:
    """Where contenders are compared: two sizes, and the steps before and after growth.

    costs: of a step. own: the recipe's schedule, whose warm-up and floor all have. base: the width at which rates are
    meant. start: the checkpoint that all contenders begin from; None where base models are trained here. base_steps:
    None where it is not known how long that checkpoint has trained.
    """

    settings: StudySettings
    costs: Costs
    own: Schedule
    base: WholeWidth
    narrow: WholeWidth
    wide: WholeWidth
    base_steps: int | None
    grown_steps: int
    start: str | None = None

    def smaller(self, width: WholeWidth) -> System:
        """The same at a small width, with a base model that is trained here."""
        wide = Width.of(width).scaled_as(Width.of(self.narrow), Width.of(self.wide)).whole
        return replace(self, narrow=width, wide=wide, start=None)

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
        steps = max(1, math.ceil(base.steps / (DECAY - 1)))
        return base.then(steps=steps, schedule=Schedule("wsd", decay=steps))

    def beginning(self, one: Contender, base_lr: float, lr: float, noise: float, seed: int) -> Stretch:
        """Where a contender begins; how long and under which schedule is not said yet."""
        base = Width.of(self.base).scaled_as(Width.of(self.narrow), Width.of(self.wide)) if one.keeps_rates else None
        first = Stretch(
            width=self.width_of(one), steps=0, lr=lr, seed=seed, order=1, base=None if base is None else base.whole
        )
        if not one.from_base:
            return first
        growing: dict[str, Any] = {"how": one.how, "noise": noise} if one.is_grown else {}
        return replace(first, parent=self.base_model(base_lr, seed), **growing)

    def leaves(self, one: Contender, base_lr: float, lr: float, noise: float, seed: int) -> dict[float, Stretch]:
        """A contender at every budget."""
        first = self.beginning(one, base_lr, lr, noise, seed)
        return branch_off(first, self.steps(one), self.settings.budgets, self.settings.schedule, self.own)

    def candidate(self, one: Contender, base_lr: float, lr: float, noise: float, seed: int) -> Candidate:
        """A contender's full budget with values that are tried: in one go, or judged after the first budget."""
        part = self.settings.budgets[0] if self.settings.prune else 1.0
        first = self.beginning(one, base_lr, lr, noise, seed)
        return plan_candidate(first, self.steps(one), part, self.settings.schedule, self.own)


class TreeTrainer(Protocol):
    """Whoever trains a tree: a recipe's trainer, or a loop of one's own."""

    def train(self, leaves: Sequence[Stretch]) -> list[float | None]:
        """Their final losses; None: diverged."""
        ...


def train_base_models(system: System, trainer: TreeTrainer, lr: float, seeds: int) -> list[int]:
    """Train base models, unless the user has brought one; the seeds whose base model did not diverge."""
    if system.start is not None:
        return list(range(seeds))
    losses = trainer.train([system.base_model(lr, seed) for seed in range(seeds)])
    alive = [seed for seed, loss in enumerate(losses) if loss is not None]
    if not alive:
        raise MupscaleError(
            f"the base model of width {Width.of(system.narrow)} diverged with every seed at learning rate {lr:g}: give "
            f"smaller ones (study.lrs)"
        )
    return alive


def train_budgets(
    system: System,
    trainer: TreeTrainer,
    contenders: Sequence[Contender],
    tuning: Tuning,
    seeds: Sequence[int],
    unit: str,
) -> SystemRuns:
    """All contenders with their tuned values, at every budget and with every seed."""
    leaves = {
        (one.name, seed): system.leaves(one, tuning.base.lr, tuning.of(one).lr, tuning.of(one).noise, seed)
        for one in contenders
        for seed in seeds
    }
    every = [leaf for by_budget in leaves.values() for leaf in by_budget.values()]
    losses = dict(zip((leaf.key for leaf in every), trainer.train(every), strict=True))
    runs = []
    for one in contenders:
        points = []
        for part in system.settings.budgets:
            steps = round(part * system.steps(one))
            ends = [losses[leaves[one.name, seed][part].key] for seed in seeds]
            points.append(BudgetPoint(part, steps, steps * system.costs.cost_per_step(system.width_of(one)), ends))
        values = tuning.of(one)
        runs.append(ContenderRuns(one.name, system.width_of(one), values.lr, values.noise, points))
    return SystemRuns(system.narrow, system.wide, system.base_cost, unit, runs)
