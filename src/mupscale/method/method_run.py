"""A run of the method and its folder: whose folder it is, how a stage is trained there, and what each stage took."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from mupscale.core import WholeWidth, Width
from mupscale.engine import Outcome, lowest_loss_bar, read_outcome, train_many
from mupscale.method.contenders import CONTENDERS, STAGES
from mupscale.method.protocol import Protocol
from mupscale.method.settings import Method
from mupscale.method.summary import StageCost
from mupscale.sweep import Cell, Space, Sweep
from mupscale.system import MupscaleError, clear_leftovers, exclusive_lock, read_json, write_json
from mupscale.train import Recipe, StoredRecipe, stored_values

Note = Callable[[str], None]
# settings of the method that may change when a run goes on
_FREE = {"seeds", "baselines", "engine", "storage", "retries"}
_ORDER = ("sweep-1", "small", "sweep-2", *STAGES)  # what names of stages begin with


class MethodRun:
    """A run of the method: recipe, settings and folder, and how a stage of it is trained."""

    def __init__(self, recipe: Recipe, method: Method, folder: Path, note: Note) -> None:
        self.protocol = Protocol(recipe, folder)
        self.recipe, self.method, self.folder, self.note = recipe, method, folder, note
        self.trained: list[str] = []  # stages, since this process began
        self.protocol.check_all_small(method.widths)
        for contender in CONTENDERS:
            if contender.check is not None and contender.is_asked_for(method.baselines):
                contender.check(self.protocol)

    def open(self) -> None:
        """Make the folder, unless it is that of another run."""
        for folder in (self.folder, self.folder / "stacks", self.folder / "sweeps"):
            clear_leftovers(folder)
        path = self.folder / "method.json"
        values = json.loads(
            json.dumps({"recipe": stored_values(self.recipe, self.folder), "method": self.method.to_json()})
        )
        if path.exists():
            self._check_same_run(path, values["method"])
        self.write("method.json", values)

    def _check_same_run(self, path: Path, method: Mapping[str, Any]) -> None:
        """Refuse a folder whose run has another recipe or other settings that matter."""
        try:
            stored = read_json(path)
            recipe, settings = StoredRecipe.of(stored["recipe"], path), dict(stored["method"])
        except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
            raise MupscaleError(f"{path} is damaged ({error}): choose another folder (--out)") from None
        if recipe.steps != self.recipe.steps:
            self._refuse(f"steps is {recipe.steps} there and {self.recipe.steps} here")
        if difference := recipe.describe_difference(self.recipe, recipe.steps):
            self._refuse(difference)
        for name, value in method.items():
            if name not in _FREE and settings.get(name) != value:
                self._refuse(f"method.{name} is {settings.get(name)} there and {value} here")

    def _refuse(self, difference: str) -> NoReturn:
        raise MupscaleError(f"{self.folder} holds a run of another recipe: {difference}; choose another folder (--out)")

    # ------------------------------------------------------------------------------------------- stages

    def train(self, stage: str, named: Mapping[str, list[Recipe]]) -> dict[str, list[Outcome]]:
        """Train the runs of a stage as one program, by contender; those that are finished are read."""
        recipes = [recipe for group in named.values() for recipe in group]
        if not recipes:
            return {}
        self.trained.append(stage)
        with self._alone():
            outcomes = self._outcomes(stage, recipes, ", ".join(named) if len(named) > 1 else "")
            self._record(stage, flops=self._flops(outcomes))  # while no other worker can
        in_order = iter(outcomes)
        result = {name: [next(in_order) for _ in group] for name, group in named.items()}
        ends = [f"{f'{name}: ' if len(named) > 1 else ''}{_final_losses(group)}" for name, group in result.items()]
        self.note(f"  {'; '.join(ends)}")
        return result

    def _outcomes(self, stage: str, recipes: Sequence[Recipe], names: str) -> list[Outcome]:
        """Train what is not finished yet; what is finished takes no time."""
        left, first = [recipe for recipe in recipes if read_outcome(recipe) is None], recipes[0]
        runs = f"{count_of(len(recipes), 'run')}{f' ({names})' if names else ''}"
        self._announce(stage, runs, f"width {Width.of(first.width).label}", first.steps, len(left), len(recipes))
        if not left:
            return [outcome for recipe in recipes if (outcome := read_outcome(recipe)) is not None]
        with self._timed(stage), lowest_loss_bar(first.steps, len(left)) as tell:
            return train_many(
                recipes,
                engine=self.method.engine,
                save=self.folder / "stacks" / f"{stage}.safetensors",
                on_point=tell,
                resume=True,
                note=self.note,
                data=self.protocol.data,
            )

    def _announce(self, stage: str, what: str, where: str, steps: int, left: int, count: int) -> None:
        """The line that a stage begins with."""
        to_do = "" if left in (0, count) else f", {left:,} of them left"
        self.note(f"{stage}: {what}{to_do}, {where}, {count_of(steps, 'step')}{'' if left else ': done already'}")

    def _flops(self, outcomes: Sequence[Outcome]) -> float | None:
        """Of all steps that were taken, a diverged run's to where it did."""
        costs = [(self.protocol.flops_per_step(one.recipe.width), min(one.step, one.recipe.steps)) for one in outcomes]
        return None if any(each is None for each, _ in costs) else math.fsum((each or 0.0) * n for each, n in costs)

    def sweep(
        self,
        name: str,
        width: WholeWidth,
        start: WholeWidth | None,
        space: Space,
        recipes: Callable[[Cell], list[Recipe]],
        worker: bool = False,
    ) -> Sweep:
        """Begin a sweep, or join the one that is there; one that is done is read."""
        from mupscale.sweep import SweepJob, run_sweep

        method = self.method
        steps = self.protocol.base_steps if start is None else self.protocol.wide_steps
        sampler = method.sampler if len(space.noises) > 1 else "grid"
        shown = Width.of(width).label if start is None else f"{Width.of(start).label} → {Width.of(width).label}"
        seeds = f" × {method.sweep_seeds} seeds" if method.sweep_seeds > 1 else ""

        def begin(left: int, count: int) -> None:
            tell.runs = left * method.sweep_seeds
            self._announce(name, f"{count_of(count, 'trial')}{seeds}", f"width {shown}", steps, left, count)

        job = SweepJob(
            name=name,
            width=width,
            start=start,
            space=space,
            recipes=recipes,
            steps=steps,
            measure=method.measure,
            sampler=sampler,
            trials=None if sampler == "grid" else method.trials,
            pruner=method.pruner,
            engine=method.engine,
            data=self.protocol.data,
        )
        with lowest_loss_bar(steps) as tell:
            sweep = run_sweep(
                job,
                method.storage or str(self.folder / "study.db"),
                worker=worker,
                folder=self.folder / "sweeps",
                retries=method.retries,
                note=self.note,
                on_point=tell,
                on_start=begin,
            )
        self.note(f"  {_best_trial(sweep)}")
        return sweep

    @property
    def sweep_seeds(self) -> range:
        """The seeds of each trial."""
        return range(self.method.sweep_seeds)

    # ------------------------------------------------------------------------------------------- what they took

    def stage_costs(self, sweeps: Sequence[Sweep]) -> list[StageCost]:
        """FLOPs and seconds of every stage, in the order of the protocol."""
        costs = [StageCost(sweep.name, sweep.flops, sweep.seconds) for sweep in sweeps]
        records = self._records()
        for name in self.trained:
            record = records.get(name, {})
            costs.append(StageCost(name, record.get("flops"), record.get("seconds", 0.0)))
        return sorted(costs, key=lambda cost: next(i for i, name in enumerate(_ORDER) if cost.name.startswith(name)))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Seconds of a stage, added to those of earlier processes."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent = self._records().get(stage, {}).get("seconds", 0.0) + time.monotonic() - began
            with suppress(MupscaleError):  # what went wrong before matters more
                self._record(stage, seconds=spent)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Several workers may share a folder: a stage's runs are then trained by one, and read by the others."""
        waiting = f"waiting for another process that trains in {self.folder}"
        with ExitStack() as held:
            with self._writing(".lock"):
                held.enter_context(exclusive_lock(self.folder / ".lock", before_waiting=lambda: self.note(waiting)))
            yield

    def _record(self, stage: str, **values: float | None) -> None:
        records = self._records()
        records[stage] = {**records.get(stage, {}), **values}
        self.write("stages.json", records)

    def _records(self) -> dict[str, dict[str, Any]]:
        try:
            records = read_json(self.folder / "stages.json")
        except (OSError, MupscaleError):
            return {}
        named = records.items() if isinstance(records, dict) else ()
        return {str(stage): dict(values) for stage, values in named if isinstance(values, dict)}

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """A file of values in the folder, whole or not at all."""
        write_json(self.folder / name, values)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MupscaleError(f"{self.folder / name} cannot be written: {error.strerror}") from None


def count_of(count: int, what: str) -> str:
    """A number of things: 1 run, 1,200 steps."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _best_trial(sweep: Sweep) -> str:
    best = sweep.best
    noise = f"noise {best.noise:.3g} and " if len(sweep.space.noises) > 1 else ""
    return f"loss {best.loss:.4f} with {noise}learning rate {best.lr:.3g}, the best"


def _final_losses(outcomes: Sequence[Outcome]) -> str:
    """The final losses of one model's seeds, for the terminal."""
    losses = [loss for outcome in outcomes if (loss := outcome.loss) is not None]
    lost = len(outcomes) - len(losses)
    if not losses:
        return "diverged"
    span = "" if len(losses) == 1 else f" ({min(losses):.4f} to {max(losses):.4f})"
    return f"loss {fmean(losses):.4f}{span}{f', {lost} of {len(outcomes)} diverged' if lost else ''}"
