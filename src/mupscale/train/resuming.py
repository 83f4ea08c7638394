"""Where a run goes on: its newest checkpoint, checked against the recipe, with the model and the optimizer it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.checkpoint import DamagedCheckpoint
from mupscale.core import WholeWidth
from mupscale.family import Family
from mupscale.system import MupscaleError
from mupscale.train.placed_members import place_member
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe
from mupscale.train.run_folder import RunFolder
from mupscale.train.snapshot import RunState, Snapshot, read_snapshot
from mupscale.train.start import hyperparameters
from mupscale.train.stored_recipes import StoredRecipe

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ResumePoint:
    """All that a run needs to go on; see RunState for the numbers."""

    model: nn.Module
    optimizer: Optimizer
    width: WholeWidth
    step: int
    lr: float
    flops: float
    seconds: float
    losses: list[float]
    norms: list[float]
    left_out: int
    notes: list[str]


def resume_newest(
    folder: RunFolder,
    recipe: Recipe,
    family: Family,
    processes: Processes,
    fingerprint: str | None,
    note: Callable[[str], None],
) -> tuple[Path, ResumePoint]:
    """The newest checkpoint that is as it was written; damaged ones are set aside, and said."""
    *before, newest = folder.all()
    while True:
        try:
            return newest, resume_point(newest, recipe, family, processes, fingerprint)
        except DamagedCheckpoint as error:
            if not before:
                raise MupscaleError(f"{error}; it is the only checkpoint, so remove it to start over") from None
            damaged, newest = newest, before.pop()
            processes.by_main(partial(folder.set_aside, damaged), f"{damaged} cannot be renamed")
            note(f"{error}; it is kept as damaged-{damaged.name}, and {newest.name} is taken instead")


def resume_point(
    path: Path, recipe: Recipe, family: Family, processes: Processes, fingerprint: str | None = None
) -> ResumePoint:
    """Read the checkpoint at `path`, if it is one of this recipe's run; fingerprint: of the data as it is now."""
    saved = _read(path)
    state = saved.run
    if state is None:
        raise MupscaleError(f"{path} is a checkpoint, but does not belong to a run, so it cannot be resumed")
    step = _required(state.step, "step", path)
    _check_recipe(state, step, recipe, path)
    _check_fingerprint(state, fingerprint, path)
    numbers = {name: _required(getattr(state, name), name, path) for name in ("lr", "flops", "seconds")}
    losses, norms = _required(state.losses, "losses", path), _required(state.norms, "norms", path)
    width = recipe.width_after(step)
    model = place_member(family, width, processes, recipe.dtype())
    saved.restore_model(model)
    optimizer = saved.restore_optimizer(recipe.optimizer_class(), hyperparameters(recipe, processes.device), model)
    numbers |= {"left_out": state.left_out or 0}
    notes = _notes(state, processes)
    return ResumePoint(model, optimizer, width, step, **numbers, losses=losses, norms=norms, notes=notes)


def _check_fingerprint(state: RunState, fingerprint: str | None, path: Path) -> None:
    """The data must be what the steps so far were taken on, where both say what it is."""
    if None not in (state.data, fingerprint) and state.data != fingerprint:
        raise MupscaleError(
            f"the data has changed since the run in {path.parents[1]} was trained (its fingerprint is {fingerprint}, "
            f"and was {state.data}): restore the data, or start a new run from the checkpoint (--from {path})"
        )


def _notes(state: RunState, processes: Processes) -> list[str]:
    """What makes the run go on otherwise than it would have, and is no mistake."""
    threads = torch.get_num_threads()
    if processes.device.type != "cpu" or state.threads in (None, threads):
        return []
    return [
        f"it ran with {state.threads} threads and goes on with {threads}: sums are taken in another order, so it "
        f"agrees to rounding with a run that was never stopped, and not bit for bit"
    ]


def _read(path: Path) -> Snapshot:
    try:
        return read_snapshot(path)
    except DamagedCheckpoint:
        raise
    except MupscaleError as error:
        raise MupscaleError(f"{error}; remove it to resume from the checkpoint before it") from None


def _check_recipe(state: RunState, step: int, recipe: Recipe, path: Path) -> None:
    """The steps so far must be those that this recipe would have taken."""
    if recipe.steps < step:
        raise MupscaleError(
            f"the run in {path.parents[1]} is already at step {step}, but you asked for {recipe.steps} steps: give "
            f"more (--steps)"
        )
    theirs = StoredRecipe.of(_required(state.recipe, "recipe", path), path, path.parents[1])
    if why := theirs.describe_difference(recipe, step):
        raise MupscaleError(
            f"{path} is a checkpoint of another recipe: {why}; choose another folder (--out), or put it back"
        )


def _required(value: _Value | None, field: str, path: Path) -> _Value:
    if value is None:
        raise MupscaleError(f"{path} does not record the run's '{field}', so the run cannot be resumed from it")
    return value
