"""Steps 1 to 4 at full size, and the honest baselines: what else the same FLOPs could have bought."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from mupscale.core import Width
from mupscale.engine import Outcome
from mupscale.method.contender_types import ComparisonSetup, PaperContender, Training
from mupscale.method.contenders import BASE, CONTENDERS, STAGES
from mupscale.method.method_run import MethodRun
from mupscale.method.summary import Curve, Runs
from mupscale.method.tuning import Tuned
from mupscale.sweep import Cell, Sweep
from mupscale.system import MupscaleError
from mupscale.train import Recipe, RunFolder

POINTS = 400
"""Of a curve in the summary, at most."""


def train_contenders(run: MethodRun, tuned: Tuned) -> tuple[list[Runs], list[Sweep]]:
    """Train every contender that is asked for, and give their runs in the registry's order.

    Beside them the sweeps that a contender has of its own, at the wide width.
    """
    comparison = ComparisonSetup(run.protocol, tuned.choice, _own_lr(run, tuned), run.method.baselines)
    training = _ContenderTraining(run, comparison)
    for stage in STAGES:
        training.train_stage(stage)
    return [training.runs[one.name] for one in CONTENDERS if one.name in training.runs], training.sweeps


def _own_lr(run: MethodRun, tuned: Tuned) -> float | None:
    """The learning rate that is best without noise, if the sweep's grid tells it from the chosen one.

    The chosen one lies between two of the grid's where it is extrapolated from several small widths. The upscaled
    model has it if a baseline has, so that none has more choice than another.
    """
    if not run.method.has_own_rates:
        return None
    nearest = min(run.method.upscaled_lrs, key=lambda lr: abs(math.log(lr / tuned.choice.lr)))
    return None if tuned.zero_lr == nearest else tuned.zero_lr


@dataclass
class _ContenderTraining:
    """What is trained so far: outcomes and runs by contender, and the seeds whose base model can be upscaled."""

    run: MethodRun
    comparison: ComparisonSetup
    base_seeds: list[int] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    runs: dict[str, Runs] = field(default_factory=dict)
    sweeps: list[Sweep] = field(default_factory=list)

    def train_stage(self, stage: str) -> None:
        """All contenders of a stage, as one program; those that share another's runs are read off these."""
        plans = [(one, plan) for one in CONTENDERS if one.stage == stage and (plan := self._plan(one)) is not None]
        recipes = {
            one.name: [plan.make_recipe(seed) for seed in self._seeds(one)] for one, plan in plans if not plan.shares
        }
        self.outcomes |= self.run.train(stage, recipes)
        for one, plan in plans:
            outcomes = self.outcomes[one.name] = self.outcomes[plan.shares or one.name]
            if one is BASE:
                self._find_base_seeds(outcomes)
            self.runs[one.name] = self._runs(one, plan, outcomes)

    def _plan(self, contender: PaperContender) -> Training | None:
        """How it is trained, after what has to be done for that first: files to start from, a sweep of its own."""
        training = contender.plan_if_asked(self.comparison)
        if training is not None and contender.write_start is not None:
            self._write_starts(contender)
        if training is None or not contender.own_sweep:
            return training
        return contender.plan(self.comparison.with_cell(self._sweep(contender).best.cell))

    def _seeds(self, contender: PaperContender) -> Sequence[int]:
        return self.base_seeds if contender.after_base else range(self.run.method.seeds)

    def _find_base_seeds(self, outcomes: Sequence[Outcome]) -> None:
        """Seeds with which the base model diverges cannot be upscaled."""
        self.base_seeds = [seed for seed, outcome in enumerate(outcomes) if outcome.status == "finished"]
        if not self.base_seeds:
            raise MupscaleError(
                f"the base model of width {Width.of(self.comparison.narrow).label} diverged with every seed at "
                f"learning rate {self.comparison.choice.base_lr:g}: let Sweep 1 (method.lrs) choose among smaller ones"
            )

    def _write_starts(self, contender: PaperContender) -> None:
        """The wide models that it starts from, one for each base model."""
        base = BASE.plan(self.comparison)
        assert base is not None
        assert contender.write_start is not None
        for seed in self.base_seeds:
            path = self.comparison.start_file(contender.name, seed)
            if not path.exists():
                contender.write_start(self.comparison, base.make_recipe(seed), path)

    def _sweep(self, contender: PaperContender) -> Sweep:
        """Noise and learning rate tuned where it is expensive, at the wide width itself."""
        setup, method = self.comparison, self.run.method
        seeds = self.base_seeds[: method.sweep_seeds]

        def make_recipes(cell: Cell) -> list[Recipe]:
            training = contender.plan(setup.with_cell(cell))
            assert training is not None
            return [replace(training.make_recipe(seed), out=None) for seed in seeds]

        name, space = contender.sweep_name(setup.wide), method.sweep_2()
        sweep = self.run.sweep(name, setup.wide, setup.narrow, space, make_recipes)
        self.sweeps.append(sweep)
        return sweep

    def _runs(self, contender: PaperContender, training: Training, outcomes: Sequence[Outcome]) -> Runs:
        seeds = self._seeds(contender)
        no_noise = self.comparison.choice.noise == 0
        text = (no_noise and contender.label_without_noise) or contender.label
        return Runs(
            name=contender.name,
            label=text.format(width=Width.of(training.width).label),
            width=training.width,
            lr=training.lr,
            steps=training.steps,
            flops_per_step=self.run.protocol.flops_per_step(training.width),
            curves=[read_curve(outcome, seed, training.steps) for outcome, seed in zip(outcomes, seeds, strict=True)],
            after_base=contender.after_base,
            noise=training.noise,
            drop=training.drop,
            drop_lr=training.drop_lr,
        )


def read_curve(outcome: Outcome, seed: int, steps: int) -> Curve:
    """A seed's curve from its run's metrics up to so many steps, thinned to what a picture can show.

    A run that diverged later than that did not diverge.
    """
    status = "finished" if outcome.step > steps + 1 else outcome.status
    records = RunFolder(str(outcome.recipe.out)).records()
    held_out = [r for r in records if r["kind"] == "eval" and r["loss"] is not None and r["step"] <= steps]
    accuracy = [r["accuracy"] for r in held_out if "accuracy" in r]
    curve = Curve(seed, status, [], [], [r["step"] for r in held_out], [r["loss"] for r in held_out], accuracy)
    return replace(curve, **thin_curve([point for point in outcome.curve if point[0] <= steps])._asdict())


class ThinnedCurve(NamedTuple):
    """Points that each stand for several: the last step, and the mean, lowest and highest loss.

    Where each stands for itself alone, lowest and highest are left out.
    """

    steps: list[int]
    losses: list[float]
    lowest: list[float]
    highest: list[float]


def thin_curve(curve: Sequence[tuple[int, float]], most: int = POINTS) -> ThinnedCurve:
    """At most so many points of a curve, each the mean of those it stands for, whose extremes are kept beside it.

    The first may stand for fewer than the others, so that a mean over the last ones is that of the steps.

    >>> thin_curve([(1, 3.0), (2, 2.0), (3, 1.5), (4, 0.5)], most=2)
    ThinnedCurve(steps=[2, 4], losses=[2.5, 1.0], lowest=[2.0, 0.5], highest=[3.0, 1.5])
    """
    each = max(1, math.ceil(len(curve) / most))
    steps, losses = [step for step, _ in curve], [loss for _, loss in curve]
    if each == 1:
        return ThinnedCurve(steps, losses, [], [])
    ends = range(len(losses) % each or each, len(losses) + 1, each)
    parts = [losses[max(0, end - each) : end] for end in ends]
    return ThinnedCurve(
        [steps[end - 1] for end in ends], list(map(fmean, parts)), list(map(min, parts)), list(map(max, parts))
    )
