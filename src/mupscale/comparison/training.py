"""The contenders with their tuned values, at every budget and with every seed."""

from __future__ import annotations

from collections.abc import Sequence

from mupscale.comparison.contenders import Contender
from mupscale.comparison.results import BudgetPoint, ContenderRuns, SystemRuns
from mupscale.comparison.stages import StageTrainer
from mupscale.comparison.system import Leg, System
from mupscale.comparison.tuning import Tuning
from mupscale.core import Width
from mupscale.system import MupscaleError

Ends = dict[tuple[str, str, int], float | None]
"""Final losses by contender, leg and seed."""


def train_base_models(system: System, trainer: StageTrainer, lr: float, seeds: int) -> list[int]:
    """Train base models, unless the user has brought one; the seeds whose base model did not diverge."""
    if system.base is not None:
        return list(range(seeds))
    losses = trainer.train([system.base_recipe(lr, seed) for seed in range(seeds)])
    alive = [seed for seed, loss in enumerate(losses) if loss is not None]
    if not alive:
        raise MupscaleError(
            f"the base model of width {Width.of(system.narrow)} diverged with every seed at learning rate {lr:g}: give "
            f"smaller ones (comparison.lrs)"
        )
    return alive


def train_budgets(
    system: System, trainer: StageTrainer, contenders: Sequence[Contender], tuning: Tuning, seeds: Sequence[int]
) -> SystemRuns:
    """Train them leg by leg; legs of one width and length are one program."""
    legs = {one.name: system.legs(one) for one in contenders}
    ends: Ends = {}
    for number in range(len(legs[contenders[0].name])):
        _train_legs(system, trainer, tuning, [(one, legs[one.name][number]) for one in contenders], seeds, ends)
    runs = [
        ContenderRuns(
            one.name,
            system.wide if one.is_wide else system.narrow,
            tuning.of(one).lr,
            tuning.of(one).noise,
            [_point(system, one, leg, seeds, ends) for leg in legs[one.name] if leg.budget is not None],
        )
        for one in contenders
    ]
    return SystemRuns(system.narrow, system.wide, system.base_cost, system.costs.unit, runs)


def _train_legs(
    system: System,
    trainer: StageTrainer,
    tuning: Tuning,
    legs: Sequence[tuple[Contender, Leg]],
    seeds: Sequence[int],
    ends: Ends,
) -> None:
    """One leg of every contender; a run that has diverged goes no further."""
    keys, recipes = [], []
    for one, leg in legs:
        values = tuning.of(one)
        for seed in seeds:
            if leg.after is not None and ends[one.name, leg.after, seed] is None:
                ends[one.name, leg.name, seed] = None
                continue
            keys.append((one.name, leg.name, seed))
            recipes.append(system.leg_recipe(one, leg, tuning.base.lr, values.lr, values.noise, seed))
    ends |= zip(keys, trainer.train(recipes), strict=True)


def _point(system: System, one: Contender, leg: Leg, seeds: Sequence[int], ends: Ends) -> BudgetPoint:
    assert leg.budget is not None
    steps = round(leg.budget * system.steps(one))
    cost = steps * system.costs.of(system.wide if one.is_wide else system.narrow)
    return BudgetPoint(leg.budget, steps, cost, [ends[one.name, leg.name, seed] for seed in seeds])
