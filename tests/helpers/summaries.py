"""A run of the paper's comparison for the report's tests, and sweeps and checks that never were: always the same."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mupscale.study import ContenderRuns, Curve, StudySummary, Sweep, Tried, load_summary
from mupscale.study.results import BudgetPoint
from mupscale.study.wording import write_paper_words

LRS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


@cache
def stored() -> StudySummary:
    """A GPT-2 from width 32 to 64 with three seeds, as results/ has it."""
    return load_summary(Path(__file__).parents[2] / "results" / "gpt2-shakespeare")


def example(**changes: Any) -> StudySummary:
    """The same with sweeps of 6 × 6, some of whose cells diverged. runs, costs, gain, choice: parts of what it has."""
    answer = {name: value for name, value in stored().answer.items() if name != "reference"}
    answer |= {name: changes.pop(name) for name in ("costs", "gain", "choice") if name in changes}
    large = replace(stored().large, contenders=changes.pop("runs", None) or all_runs())
    given = {"tuned": [sweep_1(), sweep_2()], "large": large, "answer": answer}
    return write_paper_words(replace(stored(), **{**given, **changes}))


def all_runs() -> list[ContenderRuns]:
    """The base model and five contenders: those without learning rates of their own."""
    return [one for one in stored().large.contenders if not one.name.endswith(("-own", "-late"))]


def with_curves(runs: ContenderRuns, curves: Sequence[Curve]) -> ContenderRuns:
    """The same with other curves, and the losses that these end at."""
    steps = curves[0].steps[-1]
    point = BudgetPoint(1.0, steps, steps * (runs.cost_per_step or 1.0), [one.final() for one in curves])
    return replace(runs, points=[point], curves=list(curves))


def diverged(runs: ContenderRuns) -> ContenderRuns:
    """The same, but every seed of it ended early in something that is no number."""
    cut = [replace(c, status="diverged", steps=c.steps[:7], losses=[*c.losses[:5], 9.0, math.inf]) for c in runs.curves]
    bare = [replace(c, held_out_steps=[], held_out_losses=[], accuracy=[]) for c in cut]
    return with_curves(runs, bare)


def sweep_1() -> Sweep:
    """Learning rates at n₀, the largest of which diverged."""
    trials = []
    for lr in LRS:
        loss = 0.52 + 0.03 * math.log2(lr / 0.016) ** 2 / 4
        losses: list[float | None] = [None] if lr > 0.03 else [loss - 0.005, loss + 0.006]
        trials.append(Tried(lr, 0.0, losses, steps=1000, cost=1.2e11))
    return Sweep("sweep-1-width-64", trials, 64, lr=0.016, noise=0.0, measure="train")


def sweep_2(sampler: str = "grid", *, name: str = "sweep-2-width-64") -> Sweep:
    """Learning rates × noise: a valley, with what is both fast and noisy diverged and one corner stopped."""
    trials, chance = [], random.Random(7)
    for number, (noise, lr) in enumerate(itertools.product(NOISES, LRS)):
        if sampler != "grid":
            lr = math.exp(chance.uniform(math.log(LRS[0]), math.log(LRS[-1])))
            noise = 0.0 if number < 2 else math.exp(chance.uniform(math.log(0.1), math.log(10)))
        level = 0.0 if noise == 0 else 0.06 * math.exp(-(math.log10(noise) ** 2) / 0.4)
        far = 0.015 * math.log2(lr / 0.004) ** 2 + (0.1 * math.log10(noise / 3) ** 2 if noise > 3 else 0)
        loss = 0.46 - level + far
        is_lost, is_stopped = lr * max(noise, 0.3) > 0.15, lr < 0.0015 and noise > 2
        steps = [50 * (i + 1) for i in range(6 if is_lost or is_stopped else 20)]
        curve = [(s, loss + (0.1 + 0.12 * noise**0.5) * math.exp(-s / 150) + 0.05 * (1 - s / 1000)) for s in steps]
        losses: list[float | None] = [None if is_lost else loss]
        budget = 0.3 if is_stopped and not is_lost else 1.0
        trials.append(Tried(lr, noise, losses, budget, curve, steps[-1], 2.6e11))
    return Sweep(name, trials, 128, 64, measure="train", sampler=sampler)


def transfer_check() -> dict[str, Any]:
    """Four widths whose optimum stays where it is."""

    def line(width: int, xs: tuple[float, ...], best: float) -> dict[str, Any]:
        far = {x: math.log2(x / best) if x else 4.0 for x in xs}
        lowest = [0.5 - 0.03 * math.log2(width / 128) + 0.004 * seed for seed in range(3)]
        points = [{"x": x, "losses": [loss + 0.008 * far[x] ** 2 for loss in lowest]} for x in xs]
        return {"width": width, "from": width // 2, "points": points}

    widths = (128, 256, 512, 1024)
    return {
        "times": 2,
        "steps": 1000,
        "fixed": {"lr": 0.004, "noise": 1.0},
        "unit": "init",
        "lr": [line(width, LRS, 0.004) for width in widths],
        "noise": [line(width, NOISES, 1.0) for width in widths],
        "verdict": ["The best learning rate does not move over widths 128 … 1024: it transfers."],
    }


def write(folder: Path, summary: StudySummary | None = None, *, check: bool = False) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True)
    (summary or example()).save(folder)
    if check:
        (folder / "transfer-check.json").write_text(json.dumps(transfer_check()))
    return folder
