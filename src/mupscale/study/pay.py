"""The preset `pay`: does growing pay? Every contender spends the same budget, tuned small, measured at several parts.

Small systems are tuned at and forecast from; the large one is the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mupscale.core import WholeWidth, Width
from mupscale.study.best_size import forecast_size_of
from mupscale.study.contenders import USUAL_IN_PAY, Contender, check_contenders, contenders_named
from mupscale.study.dry_run import describe_stages
from mupscale.study.forecast import check_forecast, make_forecast
from mupscale.study.pay_words import write_pay_words
from mupscale.study.results import StudySummary, SystemRuns, Tuning
from mupscale.study.settings import StudySettings
from mupscale.study.systems import System, train_base_models, train_budgets
from mupscale.study.training import Ground, Note, Trainer
from mupscale.study.tree import Stretch
from mupscale.study.tuning import tune_contenders
from mupscale.study.verdict import answer_comparison
from mupscale.system import MupscaleError, print_at_once
from mupscale.train import Recipe, build_operator, describe_start, stored_values

NO_FLOPS = (
    "the model's FLOPs cannot be counted, so costs are steps: a step of the wide model counts as much as one of the "
    "base model, which favours the wide ones"
)


class PlannedComparison(NamedTuple):
    """What is compared where: the large system, the small ones, and the contenders."""

    large: System
    small: list[System]
    contenders: list[Contender]


def run_pay(
    recipe: Recipe,
    settings: StudySettings,
    folder: str | Path,
    *,
    command: str = "",
    forecast_only: bool = False,
    note: Note = print_at_once,
    base_name: str = "",
    notes: Sequence[str] = (),
) -> StudySummary:
    """Tune at small widths, forecast, train all contenders at full size, and say what came of it; summary.json.

    The recipe has one growth event, which tells both widths and how long each model trains; or it starts from a
    checkpoint (`start`) and its width is the wide one. The same call goes on where an earlier one was stopped.
    base_name: what the user calls that checkpoint. notes: what the answer is to keep in mind beside its own.

    >>> from mupscale.train import Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10,
    ... )
    >>> run_pay(recipe, StudySettings(), "runs/demo")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: a comparison needs to know what the model grows to: give the recipe one ...
    """
    run = PayStudy(recipe, settings, Path(folder), note, base_name, list(notes))
    plan = run.plan()
    for line in run.notes:
        note(f"Note: {line}")
    return run.run(plan, command, forecast_only)


@dataclass
class PayStudy:
    """A comparison in its folder: what is compared, and the stages in their order.

    base_name: what the user calls the checkpoint that it starts from. notes: sentences to keep in mind.
    """

    recipe: Recipe
    settings: StudySettings
    folder: Path
    note: Note
    base_name: str = ""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self.settings.resolved(USUAL_IN_PAY, "held-out")
        check_contenders(self.settings.contenders, "study.contenders")
        self.ground = Ground(replace(self.recipe, grow=[]), self.settings.measure or "held-out")

    def plan(self) -> PlannedComparison:
        """Everything that can be refused is refused here, before anything is written."""
        system = self.large_system()
        widths = self.settings.small_widths(system.narrow, system.wide)
        contenders = self._contenders(system)
        system = replace(system, settings=self.settings)
        self._check(system, system)
        small = [self._smaller(system, width) for width in widths]
        for one in small:
            self._check(one, system)
        if self.ground.unit == "steps":
            self.notes.append(NO_FLOPS)
        return PlannedComparison(system, small, contenders)

    def run(self, plan: PlannedComparison, command: str, forecast_only: bool) -> StudySummary:
        """All stages; the summary is written after the forecast, and again with the answer."""
        system, small, contenders = plan
        trainer = Trainer(
            self.ground,
            self.folder,
            "pay",
            self.settings.engine,
            self.note,
            stages=3 + len(small) + (0 if forecast_only else 2),
        )
        with trainer.alone():
            tuning = tune_contenders(small[0], trainer, float(self.recipe.optimizer.init_args["lr"]))
            systems = [self._forecast_system(one, trainer, contenders, tuning) for one in small]
            forecast = make_forecast(systems, system.narrow)
            forecast["size"] = forecast_size_of(system, systems)
            for said in (forecast, forecast["size"]):
                if "sentence" in said:
                    self.note(said["sentence"])
            summary = write_pay_words(self._summary(command, system, tuning, systems, forecast, trainer))
            summary.save(self.folder)
            if forecast_only:
                return summary
            large = self._train_large(system, trainer, contenders, tuning)
            answer = answer_comparison(large)
            forecast["held"] = check_forecast(forecast, large, answer)
            summary = self._summary(command, system, tuning, systems, forecast, trainer)
            summary = write_pay_words(replace(summary, large=large, answer=answer))
            summary.save(self.folder)
            return summary

    # ------------------------------------------------------------------------------------------- what is compared

    def large_system(self) -> System:
        """The user's own two widths, from the recipe's growth event or from a checkpoint."""
        recipe = self.recipe
        if recipe.start is not None:
            return self._from_checkpoint()
        if len(recipe.grow) != 1:
            raise MupscaleError(
                "a comparison needs to know what the model grows to: give the recipe one growth event, grow: "
                "[{at: STEPS OF THE BASE MODEL, width: WIDE}], or start from a checkpoint (--from PATH --width WIDE)"
            )
        (growth,) = recipe.grow
        if Width.of(growth.width) == Width.of(recipe.width):
            raise MupscaleError(f"the recipe's growth keeps the width at {recipe.width}: there is nothing to compare")
        return self._system(recipe.width, growth.width, growth.at, recipe.steps - growth.at)

    def _system(self, narrow: WholeWidth, wide: WholeWidth, before: int | None, after: int) -> System:
        recipe, start = self.recipe, self.ground.start
        return System(self.settings, self.ground, recipe.schedule, recipe.base, narrow, wide, before, after, start)

    def _from_checkpoint(self) -> System:
        recipe, start = self.recipe, describe_start(self.recipe)
        name = self.base_name or recipe.start
        narrow, wide = Width.of(start.width), Width.of(recipe.width)
        if narrow == wide or narrow.size > wide.size:
            raise MupscaleError(
                f"{name} holds a model of width {narrow}, and the width to grow to is {wide}: give a wider one "
                f"(--width)"
            )
        if not start.has_optimizer:
            file = next(Path(str(name)).glob("optimizer*"), None)  # of transformers' Trainer
            unread = "" if file is None else f"has its optimizer's state in {file.name}, which is not read"
            self.notes.append(f"{name} {unread or 'holds no optimizer state'}, so every contender starts without one")
        if start.is_decayed:
            self.notes.append(
                f"the learning rate of {name} has fallen already: every contender takes it from there, and "
                f"raises the rate again"
            )
        steps = self.settings.base_steps if start.steps is None else start.steps
        after = recipe.steps - (recipe.grow[0].at if recipe.grow else 0)
        return self._system(start.width, recipe.width, steps, after)

    def _contenders(self, system: System) -> list[Contender]:
        """Those that are asked for; copies need a whole multiple."""
        wanted = contenders_named(self.settings.contenders)
        try:
            Width.of(system.wide).check_multiple_of(Width.of(system.narrow), "copies")
        except MupscaleError as error:
            self.notes.append(f"{error}; copies are left out")
            wanted = [one for one in wanted if not one.needs_multiples]
            self.settings = replace(self.settings, contenders=[one.name for one in wanted])
        return wanted

    def _smaller(self, system: System, width: WholeWidth) -> System:
        """The same at a small width, which must have a wide one of its own; base models train as long as the large."""
        if system.base_steps is None:
            raise MupscaleError(
                f"{self.base_name or self.recipe.start} does not tell for how many steps its model has trained, and "
                f"small base models are to train as long: give study.base_steps"
            )
        try:
            return system.smaller(width)
        except MupscaleError as error:
            raise MupscaleError(
                f"a small model of width {Width.of(width)} is to grow as the large one does, from "
                f"{Width.of(system.narrow)} to {Width.of(system.wide)}, and {str(error).partition(':')[0]}: "
                f"{self._other_small_widths(system)}"
            ) from None

    def _other_small_widths(self, system: System) -> str:
        """Whose the small widths are, and what to give."""
        if self.settings.widths:
            return "give other small widths in study.widths"
        return (
            f"study.widths gives no small widths, so that they are an eighth and a quarter of "
            f"{Width.of(system.narrow)}; give them there (--study.widths)"
        )

    def _check(self, system: System, large: System) -> None:
        """Refuse widths at which the model cannot be built, budgets too short for the schedule, and growth."""
        small = f"; {self._other_small_widths(large)}"
        for width in (system.narrow, system.wide):
            try:
                self.recipe.family().sketch(width)
            except MupscaleError as error:
                if system is large:
                    raise
                raise MupscaleError(
                    f"{error}; a small model grows as the large one does, here from {Width.of(system.narrow)} to "
                    f"{Width.of(system.wide)}{small}"
                ) from None
            except Exception as error:  # the model's own
                raise MupscaleError(
                    f"the model cannot be built at width {Width.of(width)}: {type(error).__name__}: "
                    f"{' '.join(str(error).split())}{'' if system is large else small}"
                ) from None
        for one in contenders_named(self.settings.contenders):
            system.leaves(one, 1.0, 1.0, 0.0, 0)
            self._check_growth(system, one)

    def _check_growth(self, system: System, one: Contender) -> None:
        """Refuse a contender that cannot grow this model."""
        if not one.is_grown:
            return
        operator = build_operator(one.how, 0.0, "init")
        try:
            operator.check(self.recipe.family().widening(system.narrow, system.wide, grow=operator))
        except MupscaleError as error:
            raise MupscaleError(f"{error}: leave {one.name} out of study.contenders") from None

    # ------------------------------------------------------------------------------------------- stages

    def _forecast_system(
        self, system: System, trainer: Trainer, contenders: Sequence[Contender], tuning: Tuning
    ) -> SystemRuns:
        name = f"forecast-{Width.of(system.narrow).label}"
        with trainer.stage(name, f"the contenders small, {system.label}: the forecast"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.small_seeds)
            return train_budgets(system, trainer, contenders, tuning, seeds, self.ground.unit)

    def _train_large(
        self, system: System, trainer: Trainer, contenders: Sequence[Contender], tuning: Tuning
    ) -> SystemRuns:
        with trainer.stage("base", f"base models, width {Width.of(system.narrow)}"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.seeds)
        with trainer.stage("contenders", f"the contenders, {system.label}"):
            return train_budgets(system, trainer, contenders, tuning, seeds, self.ground.unit)

    def _summary(
        self,
        command: str,
        system: System,
        tuning: Tuning,
        small: list[SystemRuns],
        forecast: dict[str, Any],
        trainer: Trainer,
    ) -> StudySummary:
        remarks = [remark for one in (tuning.base, *tuning.contenders) for remark in one.remarks]
        base = {
            "from": self.base_name or self.recipe.start,
            "steps": system.base_steps,
            "lr": tuning.base.lr,
            "width": system.narrow,
        }
        return StudySummary(
            name=self.folder.resolve().name,
            command=command,
            preset="pay",
            recipe=stored_values(self.recipe, self.folder),
            settings=self.settings.to_json(),
            base=base,
            tuned=[tuning.base, *tuning.contenders],
            small=small,
            forecast=dict(forecast),
            stages=list(trainer.spent.values()),
            notes=[*self.notes, *remarks],
        )


# ---------------------------------------------------------------------------------------------- before it is trained


def describe_plan(
    recipe: Recipe,
    settings: StudySettings,
    folder: str | Path,
    *,
    base_name: str = "",
    notes: Sequence[str] = (),
) -> str:
    """A table of stages, for `mupscale run --dry-run`; nothing is written. base_name, notes: as in `run_pay`.

    Every stage builds the tree that it would train, with the first of the values to try where tuning is to choose;
    what an earlier stage has trained is not counted again.

    >>> from mupscale.train import Growth, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=16, base=4, steps=120, batch=10, grow=[Growth(at=60, width=64)],
    ... )
    >>> print(describe_plan(recipe, StudySettings(widths=[8], seeds=2), "runs/demo"))
    tuning, 8 → 32         75 models   5.57e+08 FLOPs   46.8%
    forecast, 8 → 32       36 models      2e+08 FLOPs   16.8%
    large, 16 → 64         24 models   4.32e+08 FLOPs   36.3%
    together                           1.19e+09 FLOPs
    steps at the full budget: from scratch 67, continued 488, grown from copies 60, grown with fresh units 60
    tuning costs at most that: candidates that are 10 % behind after 0.25 of the budget go no further
    """
    run = PayStudy(recipe, settings, Path(folder), lambda text: None, base_name, list(notes))
    large, small, contenders = run.plan()
    rates = settings.rates(float(recipe.optimizer.init_args["lr"]))
    chosen = [(one, rates[0], run.settings.noises[0] if one.tunes_noise else 0.0) for one in contenders]
    stages = {f"tuning, {small[0].label}": _tuning_leaves(small[0], contenders, rates)}
    for name, system, seeds in [
        *(("forecast", one, settings.small_seeds) for one in small),
        ("large", large, settings.seeds),
    ]:
        stages[f"{name}, {system.label}"] = [
            leaf
            for one, lr, noise in chosen
            for seed in range(seeds)
            for leaf in system.leaves(one, rates[0], lr, noise, seed).values()
        ]
    lines = [describe_stages(stages, run.ground)]
    steps = ", ".join(f"{one.label} {large.steps(one):,}" for one in contenders)
    lines.append(f"steps at the full budget: {steps}")
    if small[0].candidate(contenders[0], 1.0, 1.0, 0.0, 0).early is not None:
        lines.append(
            f"tuning costs at most that: candidates that are {100 * settings.prune:g} % behind after "
            f"{settings.budgets[0]:g} of the budget go no further"
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in run.notes)])


def _tuning_leaves(system: System, contenders: Sequence[Contender], rates: Sequence[float]) -> list[Stretch]:
    """One seed of every candidate, all to the end, not counting the seeds that close ones get."""
    leaves = [system.decayed_base(lr, 0) for lr in rates]
    for one in contenders:
        noises = system.settings.noises if one.tunes_noise else [0.0]
        for lr, noise in ((lr, noise) for noise in noises for lr in rates if one.tuned_as is None):
            leaves += [leaf for leaf in system.candidate(one, rates[0], lr, noise, 0) if leaf is not None]
    return leaves
