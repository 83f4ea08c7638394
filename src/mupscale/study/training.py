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
from typing import Any, Literal

import torch

from mupscale.core import WholeWidth, Width
from mupscale.data import Data
from mupscale.engine import Outcome, lowest_loss_bar, read_outcome, train_many
from mupscale.study.results import StageSpent, StudySummary
from mupscale.study.tree import Stretch, hash_values, list_waves
from mupscale.system import (
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
    Filling,
    Growth,
    Processes,
    Recipe,
    Seeds,
    copy_checkpoint,
    cost_per_example,
    fingerprint_checkpoint,
    stored_values,
)

Note = Callable[[str], None]
COMMAND_FILE = "command.txt"
"""In a study's folder: the command that began it, and that goes on with it."""
POINTS = 40  # of a run's curve at least, where it has so many steps
_OTHER_DATA = 10_000  # between the data seeds of two orders, so that each stretch goes on with batches of its own
_OF_STRETCHES = {"width", "steps", "schedule", "grow", "start", "start_width", *Filling().filling, "state"}


@dataclass(frozen=True)
class Ground:
    """A recipe that stretches vary: what a step costs at every width, and the recipe of a stretch.

    measure: whose loss counts, held-out or train; what trains for the one may have no value of the other.
    """

    recipe: Recipe
    measure: str = "held-out"

    @cached_property
    def data(self) -> Data:
        """The data of all runs."""
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
        """Of these stretches together."""
        return math.fsum(map(self.cost, stretches))

    def make_trainer(self, *given: Any, **more: Any) -> Trainer:
        """Who trains stretches of this recipe; given: what `Trainer` takes behind its ground."""
        return Trainer(self, *given, **more)

    @cached_property
    def example(self) -> tuple[int, str]:
        """What an example of the data counts: so many tokens of text, else one example."""
        return self.data.per_example, "examples" if self.data.unit == "samples" else self.data.unit

    @property
    def unit(self) -> str:
        """FLOPs, or steps."""
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
            **{"start_width": None, **stretch.filling, **self.watch(stretch), **changes},
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
        try:
            make_folder(self.folder)
            if self.command:
                replace_text(self.folder / COMMAND_FILE, f"{self.command}\n")
        except OSError as error:
            raise MupscaleError(f"{self.folder} cannot be written: {error.strerror or error}") from None

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
        """Let the main process write something into the folder, while the others wait."""
        self.processes.by_main(write, f"{self.folder} cannot be written")

    def _take_checkpoint(self) -> None:
        """A copy of the checkpoint that the recipe starts from, so that the folder can be moved without it."""
        start = self.ground.recipe.start
        if start is not None and not Path(start).resolve().is_relative_to(self.folder.resolve()):
            self.start_at = str(copy_checkpoint(start, self.folder / f"base-{self.ground.start}"))

    @contextmanager
    def stage(self, name: str, about: str) -> Iterator[None]:
        """Everything trained within belongs to this stage."""
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
        return [self.ended[leaf.key] for leaf in leaves]

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
        stored = self.processes.ask_main(lambda: [read_outcome(recipe) for recipe in recipes])
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
            outcomes = self.processes.ask_main(partial(list, outcomes))
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
        """Add to what a stage has taken, in this process or others."""
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
        """What stages have taken so far, by name."""
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
