"""Comparisons small enough for a test, and systems of made-up losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mupscale.models import MLP
from mupscale.study import ContenderRuns, StudySettings, StudySummary, SystemRuns, contender_named, run_pay
from mupscale.study.results import BudgetPoint
from mupscale.train import Growth, Recipe
from small_runs import CLASSES, FEATURES, recipe


def growing(**changes: Any) -> Recipe:
    """A base model of width 8 for 9 steps, and 16 more after it grows to 16."""
    usual = {"width": 8, "base": 4, "init_at": 4, "steps": 25, "grow": [Growth(at=9, width=16, how="copies")]}
    return recipe(**{**usual, **changes})


def few(**changes: Any) -> StudySettings:
    """Two learning rates and one noise at width 4; two budgets and seeds."""
    usual: dict[str, Any] = {"widths": [4], "lrs": [0.02, 0.05], "noises": [0.5], "budgets": [0.5, 1.0], "seeds": 2}
    return StudySettings(**{**usual, "small_seeds": 2, **changes})


def least(**changes: Any) -> StudySettings:
    """One learning rate and one seed of each."""
    return few(**{"seeds": 1, "small_seeds": 1, "lrs": [0.02], **changes})


def compare_quietly(folder: Path, of: Recipe | None = None, how: StudySettings | None = None, **more: Any) -> Any:
    """A whole comparison."""
    return run_pay(of or growing(), how or few(), folder, note=lambda text: None, **more)


def facts(summary: StudySummary) -> dict[str, Any]:
    """All of a summary but the clock, its name and the part of costs that a kill has paid twice."""
    values: dict[str, Any] = json.loads(
        json.dumps(asdict(summary)).replace("StudySettings.", "study.")
    )  # as a command says it
    return {name: value for name, value in values.items() if name not in ("name", "command", "stages")}


def system_of(
    losses: Mapping[str, list[list[float | None]]], *, narrow: int = 64, base_cost: float | None = 100.0
) -> SystemRuns:
    """A system with these losses by contender, budget (1/4, 1/2, 1 of them) and seed; each costs up to 400."""
    contenders = []
    for name, by_budget in losses.items():
        full = 400.0 if contender_named(name).from_base else 400.0 + (base_cost or 0.0)
        parts = [0.25, 0.5, 1.0][-len(by_budget) :]
        points = [BudgetPoint(part, 10, part * full, each) for part, each in zip(parts, by_budget, strict=True)]
        contenders.append(ContenderRuns(name, 2 * narrow, 0.01, 0.0, points))
    return SystemRuns(narrow, 2 * narrow, base_cost, "FLOPs", contenders)


class Uncounted(MLP):
    """A model whose FLOPs cannot be counted: it does not run where torch counts them."""

    def __init__(self, width: int) -> None:
        super().__init__(FEATURES, width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("kernels of its own, which nobody can look into")
        return super().forward(x)
