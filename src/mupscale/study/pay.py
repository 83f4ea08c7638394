"""The preset `pay`: does growing pay? Every contender spends the same budget, tuned small, measured at several parts.

Small systems are tuned at and forecast from; the large one is the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mupscale.core import WholeWidth, Width
from mupscale.study.best_size import forecast_size_of
from mupscale.study.contenders import USUAL_IN_DEPTH, USUAL_IN_PAY, Contender, check_contenders, contenders_named
from mupscale.study.dry_run import describe_stages
from mupscale.study.forecast import check_forecast, make_forecast
from mupscale.study.results import StudySummary, SystemRuns, Tuning
from mupscale.study.settings import StudySettings
from mupscale.study.systems import (
    System,
    check_builds,
    check_operators,
    read_system,
    train_base_models,
    train_budgets,
)
from mupscale.study.training import Ground, MakeGround, Note, Trainer
from mupscale.study.tuning import CLOSE, list_candidates, tune_contenders
from mupscale.study.verdict import answer_comparison
from mupscale.study.wording import write_pay_words
from mupscale.system import MupscaleError, print_at_once
from mupscale.train import Recipe, describe_start, stored_values

_NARROW = 8
NO_FLOPS = (
    "the model's FLOPs cannot be counted, so costs are steps: a step of the wide model counts as much as one of the "
    "base model, which favours the wide ones"
)


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
    make_ground: MakeGround = Ground,
) -> StudySummary:
    """Tune at small widths, forecast, train all contenders at full size, and say what came of it; summary.json.

    The recipe has one growth event, which tells both widths and how long each model trains; or it starts from a
    checkpoint (`start`) and its width is the wide one. The same call goes on where an earlier one was stopped.
    base_name: what the user calls that checkpoint. notes: what the answer is to keep in mind beside its own.
    """
    study = PayStudy(recipe, settings, Path(folder), note, base_name, list(notes), make_ground)
    for line in study.notes:
        note(f"Note: {line}")
    return study.run(command, forecast_only)


@dataclass
class PayStudy:
    """A comparison in its folder: what is compared, and the stages in their order.

    base_name: what the user calls the checkpoint that it starts from. notes: sentences to keep in mind. Everything that
    can be refused is refused when it is made, before anything is written.
    """

    recipe: Recipe
    settings: StudySettings
    folder: Path
    note: Note
    base_name: str = ""
    notes: list[str] = field(default_factory=list)
    make_ground: MakeGround = Ground

    def __post_init__(self) -> None:
        self.has_choice = bool(self.settings.contenders)
        self.settings = self.settings.resolved(USUAL_IN_PAY, "held-out")
        check_contenders(self.settings.contenders, "study.contenders")
        self.ground = self.make_ground(replace(self.recipe, grow=[]), self.settings.measure or "held-out")
        system = self._large_system()
        self.contenders = self._contenders(system)
        self.system = system = replace(system, settings=self.settings)
        self._check(system)
        widths = self.settings.small_widths(system.narrow, system.wide, partial(self._can_have, system))
        self.small = [self._smaller(width) for width in widths]
        for one in self.small:
            self._check(one)
        if self.ground.unit == "steps":
            self.notes.append(NO_FLOPS)
        if min(Width.of(widths[0]).sizes.values()) < _NARROW:
            self.notes.append(
                f"learning rates and noise are tuned at width {Width.of(widths[0])}: so narrow a model is a poor guide "
                f"to a large one; study.widths takes wider ones"
            )

    def _check(self, one: System) -> None:
        """Refuse widths at which the model cannot be built, budgets too short for the schedule, and growth."""
        check_builds(self.recipe, one, "" if one is self.system else f"; {self._other_small_widths()}")
        for contender in self.contenders:
            one.leaves(contender, 1.0, 1.0, 0.0, 0)
        check_operators(self.recipe, one, self.contenders)

    def run(self, command: str, forecast_only: bool) -> StudySummary:
        """All stages; the summary is written after the forecast, and again with the answer."""
        stages = 3 + len(self.small) + (0 if forecast_only else 2)
        trainer = self.ground.make_trainer(self.folder, "pay", self.settings.engine, self.note, stages)
        trainer.command = command
        with trainer.alone():
            tuning = tune_contenders(self.small[0], trainer, float(self.recipe.optimizer.init_args["lr"]))
            small = [self._train_small(one, trainer, tuning) for one in self.small]
            forecast = make_forecast(small, self.system.narrow)
            forecast["size"] = forecast_size_of(self.system, small)
            for said in () if forecast_only else (forecast, forecast["size"]):  # its summary says it
                if "sentence" in said:
                    self.note(said["sentence"])
            summary = StudySummary(
                name=self.folder.resolve().name,
                command=command,
                preset="pay",
                recipe=stored_values(self.recipe, self.folder),
                settings=self.settings.to_json(),
                base={
                    "from": self.base_name or self.recipe.start,
                    "steps": self.system.base_steps,
                    "lr": tuning.base.lr,
                    "width": self.system.narrow,
                },
                tuned=[tuning.base, *tuning.contenders],
                small=small,
                forecast=forecast,
                stages=list(trainer.spent.values()),
                notes=[*self.notes, *(remark for one in (tuning.base, *tuning.contenders) for remark in one.remarks)],
            )
            if not forecast_only:
                write_pay_words(summary).save(self.folder)
                large = self._train_large(trainer, tuning)
                answer = answer_comparison(large)
                held = check_forecast(forecast, large, answer)
                summary = replace(summary, large=large, answer=answer, forecast={**forecast, "held": held})
                summary = replace(summary, stages=list(trainer.spent.values()))
            summary = write_pay_words(summary)
            summary.save(self.folder)
            return summary

    # ------------------------------------------------------------------------------------------- what is compared

    def _large_system(self) -> System:
        """The user's own two widths, from the recipe's growth event or from a checkpoint."""
        if self.recipe.start is not None:
            return self._from_checkpoint()
        otherwise = ", or start from a checkpoint (--from PATH --width WIDE)"
        return read_system(self.recipe, self.settings, self.ground, "a comparison", otherwise)

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
        unit = recipe.grow[0].unit if recipe.grow else recipe.noise_unit
        sizes = start.width, recipe.width, steps, after
        return System(self.settings, self.ground, recipe.schedule, recipe.base, *sizes, self.ground.start, unit)

    def _contenders(self, system: System) -> list[Contender]:
        """Those that are asked for, about new blocks where depth alone grows; copies need a whole multiple."""
        narrow, wide = Width.of(system.narrow), Width.of(system.wide)
        depth_alone = narrow.growing(wide) == [self.recipe.family().depth_size]
        if depth_alone and not self.has_choice:
            self.settings = replace(self.settings, contenders=list(USUAL_IN_DEPTH))
        wanted = contenders_named(self.settings.contenders)
        if odd := next((one for one in wanted if one.is_grown and one.adds_blocks != depth_alone), None):
            grows, about = ("depth alone grows", "units") if depth_alone else ("a width grows", "blocks")
            raise MupscaleError(
                f"from {narrow} to {wide} {grows}, and {odd.name} is about new {about}: take from "
                f"{', '.join(USUAL_IN_DEPTH if depth_alone else USUAL_IN_PAY)}"
            )
        try:
            Width.of(system.wide).check_multiple_of(Width.of(system.narrow), "copies")
        except MupscaleError as error:
            self.notes.append(f"{error}; copies are left out")
            wanted = [one for one in wanted if not one.needs_multiples]
            self.settings = replace(self.settings, contenders=[one.name for one in wanted])
        return wanted

    def _can_have(self, system: System, width: WholeWidth) -> bool:
        """Whether the model can be built at this width, and at the one that it would grow to from there."""
        try:
            small = system.smaller(width)
            for size in (small.narrow, small.wide):
                self.recipe.family().sketch(size)
        except Exception:  # the model's own, too
            return False
        return True

    def _smaller(self, width: WholeWidth) -> System:
        """The same at a small width, which must have a wide one of its own; base models train as long as the large."""
        system = self.system
        if system.base_steps is None:
            raise MupscaleError(
                f"{self.base_name or self.recipe.start} does not record how many steps its model has trained, and "
                f"small base models train for the same number: give study.base_steps"
            )
        try:
            return system.smaller(width)
        except MupscaleError as error:
            raise MupscaleError(
                f"a small model of width {Width.of(width)} is to grow as the large one does, from "
                f"{Width.of(system.narrow)} to {Width.of(system.wide)}, and {str(error).partition(':')[0]}: "
                f"{self._other_small_widths()}"
            ) from None

    def _other_small_widths(self) -> str:
        """Whose the small widths are, and what to give."""
        if self.settings.widths:
            return "give other small widths in study.widths"
        return (
            f"study.widths gives no small widths, so that they are the sizes nearest to an eighth and a "
            f"quarter of {Width.of(self.system.narrow)}; give them there (--study.widths)"
        )

    # ------------------------------------------------------------------------------------------- stages

    def _train_small(self, system: System, trainer: Trainer, tuning: Tuning) -> SystemRuns:
        name = f"forecast-{Width.of(system.narrow).label}"
        with trainer.stage(name, f"the contenders small, {system.label}: the forecast"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.small_seeds)
            return train_budgets(system, trainer, self.contenders, tuning, seeds, self.ground.unit)

    def _train_large(self, trainer: Trainer, tuning: Tuning) -> SystemRuns:
        system = self.system
        with trainer.stage("base", f"base models, width {Width.of(system.narrow)}"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.seeds)
        with trainer.stage("contenders", f"the contenders, {system.label}"):
            return train_budgets(system, trainer, self.contenders, tuning, seeds, self.ground.unit)


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
    """
    study = PayStudy(recipe, settings, Path(folder), lambda text: None, base_name, list(notes))
    first, contenders = study.small[0], study.contenders
    rates = settings.rates(float(recipe.optimizer.init_args["lr"]))
    tried = list_candidates(first, contenders, rates)
    # one seed of every candidate, all to the end, not counting the seeds that close ones get
    leaves = [leaf for one in tried for leaf in first.candidate(one.contender, rates[0], one.lr, one.noise, 0)]
    tuning = [*(first.decayed_base(lr, 0) for lr in rates), *(leaf for leaf in leaves if leaf is not None)]
    stages = {f"tuning, {first.label}": tuning}
    chosen = [(one, settings.noises[0] if one.tunes_noise else 0.0) for one in contenders]
    for name, system, seeds in [
        *(("forecast", one, settings.small_seeds) for one in study.small),
        ("large", study.system, settings.seeds),
    ]:
        stages[f"{name}, {system.label}"] = [
            leaf
            for one, noise in chosen
            for seed in range(seeds)
            for leaf in system.leaves(one, rates[0], rates[0], noise, seed).values()
        ]
    lines = [describe_stages(stages, study.ground, settings.engine)]
    steps = ", ".join(f"{one.label} {study.system.steps(one):,}" for one in contenders)
    lines.append(f"Steps at the full budget: {steps}.")
    if None not in leaves:  # each is judged early
        lines.append(
            f"Tuning costs less if candidates stop early: those that are {100 * settings.prune:g} % behind after "
            f"{settings.budgets[0]:g} of the budget. It costs more if candidates within {100 * CLOSE:g} % of the best "
            f"train with further seeds (study.small_seeds is {settings.small_seeds})."
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in study.notes)])
