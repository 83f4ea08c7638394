"""The preset `paper`: the paper's Steps 0 to 4 and its comparison, with constant rates and its own accounting.

Sweep 1 tunes the base model's learning rate at the largest small width, Sweep 2 the noise and the learning rate after
growing at each of them. What they choose is transferred to the large models, which train beside the baselines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from mupscale.core import WholeWidth, Width
from mupscale.engine import Outcome, lowest_loss_bar
from mupscale.growth import SignalNoise
from mupscale.study.contenders import (
    BASE,
    CONTINUED,
    COPIES,
    COPIES_WITHOUT_NOISE,
    IN_PAPER,
    USUAL_IN_PAPER,
    Contender,
    check_contenders,
    contenders_named,
)
from mupscale.study.coordinate_check import check_coordinates
from mupscale.study.dry_run import describe_stages
from mupscale.study.extrapolation import Extrapolation, extrapolate
from mupscale.study.paper_verdict import compute_costs, compute_gain, write_verdict, write_warnings
from mupscale.study.paper_words import write_paper_words
from mupscale.study.results import (
    BudgetPoint,
    ContenderRuns,
    Curve,
    Search,
    StageSpent,
    StudySummary,
    SystemRuns,
    Tried,
)
from mupscale.study.settings import StudySettings
from mupscale.study.training import POINTS, Ground, Note, Trainer
from mupscale.study.tree import Stretch, hash_values
from mupscale.sweep import Cell, Space, Sweep, sweep_remarks
from mupscale.system import MupscaleError, derive, print_at_once, writes_into
from mupscale.train import (
    Growth,
    NoiseLevel,
    Recipe,
    RunFolder,
    build_operator,
    check_copies,
    find_checkpoint,
    read_snapshot,
    stored_values,
)

if TYPE_CHECKING:
    from mupscale.sweep import Trial

CURVE_POINTS = 400
"""Of a curve in the summary, at most."""
STAGES = ("base", "from-scratch", "continued", "copies-without-noise", "copies", "naive-widening", "net2net")
"""What is trained together, one after the other: the contenders whose names begin so."""


# ---------------------------------------------------------------------------------------------- the protocol


@dataclass(frozen=True)
class Protocol(Ground):
    """A recipe with one growth event, which says it all: two widths, and how long each model trains."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        if len(recipe.grow) != 1:
            raise MupscaleError(
                f"the paper's method grows once, so its recipe needs one growth event, and this one has "
                f"{len(recipe.grow)}: write grow: [{{at: STEPS OF THE BASE MODEL, width: WIDE}}]"
            )
        if recipe.start is not None:
            raise MupscaleError(
                "mupscale run --paper trains its own base model, so its recipe cannot start from a checkpoint (from); "
                "to grow yours with what a run has found: mupscale train RECIPE --from PATH --width W --noise X"
            )
        if self.growth.how == "fresh":  # what a growth is that does not say; this method has copies
            object.__setattr__(self, "recipe", replace(recipe, grow=[replace(self.growth, how="copies")]))
        elif self.growth.how != "copies":
            raise MupscaleError(
                f"the paper's method tunes the noise of copies, and the growth's how is {self.growth.how}: say how: "
                f"copies in grow, or train the recipe with mupscale train"
            )
        if recipe.width == self.growth.width:
            raise MupscaleError(f"the recipe's growth keeps the width at {recipe.width}: there is nothing to grow")

    @property
    def growth(self) -> Growth:
        """The growth event."""
        return self.recipe.grow[0]

    @property
    def base_steps(self) -> int:
        """Steps of a base model."""
        return self.growth.at

    @property
    def wide_steps(self) -> int:
        """Steps of a grown model."""
        return self.recipe.steps - self.growth.at

    @property
    def wide(self) -> WholeWidth:
        """The width k·n."""
        return self.growth.width

    def upscaled_width(self, width: WholeWidth) -> WholeWidth:
        """k times a small width, k as between the recipe's two widths."""
        base, small = Width.of(self.recipe.width), Width.of(width)
        small.check_form(base, "the small width", "the recipe's width")
        return small.scaled_as(base, Width.of(self.wide)).whole

    def times(self, width: WholeWidth, factor: int) -> WholeWidth:
        """A width so many times as large, in the sizes that grow."""
        narrow = Width.of(width)
        return narrow.times(factor, narrow.growing(Width.of(self.upscaled_width(width)))).whole

    def check_small(self, width: WholeWidth) -> None:
        """A small width is one, or the error says why not."""
        Width.of(width, "the small width", whole=True)
        wide = self.upscaled_width(width)
        try:
            self.recipe.family().widening(width, wide)
        except MupscaleError:
            raise
        except Exception as error:  # the model's own
            raise MupscaleError(
                f"the model cannot be built at the small width {width} and at {wide}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from None

    def equal_cost(self, steps: int, width: WholeWidth, other: WholeWidth) -> int:
        """How many steps at another width cost as much as so many at this one; as many where that is not known."""
        ours, theirs = self.flops_per_step(width), self.flops_per_step(other)
        return steps if ours is None or theirs is None else max(1, round(steps * ours / theirs))

    def fresh(self, width: WholeWidth, lr: float, steps: int, seed: int) -> Stretch:
        """A model from its initialisation."""
        return Stretch(width=width, steps=steps, lr=lr, schedule=self.recipe.schedule, seed=seed)

    def small(self, width: WholeWidth, lr: float, seed: int) -> Stretch:
        """A base model of a width."""
        return self.fresh(width, lr, self.base_steps, seed)

    def after(self, base: Stretch, width: WholeWidth, lr: float, steps: int, noise: NoiseLevel = 0.0) -> Stretch:
        """A model that starts from a base model, grown to `width` if that is wider."""
        unit = "theory" if isinstance(noise, dict) else self.growth.unit
        piece = self.recipe.schedule
        return base.then(width=width, lr=lr, steps=steps, noise=noise, noise_unit=unit, schedule=piece)

    def trial(self, base: Stretch, cell: Cell) -> Stretch:
        """A trial of Sweep 2: a small base model grown, with this noise and learning rate."""
        return self.after(base, self.upscaled_width(base.width), cell.lr, self.wide_steps, cell.noise)

    # ------------------------------------------------------------------------------------------- points of curves

    def watch(self, stretch: Stretch) -> dict[str, Any]:
        """Curves that end on a point, at the same steps for all that start from a base model."""
        recipe = self.recipe
        if stretch.parent is None:
            return {"log_every": near_divisor(stretch.steps, min(recipe.log_every, stretch.steps // POINTS))}
        apart = near_divisor(self.wide_steps, recipe.evaluation.every or self.wide_steps)
        return {"log_every": self.points_apart, "evaluation": replace(recipe.evaluation, every=apart)}

    @property
    def points_apart(self) -> int:
        """Steps between two points of the curve of whatever starts from a base model; the grown end on one."""
        return near_divisor(self.wide_steps, min(self.recipe.log_every, self.wide_steps // POINTS))

    @property
    def exact_is_a_beginning(self) -> bool:
        """Whether the first steps of a longer run are those of a short one, with a point at the short one's end."""
        return self.recipe.schedule.kind == "constant" and self.wide_steps % self.points_apart == 0


def near_divisor(steps: int, most: int) -> int:
    """The largest number up to `most`, and not far below it, that divides the steps; `most` where there is none."""
    most = max(1, most)
    return next((every for every in range(most, most // 4, -1) if steps % every == 0), most)


# ---------------------------------------------------------------------------------------------- Step 0: what is tuned


@dataclass(frozen=True)
class Choice:
    """The hyperparameters for the large models: the base model's lr, and noise and lr for growing it.

    own_lr: the learning rate that is best without noise, where that is another one than the chosen. plain: noise and lr
    as one small width alone would transfer them, where an extrapolated value is used instead. constants: noise by
    parameter, where it is measured in the signal.
    """

    base_lr: float
    lr: float
    noise: float
    unit: str
    own_lr: float | None = None
    plain: tuple[float, float] | None = None
    constants: dict[str, float] | None = None

    @property
    def level(self) -> NoiseLevel:
        """The chosen noise: one number, or constants per parameter."""
        return self.constants or self.noise

    def rate(self, name: str) -> float | None:
        """A learning rate as the table of contenders calls it; None where there is none."""
        plain = None if self.plain is None else self.plain[1]
        return {"base": self.base_lr, "tuned": self.lr, "own": self.own_lr, "plain": plain}[name]


@dataclass(frozen=True)
class Tuned:
    """The sweeps, and the hyperparameters that follow for the large models. sentences: how the optimum moves."""

    sweeps: list[Sweep]
    choice: Choice
    sentences: list[str]


class _Planned(NamedTuple):
    """How a contender trains: its stretch by seed, what its runs say, and whose runs it has as far as its steps go."""

    width: WholeWidth
    steps: int
    noise: NoiseLevel
    stretch: Callable[[int], Stretch]
    shares: str | None = None


@dataclass
class PaperStudy:
    """A run of the paper's method in its folder: tuning, the large models, and what came of them."""

    recipe: Recipe
    settings: StudySettings
    folder: Path
    note: Note = print_at_once
    sweeps: list[Sweep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self.settings.resolved(USUAL_IN_PAPER, "train")
        check_contenders(self.settings.contenders, "study.contenders", IN_PAPER)
        self.protocol = Protocol(self.recipe, self.settings.measure or "train")
        widths = self.settings.small_widths(self.recipe.width, self.protocol.wide)
        if len({Width.of(width) for width in widths}) < len(widths):
            raise MupscaleError(f"study.widths is {list(widths)}, but small widths must differ from each other")
        self.widths = widths
        for width in widths:
            self.protocol.check_small(width)
        self.contenders = contenders_named([BASE.name, COPIES.name, *self.settings.contenders])
        for one in self.contenders:
            self._check_growth(one)
        engine = self.settings.engine
        self.trainer = Trainer(self.protocol, self.folder, "paper", engine, self.note, stages=0)

    def _check_growth(self, one: Contender) -> None:
        """Refuse a model that a contender is not defined for, before anything is trained."""
        if not one.on_request:
            return
        operator = build_operator(one.how, 0.0, "init")
        try:
            operator.check(self.recipe.family().widening(self.recipe.width, self.protocol.wide, grow=operator))
        except MupscaleError as error:
            raise MupscaleError(f"{error}: leave {one.name} out of study.contenders") from None

    # ------------------------------------------------------------------------------------------- tuning

    def tune(self, worker: bool = False) -> Tuned:
        """Run Sweep 1 at the largest small width and Sweep 2 at each of them, and choose."""
        self.trainer.make_folder()
        own = float(self.recipe.optimizer.init_args["lr"])
        rates, sweeps, base_lr = self.settings.rates(own), list[Sweep](), own
        if len(rates) > 1:
            first = self._sweep_1(self.widths[-1], rates, worker)
            base_lr = first.best.lr
            sweeps.append(first)
        elif rates:
            base_lr = rates[0]
        space = Space(tuple(self.settings.grown_lrs or rates), tuple(self.settings.noises))
        pairs: list[tuple[float, Sweep]] = []
        for width in self.widths:
            self._train_small(width, base_lr)
            pairs.append((Width.of(width).size, self._sweep_2(width, base_lr, space, worker)))
        optimum = extrapolate(pairs, Width.of(self.recipe.width).size)
        choice = self._choose(optimum, base_lr, pairs[-1][1])
        self.sweeps = [*sweeps, *(sweep for _, sweep in pairs)]
        return Tuned(list(self.sweeps), choice, optimum.sentences)

    def _sweep_1(self, width: WholeWidth, rates: Sequence[float], worker: bool) -> Sweep:
        def stretches(cell: Cell) -> list[Stretch]:
            return [self.protocol.small(width, cell.lr, seed) for seed in self._small_seeds]

        name = f"sweep-1-width-{Width.of(width).label}"
        return self.sweep(name, width, None, Space(tuple(rates)), stretches, worker)

    def _sweep_2(self, width: WholeWidth, base_lr: float, space: Space, worker: bool) -> Sweep:
        protocol = self.protocol

        def stretches(cell: Cell) -> list[Stretch]:
            return [protocol.trial(protocol.small(width, base_lr, seed), cell) for seed in self._small_seeds]

        name = f"sweep-2-width-{Width.of(width).label}"
        return self.sweep(name, protocol.upscaled_width(width), width, space, stretches, worker)

    @property
    def _small_seeds(self) -> range:
        return range(self.settings.small_seeds)

    def _train_small(self, width: WholeWidth, lr: float) -> None:
        """The small base models that Sweep 2 grows."""
        label = Width.of(width).label
        small = [self.protocol.small(width, lr, seed) for seed in self._small_seeds]
        outcomes = self._train(f"small-width-{label}", {"small": small})["small"]
        if any(outcome.status != "finished" for outcome in outcomes):
            raise MupscaleError(
                f"the small base model of width {label} diverged at learning rate {lr:g}: let Sweep 1 (study.lrs) "
                f"choose among smaller ones"
            )

    def _choose(self, optimum: Extrapolation, base_lr: float, last: Sweep) -> Choice:
        """Extrapolated and plain values; for signal-normalised noise constants by parameter, as the paper transfers it.

        The rate that is best without noise counts where the grid tells it from the chosen one, and a contender has it.
        """
        unit, best, plain = (
            self.protocol.growth.unit,
            (optimum.noise, optimum.lr),
            (optimum.plain_noise, optimum.plain_lr),
        )
        signal = unit == "signal" and optimum.noise > 0
        constants = self._constants(base_lr, optimum.noise) if signal else None
        zero_lr = (last.best_without_noise or last.best).lr
        nearest = min(last.space.lrs, key=lambda lr: abs(math.log(lr / optimum.lr)))
        others = any(one.has_own_rate and one is not COPIES for one in self.contenders if one.kind == "baseline")
        own_lr = None if zero_lr == nearest or not others else zero_lr
        return Choice(base_lr, optimum.lr, optimum.noise, unit, own_lr, None if best == plain else plain, constants)

    def _constants(self, base_lr: float, t: float) -> dict[str, float]:
        """What t amounts to in each parameter at the small width, over the sweep's seeds ('Modification to Step 0')."""
        by_seed: list[Mapping[str, float]] = []
        for seed in self._small_seeds:
            small = self.protocol.small(self.widths[-1], base_lr, seed)
            recipe = self.trainer.recipe_of(small)
            family, wide, noise = recipe.family(), self.protocol.upscaled_width(small.width), SignalNoise(t)
            check_copies(family, self.protocol.data, recipe.width, wide)
            family.upscale(_load_trained(recipe), width=wide, noise=noise, seed=derive(recipe.seeds.noise, "start"))
            assert noise.effective is not None
            assert isinstance(noise.effective.std, Mapping)
            by_seed.append(noise.effective.std)
        return {name: fmean(constants[name] for constants in by_seed) for name in by_seed[0]}

    def sweep(
        self,
        name: str,
        width: WholeWidth,
        start: WholeWidth | None,
        space: Space,
        stretches: Callable[[Cell], Sequence[Stretch]],
        worker: bool = False,
    ) -> Sweep:
        """Begin a sweep, or join the one that is there; one that is done is read."""
        from mupscale.sweep import SweepJob, run_sweep

        settings = self.settings
        steps = self.protocol.base_steps if start is None else self.protocol.wide_steps
        sampler = settings.sampler if len(space.noises) > 1 else "grid"
        shown = Width.of(width).label if start is None else f"{Width.of(start).label} → {Width.of(width).label}"
        seeds = f" × {settings.small_seeds} seeds" if settings.small_seeds > 1 else ""

        def begin(left: int, count: int) -> None:
            tell.runs = left * settings.small_seeds
            self.note(announce(name, f"{count_of(count, 'trial')}{seeds}", f"width {shown}", steps, left, count))

        def recipes(cell: Cell) -> list[Recipe]:
            return [replace(self.trainer.recipe_of(stretch), out=None) for stretch in stretches(cell)]

        leaves = [self.protocol.identify(stretch) for stretch in stretches(space.cells[-1])]
        searched = [leaves, space.lrs, space.noises, sampler, settings.trials, settings.pruner]
        job = SweepJob(
            name=name,
            key=hash_values(searched),
            width=width,
            start=start,
            space=space,
            recipes=recipes,
            steps=steps,
            measure=settings.measure or "train",
            sampler=sampler,
            trials=None if sampler == "grid" else settings.trials,
            pruner=settings.pruner,
            engine=settings.engine,
            data=self.protocol.data,
        )
        with lowest_loss_bar(steps) as tell:
            sweep = run_sweep(
                job,
                settings.storage or str(self.folder / "study.db"),
                worker=worker,
                folder=self.folder / "sweeps",
                retries=settings.retries,
                note=self.note,
                on_point=tell,
                on_start=begin,
            )
        best = sweep.best
        noise = f"noise {best.noise:.3g} and " if len(space.noises) > 1 else ""
        self.note(f"  loss {best.loss:.4f} with {noise}learning rate {best.lr:.3g}, the best")
        return sweep

    # ------------------------------------------------------------------------------------------- the large models

    def run(self, command: str = "") -> StudySummary:
        """From wherever it stands in the folder to summary.json."""
        tuned = self.tune()
        summary = self._summarise(tuned, command)
        summary.save(self.folder)  # the answer first: the check below is one picture of its page
        protocol, lr = self.protocol, tuned.choice.base_lr
        coords = check_coordinates(protocol, self.widths, protocol.times, self.folder, lr, self.note)
        summary = replace(summary, coords=coords)
        summary.save(self.folder)
        return summary

    def _train(self, stage: str, named: Mapping[str, Sequence[Stretch]]) -> dict[str, list[Outcome]]:
        """Train the models of a stage as one program, by contender; of several workers one trains, and others wait."""
        every = [stretch for group in named.values() for stretch in group]
        if not every:
            return {}
        names = f" ({', '.join(named)})" if len(named) > 1 else ""
        with self.trainer.alone(wait=True):
            left = self.trainer.count_left(every)
            what, where = f"{count_of(len(every), 'run')}{names}", f"width {Width.of(every[0].width).label}"
            about = announce(stage, what, where, every[0].steps, left, len(every))
            with self.trainer.stage(stage, about):
                self.trainer.train(every)
        ended = {name: [self.trainer.outcome(stretch) for stretch in group] for name, group in named.items()}
        said = [f"{f'{name}: ' if len(named) > 1 else ''}{_final_losses(group)}" for name, group in ended.items()]
        self.note(f"  {'; '.join(said)}")
        return ended

    def _train_contenders(self, choice: Choice) -> list[ContenderRuns]:
        """Every contender that is asked for and that the tuned values leave something to train."""
        outcomes: dict[str, list[Outcome]] = {}
        runs: dict[str, ContenderRuns] = {}
        alive = list(range(self.settings.seeds))
        for stage in STAGES:
            plans = [
                (one, plan)
                for one in self.contenders
                if _stage_of(one) == stage and (plan := self._plan(one, choice)) is not None
            ]
            swept = [(one, self._plan_swept(one, plan, choice, alive)) for one, plan in plans]
            seeds = {one.name: alive if one.from_base else range(self.settings.seeds) for one, _ in swept}
            groups = {one.name: [p.stretch(s) for s in seeds[one.name]] for one, p in swept if p.shares is None}
            outcomes |= self._train(stage, groups)
            for one, plan in swept:
                outcomes[one.name] = outcomes[plan.shares or one.name]
                if one is BASE:
                    alive = self._find_alive(outcomes[one.name], choice)
                runs[one.name] = self._runs(one, plan, outcomes[one.name], seeds[one.name], choice)
        return [runs[one.name] for one in self.contenders if one.name in runs]

    def _find_alive(self, outcomes: Sequence[Outcome], choice: Choice) -> list[int]:
        """Seeds with which the base model diverges cannot be grown."""
        alive = [seed for seed, outcome in enumerate(outcomes) if outcome.status == "finished"]
        if not alive:
            raise MupscaleError(
                f"the base model of width {Width.of(self.recipe.width).label} diverged with every seed at "
                f"learning rate {choice.base_lr:g}: let Sweep 1 (study.lrs) choose among smaller ones"
            )
        return alive

    def _plan(self, one: Contender, choice: Choice) -> _Planned | None:
        """How a contender is trained with these values; None where they leave nothing to train.

        A rate that changes to itself is no change, so that its runs are those of the contender without it.
        """
        protocol, narrow, wide = self.protocol, self.recipe.width, self.protocol.wide
        rate, other = choice.rate(one.rate), None if one.change is None else choice.rate(one.change)
        noise: NoiseLevel = choice.level if one.is_grown and one is not COPIES_WITHOUT_NOISE else 0.0
        if rate is None or (one.change is not None and other is None):
            return None
        if one.rate == "plain":
            assert choice.plain is not None
            if choice.plain[0] == 0:
                return None
            noise = choice.plain[0]
            if choice.constants is not None:  # signal-normalised noise transfers as constants, proportional to it
                noise = {name: c * choice.plain[0] / choice.noise for name, c in choice.constants.items()}
        steps = self._steps(one)
        if one.is_grown and one.change is not None and choice.noise == 0:
            return None
        change = None
        if one.change is not None:
            part = protocol.base_steps / self.recipe.steps if not one.from_base else 0.5
            at = max(1, min(steps - 1, round(steps * part))) if not one.from_base else steps // 2
            if steps < 2:
                return None
            change = None if other is None or other == rate else (at, other)
        if one is COPIES and choice.noise == 0 and COPIES_WITHOUT_NOISE in self.contenders:
            return _Planned(wide, steps, noise, self._never, shares=COPIES_WITHOUT_NOISE.name)
        # without noise the wide model computes what the narrow one does, step by step, so that one is trained instead
        width = narrow if one is COPIES_WITHOUT_NOISE or not one.is_wide else wide
        shares = None
        if one is COPIES_WITHOUT_NOISE and CONTINUED in self.contenders and protocol.exact_is_a_beginning:
            shares = CONTINUED.name

        def stretch(seed: int) -> Stretch:
            base = protocol.small(narrow, choice.base_lr, seed)
            if one is BASE:
                return base
            if not one.from_base:
                return replace(protocol.fresh(width, rate, steps, seed), change=change)
            made = replace(protocol.after(base, width, rate, steps, noise), how=one.how, change=change)
            return replace(made, base=protocol.upscaled_width(self.recipe.base)) if one.keeps_rates else made

        return _Planned(narrow if one is BASE or not one.is_wide else wide, steps, noise, stretch, shares)

    @staticmethod
    def _never(seed: int) -> Stretch:
        raise AssertionError("its runs are another contender's")

    def _steps(self, one: Contender) -> int:
        """What all spend: the FLOPs of the base model and the grown one together."""
        protocol, narrow, wide = self.protocol, self.recipe.width, self.protocol.wide
        if one is BASE:
            return protocol.base_steps
        if not one.from_base:
            return protocol.wide_steps + protocol.equal_cost(protocol.base_steps, narrow, wide)
        return protocol.wide_steps if one.is_wide else protocol.equal_cost(protocol.wide_steps, wide, narrow)

    def sweep_name(self, one: Contender) -> str:
        """Of the sweep that a contender has for itself, at the wide width."""
        return f"{one.name}-width-{Width.of(self.protocol.wide).label}"

    def _plan_swept(self, one: Contender, plan: _Planned, choice: Choice, alive: Sequence[int]) -> _Planned:
        """What does not transfer has noise and learning rate tuned at the wide width itself, where it is expensive."""
        if not one.own_sweep:
            return plan

        def planned(cell: Cell) -> _Planned:
            given = self._plan(one, replace(choice, lr=cell.lr, noise=cell.noise, constants=None))
            assert given is not None
            return given

        def stretches(cell: Cell) -> list[Stretch]:
            return [planned(cell).stretch(seed) for seed in alive[: self.settings.small_seeds]]

        rates = self.settings.grown_lrs or self.settings.rates(float(self.recipe.optimizer.init_args["lr"]))
        space = Space(tuple(rates), tuple(self.settings.noises))
        sweep = self.sweep(self.sweep_name(one), plan.width, self.recipe.width, space, stretches)
        self.sweeps.append(sweep)
        return planned(sweep.best.cell)

    def _runs(
        self, one: Contender, plan: _Planned, outcomes: Sequence[Outcome], seeds: Sequence[int], choice: Choice
    ) -> ContenderRuns:
        curves = [read_curve(outcome, seed, plan.steps) for outcome, seed in zip(outcomes, seeds, strict=True)]
        each = self.protocol.flops_per_step(plan.width)
        first = None if plan.shares is not None else plan.stretch(0)
        rate = choice.rate(one.rate)
        assert rate is not None
        cost = plan.steps * (each or 1.0)
        label = f"{one.short}, width {Width.of(plan.width).label}"
        if one is COPIES and choice.noise == 0:
            label += ", for which the sweep chose no noise"
        return ContenderRuns(
            name=one.name,
            width=plan.width,
            lr=rate if first is None else first.lr,
            noise=plan.noise,
            points=[BudgetPoint(1.0, plan.steps, cost, [curve.final() for curve in curves])],
            label=label,
            cost_per_step=each,
            change=None if first is None else first.change,
            curves=curves,
        )

    # ------------------------------------------------------------------------------------------- what came of it

    def _summarise(self, tuned: Tuned, command: str) -> StudySummary:
        """Train the contenders, and say what came of them."""
        choice = tuned.choice
        runs = self._train_contenders(choice)
        own_sweeps = self.sweeps[len(tuned.sweeps) :]
        stages = self._stages()
        costs, gain = compute_costs(runs, stages, tuned.sweeps), compute_gain(runs)
        verdict = write_verdict(runs, costs, gain)
        base = next(one for one in runs if one.name == BASE.name)
        return write_paper_words(
            StudySummary(
                name=self.folder.resolve().name,
                command=command,
                preset="paper",
                recipe=stored_values(self.recipe, self.folder),
                settings=self.settings.to_json(),
                sentences=verdict,
                tuned=[as_search(sweep) for sweep in self.sweeps],
                large=SystemRuns(
                    self.recipe.width,
                    self.protocol.wide,
                    None if base.cost_per_step is None else base.points[-1].cost,
                    self.protocol.unit,
                    runs,
                ),
                answer={"sentence": verdict[0], "costs": costs, "gain": gain, "choice": vars(choice)},
                stages=stages,
                notes=[
                    *tuned.sentences,
                    *write_warnings(tuned.sweeps, runs),
                    *(f"{sweep.name}: {finding}" for sweep in own_sweeps for finding in sweep_remarks(sweep)),
                ],
            )
        )

    def _stages(self) -> list[StageSpent]:
        """FLOPs and seconds of every stage, in the order of the protocol."""
        counted = self.protocol.unit == "FLOPs"
        spent = [StageSpent(sweep.name, sweep.flops, sweep.seconds) for sweep in self.sweeps]
        spent += [replace(one, cost=one.cost if counted else None) for one in self.trainer.spent.values()]
        order = ("sweep-1", "small", "sweep-2", *STAGES)
        return sorted(spent, key=lambda one: next(i for i, name in enumerate(order) if one.name.startswith(name)))


@writes_into("folder")
def run_paper(
    recipe: Recipe, settings: StudySettings, folder: str | Path, *, command: str = "", note: Note = print_at_once
) -> StudySummary:
    """Run the paper's whole method, from wherever it stands in the folder, to summary.json.

    Args:
        recipe: a recipe with one growth event: the base model up to it, the wide one from there on
        settings: where to tune, over what, and what to compare with
        folder: where everything is kept; the same call goes on with what is there
        command: what to write into the summary as the way to do it again
        note: is told what is done, line by line

    A recipe that does not grow is refused before anything is trained or written:

    >>> from mupscale.train import Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10,
    ... )
    >>> run_paper(recipe, StudySettings(widths=[4]), "runs/demo")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: the paper's method grows once, so its recipe needs one growth event, and ...
    """
    return PaperStudy(recipe, settings, Path(folder), note).run(command)


@writes_into("folder")
def run_sweeps(
    recipe: Recipe, settings: StudySettings, folder: str | Path, *, worker: bool = False, note: Note = print_at_once
) -> Tuned:
    """Run Step 0 alone; with a storage that others reach, as one worker of many.

    It takes what `run_paper` takes, and refuses the same before anything is trained:

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> recipe = Recipe(
    ...     model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
    ...     data=Spec("mupscale.data.CoverTypeSample"),
    ...     optimizer=Spec("torch.optim.SGD", {"lr": 0.1}),
    ...     width=8, base=4, steps=12, batch=10, grow=[Growth(at=4, width=16, how="copies")],
    ... )
    >>> run_sweeps(recipe, StudySettings(widths=[4, 4]), "runs/demo")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: study.widths is [4, 4], but small widths must differ from each other
    """
    return PaperStudy(recipe, settings, Path(folder), note).tune(worker)


def estimate_paper(recipe: Recipe, settings: StudySettings, folder: str | Path) -> str:
    """The table that `mupscale run --paper --dry-run` prints, a line for each stage; nothing is written.

    As is mostly so, tuning is taken to choose some noise, another learning rate than the base model's, and a third one
    without noise. Plain transfer beside an extrapolated one is left out, and so is pruning.

    >>> from mupscale.train import Growth, Recipe, Spec
    >>> model, data = Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}), Spec("mupscale.data.CoverTypeSample")
    >>> sgd, grow = Spec("torch.optim.SGD", {"lr": 0.1}), [Growth(at=10, width=8, how="copies")]
    >>> recipe = Recipe(model, data, sgd, width=4, base=4, steps=20, batch=4, grow=grow, device="cpu")
    >>> settings = StudySettings(widths=[2], lrs=[0.1], noises=[1.0], contenders=["copies"], seeds=1, small_seeds=1)
    >>> print("\\n".join(line[:42].rstrip() for line in estimate_paper(recipe, settings, "runs/none").splitlines()))
    small-width-2          1 model    3.12e+04
    sweep-2-width-2        2 models   1.32e+05
    base                   1 model    6.62e+04
    copies                 1 model    1.48e+05
    together                          3.78e+05
    """
    study = PaperStudy(recipe, settings, Path(folder), lambda text: None)
    return describe_stages(_outline(study), study.protocol, study.settings.engine)


def _outline(study: PaperStudy) -> dict[str, list[Stretch]]:
    """The stages of a run, each with what it would train."""
    protocol, settings = study.protocol, study.settings
    lr = float(study.recipe.optimizer.init_args["lr"])
    rates, seeds, stages = settings.rates(lr), range(settings.small_seeds), dict[str, list[Stretch]]()
    if len(rates) > 1:
        width = study.widths[-1]
        name = f"sweep-1-width-{Width.of(width).label}"
        stages[name] = [replace(protocol.small(width, rate, s), order=9) for rate in rates for s in seeds]
    cells = Space(tuple(settings.grown_lrs or rates), tuple(settings.noises)).cells
    cells = cells if settings.sampler == "grid" else cells[:1] * int(settings.trials or 0)

    def trials(bases: Sequence[Stretch]) -> list[Stretch]:
        grown = [protocol.trial(base, cells[0]) for base in bases]
        return [replace(each, order=10 + number) for number in range(len(cells)) for each in grown]

    for width in study.widths:
        small = [protocol.small(width, lr, seed) for seed in seeds]
        stages[f"small-width-{Width.of(width).label}"] = small
        stages[f"sweep-2-width-{Width.of(width).label}"] = trials(small)
    choice = Choice(lr, lr / 2, 1.0, protocol.growth.unit, own_lr=lr / 4)
    large = [protocol.small(study.recipe.width, lr, seed) for seed in range(settings.seeds)]
    for stage in STAGES:
        plans = [(one, p) for one in study.contenders if _stage_of(one) == stage and (p := study._plan(one, choice))]
        for one, _ in plans:
            if one.own_sweep:
                stages[study.sweep_name(one)] = trials(large[: settings.small_seeds])
        leaves = [plan.stretch(seed) for _, plan in plans if plan.shares is None for seed in range(settings.seeds)]
        if leaves:
            stages[stage] = leaves
    return stages


# ---------------------------------------------------------------------------------------------- pieces


def _stage_of(one: Contender) -> str:
    """The longest stage that its name begins with."""
    return max((stage for stage in STAGES if one.name.startswith(stage)), key=len)


def _load_trained(recipe: Recipe) -> nn.Module:
    """The model of a recipe whose run is finished, with its trained weights."""
    model = recipe.family().build(recipe.width).to(recipe.dtype())
    read_snapshot(find_checkpoint(str(recipe.out))).restore_model(model)
    return model


def as_search(sweep: Sweep) -> Search:
    """A sweep as a summary keeps it."""
    best = sweep.best
    most = max((trial.steps for trial in sweep.trials), default=0)

    def as_trial(trial: Trial) -> Tried:
        losses: list[float | None] = list(trial.by_seed)
        if trial.status == "diverged":
            losses = [None] * sweep.seeds
        part = trial.steps / most if trial.status == "pruned" else 1.0
        return Tried(trial.lr, trial.noise, losses, part, trial.curve, trial.steps, trial.flops)

    return Search(
        name=sweep.name,
        lr=best.lr,
        noise=best.noise,
        trials=[as_trial(trial) for trial in sweep.trials],
        label=sweep.name,
        width=sweep.width,
        start=sweep.start,
        measure=sweep.measure,
        sampler=sweep.sampler,
    )


def announce(stage: str, what: str, where: str, steps: int, left: int, count: int) -> str:
    """The line that a stage begins with."""
    to_do = "" if left in (0, count) else f", {left:,} of them left"
    return f"{stage}: {what}{to_do}, {where}, {count_of(steps, 'step')}{'' if left else ': done already'}"


def count_of(count: int, what: str) -> str:
    """A number of things: 1 run, 1,200 steps."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _final_losses(outcomes: Sequence[Outcome]) -> str:
    """The final losses of one model's seeds, for the terminal."""
    losses = [loss for outcome in outcomes if (loss := outcome.loss) is not None]
    lost = len(outcomes) - len(losses)
    if not losses:
        return "diverged"
    span = "" if len(losses) == 1 else f" ({min(losses):.4f} to {max(losses):.4f})"
    return f"loss {fmean(losses):.4f}{span}{f', {lost} of {len(outcomes)} diverged' if lost else ''}"


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


def thin_curve(curve: Sequence[tuple[int, float]], most: int = CURVE_POINTS) -> ThinnedCurve:
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
