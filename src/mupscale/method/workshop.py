"""The folder of a run of the method: which run it is, how its stages are trained, and what each of them took."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from mupscale.engine import Outcome, Tell, finished, train_many
from mupscale.method.peers import check_net2net
from mupscale.method.settings import Method
from mupscale.method.stages import Protocol, label
from mupscale.method.summary import Stage
from mupscale.sweep import Cell, Space, Sweep
from mupscale.system import MupscaleError, exclusive_lock, replace_text
from mupscale.train import Recipe, Width, make_progress

Note = Callable[[str], None]
_FREE = {"seeds", "baselines", "engine", "storage"}  # settings of the method that may change when a run goes on
_ORDER = ("sweep-1", "small", "sweep-2", "base", "scratch", "continued", "exact", "upscaled", "naive", "net2net")


def say(text: str) -> None:
    """To whoever looks on, at once."""
    print(text, flush=True)


class Workshop:
    """Where a run of the method is made: its recipe and settings, its folder, and the way a stage is trained there."""

    def __init__(self, recipe: Recipe, method: Method, folder: Path, note: Note) -> None:
        self.protocol = Protocol(recipe, folder)
        self.recipe, self.method, self.folder, self.note = recipe, method, folder, note
        self.trained: list[str] = []  # the stages of this sitting
        self.protocol.check_all_small(method.widths)
        if "net2net" in method.baselines:
            family = recipe.family()
            check_net2net(family.sketch(recipe.width), family.widening(recipe.width, self.protocol.wide))

    def open(self) -> None:
        """Make the folder, unless it is that of another run."""
        path = self.folder / "method.json"
        ours = json.loads(json.dumps({"recipe": self.recipe.to_json(), "method": self.method.to_json()}))
        if path.exists() and (why := self._differs(path, ours["method"])):
            raise MupscaleError(f"{self.folder} holds a run of another recipe: {why}; choose another folder (--out)")
        self.write("method.json", ours)

    def _differs(self, path: Path, method: Mapping[str, Any]) -> str | None:
        """What in the run that is there is not as in this one."""
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
            before, kept = Recipe.from_json(theirs["recipe"]), dict(theirs["method"])
        except (OSError, ValueError, KeyError, TypeError, MupscaleError) as error:
            raise MupscaleError(f"{path} is damaged ({error}): choose another folder (--out)") from None
        if before.steps != self.recipe.steps:
            return f"steps is {before.steps} there and {self.recipe.steps} here"
        if why := before.differs_from(self.recipe, before.steps):
            return why
        changed = [name for name, value in method.items() if name not in _FREE and kept.get(name) != value]
        return f"method.{changed[0]} is {kept.get(changed[0])} there and {method[changed[0]]} here" if changed else None

    # ------------------------------------------------------------------------------------------- stages

    def train(self, stage: str, named: Mapping[str, list[Recipe]]) -> dict[str, list[Outcome]]:
        """The runs of a stage, together; those that are finished are read."""
        recipes = [recipe for some in named.values() for recipe in some]
        if not recipes:
            return {}
        self.trained.append(stage)
        with self._alone():
            outcomes = self._outcomes(stage, recipes, ", ".join(named) if len(named) > 1 else "")
            self._keep(stage, flops=self._flops(outcomes))  # while no other worker can
        in_order = iter(outcomes)
        result = {name: [next(in_order) for _ in some] for name, some in named.items()}
        ends = [f"{f'{name}: ' if len(named) > 1 else ''}{_ended(some)}" for name, some in result.items()]
        self.note(f"  {'; '.join(ends)}")
        return result

    def _outcomes(self, stage: str, recipes: Sequence[Recipe], names: str) -> list[Outcome]:
        """Trained as far as they are not; what is done takes no time."""
        left, first = [recipe for recipe in recipes if finished(recipe) is None], recipes[0]
        runs = f"{counted(len(recipes), 'run')}{f' ({names})' if names else ''}"
        self._announce(stage, runs, f"width {label(first.width)}", first.steps, len(left), len(recipes))
        if not left:
            return [outcome for recipe in recipes if (outcome := finished(recipe)) is not None]
        with self._timed(stage), self._watched(first.steps) as tell:
            return train_many(
                recipes,
                engine=self.method.engine,
                save=self.folder / "stacks" / f"{stage}.safetensors",
                tell=tell,
                resume=True,
                note=self.note,
                data=self.protocol.data,
            )

    def _announce(self, stage: str, what: str, where: str, steps: int, left: int, count: int) -> None:
        """The line that a stage begins with."""
        to_do = "" if left in (0, count) else f", {left:,} of them left"
        self.note(f"{stage}: {what}{to_do}, {where}, {counted(steps, 'step')}{'' if left else ': done already'}")

    def _flops(self, outcomes: Sequence[Outcome]) -> float | None:
        """Of all steps that were taken, a diverged run's to where it did."""
        costs = [(self.protocol.flops_per_step(one.recipe.width), min(one.step, one.recipe.steps)) for one in outcomes]
        return None if any(each is None for each, _ in costs) else math.fsum((each or 0.0) * n for each, n in costs)

    def sweep(
        self,
        name: str,
        width: Width,
        start: Width | None,
        space: Space,
        recipes: Callable[[Cell], list[Recipe]],
        worker: bool = False,
    ) -> Sweep:
        """A sweep, joined or begun; one that is done is read."""
        from mupscale.sweep import Task, run_sweep

        method = self.method
        steps = self.protocol.base_steps if start is None else self.protocol.wide_steps
        sampler = method.sampler if len(space.noises) > 1 else "grid"
        shown = label(width) if start is None else f"{label(start)} → {label(width)}"
        seeds = f" × {method.sweep_seeds} seeds" if method.sweep_seeds > 1 else ""

        def begin(left: int, count: int) -> None:
            self._announce(name, f"{counted(count, 'trial')}{seeds}", f"width {shown}", steps, left, count)

        task = Task(
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
        storage = method.storage or str(self.folder / "study.db")
        with self._watched(steps) as tell:
            found = run_sweep(
                task,
                storage,
                worker=worker,
                folder=self.folder / "sweeps",
                note=self.note,
                watch=tell,
                begin=begin,
            )
        best = found.best
        noise = f"noise {best.noise:.3g} and " if len(space.noises) > 1 else ""
        self.note(f"  loss {best.loss:.4f} with {noise}learning rate {best.lr:.3g}, the best")
        return found

    @property
    def sweep_seeds(self) -> range:
        """The seeds of each trial."""
        return range(self.method.sweep_seeds)

    @contextmanager
    def _watched(self, steps: int) -> Iterator[Tell]:
        """A bar for a stage, with the lowest loss among its runs."""
        progress = make_progress(steps, "steps", visible=True, passing=True)

        def tell(step: int, values: Mapping[int, float]) -> None:
            finite = [value for value in values.values() if math.isfinite(value)]
            if finite:
                progress.update({"kind": "train", "step": step, "loss": min(finite)}, 0.0)

        try:
            yield tell
        finally:
            progress.close()

    # ------------------------------------------------------------------------------------------- what they took

    def stages(self, sweeps: Sequence[Sweep]) -> list[Stage]:
        """FLOPs and seconds of every stage, in the order of the protocol."""
        made = [Stage(sweep.name, sweep.flops, sweep.seconds) for sweep in sweeps]
        kept = self._kept()
        for name in self.trained:
            held = kept.get(name, {})
            made.append(Stage(name, held.get("flops"), held.get("seconds", 0.0)))
        return sorted(made, key=lambda stage: next(i for i, name in enumerate(_ORDER) if stage.name.startswith(name)))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Seconds of a stage, over all sittings."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent = self._kept().get(stage, {}).get("seconds", 0.0) + time.monotonic() - began
            with suppress(MupscaleError):  # what went wrong before matters more
                self._keep(stage, seconds=spent)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Several workers may share a folder: a stage's runs are then trained by one, and read by the others."""
        waiting = f"waiting for another process that trains in {self.folder}"
        with ExitStack() as held:
            with self._writing(".lock"):
                held.enter_context(exclusive_lock(self.folder / ".lock", before_waiting=lambda: self.note(waiting)))
            yield

    def _keep(self, stage: str, **values: float | None) -> None:
        kept = self._kept()
        kept[stage] = {**kept.get(stage, {}), **values}
        self.write("stages.json", kept)

    def _kept(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(json.loads((self.folder / "stages.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """A file of values in the folder, whole or not at all."""
        with self._writing(name):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / name, json.dumps(values, indent=1) + "\n")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MupscaleError(f"{self.folder / name} cannot be written: {error.strerror}") from None


def counted(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _ended(outcomes: Sequence[Outcome]) -> str:
    """The final losses of one model's seeds, in few words."""
    losses = [loss for outcome in outcomes if (loss := outcome.loss) is not None]
    lost = len(outcomes) - len(losses)
    if not losses:
        return "diverged"
    span = "" if len(losses) == 1 else f" ({min(losses):.4f} to {max(losses):.4f})"
    return f"loss {fmean(losses):.4f}{span}{f', {lost} of {len(outcomes)} diverged' if lost else ''}"
