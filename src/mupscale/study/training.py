"""Training a tree: wave by wave, stretches of one shape as one program, kept so that a kill loses nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from mupscale.core import WholeWidth, Width
from mupscale.data import Data
from mupscale.engine import NotStackable, Outcome, RunStack, lowest_loss_bar, read_outcome, train_many
from mupscale.growth import GrowthSettings
from mupscale.study.results import BudgetPoint, StageSpent, StudySummary
from mupscale.study.tree import Stretch, hash_values, list_stretches, list_waves
from mupscale.system import (
    Display,
    MupscaleError,
    clear_leftovers,
    exclusive_lock,
    make_folder,
    read_json,
    replace_text,
    rough_time,
    write_json,
)
from mupscale.train import (
    MAY_CHANGE,
    Evaluation,
    Growth,
    Processes,
    Recipe,
    Seeds,
    TrainingRun,
    copy_checkpoint,
    cost_per_example,
    fingerprint_checkpoint,
    join_processes,
    matmul_precision,
    stored_values,
)

Note = Callable[[str], None]
COMMAND_FILE = "command.txt"
"""In a study's folder: the command that began it, and that goes on with it."""
POINTS = 40  # of a run's curve at least, where it has so many steps
_OTHER_DATA = 10_000  # between the data seeds of two orders, so that each stretch goes on with batches of its own
_GROWTH = GrowthSettings().growth_settings.keys()
_OF_STRETCHES = {"width", "steps", "schedule", "grow", "start", "start_width", *_GROWTH, "state"}


@dataclass(frozen=True)
class Ground:
    """A recipe that stretches vary: what a step costs at every width, and the recipe of a stretch.

    measure: whose loss counts, held-out or train; what trains for the one may have no value of the other.
    """

    recipe: Recipe
    measure: str = "held-out"

    @cached_property
    def data(self) -> Data:
        return self.recipe.make_data()

    def flops_per_step(self, width: WholeWidth) -> float | None:
        """Training FLOPs of a step at a width; None where the model's cost cannot be counted."""
        each = cost_per_example(self.recipe.family(), width, self.data, self.recipe)
        return None if each is None else each * self.recipe.batch

    def cost_per_step(self, width: WholeWidth) -> float:
        """In FLOPs; 1 where a model's FLOPs cannot be counted."""
        return (self.flops_per_step(width) or 1.0) if self.unit == "FLOPs" else 1.0

    def cost(self, stretch: Stretch) -> float:
        """Of one stretch, without those before it."""
        share = 1.0 if stretch.batch is None else stretch.batch / self.recipe.batch
        return share * stretch.steps * self.cost_per_step(stretch.width)

    def total_cost(self, stretches: Iterable[Stretch]) -> float:
        return math.fsum(map(self.cost, stretches))

    def make_trainer(self, *given: Any, **more: Any) -> Trainer:
        """Who trains stretches of this recipe; given: what `Trainer` takes behind its ground."""
        return Trainer(self, *given, **more)

    @cached_property
    def example(self) -> tuple[int, str]:
        """What an example of the data counts: so many tokens of text, else one example."""
        return self.data.per_example, "examples" if self.data.unit == "samples" else self.data.unit

    def epochs(self, leaves: Iterable[Stretch]) -> float | None:
        """How often the model with the most steps goes over the training data; None where nobody knows its size."""
        steps = max(sum(stretch.steps for stretch in leaf.path) for leaf in leaves)
        return self.data.epochs(steps * self.recipe.batch)

    @property
    def unit(self) -> str:
        return "FLOPs" if self.flops_per_step(self.recipe.width) is not None else "steps"

    @cached_property
    def start(self) -> str | None:
        """What stretches call the checkpoint that the recipe starts from: by its content, wherever it lies."""
        return None if self.recipe.start is None else fingerprint_checkpoint(self.recipe.start)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What all results here depend on beside their stretch."""
        told = self.recipe.to_json()
        told["optimizer"] = {**told["optimizer"], "init_args": {**told["optimizer"]["init_args"], "lr": None}}
        free = {*MAY_CHANGE, *_OF_STRETCHES, "from", "from_width"}
        return {"measure": self.measure, **{name: value for name, value in told.items() if name not in free}}

    def identify(self, stretch: Stretch) -> str:
        """What tells its result from all others: those of other recipes, and those that are looked at elsewhere."""
        looks: dict[str, Any] = {"evaluation": self.recipe.evaluation, **self.watch(stretch)}
        return hash_values([self.identity, looks["log_every"], looks["evaluation"].every, stretch.key])

    def folder_name(self, stretch: Stretch) -> str:
        """The name of its folder: its label for a person, and what identifies it."""
        return f"{stretch.label}-{self.identify(stretch)}"

    def recipe_of(self, stretch: Stretch, folder: Path, start_at: str | None = None) -> Recipe:
        """A stretch as an ordinary recipe, whose run is kept below the folder. start_at: where the checkpoint lies."""
        recipe, first = self.recipe, self.recipe.seeds
        own = {"rules": stretch.rules, "batch": stretch.batch, "tuned_at": stretch.tuned_at}
        changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if stretch.base is not None:
            changes |= {"base": stretch.base, "init_at": Width.of(recipe.family().init_at).whole}
        before = stretch.parent
        start = None if before is None else str(folder / self.folder_name(before))
        if before is not None and before.start is not None:
            start, changes["start_width"] = start_at or recipe.start, recipe.start_width
        rates: list[Growth] = []
        if stretch.change is not None:  # another learning rate from a step on is a growth to the width it has
            rates = [Growth(at=stretch.change[0], width=stretch.width, lr=stretch.change[1])]
        data = first.data + stretch.seed + stretch.order * _OTHER_DATA
        return replace(
            recipe,
            width=stretch.width,
            steps=stretch.steps,
            schedule=stretch.schedule,
            optimizer=replace(recipe.optimizer, init_args={**recipe.optimizer.init_args, "lr": stretch.lr}),
            seeds=Seeds(first.init + stretch.seed, data, first.noise + stretch.seed, first.dropout + stretch.seed),
            out=str(folder / self.folder_name(stretch)),
            grow=rates,
            start=start,
            state=stretch.state,
            **{"start_width": None, **stretch.growth_settings, **self.watch(stretch), **changes},
        )

    def watch(self, stretch: Stretch) -> dict[str, Any]:
        """How often a stretch is looked at on its way; all are evaluated at their end."""
        recipe = self.recipe
        return {
            "evaluation": Evaluation(0, recipe.evaluation.batch),
            "log_every": max(1, min(recipe.log_every, stretch.steps // POINTS)),
        }


MakeGround = Callable[[Recipe, str], Ground]
"""Of a recipe, and whose loss counts; one's own loop has a ground of its own."""


@dataclass
class Trainer:
    """Trains stretches in a study's folder, and counts what they take. stages: how many there will be.

    processes: those that train each stretch together, of which the main one decides and writes.
    planned: about what all stages together cost, where that is known: then each says how far the study is.
    trained: how often something was trained here and now, rather than read from the folder.
    study: tells whose seconds are kept, where several studies share a folder. Costs are those of a stage's stretches,
    whichever process has trained them.
    """

    ground: Ground
    folder: Path
    study: str
    engine: Literal["auto", "vectorised", "serial"]
    note: Note
    stages: int
    spent: dict[str, StageSpent] = field(default_factory=dict)
    number: int = 0
    name: str = ""
    visible: bool = True
    start_at: str | None = None
    ended: dict[str, float | None] = field(default_factory=dict)
    trained: int = 0
    planned: float = 0.0
    processes: Processes = field(default_factory=lambda: Processes(torch.device("cpu")))
    command: str = ""

    def __post_init__(self) -> None:
        if not self.processes.main:
            self.note = lambda text: None
        self.note_once = cache(
            self.note
        )  # of every group of runs the same would be said, such as why it is not stacked

    def make_folder(self) -> None:
        """Make the study's folder if there is none, and say in it which command goes on with what is there."""
        make_folder(self.folder)
        if self.command:
            replace_text(self.folder / COMMAND_FILE, f"{self.command}\n")

    @contextmanager
    def alone(self, *, wait: bool = False) -> Iterator[None]:
        """The folder, made if there is none, and locked meanwhile. wait: for others who train there, as workers do."""
        busy = f"another process is training in {self.folder}: wait for it, or choose another folder"
        waiting = f"waiting for another process that trains in {self.folder}"
        lock = self.folder / ".lock"

        def begin() -> None:
            self.make_folder()
            refusal = None if wait else busy
            held.enter_context(exclusive_lock(lock, refusal=refusal, before_waiting=lambda: self.note(waiting)))
            for folder in (self.folder, self.folder / "stacks"):
                clear_leftovers(folder, alone=not wait)
            self._take_checkpoint()

        try:
            with ExitStack() as held:
                self.by_main(begin)
                self._take_checkpoint()  # which is there now
                yield
        except OSError as error:
            raise MupscaleError(f"{self.folder} cannot be written: {error.strerror or error}") from None

    def by_main(self, write: Callable[[], object]) -> None:
        self.processes.by_main(write, f"{self.folder} cannot be written")

    def _take_checkpoint(self) -> None:
        """A copy of the checkpoint that the recipe starts from, so that the folder can be moved without it."""
        start = self.ground.recipe.start
        if start is not None and not Path(start).resolve().is_relative_to(self.folder.resolve()):
            self.start_at = str(copy_checkpoint(start, self.folder / f"base-{self.ground.start}"))

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        self.number, self.name = self.number + 1, name
        self.note((f"{self.number}/{self.stages} {about}" if self.stages else about) + self.describe_progress(0.2))
        self.spent.setdefault(name, StageSpent(name, 0.0, read_numbers(self._clock).get(name) or 0.0))
        yield

    def describe_progress(self, least: float = 0.0) -> str:
        """About how far the whole study is, and how long it still takes; nothing where that is not known.

        least: the share from which on the time is told. Small models come first, and take longer than their cost says.
        """
        spent = self.spent.values()
        if not self.planned or not (done := math.fsum(one.cost or 0.0 for one in spent)):
            return ""
        share, seconds = min(done / self.planned, 0.99), math.fsum(one.seconds for one in spent)
        left = f", about {rough_time(seconds * (1 - share) / share)} left" if seconds and share >= least else ""
        return f" (about {share:.0%} of all the training is done{left})"

    def train(self, leaves: Sequence[Stretch], *, keep: bool = True) -> list[float | None]:
        """The final losses of these, None: diverged. All that they stand on is trained, unless it is there already.

        keep: as an ordinary run with a folder; else nothing but the loss is kept of the leaves.
        """
        light = {} if keep else {leaf.key: self.ground.identify(leaf) for leaf in leaves}
        if light:
            stored = read_numbers(self._light)
            self.ended |= {key: stored[name] for key, name in light.items() if name in stored}
        for wave in list_waves(leaves):
            ready = []
            for stretch in wave:
                if stretch.key in self.ended:
                    continue
                if stretch.start is not None:
                    self.ended[stretch.key] = 0.0  # somebody else has trained it
                elif stretch.parent is not None and self.ended[stretch.parent.key] is None:
                    self.ended[stretch.key] = None  # what stands on a diverged one has diverged
                else:
                    ready.append(stretch)
            self._train_wave(ready, light)
        return self.ends(leaves)

    def ends(self, leaves: Iterable[Stretch]) -> list[float | None]:
        """The final losses of what is trained already."""
        return [self.ended[leaf.key] for leaf in leaves]

    def ends_of_seeds(self, leaves: Sequence[Stretch]) -> BudgetPoint:
        """The end of one model, trained with several seeds: all that its path has cost."""
        path = leaves[0].path
        return BudgetPoint(1.0, sum(each.steps for each in path), self.ground.total_cost(path), self.ends(leaves))

    def has_losses(self, leaves: Iterable[Stretch]) -> bool:
        """Whether the losses of all these are there, of which nothing else is kept."""
        return {self.ground.identify(leaf) for leaf in leaves} <= read_numbers(self._light).keys()

    def recipe_of(self, stretch: Stretch) -> Recipe:
        """A stretch as the ordinary run that it is in this folder."""
        return self.ground.recipe_of(stretch, self.folder / "stretches", self.start_at)

    def outcome(self, stretch: Stretch) -> Outcome:
        """How a stretch ended that is trained already; one without a finite loss has diverged, too."""
        outcome = read_outcome(self.recipe_of(stretch))
        assert outcome is not None
        return outcome if self.ended[stretch.key] is not None else replace(outcome, status="diverged")

    def save_summary(
        self, recipe: Recipe, settings: Any, with_words: Callable[[StudySummary], StudySummary] = copy, **more: Any
    ) -> StudySummary:
        """Write what came of the study. settings: a dataclass, the preset's own; with_words: says it in words."""
        values = {"settings": asdict(settings), "stages": list(self.spent.values()), **more}
        name, told = self.folder.resolve().name, stored_values(recipe, self.folder)
        summary = with_words(StudySummary(name=name, command=self.command, preset=self.study, recipe=told, **values))
        self.by_main(partial(summary.save, self.folder))
        return summary

    def _train_wave(self, wave: Sequence[Stretch], light: Mapping[str, str]) -> None:
        for name, members in group_programs(wave).items():
            recipes = [self.recipe_of(stretch) for stretch in members]
            for number, stretch in enumerate(members):
                if stretch.key in light:
                    recipes[number] = replace(recipes[number], out=None)
            outcomes = self._train_group(name, recipes)
            losses = {one.key: self._loss(end) for one, end in zip(members, outcomes, strict=True)}
            self.ended |= losses
            if new := {light[key]: loss for key, loss in losses.items() if key in light}:
                self.by_main(partial(write_json, self._light, {**read_numbers(self._light), **new}))

    def _train_group(self, name: str, recipes: list[Recipe]) -> list[Outcome]:
        began, together = time.monotonic(), self.processes.world > 1
        stored = self.processes.by_main(lambda: [read_outcome(recipe) for recipe in recipes])
        outcomes = [outcome for outcome in stored if outcome is not None]
        if len(outcomes) < len(recipes):
            visible = self.visible and self.processes.main
            with lowest_loss_bar(recipes[0].steps, stored.count(None), visible=visible) as tell:
                outcomes = train_many(
                    recipes,
                    engine="serial" if together else self.engine,
                    evaluate=self.ground.measure == "held-out",
                    save=None if together else self.folder / "stacks" / f"{self.name}-{name}.safetensors",
                    on_point=tell,
                    resume=True,
                    note=self.note_once,
                    data=self.ground.data,
                )
            outcomes = self.processes.by_main(partial(list, outcomes))
            self._keep_seconds(time.monotonic() - began)
        each = [min(one.step, one.recipe.steps) * self.ground.cost_per_step(one.recipe.width) for one in outcomes]
        spent = self.spent[self.name]
        self.spent[self.name] = replace(spent, cost=(spent.cost or 0.0) + math.fsum(each))
        return outcomes

    def _loss(self, outcome: Outcome) -> float | None:
        if outcome.status != "finished":
            return None
        loss = outcome.scores.get("loss") if self.ground.measure == "held-out" else outcome.loss
        return loss if loss is not None and math.isfinite(loss) else None

    # ------------------------------------------------------------------------------------------- what it took

    def _keep_seconds(self, seconds: float) -> None:
        self.trained += 1
        stored = read_numbers(self._clock)
        taken = (stored.get(self.name) or 0.0) + seconds
        self.spent[self.name] = replace(self.spent[self.name], seconds=taken)
        self.by_main(partial(write_json, self._clock, {**stored, self.name: taken}))

    @property
    def _light(self) -> Path:
        """Losses of stretches that have no folder, by what identifies them."""
        return self.folder / f"losses-{self.study}.json"

    @property
    def _clock(self) -> Path:
        return self.folder / f"seconds-{self.study}-{hash_values(self.ground.identity)[:8]}.json"


def group_programs(wave: Iterable[Stretch]) -> dict[str, list[Stretch]]:
    """Those of one size, length, schedule and rules are one program, by a name for its file."""
    groups: dict[str, list[Stretch]] = {}
    for stretch in wave:
        own = stretch.schedule
        alike = [own.kind, own.warmup, own.before, own.after, stretch.base, str(stretch.rules), stretch.batch]
        name = f"{Width.of(stretch.width).label}-{stretch.steps}-{hash_values(alike)}"
        groups.setdefault(name, []).append(stretch)
    return groups


def read_numbers(path: Path) -> dict[str, float | None]:
    """Numbers by name in a file of a study's folder; none where it is damaged, or not there yet."""
    try:
        return {str(name): None if value is None else float(value) for name, value in read_json(path).items()}
    except (OSError, ValueError, TypeError, AttributeError, MupscaleError):
        return {}


# ---------------------------------------------------------------------------------------------- what it would cost

_STEPS = 5  # that are measured, after as many that are not
_PROBED = 32  # runs in a probe, at most; more cost in proportion
_PATIENCE = 10.0  # seconds for a probe; beyond that, a smaller size tells the time, in proportion to FLOPs
_LONG = 1.0  # seconds after which no further step is taken


def describe_stages(stages: Mapping[str, Sequence[Stretch]], ground: Ground, engine: str) -> str:
    """A row for every stage: its finished models, its cost beyond what earlier stages have trained, and its time.

    Both have their shares of the whole beside them.

    engine: with which a few steps of every size are measured.
    """
    trained: set[str] = set()
    rows: list[tuple[str, int, float, float | None]] = []
    with Stopwatch(ground, engine) as clock:
        for name, leaves in stages.items():
            new = [one for one in list_stretches(leaves) if one.key not in trained and one.start is None]
            trained |= {one.key for one in new}
            cost = math.fsum(ground.cost(one) for one in new)
            rows.append((name, len({leaf.key for leaf in leaves}), cost, clock.measure(new)))
    total, unit, wide = math.fsum(row[2] for row in rows), ground.unit, max(len(name) for name in stages) + 4
    spent = [seconds for *_, seconds in rows]
    known = None if None in spent else math.fsum(each or 0.0 for each in spent)
    lines = list[str]()
    for name, count, cost, seconds in rows:
        what = f"{name:<{wide}}{count:>5} {'model' if count == 1 else 'models':<6}"
        # small models do few FLOPs a second: their share of the time is far above that of the FLOPs
        share_of_time = f"{seconds / known:8.1%}" if known and seconds is not None else ""
        lines.append(f"{what}  {cost:9.3g} {unit}  {cost / total:6.1%}{_about(seconds)}{share_of_time}")
    lines.append(f"{'together':<{wide}}{'':>12}  {total:9.3g} {unit}{'':8}{_about(known)}")
    lines.append(clock.remark(known) + (" The share behind a time is its share of the time." if known else ""))
    lines += describe_epochs([leaf for leaves in stages.values() for leaf in leaves], ground)
    return "\n".join(line.rstrip() for line in lines)


def describe_epochs(leaves: Sequence[Stretch], ground: Ground) -> list[str]:
    """A line on how often models go over the data, if one does so more than once and the size of the data is known."""
    steps = max(sum(stretch.steps for stretch in leaf.path) for leaf in leaves)
    epochs = ground.data.describe_epochs(steps * ground.recipe.batch)
    return [f"The model with the most steps trains for {epochs}."] if epochs else []


def _about(seconds: float | None) -> str:
    return f"{'?' if seconds is None else rough_time(seconds):>12}"


class Speed(NamedTuple):
    """Of runs that train at once: seconds that they take to begin, and that a step of all of them takes."""

    start: float
    step: float

    def times(self, runs: float, cost: float = 1.0) -> Speed:
        return Speed(self.start * runs, self.step * runs * cost)


@dataclass
class Stopwatch:
    """Measures a few steps of each size, and as a context shows which.

    speeds: by the cost of a step of one run, its width, and how many run at once. Few at once have a speed of their
    own: a step of one or three small models takes as long as one of thirty.
    """

    ground: Ground
    engine: str
    speeds: dict[tuple[float, str, int], Speed] = field(default_factory=dict)
    failure: str = ""
    display: Display = field(default_factory=lambda: Display((), visible=False))

    def __enter__(self) -> Stopwatch:
        columns = ["To estimate the time: a few steps of {task.fields[size]}", "time"]
        self.display = Display(columns, transient=True, lines="stderr", first_line_at_once=True, size="each size")
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()

    @cached_property
    def evaluation_steps(self) -> float:
        """What an evaluation takes, in training steps: a forward pass is about a third of a step."""
        batch = self.ground.recipe.evaluation.batch or self.ground.recipe.batch
        return sum(len(x) for x, _ in self.ground.data.evaluation(batch)) / self.ground.recipe.batch / 3

    def measure(self, stretches: Sequence[Stretch]) -> float | None:
        """Seconds for all of these, in the programs that a trainer makes of them; None if not one fits into memory.

        The time to begin counts twice: what else a program does beside its steps takes about as long. It looks how much
        memory a run takes, and writes its models.
        """
        total, evaluated = 0.0, self.evaluation_steps if self.ground.measure == "held-out" else 0.0
        asked = {stretch.key for stretch in stretches}
        for wave in list_waves(stretches):
            for same in group_programs(stretch for stretch in wave if stretch.key in asked).values():
                size = Width.of(same[0].width).phrase
                self.display.update(len(self.speeds), f"To estimate the time: a few steps of {size} …", size=size)
                speed = self._speed(same)
                if speed is None:
                    return None
                each = self.ground.cost_per_step(same[0].width)  # at the recipe's batch
                total += 2 * speed.start + speed.step * (self.ground.cost(same[0]) / each + evaluated)
        return total

    def remark(self, seconds: float | None) -> str:
        if self.failure:
            return f"There is no estimate of the time, because a step failed: {self.failure}"
        if seconds is None:
            return "Too big: one run does not fit into memory, so use a smaller batch or width."
        return "Times are estimates for this machine, from a few steps of each size. They include evaluation."

    def _speed(self, same: Sequence[Stretch]) -> Speed | None:
        cost, width = self.ground.cost_per_step(same[0].width), Width.of(same[0].width).label
        runs = count = min(len(same), _PROBED)
        key, known = (cost, width, runs), [key for key in self.speeds if key[0] <= cost]
        if key not in self.speeds and known and self.ground.unit == "FLOPs":
            nearest = max(known, key=lambda key: (key[0], -abs(key[2] - runs)))
            likely = self.speeds[nearest].times(len(same) / nearest[2], cost / nearest[0])
            each = likely.step / len(same)  # too much, where a small size's steps are all overhead
            if 2 * each > _PATIENCE:
                return likely
            count = min(count, int(_PATIENCE / (2 * each)))
        while count:
            try:
                if key not in self.speeds:
                    speed = _probe(same[0], self.ground, self.engine, count)
                    self.speeds[key] = speed.times(runs / count)
                return self.speeds[key].times(len(same) / runs)
            except torch.OutOfMemoryError:
                count //= 2
            except MupscaleError as error:  # which the run itself would say, too
                self.failure = str(error)
                return None
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return None


def _probe(stretch: Stretch, ground: Ground, engine: str, count: int) -> Speed:
    no_growth = GrowthSettings(how="copies").growth_settings
    alone = replace(stretch, parent=None, start=None, change=None, batch=None, tuned_at=None, **no_growth)
    alone = replace(alone, steps=max(2 * _STEPS, stretch.steps, stretch.schedule.warmup + stretch.schedule.decay))
    recipe = replace(ground.recipe_of(alone, Path()), compile=False, out=None, callbacks=[])
    with join_processes(recipe.device, recipe.parallel) as processes, matmul_precision(recipe.precision):
        if engine != "serial":
            try:
                recipes = [replace(recipe, seeds=Seeds(init=number)) for number in range(count)]
                data = ground.data.to(processes.device, recipe.dtype())
                RunStack(recipes[:1], processes.device, data)  # what is slow once in a process
                began = time.perf_counter()
                stack = RunStack(recipes, processes.device, data)
                start = time.perf_counter() - began
                return Speed(start, _time_step(lambda: stack.advance(1), processes.device))
            except NotStackable:
                if engine == "vectorised":
                    raise
        run = TrainingRun(recipe, processes, [], ground.data)
        began = time.perf_counter()
        run.begin(resume=False)
        start = time.perf_counter() - began
        return Speed(start, _time_step(run.advance, processes.device)).times(count)


def _time_step(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step, after some that do not count; of slow ones fewer are taken."""
    seconds = 0.0
    for _ in ("warm-up", "measured"):
        began, taken = time.perf_counter(), 0
        while taken < _STEPS and (not taken or time.perf_counter() - began < _LONG):
            step()
            taken += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - began) / taken
    return seconds
