"""The preset `pay`: does growing pay? Every contender spends the same budget, tuned small, measured at several parts.

Small systems are tuned at and forecast from; the large one is the user's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mupscale.core import WholeWidth, Width
from mupscale.growth import DEPTH_OPERATORS
from mupscale.study.contenders import (
    BASE,
    CONTINUED,
    USUAL_IN_DEPTH,
    USUAL_IN_PAY,
    Contender,
    check_contenders,
    contenders_named,
)
from mupscale.study.forecast import check_forecast, forecast_size, make_forecast
from mupscale.study.results import BudgetPoint, ContenderRuns, StudySummary, SystemRuns, Tuning
from mupscale.study.space import CLOSE, Cell, Sweep, Tried, joined_edges
from mupscale.study.systems import (
    NARROW,
    StudySettings,
    System,
    check_builds,
    check_operators,
    describe_own_width,
    find_alive,
    read_system,
)
from mupscale.study.training import Ground, MakeGround, Note, Trainer, describe_stages
from mupscale.study.tree import Candidate, Stretch, list_stretches
from mupscale.study.verdict import answer_comparison
from mupscale.study.wording import write_pay_words
from mupscale.system import Diverged, MupscaleError, print_at_once, recipe_entry
from mupscale.train import Recipe, describe_start

NO_FLOPS = (
    "the model's FLOPs cannot be counted, so costs are steps: a step of the wide model counts as much as one of the "
    "base model, which favours the wide ones"
)

MANY_EPOCHS = 4
"""How often data may be gone over and still teach about as much as new data (Muennighoff et al., 2023)."""


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
        if system.base_steps is None:
            raise MupscaleError(
                f"{self.base_name or self.recipe.start} does not record how many steps its model has trained, and "
                f"small base models train for the same number: give {recipe_entry('study.base_steps')}"
            )
        widths = self.settings.small_widths(system.narrow, system.wide, self._why_not)
        self.small = [self._smaller(width) for width in widths]
        for one in self.small:
            self._check(one)
        if self.ground.unit == "steps":
            self.notes.append(NO_FLOPS)
        self.notes += self._describe_overfitting()
        self.notes += describe_own_width(widths, system.narrow)
        if min(Width.of(widths[0]).sizes.values()) < NARROW:
            self.notes.append(
                f"learning rates and noise are tuned at {Width.of(widths[0]).phrase}: so narrow a model is a poor "
                f"guide to a large one; {recipe_entry('study.widths')} takes wider ones"
            )

    def _describe_overfitting(self) -> list[str]:
        """What to keep in mind where models go over the data so often that they learn it by heart."""
        if self.ground.measure != "held-out":
            return []
        leaves = [leaf for one in self.contenders for leaf in self.system.leaves(one, 1.0, 1.0, 0.0, 0).values()]
        epochs = self.ground.epochs(leaves)
        if epochs is None or epochs <= MANY_EPOCHS:
            return []
        return [
            f"the model with the most steps goes over the training data {epochs:.0f} times. Models overfit then, and "
            f"large ones more than the small ones that the forecast is made from, so its held-out losses may not hold: "
            f"train for fewer steps, or on more data"
        ]

    def _check(self, one: System) -> None:
        """Refuse widths at which the model cannot be built, budgets too short for the schedule, and growth."""
        check_builds(self.recipe, one, "" if one is self.system else f"; {self._other_small_widths()}")
        for contender in self.contenders:
            one.leaves(contender, 1.0, 1.0, 0.0, 0)
        check_operators(self.recipe, one, self.contenders, "" if one is self.system else self._other_small_widths())

    def run(self, command: str, forecast_only: bool) -> StudySummary:
        """All stages; the summary is written after the forecast, and again with the answer."""
        stages = 3 + len(self.small) + (0 if forecast_only else 2)
        planned = list_stretches(leaf for leaves in self.planned(forecast_only)[0].values() for leaf in leaves)
        cost, engine = self.ground.total_cost(planned), self.settings.engine
        trainer = self.ground.make_trainer(self.folder, "pay", engine, self.note, stages, planned=cost, command=command)
        with trainer.alone():
            tuning = tune_contenders(self.small[0], trainer, float(self.recipe.optimizer.init_args["lr"]))
            small = [self._train(one, trainer, tuning) for one in self.small]
            forecast = make_forecast(small, self.system.narrow)
            system, cost_per_step, forecast["size"] = self.system, self.ground.cost_per_step, dict[str, Any]()
            if system.base_steps is not None:  # the better size, with all that the base model and the growth cost
                budget = (system.base_steps + system.steps(CONTINUED)) * cost_per_step(system.narrow)
                forecast["size"] = forecast_size(small, system.narrow, system.wide, budget, cost_per_step)
            for said in () if forecast_only else (forecast, forecast["size"]):  # its summary says it
                if "sentence" in said:
                    self.note(said["sentence"])
            base = {"from": self.base_name or self.recipe.start, "steps": self.system.base_steps}
            told: dict[str, Any] = {
                "base": {**base, "lr": tuning[BASE.name].best.lr, "width": self.system.narrow},
                "tuned": list(tuning.values()),
                "small": small,
                "forecast": forecast,
                "notes": [
                    *self.notes,
                    *(remark for one in tuning.values() for remark in one.remarks),
                    *joined_edges(tuning.values()),
                ],
            }
            summary = trainer.save_summary(self.recipe, self.settings, write_pay_words, **told)
            if not forecast_only:
                large = self._train(self.system, trainer, tuning)
                if self.system.start is None:  # where growing starts from
                    models = [self.system.base_model(told["base"]["lr"], seed) for seed in range(self.settings.seeds)]
                    told["base"]["losses"] = trainer.ends(models)
                try:
                    answer = answer_comparison(large)
                except Diverged as error:
                    said = f"There is no answer: {error}."
                    say = partial(_say_instead, said)
                    return trainer.save_summary(self.recipe, self.settings, say, **told, diverged=True)
                told["forecast"] = {**forecast, "held": check_forecast(forecast, large, answer)}
                told |= {"large": large, "answer": answer}
                summary = trainer.save_summary(self.recipe, self.settings, write_pay_words, **told)
            return summary

    def planned(self, forecast_only: bool) -> tuple[dict[str, list[Stretch]], bool]:
        """The leaves of every stage, and whether all candidates are tried in one go.

        Where tuning is to choose, the first of the values to try stand for it; candidates have one seed, and go on to
        the end.
        """
        first, settings = self.small[0], self.settings
        rates = settings.rates(float(self.recipe.optimizer.init_args["lr"]))
        tried = list_candidates(first, self.contenders, rates)
        leaves = [leaf for one in tried for leaf in first.candidate(one.contender, rates[0], one.lr, one.noise, 0)]
        tuning = [*(first.decayed_base(lr, 0) for lr in rates), *(leaf for leaf in leaves if leaf is not None)]
        stages = {f"tuning, {first.label}": tuning}
        chosen = [(one, settings.noises[0] if one.tunes_noise else 0.0) for one in self.contenders]
        for name, system, seeds in [
            *(("forecast", one, settings.small_seeds) for one in self.small),
            *([] if forecast_only else [("large", self.system, settings.seeds)]),
        ]:
            stages[f"{name}, {system.label}"] = [
                leaf
                for one, noise in chosen
                for seed in range(seeds)
                for leaf in system.leaves(one, rates[0], rates[0], noise, seed).values()
            ]
        return stages, None in leaves

    # ------------------------------------------------------------------------------------------- what is compared

    def _large_system(self) -> System:
        """The user's own two widths, from the recipe's growth event or from a checkpoint."""
        recipe = self.recipe
        if recipe.start is None:
            otherwise = ", or start from a checkpoint (--from PATH --width WIDE)"
            return read_system(recipe, self.settings, self.ground, "a comparison", otherwise)
        start, name = describe_start(recipe), self.base_name or recipe.start
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
        unit = (recipe.grow[0] if recipe.grow else recipe).noise_unit
        sizes = start.width, recipe.width, steps, after
        return System(self.settings, self.ground, *sizes, self.ground.start, unit)

    def _contenders(self, system: System) -> list[Contender]:
        """Those that are asked for, about new blocks where depth alone grows; copies need a whole multiple."""
        narrow, wide = Width.of(system.narrow), Width.of(system.wide)
        depth_alone = narrow.growing(wide) == [self.recipe.family().depth_size]
        if depth_alone and not self.has_choice:
            self.settings = replace(self.settings, contenders=list(USUAL_IN_DEPTH))
        wanted = contenders_named(self.settings.contenders)
        if odd := next((one for one in wanted if one.is_grown and (one.how in DEPTH_OPERATORS) != depth_alone), None):
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

    def _why_not(self, width: WholeWidth) -> str:
        """Why the model cannot be built at this width or at the one that it would grow to; nothing where it can."""
        own = f"tune at the base model's own width ({recipe_entry('study.widths')} [{self.system.narrow}])"
        try:
            check_builds(self.recipe, self._smaller(width, own + self._or_a_multiple), f"; {own}{self._or_a_multiple}")
        except MupscaleError as error:
            return str(error)
        return ""

    def _smaller(self, width: WholeWidth, otherwise: str = "") -> System:
        """The same at a small width, which must have a wide one of its own; base models train as long as the large."""
        system = self.system
        try:
            return system.smaller(width)
        except MupscaleError as error:
            raise MupscaleError(
                f"a small model of {Width.of(width).phrase} is to grow as the large one does, from "
                f"{Width.of(system.narrow)} to {Width.of(system.wide)}, and {str(error).partition(':')[0]}: "
                f"{otherwise or self._other_small_widths()}"
            ) from None

    def _other_small_widths(self) -> str:
        if self.settings.widths:
            return f"give other small widths in {recipe_entry('study.widths')}{self._or_a_multiple}"
        return (
            f"the small widths are parts of {Width.of(self.system.narrow)} that the model can have; to "
            f"choose them yourself, give {recipe_entry('study.widths')}"
        )

    @property
    def _or_a_multiple(self) -> str:
        """What else there is to do where the wide model is between multiples of the base model."""
        narrow = Width.of(self.system.narrow)
        between = any(ratio % 1 for ratio in Width.of(self.system.wide).ratio_to(narrow).values())
        return f", or grow to a multiple, such as {narrow.times(2)}" if between else ""

    # ------------------------------------------------------------------------------------------- stages

    def _train(self, system: System, trainer: Trainer, tuning: Tuning) -> SystemRuns:
        """Base models, unless the user has brought one; then all contenders, at every budget and with every seed.

        A small system is one stage, the large one two. Seeds whose base model diverged are left out.
        """
        is_large, base_lr, budgets = system is self.system, tuning[BASE.name].best.lr, self.settings.budgets
        seeds = list(range(self.settings.seeds if is_large else self.settings.small_seeds))
        first = f"forecast-{Width.of(system.narrow).label}", f"the contenders small, {system.label}: the forecast"
        if is_large:
            first = "base", f"base models, {Width.of(system.narrow).phrase}"
        with trainer.stage(*first):
            if system.start is None:
                losses = trainer.train([system.base_model(base_lr, seed) for seed in seeds])
                seeds = find_alive(system, base_lr, [loss is not None for loss in losses])
        values = {one.name: tuning[one.tuned_as or one.name].best.cell for one in self.contenders}
        leaves = {
            (one.name, seed): system.leaves(one, base_lr, *values[one.name], seed)
            for one in self.contenders
            for seed in seeds
        }
        with trainer.stage("contenders", f"the contenders, {system.label}") if is_large else nullcontext():
            trainer.train([leaf for by_budget in leaves.values() for leaf in by_budget.values()])
        runs = []
        for one in self.contenders:
            width, points = system.width_of(one), []
            for part in budgets:
                steps = round(part * system.steps(one))
                ends = trainer.ends(leaves[one.name, seed][part] for seed in seeds)
                points.append(BudgetPoint(part, steps, steps * self.ground.cost_per_step(width), ends))
            runs.append(ContenderRuns(one.name, width, *values[one.name], points))
        return SystemRuns(system.narrow, system.wide, system.base_cost, self.ground.unit, runs)


def _say_instead(sentence: str, summary: StudySummary) -> StudySummary:
    """The summary of the forecast alone, where the large models gave nothing to compare with it."""
    forecast = write_pay_words(summary)
    return replace(forecast, sentences=[sentence, str(summary.forecast["sentence"])])


# ---------------------------------------------------------------------------------------------- before it is trained


def describe_plan(
    recipe: Recipe,
    settings: StudySettings,
    folder: str | Path,
    *,
    forecast_only: bool = False,
    base_name: str = "",
    notes: Sequence[str] = (),
) -> str:
    """A table of stages, for `mupscale run --dry-run`; nothing is written. forecast_only … notes: as in `run_pay`.

    What an earlier stage has trained is not counted again.
    """
    study = PayStudy(recipe, settings, Path(folder), lambda text: None, base_name, list(notes))
    stages, in_one_go = study.planned(forecast_only)
    lines = [describe_stages(stages, study.ground, settings.engine)]
    largest = study.small[-1] if forecast_only else study.system
    steps = ", ".join(f"{one.label} {largest.steps(one):,}" for one in study.contenders)
    lines.append(f"Steps at the full budget, {largest.label}: {steps}.")
    if not in_one_go:  # each is judged early
        lines.append(
            f"Tuning costs less if candidates stop early: those that are {100 * settings.prune:g} % behind after "
            f"{settings.budgets[0]:g} of the budget. It costs more if candidates within {100 * CLOSE:g} % of the best "
            f"train with further seeds ({recipe_entry('study.small_seeds')} is {settings.small_seeds})."
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in study.notes)])


# ---------------------------------------------------------------------------------------------- tuning


class _Values(NamedTuple):
    """What a contender tries: one learning rate and noise, with one seed."""

    contender: Contender
    lr: float
    noise: float
    seed: int = 0


def tune_contenders(system: System, trainer: Trainer, lr: float) -> Tuning:
    """Tune the base model's rate, then every contender's values from the base model that it gives. lr: the recipe's.

    One seed first. What lies far behind after the first budget goes no further. More seeds only where some are close.
    """
    settings, rates = system.settings, system.settings.rates(lr)
    with trainer.stage("base-rates", f"the base model's learning rate, at {Width.of(system.narrow).phrase}"):
        losses = trainer.train([system.decayed_base(rate, 0) for rate in rates])
        cells = [Tried(rate, 0.0, [loss]) for rate, loss in zip(rates, losses, strict=True)]
        tuning = {BASE.name: replace(choose("the base model", cells), name=BASE.name)}

    def plan(one: _Values) -> Candidate:
        return system.candidate(one.contender, tuning[BASE.name].best.lr, one.lr, one.noise, one.seed)

    with trainer.stage("rates", f"learning rates and noise of the contenders, {system.label}"):
        tried = list_candidates(system, contenders_named(settings.contenders), rates)
        by_name = {one.contender.name: [c for c in tried if c.contender is one.contender] for one in tried}
        early = {one: leaf for one in tried if (leaf := plan(one).early) is not None}
        first = dict(zip(early, trainer.train(list(early.values())), strict=True))
        stopped: dict[_Values, Tried] = {}
        for own in by_name.values() if early else ():  # those that diverged, or lie far behind, go no further
            judged = {one: Tried(one.lr, one.noise, [first[one]], settings.budgets[0]) for one in own}
            promising = list_promising(list(judged.values()), settings.prune)
            stopped |= {one: cell for one, cell in judged.items() if cell not in promising}
            stopped |= {one: replace(cell, budget=1.0) for one, cell in judged.items() if cell.mean is None}
        going_on = [one for one in tried if one not in stopped]
        final = dict(zip(going_on, trainer.train([plan(one).full for one in going_on]), strict=True))
        for name, own in by_name.items():
            tuning[name] = choose(name, [stopped.get(one) or Tried(one.lr, one.noise, [final[one]]) for one in own])
    with trainer.stage("close", "more seeds where candidates are close"):
        seeds = range(1, settings.small_seeds)
        close = {name: _close(tuning[name].trials) for name in by_name if seeds}
        again = [one for one in tried if (one.lr, one.noise) in close.get(one.contender.name, ())]
        ends = iter(trainer.train([plan(one._replace(seed=seed)).full for one in again for seed in seeds]))
        more = {one: [next(ends) for _ in seeds] for one in again}
        for name, own in by_name.items():
            cells = [
                replace(cell, losses=cell.losses + more.get(one, []))
                for one, cell in zip(own, tuning[name].trials, strict=True)
            ]
            tuning[name] = choose(name, cells, among=close.get(name))
    return tuning


def list_candidates(system: System, contenders: Sequence[Contender], rates: Sequence[float]) -> list[_Values]:
    """What is tried for every contender that is not tuned as another one."""
    return [
        _Values(one, lr, noise)
        for one in contenders
        if one.tuned_as is None
        for noise in (system.settings.noises if one.tunes_noise else [0.0])
        for lr in rates
    ]


def list_promising(tried: Sequence[Tried], margin: float) -> list[Tried]:
    """Those that may still win: within the margin of the best, or next to it in learning rate at its noise.

    The neighbours go on however far behind they are, so that the best one is known to lie between two others.
    """
    ended = [cell for cell in tried if cell.mean is not None]
    if not ended:
        return []
    best = min(ended, key=lambda cell: cell.mean or 0.0)
    same_noise = sorted((cell for cell in tried if cell.noise == best.noise), key=lambda cell: cell.lr)
    place = same_noise.index(best)
    beside, limit = same_noise[max(0, place - 1) : place + 2], _limit(best.mean, margin)
    return [cell for cell in ended if cell in beside or (cell.mean or 0.0) <= limit]


def _limit(lowest: float | None, margin: float) -> float:
    """The loss that lies so far above the lowest, as a part of it."""
    return (lowest or 0.0) + margin * abs(lowest or 0.0)


def _close(tried: Sequence[Tried]) -> set[Cell]:
    """The candidates that one seed cannot tell apart; none where the best stands alone."""
    losses = {cell.cell: cell.loss for cell in tried if cell.loss is not None}
    near = {cell for cell, loss in losses.items() if loss <= _limit(min(losses.values()), CLOSE)}
    return near if len(near) > 1 else set()


def choose(name: str, tried: Sequence[Tried], among: Collection[tuple[float, float]] | None = None) -> Sweep:
    """The values with the lowest mean loss; next to divergence only if nothing as good is not.

    among: the cells that may be chosen, where only some have all seeds.
    """
    ended = [cell for cell in tried if cell.loss is not None and (not among or cell.cell in among)]
    if not ended:
        raise Diverged(
            f"{name}: all {len(tried)} trials at the small width diverged, with learning rates from "
            f"{min(cell.lr for cell in tried):g} to {max(cell.lr for cell in tried):g}: give smaller ones "
            f"({recipe_entry('study.lrs')})"
        )
    best, remarks = min(ended, key=lambda cell: cell.loss or 0.0), []
    if _is_next_to_divergence(best, tried):
        limit = (best.loss or 0.0) + max(cell.spread for cell in ended)
        safe = [cell for cell in ended if (cell.loss or 0.0) <= limit and not _is_next_to_divergence(cell, tried)]
        if safe:
            best = min(safe, key=lambda cell: cell.loss or 0.0)
        else:
            remarks.append(f"{name}: the best learning rate, {best.lr:g}, is the last before divergence")
    return Sweep(name, list(tried), lr=best.lr, noise=best.noise, remarks=remarks)


def _is_next_to_divergence(cell: Tried, tried: Sequence[Tried]) -> bool:
    larger = [other for other in tried if other.noise == cell.noise and other.lr > cell.lr]
    return bool(larger) and min(larger, key=lambda other: other.lr).mean is None
