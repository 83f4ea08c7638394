"""The same comparison in a training loop of one's own: no recipe, one function that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.comparison.answer import answer_comparison
from mupscale.comparison.contenders import DEFAULT_NAMES, Contender, check_contenders
from mupscale.comparison.results import BudgetPoint, ContenderRuns, SystemRuns, Tried, TunedContender
from mupscale.comparison.system import Leg, plan_legs, whole_leg
from mupscale.comparison.tuning import asked_for, choose
from mupscale.core import WholeWidth, Width, naming
from mupscale.family import Family
from mupscale.system import MupscaleError, print_at_once
from mupscale.train import Schedule, build_operator

Train = Callable[[nn.Module, Optimizer, int, Callable[[int], float]], Sequence[float]]
"""Trains a model for so many steps and gives their losses; learning rates are to be multiplied by schedule(step)."""
Trained = tuple[nn.Module, Optimizer]


@dataclass(frozen=True)
class LoopComparison:
    """What each contender took from the small system, how it ended at every budget, and the answer in words."""

    tuned: list[TunedContender]
    runs: SystemRuns
    answer: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join([str(self.answer["sentence"]), *(remark for one in self.tuned for remark in one.remarks)])


@dataclass(frozen=True)
class OwnLoop:
    """A training loop of one's own, in which `compare` asks whether growing a model pays.

    Args:
        family: of the model
        train: takes a model, its optimizer, a number of steps and a schedule (step -> multiple of the learning rate,
            as LambdaLR takes it), and gives the loss of every step
        make_optimizer: of a model and a learning rate at the family's base width
        lr: the base model's learning rate, where its optimizer is now: in the middle of a schedule not the peak
        base_steps: that the base model has trained
        steps: of the grown model; the others have as many as cost the same, by the number of weights
        small: the width to tune at
        factors: of lr, which every contender tries there
        noises: which copies try there
        budgets: parts of the full budget at which every contender is measured
        seeds: of the large models
        contenders: who takes part
        note: is told what is trained next
        warmup: steps of a linear warm-up, with which every contender and the small base model begin

    Example:
        >>> import mupscale as mu
        >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
        >>> def train(model, optimizer, steps, schedule):
        ...     scheduler, losses = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule), []
        ...     for _ in range(steps):
        ...         loss = nn.functional.mse_loss(model(x), y)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         scheduler.step()
        ...         losses.append(loss.item())
        ...     return losses
        >>> build = lambda width: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        >>> family = mu.Family(build, base=8, inputs=x)
        >>> make = lambda model, lr: family.optimizer(model, torch.optim.AdamW, lr=lr)
        >>> model = family.init(8)
        >>> optimizer = make(model, 0.01)
        >>> _ = train(model, optimizer, 20, lambda step: 1.0)
        >>> loop = OwnLoop(family, train, make, lr=0.01, base_steps=20, steps=16, small=4, factors=[1.0], noises=[1.0])
        >>> result = loop.compare(model, optimizer, 8, 16)
        1/9 a base model of width 4, 20 steps
        2/9 tuning at width 4: from scratch, 1 × 26 steps
        3/9 tuning at width 4: continued, 1 × 32 steps
        4/9 tuning at width 4: grown from copies, 1 × 16 steps
        5/9 tuning at width 4: grown with fresh units, 1 × 16 steps
        6/9 from scratch, 2 × 30 steps
        7/9 continued, 2 × 38 steps
        8/9 grown from copies, 2 × 19 steps
        9/9 grown with fresh units, 2 × 19 steps
        >>> sorted(result.answer["ranking"])
        ['continued', 'copies', 'fresh', 'from-scratch']
    """

    family: Family
    train: Train
    make_optimizer: Callable[[nn.Module, float], Optimizer]
    lr: float
    base_steps: int
    steps: int
    small: WholeWidth
    factors: Sequence[float] = (0.5, 1.0, 2.0)
    noises: Sequence[float] = (0.5, 1.0, 2.0)
    budgets: Sequence[float] = (0.25, 0.5, 1.0)
    seeds: int = 2
    contenders: Sequence[str] = DEFAULT_NAMES
    note: Callable[[str], None] = print_at_once
    warmup: int = 0

    def compare(self, model: nn.Module, optimizer: Optimizer, narrow: WholeWidth, wide: WholeWidth) -> LoopComparison:
        """Tune at the small width, and train all contenders from this model; it and its optimizer are not changed.

        narrow, wide: the model's width, and the one to grow to.
        """
        check_contenders(self.contenders, "contenders")
        chosen = asked_for(self.contenders)
        if any(one.keeps_rates for one in chosen):
            raise MupscaleError("naive-widening needs a recipe, whose rates can be left as they are: leave it out here")
        self._check_width(model, narrow)
        self._check_growth(chosen, narrow, wide)
        small_wide = Width.of(self.small).scaled_as(Width.of(narrow), Width.of(wide)).whole
        to_tune = [one for one in chosen if one.tuned_as is None]
        for one in chosen:
            self._all_steps(one, narrow, wide)  # refuses now what would be too few then
        tell = _Stages(1 + len(to_tune) + len(chosen), self.note)
        at_width = f"width {Width.of(self.small)}"
        tell(f"a base model of {at_width}, {self.base_steps} steps")
        base, tuned, runs = self._small_base(), [], []
        for one in to_tune:
            steps = self._steps(one, self.small, small_wide)
            tell(f"tuning at {at_width}: {one.label}, {len(self._candidates(one))} × {steps} steps")
            tuned.append(self._tune(one, base, small_wide))
        values = {one.name: one for one in tuned}
        for one in chosen:
            tell(f"{one.label}, {self.seeds} × {self._all_steps(one, narrow, wide)} steps")
            runs.append(self._run(one, (model, optimizer), narrow, wide, values[one.tuned_as or one.name]))
        system = SystemRuns(narrow, wide, self.base_steps * self._cost(narrow), "weights", runs)
        return LoopComparison(tuned, system, answer_comparison(system))

    def _check_width(self, model: nn.Module, narrow: WholeWidth) -> None:
        """Refuse a width that is not the model's own."""
        there = {name: tuple(p.shape) for name, p in self.family.sketch(narrow).named_parameters()}
        for name, p in naming.unwrap(model).named_parameters():
            if there.get(name) != tuple(p.shape):
                raise MupscaleError(
                    f"the model is not the family's at width {Width.of(narrow)}: its '{name}' has shape "
                    f"{tuple(p.shape)}, and there it has {there.get(name, 'none')}; give the model's own width"
                )

    def _check_growth(self, chosen: Sequence[Contender], narrow: WholeWidth, wide: WholeWidth) -> None:
        """Refuse growth in which copies and fresh units are the same, and copies at sizes that they cannot have."""
        before, after, depth = Width.of(narrow).sizes, Width.of(wide).sizes, self.family.depth_size
        growing = {name: (size, after[name]) for name, size in before.items() if name in after and name != depth}
        if all(there == here for here, there in growing.values()):
            raise MupscaleError(
                f"from {Width.of(narrow)} to {Width.of(wide)} the model becomes no wider, and the contenders differ in "
                f"how new units are filled: let a width grow; new blocks alone are no part of this comparison"
            )
        unfit = next((f"{name} {b} is no multiple of {a}" for name, (a, b) in growing.items() if b % a), None)
        if unfit and (names := [one.name for one in chosen if one.needs_multiples]):
            raise MupscaleError(
                f"{unfit}, as {', '.join(names)} need: take a multiple, or leave them out of contenders"
            )

    def _small_base(self) -> Trained:
        """A base model at the small width."""
        model = self.family.init(self.small)
        optimizer = self.make_optimizer(model, self.lr)
        self._train((model, optimizer), self.base_steps, self._schedule, 0)
        return model, optimizer

    def _tune(self, one: Contender, base: Trained, wide: WholeWidth) -> TunedContender:
        """Its learning rate and noise, at the full budget with one seed."""
        leg = whole_leg(self._steps(one, self.small, wide), "wsd", self._schedule)
        tried = []
        for lr, noise in self._candidates(one):
            begun = self._begin(one, base, wide, lr, noise, 0)
            tried.append(Tried(lr, noise, [self._train(begun, leg.steps, leg.schedule, 0)]))
        return choose(one.name, tried)

    def _candidates(self, one: Contender) -> list[tuple[float, float]]:
        """Learning rates and noise levels that it tries."""
        noises = self.noises if one.tunes_noise else [0.0]
        return [(self.lr * factor, noise) for noise in noises for factor in self.factors]

    def _run(
        self, one: Contender, base: Trained, narrow: WholeWidth, wide: WholeWidth, values: TunedContender
    ) -> ContenderRuns:
        """All budgets with every seed; decays branch off the constant phase."""
        steps, width = self._steps(one, narrow, wide), wide if one.is_wide else narrow
        legs = self._legs(steps)
        losses: dict[float, list[float | None]] = {part: [] for part in self.budgets}
        for seed in range(self.seeds):
            constant = self._begin(one, base, wide, values.lr, values.noise, seed)
            for leg in legs:
                branch = constant if leg.budget is None else copy_training(*constant)
                loss = self._train(branch, leg.steps, leg.schedule, seed + 1000 * leg.order)
                if leg.budget is not None:
                    losses[leg.budget].append(loss)
        points = [
            BudgetPoint(part, round(part * steps), round(part * steps) * self._cost(width), losses[part])
            for part in self.budgets
        ]
        return ContenderRuns(one.name, width, values.lr, values.noise, points)

    def _begin(self, one: Contender, base: Trained, wide: WholeWidth, lr: float, noise: float, seed: int) -> Trained:
        """Where a contender begins."""
        if not one.from_base:
            model = self.family.init(wide, seed=seed)
            return model, self.make_optimizer(model, lr)
        if not one.is_wide:
            model, optimizer = copy_training(*base)
            for group in optimizer.param_groups:
                group["lr"] *= lr / self.lr
            return model, optimizer
        operator = build_operator(one.how, noise, "init")
        model, grown = self.family.upscale(*base, width=wide, grow=operator, lr=lr, seed=seed)
        assert grown is not None
        return model, grown

    def _train(self, trained: Trained, steps: int, schedule: Schedule, seed: int) -> float | None:
        """Train on, and give the mean loss of the last tenth; None where it is not finite."""
        model, optimizer = trained
        rates = [group["lr"] for group in optimizer.param_groups]
        torch.manual_seed(seed)
        losses = _check_losses(self.train(model, optimizer, steps, partial(schedule.at, steps=steps)), steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a scheduler has left its own there
            group.pop("initial_lr", None)
        loss = fmean(losses[-max(1, len(losses) // 10) :])
        return loss if abs(loss) < float("inf") else None

    def _steps(self, one: Contender, narrow: WholeWidth, wide: WholeWidth) -> int:
        """At the full budget."""
        if one.full_steps:
            return self.base_steps + self.steps
        spent = self.steps * self._cost(wide) + (0 if one.from_base else self.base_steps * self._cost(narrow))
        return max(1, round(spent / self._cost(wide if one.is_wide else narrow)))

    @property
    def _schedule(self) -> Schedule:
        """Of a training that begins."""
        return Schedule(warmup=self.warmup)

    def _legs(self, steps: int) -> list[Leg]:
        """The parts of a large model's training."""
        return plan_legs(steps, self.budgets, "wsd", self._schedule)

    def _all_steps(self, one: Contender, narrow: WholeWidth, wide: WholeWidth) -> int:
        """Of one seed, the decays of all budgets included; refused where they are too few for a budget."""
        return sum(leg.steps for leg in self._legs(self._steps(one, narrow, wide)))

    def _cost(self, width: WholeWidth) -> float:
        """Of a step: the number of weights."""
        return float(sum(p.numel() for p in self.family.sketch(width).parameters() if p.dim() > 1))


@dataclass
class _Stages:
    """Numbers what is told: 3/9 tuning …"""

    count: int
    note: Callable[[str], None]
    number: int = 0

    def __call__(self, text: str) -> None:
        self.number += 1
        self.note(f"{self.number}/{self.count} {text}")


def _check_losses(losses: Any, steps: int) -> list[float]:
    """What the user's function gave: a number for every step."""
    try:
        values = [float(loss) for loss in losses]
    except (TypeError, ValueError):
        raise MupscaleError(
            f"train returned {type(losses).__name__}, but is to return the losses of its {steps} steps, as numbers"
        ) from None
    if len(values) != steps:
        raise MupscaleError(f"train returned {len(values)} losses for {steps} steps: return the loss of every step")
    return values


def copy_training(model: nn.Module, optimizer: Optimizer) -> Trained:
    """A model and its optimizer, copied together; what a scheduler has left in the optimizer stays behind."""
    twin = copy.deepcopy(model)
    of = dict(zip(model.parameters(), twin.parameters(), strict=True))
    groups = [
        {**{name: copy.deepcopy(value) for name, value in group.items() if name != "params"},
         "params": [of[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip
    other = type(optimizer)(groups)  # type: ignore[call-arg]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in other.param_groups:
        group.pop("initial_lr", None)  # from which the next scheduler would begin, instead of the rate
    return twin, other
