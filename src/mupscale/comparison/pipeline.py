"""A comparison from its first small model to its answer, in a folder that a kill at any moment leaves whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mupscale.comparison.answer import answer_comparison
from mupscale.comparison.contenders import Contender
from mupscale.comparison.forecast import check_forecast, make_forecast
from mupscale.comparison.results import ComparisonSummary, SystemRuns
from mupscale.comparison.settings import ComparisonSettings
from mupscale.comparison.stages import Note, StageTrainer
from mupscale.comparison.system import Costs, System
from mupscale.comparison.training import train_base_models, train_budgets
from mupscale.comparison.tuning import Tuning, asked_for, tune_contenders
from mupscale.core import WholeWidth, Width
from mupscale.system import (
    MupscaleError,
    clear_leftovers,
    exclusive_lock,
    make_folder,
    print_at_once,
    read_json,
    write_json,
)
from mupscale.train import (
    Recipe,
    StoredRecipe,
    copy_checkpoint,
    describe_start,
    fingerprint_checkpoint,
    stored_values,
)

_MAY_CHANGE = {"seeds", "small_seeds", "contenders", "engine"}
_TUNING_STAGES = 3
NO_FLOPS = (
    "the model's FLOPs cannot be counted, so costs are steps: a step of the wide model counts as much as one of the "
    "base model, which favours the wide ones"
)


def run_comparison(
    recipe: Recipe,
    settings: ComparisonSettings,
    folder: str | Path,
    *,
    command: str = "",
    forecast_only: bool = False,
    note: Note = print_at_once,
    base_name: str = "",
    notes: Sequence[str] = (),
) -> ComparisonSummary:
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
    >>> run_comparison(recipe, ComparisonSettings(), "runs/demo")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: a comparison needs to know what the model grows to: give the recipe one ...
    """
    run = ComparisonRun(recipe, settings, Path(folder), note, forecast_only, base_name, list(notes))
    plan = run.plan()
    for line in run.notes:
        note(f"Note: {line}")
    with run.opened():
        return run.run(plan, command)


class PlannedComparison(NamedTuple):
    """What is compared where: the large system, the small ones, and the contenders."""

    large: System
    small: list[System]
    contenders: list[Contender]


@dataclass
class ComparisonRun:
    """A comparison in its folder: what is compared, and the stages in their order.

    base_name: what the user calls the checkpoint that it starts from. notes: sentences to keep in mind.
    """

    recipe: Recipe
    settings: ComparisonSettings
    folder: Path
    note: Note
    forecast_only: bool
    base_name: str = ""
    notes: list[str] = field(default_factory=list)

    def plan(self) -> PlannedComparison:
        """Everything that can be refused is refused here, before anything is written."""
        system = self.large_system()
        widths = self.settings.small_widths(system.narrow, system.wide)
        contenders = self.contenders(system)
        system = replace(system, settings=self.settings)
        self._check(system, system)
        small = [self._smaller(system, width) for width in widths]
        for one in small:
            self._check(one, system)
        if system.costs.unit == "steps":
            self.notes.append(NO_FLOPS)
        return PlannedComparison(system, small, contenders)

    def run(self, plan: PlannedComparison, command: str) -> ComparisonSummary:
        """All stages; the summary is written after the forecast, and again with the answer."""
        system, small, contenders = plan
        stages = _TUNING_STAGES + len(small) + (0 if self.forecast_only else 2)
        trainer = StageTrainer(
            self.folder, system.costs, self.settings.engine, self.settings.measure, self.note, stages
        )
        tuning = tune_contenders(small[0], trainer, self.settings.small_seeds)
        systems = [self._forecast_system(one, trainer, contenders, tuning) for one in small]
        forecast = make_forecast(systems, system.narrow)
        self.note(forecast["sentence"])
        summary = self._summary(command, system, tuning, systems, forecast, trainer)
        summary.save(self.folder)
        if self.forecast_only:
            return summary
        large = self._train_large(system, trainer, contenders, tuning)
        answer = answer_comparison(large)
        held = check_forecast(forecast, large, answer)
        summary = self._summary(command, system, tuning, systems, {**forecast, "held": held}, trainer)
        summary = replace(summary, large=large, answer=answer)
        summary.save(self.folder)
        return summary

    # ------------------------------------------------------------------------------------------- what is compared

    def large_system(self) -> System:
        """The user's own two widths, from the recipe's growth event or from a checkpoint."""
        recipe = self.recipe
        costs = Costs(replace(recipe, grow=[]))
        folder = self.folder / "large"
        if recipe.start is not None:
            return self._from_checkpoint(costs, folder)
        if len(recipe.grow) != 1:
            raise MupscaleError(
                "a comparison needs to know what the model grows to: give the recipe one growth event, grow: "
                "[{at: STEPS OF THE BASE MODEL, width: WIDE}], or start from a checkpoint (--from PATH --width WIDE)"
            )
        (growth,) = recipe.grow
        if Width.of(growth.width) == Width.of(recipe.width):
            raise MupscaleError(f"the recipe's growth keeps the width at {recipe.width}: there is nothing to compare")
        return System(
            recipe, self.settings, costs, recipe.width, growth.width, growth.at, recipe.steps - growth.at, folder
        )

    def _from_checkpoint(self, costs: Costs, folder: Path) -> System:
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
        return System(
            recipe, self.settings, costs, start.width, recipe.width, steps, after, folder, base=str(recipe.start)
        )

    def small_base_steps(self, system: System) -> int:
        """Of small base models: as many as the large one has trained."""
        if system.base_steps is None:
            raise MupscaleError(
                f"{self.base_name or system.base} does not tell for how many steps its model has trained, and small "
                f"base models are to train as long: give comparison.base_steps"
            )
        return system.base_steps

    def contenders(self, system: System) -> list[Contender]:
        """Those that are asked for; copies need a whole multiple."""
        wanted = asked_for(self.settings.contenders)
        try:
            Width.of(system.wide).check_multiple_of(Width.of(system.narrow), "copies")
        except MupscaleError as error:
            self.notes.append(f"{error}; copies are left out")
            wanted = [one for one in wanted if not one.needs_multiples]
            self.settings = replace(self.settings, contenders=[one.name for one in wanted])
        return wanted

    def _smaller(self, system: System, width: WholeWidth) -> System:
        """The same at a small width, which must have a wide one of its own."""
        steps = self.small_base_steps(system)
        try:
            return system.smaller(width, steps)
        except MupscaleError as error:
            raise MupscaleError(
                f"a small model of width {Width.of(width)} is to grow as the large one does, from "
                f"{Width.of(system.narrow)} to {Width.of(system.wide)}, and {str(error).partition(':')[0]}: "
                f"{self._other_small_widths(system)}"
            ) from None

    def _other_small_widths(self, system: System) -> str:
        """Whose the small widths are, and what to give."""
        if self.settings.widths:
            return "give other small widths in comparison.widths"
        return (
            f"comparison.widths gives no small widths, so that they are an eighth and a quarter of "
            f"{Width.of(system.narrow)}; give them there (--comparison.widths)"
        )

    def _check(self, system: System, large: System) -> None:
        """Refuse widths at which the model cannot be built, and budgets too short for the schedule."""
        small = f"; {self._other_small_widths(large)}"
        for width in (system.narrow, system.wide):
            try:
                system.recipe.family().sketch(width)
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
        for contender in asked_for(self.settings.contenders):
            system.legs(contender)
            system.check_growth(contender)

    # ------------------------------------------------------------------------------------------- stages

    def _forecast_system(
        self, system: System, trainer: StageTrainer, contenders: Sequence[Contender], tuning: Tuning
    ) -> SystemRuns:
        label = f"{Width.of(system.narrow)} → {Width.of(system.wide)}"
        with trainer.stage(f"forecast-{Width.of(system.narrow).label}", f"the contenders small, {label}: the forecast"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.small_seeds)
            return train_budgets(system, trainer, contenders, tuning, seeds)

    def _train_large(
        self, system: System, trainer: StageTrainer, contenders: Sequence[Contender], tuning: Tuning
    ) -> SystemRuns:
        system = self._with_base_inside(system)
        with trainer.stage("base", f"base models, width {Width.of(system.narrow)}"):
            seeds = train_base_models(system, trainer, tuning.base.lr, self.settings.seeds)
        label = f"{Width.of(system.narrow)} → {Width.of(system.wide)}"
        with trainer.stage("contenders", f"the contenders, {label}"):
            return train_budgets(system, trainer, contenders, tuning, seeds)

    def _with_base_inside(self, system: System) -> System:
        """With a copy of the user's checkpoint in the folder, which can then be moved; one begun without stays so."""
        base, is_begun = system.base, system.folder.exists()
        if base is None or Path(base).resolve().is_relative_to(self.folder.resolve()):
            return system
        place = self.folder / f"base-{fingerprint_checkpoint(base)}"
        return system if is_begun and not place.exists() else replace(system, base=str(copy_checkpoint(base, place)))

    def _summary(
        self,
        command: str,
        system: System,
        tuning: Tuning,
        small: list[SystemRuns],
        forecast: dict[str, Any],
        trainer: StageTrainer,
    ) -> ComparisonSummary:
        remarks = [remark for one in (tuning.base, *tuning.contenders) for remark in one.remarks]
        return ComparisonSummary(
            name=self.folder.resolve().name,
            command=command,
            recipe=stored_values(self.recipe, self.folder),
            settings=self.settings.to_json(),
            base={
                "from": self.base_name or self.recipe.start,
                "steps": system.base_steps,
                "lr": tuning.base.lr,
                "width": system.narrow,
            },
            tuned=[tuning.base, *tuning.contenders],
            small=small,
            forecast=forecast,
            stages=list(trainer.spent.values()),
            notes=[*self.notes, *remarks],
        )

    # ------------------------------------------------------------------------------------------- the folder

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, made if there is none, refused if it holds another comparison, and locked meanwhile."""
        path = self.folder / "comparison.json"
        values = json.loads(
            json.dumps({"recipe": stored_values(self.recipe, self.folder), "settings": self.settings.to_json()})
        )
        values["base"] = None if self.recipe.start is None else fingerprint_checkpoint(self.recipe.start)
        try:
            make_folder(self.folder)
            busy = f"another process is comparing in {self.folder}: wait for it, or choose another folder (--out)"
            with exclusive_lock(self.folder / ".lock", refusal=busy):
                if path.exists():
                    self._check_same(path, values["settings"], values["base"])
                for folder in (self.folder, self.folder / "stacks"):
                    clear_leftovers(folder, alone=True)
                write_json(path, values)
                yield
        except OSError as error:
            raise MupscaleError(f"{path} cannot be written: {error.strerror or error}") from None

    def _check_same(self, path: Path, settings: Mapping[str, Any], base: str | None) -> None:
        try:
            stored = read_json(path)
            recipe, theirs = StoredRecipe.of(stored["recipe"], path), dict(stored["settings"])
            their_base = stored.get("base", base)  # earlier versions have none
        except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
            raise MupscaleError(f"{path} is damaged ({error}): choose another folder (--out)") from None
        same_start = base is not None and stored.get("base") == base  # the same bytes, wherever they lie
        difference = recipe.describe_difference(self.recipe, recipe.steps, same_start=same_start)
        if recipe.steps != self.recipe.steps:
            difference = f"steps is {recipe.steps} there and {self.recipe.steps} here"
        for name, value in settings.items():
            if name not in _MAY_CHANGE and theirs.get(name) != value:
                difference = f"comparison.{name} is {theirs.get(name)} there and {value} here"
        if not difference and their_base != base:
            difference = f"{self.recipe.start} has changed since"
        if difference:
            raise MupscaleError(
                f"{self.folder} holds a comparison of another recipe: {difference}; choose another folder (--out)"
            )
