"""The preset `paper`: the paper's Steps 0 to 4 and its comparison, with constant rates and its own accounting.

Sweep 1 tunes the base model's learning rate at the largest small width, Sweep 2 the noise and the learning rate after
growing at each of them. What they choose is transferred to the large models, which train beside the baselines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor, nn

from mupscale.checks import CoordCheck, coord_check
from mupscale.core import WholeWidth, Width
from mupscale.engine import Outcome, lowest_loss_bar, read_outcome
from mupscale.growth import NoiseLevel, Operator, SignalNoise
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
from mupscale.study.forecast import extrapolate
from mupscale.study.results import BudgetPoint, ContenderRuns, Curve, StageSpent, StudySummary, SystemRuns
from mupscale.study.search import run_sweep
from mupscale.study.space import Cell, Space, Sweep, SweepJob, sweep_remarks
from mupscale.study.systems import (
    StudySettings,
    System,
    check_builds,
    check_operators,
    describe_own_width,
    find_alive,
    read_system,
)
from mupscale.study.training import POINTS, Ground, Note, Trainer, describe_stages
from mupscale.study.tree import Stretch, hash_values
from mupscale.study.verdict import compute_costs, compute_gain, write_verdict, write_warnings
from mupscale.study.wording import count_of, write_paper_words
from mupscale.system import (
    Diverged,
    MupscaleError,
    derive,
    parse_record,
    print_at_once,
    read_json,
    recipe_entry,
    write_json,
    writing_into,
)
from mupscale.train import Recipe, RunFolder, cast_input, check_copies, find_checkpoint, read_snapshot

CURVE_POINTS = 400
"""Of a curve in the summary, at most."""
STAGES = ("base", "from-scratch", "continued", "copies-without-noise", "copies", "naive-widening", "net2net")
"""What is trained together, one after the other: the contenders whose names begin so."""


# ---------------------------------------------------------------------------------------------- the protocol


@dataclass(frozen=True)
class Protocol(Ground):
    """A recipe with one growth event, whose curves end on a point, at the same steps for all that are grown."""

    @property
    def grown_steps(self) -> int:
        return self.recipe.steps - self.recipe.grow[0].at

    def watch(self, stretch: Stretch) -> dict[str, Any]:
        recipe = self.recipe
        if stretch.parent is None:
            return {"log_every": near_divisor(stretch.steps, min(recipe.log_every, stretch.steps // POINTS))}
        apart = near_divisor(self.grown_steps, recipe.evaluation.every or self.grown_steps)
        return {"log_every": self.points_apart, "evaluation": replace(recipe.evaluation, every=apart)}

    @property
    def points_apart(self) -> int:
        """Steps between two points of the curve of whatever starts from a base model; the grown end on one."""
        return near_divisor(self.grown_steps, min(self.recipe.log_every, self.grown_steps // POINTS))

    @property
    def exact_is_a_beginning(self) -> bool:
        """Whether the first steps of a longer run are those of a short one, with a point at the short one's end."""
        return self.recipe.schedule.kind == "constant" and self.grown_steps % self.points_apart == 0

    def system(self, settings: StudySettings) -> System:
        """The recipe's two widths; refuses what is not for the paper's method."""
        recipe = self.recipe
        if recipe.start is not None:
            raise MupscaleError(
                "mupscale run --paper trains its own base model, so its recipe cannot start from a checkpoint (from); "
                "to grow yours with what a run has found: mupscale train RECIPE --from PATH --width W --noise X"
            )
        constant = replace(settings, schedule="recipe", budgets=[1.0])
        alone = ". Without growing: mupscale transfer-check RECIPE --compare '[default]' --widths '[16, 32]'"
        return read_system(recipe, constant, self, "the paper's method, which grows once,", alone)

    def small_systems(self, system: System, widths: Sequence[WholeWidth], grow: Operator | None = None) -> list[System]:
        """The same at small widths, narrowest first; refuses those at which it cannot be. grow: if not by copies."""
        found = [system.smaller(width) for width in sorted(widths, key=lambda width: Width.of(width).size)]
        for small in found:
            check_builds(self.recipe, small)
            self.recipe.family().widening(small.narrow, small.wide, grow=grow)
        return found


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

    def rate(self, name: str) -> float | None:
        """A learning rate as the table of contenders calls it; None where there is none."""
        plain = None if self.plain is None else self.plain[1]
        return {"base": self.base_lr, "tuned": self.lr, "own": self.own_lr, "plain": plain}[name]

    def level(self, name: str) -> NoiseLevel:
        """The noise beside a learning rate: one number, or constants per parameter, which are proportional to it."""
        if name != "plain" or self.plain is None:
            return self.constants or self.noise
        noise = self.plain[0]
        if self.constants is None or noise == 0:
            return noise
        return {parameter: constant * noise / self.noise for parameter, constant in self.constants.items()}


class _Planned(NamedTuple):
    """How a contender trains: its stretch by seed, and whose runs it has as far as its steps go."""

    stretch: Callable[[int], Stretch]
    shares: str | None


@dataclass
class PaperStudy:
    """A run of the paper's method in its folder: tuning, the large models, and what came of them.

    sweeps, choice: of the tuning, and what follows for the large models. sentences: how the optimum moves.
    """

    recipe: Recipe
    settings: StudySettings
    folder: Path
    note: Note = print_at_once
    sweeps: list[Sweep] = field(default_factory=list)
    choice: Choice | None = None
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = self.settings.resolved(USUAL_IN_PAPER, "train")
        check_contenders(self.settings.contenders, "study.contenders", IN_PAPER)
        self.protocol = Protocol(self.recipe, self.settings.measure or "train")
        self.system = self.protocol.system(self.settings)
        if self.recipe.grow[0].how not in ("copies", "fresh"):  # a growth that says nothing is fresh
            raise MupscaleError(
                f"the paper's method tunes the noise of copies, but the recipe grows with how: "
                f"{self.recipe.grow[0].how}. Set how: copies in grow, or train the recipe with mupscale train"
            )
        widths = self.settings.small_widths(self.system.narrow, self.system.wide)
        if len({Width.of(width).size for width in widths}) < len(widths):
            raise MupscaleError(
                f"{recipe_entry('study.widths')} is {list(widths)}, but small widths must differ from each other"
            )
        self.small = self.protocol.small_systems(self.system, widths)
        self.contenders = contenders_named([BASE.name, COPIES.name, *self.settings.contenders])
        check_operators(self.recipe, self.system, [one for one in self.contenders if one.paper.on_request])
        engine = self.settings.engine
        self.trainer = Trainer(self.protocol, self.folder, "paper", engine, self.note, stages=0)
        self.own_lr = float(self.recipe.optimizer.init_args["lr"])
        self.rates = self.settings.rates(self.own_lr)
        self.space = Space(tuple(self.settings.grown_lrs or self.rates), tuple(self.settings.noises))
        factors = tuple(self.settings.embeddings)
        self.first_space = Space(tuple(self.rates), factors, "embeddings") if factors else Space(tuple(self.rates))
        is_fresh = self.recipe.grow[0].how == "fresh"  # which this method does not do
        self.remarks = ["The recipe grows with fresh units. The paper's method grows with copies instead."] * is_fresh
        self.remarks += describe_own_width(widths, self.system.narrow)

    # ------------------------------------------------------------------------------------------- tuning

    def tune(self, worker: bool = False) -> Choice:
        """Run Sweep 1 at the largest small width and Sweep 2 at each of them, and choose."""
        self.trainer.by_main(self.trainer.make_folder)
        base_lr, seeds = self.rates[0], range(self.settings.small_seeds)
        if len(self.first_space.cells) > 1:
            largest = self.small[-1]
            name = f"sweep-1-width-{Width.of(largest.narrow).label}"
            first = self._sweep(name, (None, largest.narrow), self.first_space, _base_model(largest), seeds, worker)
            base_lr = first.best.lr
            self.sweeps.append(first)
            if not self.first_space.has_noise:  # go on by other rules, which hold for every width
                rules, command = replace(self.recipe.rules, embeddings=first.best.noise), self.trainer.command
                self.recipe = replace(self.recipe, rules=rules)
                self.__post_init__()
                self.trainer.command = command
        pairs: list[tuple[float, Sweep]] = []
        for small in self.small:
            self._train_small(small, base_lr)
            name = f"sweep-2-width-{Width.of(small.narrow).label}"
            sizes = small.narrow, small.wide
            sweep = self._sweep(name, sizes, self.space, _grown_model(small, base_lr), seeds, worker)
            pairs.append((Width.of(small.narrow).size, sweep))
            self.sweeps.append(sweep)
        optimum, self.sentences = extrapolate(pairs, Width.of(self.system.narrow).size)
        self.choice = self._choose(optimum, base_lr, pairs[-1][1])
        return self.choice

    def _train_small(self, small: System, lr: float) -> None:
        label = Width.of(small.narrow).label
        stretches = [small.base_model(lr, seed) for seed in range(self.settings.small_seeds)]
        outcomes = self._train(f"small-width-{label}", {"small": stretches})["small"]
        if any(outcome.status != "finished" for outcome in outcomes):
            raise Diverged(
                f"the small base model of width {label} diverged at learning rate {lr:g}: let Sweep 1 "
                f"({recipe_entry('study.lrs')}) choose among smaller ones"
            )

    def _choose(self, optimum: Cell, base_lr: float, last: Sweep) -> Choice:
        """Extrapolated and plain values; for signal-normalised noise constants by parameter, as the paper transfers it.

        The rate that is best without noise counts where the grid tells it from the chosen one, and a contender has it.
        """
        unit, plain = self.system.noise_unit, (last.best.noise, last.best.lr)
        signal = unit == "signal" and optimum.noise > 0
        constants = self._constants(base_lr, optimum.noise) if signal else None
        zero_lr = (last.best_without_noise or last.best).lr
        nearest = min(last.grid.lrs, key=lambda lr: abs(math.log(lr / optimum.lr)))
        baselines = [one.paper for one in self.contenders if one.kind == "baseline"]
        others = any("own" in (one.rate, one.change) for one in baselines)
        own_lr = None if zero_lr == nearest or not others else zero_lr
        is_plain = (optimum.noise, optimum.lr) == plain
        return Choice(base_lr, optimum.lr, optimum.noise, unit, own_lr, None if is_plain else plain, constants)

    def _constants(self, base_lr: float, t: float) -> dict[str, float]:
        """What t amounts to in each parameter at the small width, over the sweep's seeds ('Modification to Step 0')."""
        by_seed: list[Mapping[str, float]] = []
        small = self.small[-1]
        for seed in range(self.settings.small_seeds):
            recipe = self.trainer.recipe_of(small.base_model(base_lr, seed))
            family, noise = recipe.family(), SignalNoise(t)
            check_copies(family, self.protocol.data, recipe.width, small.wide)
            trained = family.build(recipe.width).to(recipe.dtype())
            read_snapshot(find_checkpoint(str(recipe.out))).restore_model(trained)
            family.upscale(trained, width=small.wide, noise=noise, seed=derive(recipe.seeds.noise, "start"))
            assert noise.effective is not None
            assert isinstance(noise.effective.std, Mapping)
            by_seed.append(noise.effective.std)
        return {name: fmean(constants[name] for constants in by_seed) for name in by_seed[0]}

    def _sweep(
        self,
        name: str,
        sizes: tuple[WholeWidth | None, WholeWidth],
        space: Space,
        stretch: Callable[[Cell, int], Stretch],
        seeds: Sequence[int],
        worker: bool = False,
    ) -> Sweep:
        """Begin a sweep, or join the one that is there; one that is done is read. sizes: grown from, and trained at."""
        settings, (start, width) = self.settings, sizes
        steps = stretch(space.cells[0], 0).steps
        sampler = settings.sampler if len(space.noises) > 1 else "grid"
        shown = " → ".join(Width.of(size).label for size in sizes if size is not None)
        each = f" × {settings.small_seeds} seeds" if settings.small_seeds > 1 else ""

        def begin(left: int, count: int) -> None:
            tell.runs = left * settings.small_seeds
            self.note(announce(name, f"{count_of(count, 'trial')}{each}", f"width {shown}", steps, left, count))

        def recipes(cell: Cell) -> list[Recipe]:
            found = [replace(self.trainer.recipe_of(stretch(cell, seed)), out=None) for seed in seeds]
            if space.has_noise:
                return found
            return [replace(one, rules=replace(one.rules, embeddings=cell.noise)) for one in found]

        leaves = [self.protocol.identify(stretch(space.cells[-1], seed)) for seed in seeds]
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
        noise = f"{space.second} {best.noise:.3g} and " if len(space.noises) > 1 else ""
        self.note(f"  loss {best.loss:.4f} with {noise}learning rate {best.lr:.3g}, the best")
        return sweep

    # ------------------------------------------------------------------------------------------- the large models

    def run(self, command: str = "") -> StudySummary:
        """From wherever it stands in the folder to summary.json."""
        self.trainer.command = command
        for sentence in self.remarks:
            self.note(f"Note: {sentence}")
        choice = self.tune()
        summary = self._summarise(choice)  # the answer first: the check below is one picture of its page
        coords = check_coordinates(self.protocol, self.small[0], self.folder, choice.base_lr, self.note)
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
            left = sum(read_outcome(self.trainer.recipe_of(stretch)) is None for stretch in every)
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
        for stage, planned in self._plan_stages(choice).items():
            plans = {one: self._tune_at_large(one, plan, choice, alive) for one, plan in planned.items()}
            seeds = {one: alive if one.from_base else range(self.settings.seeds) for one in plans}
            new = {one.name: [p.stretch(s) for s in seeds[one]] for one, p in plans.items() if p.shares is None}
            outcomes |= self._train(stage, new)
            for one, plan in plans.items():
                outcomes[one.name] = outcomes[plan.shares or one.name]
                if one is BASE:
                    finished = [outcome.status == "finished" for outcome in outcomes[one.name]]
                    alive = find_alive(self.system, choice.base_lr, finished)
                runs[one.name] = self._runs(one, plan, outcomes[one.name], seeds[one])
        return [runs[one.name] for one in self.contenders if one.name in runs]

    def _plan_stages(self, choice: Choice) -> dict[str, dict[Contender, _Planned]]:
        plans = {one: plan for one in self.contenders if (plan := self._plan(one, choice)) is not None}
        return {stage: {one: plan for one, plan in plans.items() if stage_of(one) == stage} for stage in STAGES}

    def _plan(self, one: Contender, choice: Choice) -> _Planned | None:
        """How a contender is trained with these values; None where they leave nothing to train.

        A rate that changes to itself is no change, so that its runs are those of the contender without it.
        """
        system, before = self.system, self.recipe.grow[0].at
        steps, rate, change = system.steps(one), choice.rate(one.paper.rate), None
        if rate is None or (one.paper.rate == "plain" and not choice.level("plain")):
            return None
        if one.paper.change is not None:
            other = choice.rate(one.paper.change)
            if other is None or steps < 2 or (one.is_grown and choice.noise == 0):
                return None
            part = round(steps * (before / self.recipe.steps))
            at = steps // 2 if one.from_base else max(1, min(steps - 1, part))
            change = None if other == rate else (at, other)
        noise = choice.level(one.paper.rate) if one.is_grown and one is not COPIES_WITHOUT_NOISE else 0.0
        shares = None
        if one is COPIES and choice.noise == 0 and COPIES_WITHOUT_NOISE in self.contenders:
            shares = COPIES_WITHOUT_NOISE.name
        if one is COPIES_WITHOUT_NOISE and CONTINUED in self.contenders and self.protocol.exact_is_a_beginning:
            shares = CONTINUED.name

        def stretch(seed: int) -> Stretch:
            if one is BASE:
                return system.base_model(choice.base_lr, seed)
            leaf = replace(system.leaf(one, choice.base_lr, rate, noise, seed), change=change)
            if one is COPIES_WITHOUT_NOISE:
                return replace(leaf, width=system.narrow)  # which computes what the wide one does, step by step
            return leaf if one.from_base else replace(leaf, order=0)  # from scratch it sees what the base model saw

        return _Planned(stretch, shares)

    def sweep_name(self, one: Contender) -> str:
        """Of the sweep that a contender has for itself, at the wide width."""
        return f"{one.name}-width-{Width.of(self.system.wide).label}"

    def _tune_at_large(self, one: Contender, plan: _Planned, choice: Choice, alive: Sequence[int]) -> _Planned:
        """What does not transfer has noise and learning rate tuned at the wide width itself, where it is expensive."""
        if not one.paper.own_sweep:
            return plan

        def planned(cell: Cell) -> _Planned:
            given = self._plan(one, replace(choice, lr=cell.lr, noise=cell.noise, constants=None))
            assert given is not None
            return given

        sizes, seeds = (self.system.narrow, self.system.wide), alive[: self.settings.small_seeds]
        sweep = self._sweep(
            self.sweep_name(one), sizes, self.space, lambda cell, seed: planned(cell).stretch(seed), seeds
        )
        self.sweeps.append(sweep)
        return planned(sweep.best.cell)

    def _runs(self, one: Contender, plan: _Planned, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> ContenderRuns:
        trained, width = plan.stretch(seeds[0]), self.system.width_of(one)
        curves = [read_curve(outcome, seed, trained.steps) for outcome, seed in zip(outcomes, seeds, strict=True)]
        each = self.protocol.flops_per_step(width)
        without = ", for which the sweep chose no noise" if one is COPIES and trained.noise == 0 else ""
        cost = trained.steps * (each or 1.0)
        return ContenderRuns(
            name=one.name,
            width=width,
            lr=trained.lr,
            noise=trained.noise,
            points=[BudgetPoint(1.0, trained.steps, cost, [curve.final() for curve in curves])],
            label=f"{one.short}, width {Width.of(width).label}{without}",
            cost_per_step=each,
            change=trained.change,
            curves=curves,
        )

    # ------------------------------------------------------------------------------------------- what came of it

    def _summarise(self, choice: Choice) -> StudySummary:
        sweeps = list(self.sweeps)
        runs = self._train_contenders(choice)
        own_sweeps = self.sweeps[len(sweeps) :]
        stages = self._stages()
        costs, gain = compute_costs(runs, stages, sweeps), compute_gain(runs)
        verdict = write_verdict(runs, costs, gain)
        return self.trainer.save_summary(
            self.recipe,
            self.settings,
            write_paper_words,
            sentences=verdict,
            tuned=[replace(sweep, lr=sweep.best.lr, noise=sweep.best.noise) for sweep in self.sweeps],
            large=SystemRuns(self.system.narrow, self.system.wide, costs["base"], self.protocol.unit, runs),
            diverged=not any(one.finals for one in runs),
            answer={"sentence": verdict[0], "costs": costs, "gain": gain, "choice": vars(choice)},
            stages=stages,
            notes=[
                *self.remarks,
                *self.sentences,
                *write_warnings(sweeps, runs),
                *(f"{sweep.name}: {finding}" for sweep in own_sweeps for finding in sweep_remarks(sweep)),
            ],
        )

    def _stages(self) -> list[StageSpent]:
        """FLOPs and seconds of every stage, in the order of the protocol."""
        counted = self.protocol.unit == "FLOPs"
        spent = [StageSpent(sweep.name, sweep.flops, sweep.seconds) for sweep in self.sweeps]
        spent += [replace(one, cost=one.cost if counted else None) for one in self.trainer.spent.values()]
        order = ("sweep-1", "small", "sweep-2", *STAGES)
        return sorted(spent, key=lambda one: next(i for i, name in enumerate(order) if one.name.startswith(name)))


def run_paper(
    recipe: Recipe, settings: StudySettings, folder: str | Path, *, command: str = "", note: Note = print_at_once
) -> StudySummary:
    """Run the paper's whole method, from wherever it stands in the folder, to summary.json.

    A recipe that does not grow is refused before anything is trained or written.

    Args:
        recipe: a recipe with one growth event: the base model up to it, the wide one from there on
        settings: where to tune, over what, and what to compare with
        folder: where everything is kept; the same call goes on with what is there
        command: what to write into the summary as the way to do it again
        note: is told what is done, line by line
    """
    with writing_into(folder):
        return PaperStudy(recipe, settings, Path(folder), note).run(command)


def run_sweeps(
    recipe: Recipe, settings: StudySettings, folder: str | Path, *, worker: bool = False, note: Note = print_at_once
) -> PaperStudy:
    """Run Step 0 alone; with a storage that others reach, as one worker of many. It takes what `run_paper` takes."""
    study = PaperStudy(recipe, settings, Path(folder), note)
    with writing_into(folder):
        study.tune(worker)
    return study


def estimate_paper(recipe: Recipe, settings: StudySettings, folder: str | Path) -> str:
    """The table that `mupscale run --paper --dry-run` prints, a line for each stage; nothing is written.

    As is mostly so, tuning is taken to choose some noise, another learning rate than the base model's, and a third one
    without noise. Plain transfer beside an extrapolated one is left out, and so is pruning.
    """
    study = PaperStudy(recipe, settings, Path(folder), lambda text: None)
    settings, lr, stages = study.settings, study.own_lr, dict[str, list[Stretch]]()
    cells = study.space.cells if settings.sampler == "grid" else study.space.cells[:1] * int(settings.trials or 0)

    def trials(stretch: Callable[[Cell, int], Stretch], count: int) -> list[Stretch]:
        """So many, each as if it were the first; their order tells them from what is kept of others."""
        some = [stretch(cells[0], seed) for seed in range(settings.small_seeds)]
        return [replace(each, order=10 + number) for number in range(count) for each in some]

    if (count := len(study.first_space.cells)) > 1:
        largest = study.small[-1]
        name = f"sweep-1-width-{Width.of(largest.narrow).label}"
        stages[name] = trials(_base_model(largest), count)
    for small in study.small:
        label = Width.of(small.narrow).label
        stages[f"small-width-{label}"] = [small.base_model(lr, seed) for seed in range(settings.small_seeds)]
        stages[f"sweep-2-width-{label}"] = trials(_grown_model(small, lr), len(cells))
    choice = Choice(lr, lr / 2, 1.0, study.system.noise_unit, own_lr=lr / 4)
    for stage, plans in study._plan_stages(choice).items():
        for one in plans:
            if one.paper.own_sweep:
                stages[study.sweep_name(one)] = trials(_grown_model(study.system, lr), len(cells))
        leaves = [plan.stretch(s) for plan in plans.values() if plan.shares is None for s in range(settings.seeds)]
        if leaves:
            stages[stage] = leaves
    return "\n".join([describe_stages(stages, study.protocol, settings.engine), *study.remarks])


# ---------------------------------------------------------------------------------------------- pieces


def _base_model(system: System) -> Callable[[Cell, int], Stretch]:
    """What Sweep 1 trains."""
    return lambda cell, seed: system.base_model(cell.lr, seed)


def _grown_model(system: System, base_lr: float) -> Callable[[Cell, int], Stretch]:
    """What Sweep 2 trains."""
    return lambda cell, seed: system.leaf(COPIES, base_lr, cell.lr, cell.noise, seed)


def stage_of(one: Contender) -> str:
    """The longest stage that its name begins with."""
    return max((stage for stage in STAGES if one.name.startswith(stage)), key=len)


def announce(stage: str, what: str, where: str, steps: int, left: int, count: int) -> str:
    """The line that a stage begins with."""
    to_do = "" if left in (0, count) else f", {left:,} of them left"
    return f"{stage}: {what}{to_do}, {where}, {count_of(steps, 'step')}{'' if left else ': done already'}"


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
    return replace(curve, **thin_curve([point for point in outcome.curve if point[0] <= steps]))


def thin_curve(curve: Sequence[tuple[int, float]], most: int = CURVE_POINTS) -> dict[str, Any]:
    """At most so many points of a curve, as fields of a `Curve`: steps, losses, and the lowest and highest of each.

    A point is the last step, and the mean of those it stands for; the first may stand for fewer than the others, so
    that a mean over the last ones is that of the steps. Where each stands for itself alone, extremes are left out.
    """
    each = max(1, math.ceil(len(curve) / most))
    steps, losses = [step for step, _ in curve], [loss for _, loss in curve]
    if each == 1:
        return {"steps": steps, "losses": losses}
    ends = range(len(losses) % each or each, len(losses) + 1, each)
    parts = [losses[max(0, end - each) : end] for end in ends]
    shown = {"losses": [*map(fmean, parts)], "lowest": [*map(min, parts)]}
    return {"steps": [steps[end - 1] for end in ends], **shown, "highest": [*map(max, parts)]}


# ---------------------------------------------------------------------------------------------- the coordinate check

_EXAMPLES = 256  # in a batch of the coordinate check, at most; of text so many tokens
_FEW = 8  # examples, below which the check is made at smaller widths
_AFFORDABLE = 5e10  # FLOPs of a step of the check
_WIDE_ENOUGH = 64  # below this width the readout's own start shows in a coordinate check


def check_coordinates(ground: Ground, small: System, folder: Path, lr: float, note: Note) -> CoordCheck | None:
    """Is the family set up right at all? The check is kept in the folder; None where it cannot be made.

    small: the smallest system that was tuned at. The three widths begin with its own, or with 64 where that is cheap.
    """
    recipe, data, narrow = ground.recipe, ground.data, Width.of(small.narrow)

    def examples(width: WholeWidth) -> int:
        """How many a batch of the check may have, for it to take seconds on a CPU."""
        cost = ground.flops_per_step(width)
        affordable = _EXAMPLES if cost is None else int(_AFFORDABLE * recipe.batch / cost)
        return max(1, min(recipe.batch, _EXAMPLES // data.per_example, affordable))

    growing = narrow.growing(Width.of(small.wide))
    start = narrow.times(math.ceil(_WIDE_ENOUGH / narrow.size)) if narrow.is_plain else narrow
    if examples(start.times(4, growing).whole) < _FEW:
        start = narrow
    widths = [start.times(factor, growing).whole for factor in (1, 2, 4)]
    settings, path = {"recipe": hash_values(ground.identity), "lr": lr, "widths": widths}, folder / "coordinates.json"
    with suppress(OSError, KeyError, TypeError, MupscaleError):  # else it is made anew
        stored = read_json(path)
        if stored["asked"] == settings:
            return parse_record(CoordCheck, stored["check"])

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return recipe.loss_function()(model(cast_input(batch[0], recipe)), batch[1])

    note(f"coordinate check: widths {', '.join(Width.of(width).label for width in widths)}")
    hyper: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.optimizer.init_args.items()}
    try:
        count = examples(widths[-1])
        drawn = [data.batch(recipe.seeds.data, number * count, count) for number in range(3)]
        check = coord_check(
            recipe.family(),
            widths,
            [(x.cpu(), y.cpu()) for x, y in drawn],  # where the check's models are
            objective,
            recipe.optimizer_class(),
            steps=3,
            seeds=2,
            dtype=recipe.dtype(),
            **{**hyper, "lr": lr},
        )
    except Exception as error:  # one picture of the report, and no reason to lose a run
        note(f"the coordinate check could not be made: {' '.join(str(error).split())[:160]}")
        return None
    write_json(path, {"asked": settings, "check": asdict(check)})
    return check
