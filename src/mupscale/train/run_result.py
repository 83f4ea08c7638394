"""How a run ended, and how one goes on with it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from mupscale.core import WholeWidth
from mupscale.train.own_runs import is_own_run
from mupscale.train.recipe import Recipe
from mupscale.train.stored_recipes import packages_to_trust

RunStatus = Literal["finished", "diverged", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended, and its model."""

    status: RunStatus
    step: int
    width: WholeWidth
    model: nn.Module
    optimizer: Optimizer
    out: Path | None


def resume_command_of(recipe: Recipe, out: Path) -> str:
    """The command that goes on with a run, with the packages of its own that it has to be trusted with."""
    packages = [] if is_own_run(out, recipe) else packages_to_trust(recipe)
    trust = "".join(f" --trust {package}" for package in packages)
    return f"mupscale resume {shlex.quote(str(out))}{trust}"
