"""The same comparison in a training loop of one's own: no recipe, one function that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import WholeWidth, Width, naming
from mupscale.family import Family
from mupscale.growth import is_replica
from mupscale.study.contenders import BASE, USUAL_IN_PAY, Contender, check_contenders, contenders_named
from mupscale.study.results import ContenderRuns, Search, SystemRuns, Tuning
from mupscale.study.settings import StudySettings
from mupscale.study.systems import System, train_budgets
from mupscale.study.tree import Stretch, list_stretches
from mupscale.study.tuning import ValueTrials, try_values
from mupscale.study.verdict import answer_comparison
from mupscale.system import MupscaleError, print_at_once
from mupscale.train import Schedule, build_operator

Train = Callable[[nn.Module, Optimizer, int, Callable[[int], float]], Sequence[float]]
"""Trains a model for so many steps and gives their losses; learning rates are to be multiplied by schedule(step)."""
Trained = tuple[nn.Module, Optimizer]


@dataclass(frozen=True)
class LoopComparison:
    """What each contender took from the small system, how it ended at every budget, and the answer in words."""

    tuned: list[Search]
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
    contenders: Sequence[str] = USUAL_IN_PAY
    note: Callable[[str], None] = print_at_once
    warmup: int = 0

    def compare(self, model: nn.Module, optimizer: Optimizer, narrow: WholeWidth, wide: WholeWidth) -> LoopComparison:
        """Tune at the small width, and train all contenders from this model; it and its optimizer are not changed.

        narrow, wide: the model's width, and the one to grow to.
        """
        check_contenders(self.contenders, "contenders")
        chosen = contenders_named(self.contenders)
        if any(one.keeps_rates for one in chosen):
            raise MupscaleError("naive-widening needs a recipe, whose rates can be left as they are: leave it out here")
        self._check_width(model, narrow)
        self._check_growth(chosen, narrow, wide)
        large = self._system(narrow, wide)
        small = large.smaller(self.small)
        to_tune = [one for one in chosen if one.tuned_as is None]
        counts = {one.name: self._count_steps(large, one) for one in chosen}  # refuses now what would be too few then
        tell = _Stages(1 + len(to_tune) + len(chosen), self.note)
        trainer = _LoopTrainer(self, (model, optimizer))
        at_width = f"width {Width.of(self.small)}"
        tell(f"a base model of {at_width}, {self.base_steps} steps")
        trainer.train([small.base_model(self.lr, 0)])
        tuned: list[Search] = []
        rates = large.settings.rates(self.lr)
        for one in to_tune:
            count = len(rates) * (len(self.noises) if one.tunes_noise else 1)
            tell(f"tuning at {at_width}: {one.label}, {count} × {small.steps(one)} steps")
            tuned += try_values(ValueTrials(small, trainer, self.lr), rates, [one])
        tuning = Tuning(Search(BASE.name, self.lr, 0.0, []), tuned)
        runs: list[ContenderRuns] = []
        for one in chosen:
            tell(f"{one.label}, {self.seeds} × {counts[one.name]} steps")
            runs += train_budgets(large, trainer, [one], tuning, range(self.seeds), "weights").contenders
        system = SystemRuns(narrow, wide, large.base_cost, "weights", runs)
        return LoopComparison(tuned, system, answer_comparison(system))

    def _system(self, narrow: WholeWidth, wide: WholeWidth) -> System:
        settings = StudySettings(
            widths=[self.small],
            lrs=[self.lr * factor for factor in self.factors],
            noises=list(self.noises),
            budgets=list(self.budgets),
            contenders=list(self.contenders),
            prune=0.0,
            measure="train",
        )
        own = Schedule(warmup=self.warmup)
        return System(settings, self, own, narrow, narrow, wide, self.base_steps, self.steps, start="the model")

    def _count_steps(self, system: System, one: Contender) -> int:
        """Of one seed of a contender, the decays of all budgets included, without a base model's."""
        leaves = system.leaves(one, self.lr, self.lr, 0.0, 0).values()
        return sum(stretch.steps for stretch in list_stretches(leaves))

    def cost_per_step(self, width: WholeWidth) -> float:
        """The number of weights."""
        return float(sum(p.numel() for p in self.family.sketch(width).parameters() if p.dim() > 1))

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


@dataclass
class _LoopTrainer:
    """Trains a tree by the user's function, depth first, so that few models are in memory at a time.

    model: the user's own, with its optimizer. bases: base models that were trained here, kept for their children.
    """

    loop: OwnLoop
    model: Trained
    bases: dict[str, Trained] = field(default_factory=dict)
    ended: dict[str, float | None] = field(default_factory=dict)

    def train(self, leaves: Sequence[Stretch]) -> list[float | None]:
        """Their final losses: the mean of the last tenth; None where it is not finite."""
        every = list_stretches(leaves)
        children: dict[str, list[Stretch]] = {}
        for stretch in every:
            if stretch.parent is not None:
                children.setdefault(stretch.parent.key, []).append(stretch)
        for root in (stretch for stretch in every if stretch.parent is None):
            self._visit(root, None, children)
        return [self.ended[leaf.key] for leaf in leaves]

    def _visit(self, stretch: Stretch, before: Trained | None, children: Mapping[str, Sequence[Stretch]]) -> None:
        trained = self.model if stretch.start is not None else self.bases.get(stretch.key)
        if trained is None:
            trained = self._begin(stretch, before)
            self.ended[stretch.key] = self._train(stretch, trained)
        if stretch.order == 0:
            self.bases[stretch.key] = trained
        for child in children.get(stretch.key, ()):
            self._visit(child, trained, children)

    def _begin(self, stretch: Stretch, before: Trained | None) -> Trained:
        """Where a stretch begins; what was there before stays as it is."""
        family = self.loop.family
        if before is None or stretch.parent is None:
            model = family.init(stretch.width, seed=stretch.seed)
            return model, self.loop.make_optimizer(model, stretch.lr)
        if stretch.is_grown:
            operator = build_operator(stretch.how, stretch.noise, "init")
            settings: dict[str, Any] = {"grow": operator, "exact": is_replica(operator), "seed": stretch.seed}
            model, grown = family.upscale(*before, width=stretch.width, lr=stretch.lr, **settings)
            assert grown is not None
            return model, grown
        model, optimizer = copy_training(*before)
        for group in optimizer.param_groups:
            group["lr"] *= stretch.lr / (self.loop.lr if stretch.parent.start is not None else stretch.parent.lr)
        return model, optimizer

    def _train(self, stretch: Stretch, trained: Trained) -> float | None:
        model, optimizer = trained
        rates = [group["lr"] for group in optimizer.param_groups]
        torch.manual_seed(stretch.seed + 1000 * stretch.order)
        schedule = partial(stretch.schedule.at, steps=stretch.steps)
        losses = _check_losses(self.loop.train(model, optimizer, stretch.steps, schedule), stretch.steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # a scheduler has left its own there
            group.pop("initial_lr", None)
        loss = fmean(losses[-max(1, len(losses) // 10) :])
        return loss if abs(loss) < float("inf") else None


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
