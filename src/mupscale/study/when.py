"""The preset `when`: one trunk that may grow early or late; after which part of the budget does it pay most?

narrow ──┬──────┬──────────┬─────────────────┐
         │10 %  │25 %      │50 %             └ decay, never grown
         └ wide └ wide     └ wide, each to the same FLOPs in all, with a decay over the last quarter
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from mupscale.core import WholeWidth, Width
from mupscale.study.contenders import CONTINUED, FRESH, FROM_SCRATCH
from mupscale.study.loss_gaps import choose_gap_kind, format_gap, gap_above
from mupscale.study.results import ContenderRuns, StudySummary, SystemRuns
from mupscale.study.systems import StudySettings, read_system
from mupscale.study.training import Ground, Note, Trainer, describe_stages
from mupscale.study.tree import DECAY, Stretch, branch_off
from mupscale.system import MupscaleError, print_at_once
from mupscale.train import Recipe, Schedule

PARTS = (0.1, 0.25, 0.5)
"""Of all FLOPs, after which the trunk may grow."""


@dataclass(frozen=True)
class Arm:
    """A way to spend the budget: after which part of it the model grows. 0: wide from scratch; 1: it never grows.

    like: the contender that it is a kind of.
    """

    part: float
    width: WholeWidth
    label: str
    like: str
    leaves: list[Stretch] = field(default_factory=list)  # one for each seed


def plan_when(recipe: Recipe, settings: StudySettings, ground: Ground) -> list[Arm]:
    """The tree: one narrow trunk for each seed, off which every arm branches; all arms cost the same."""
    if recipe.start is not None:
        raise MupscaleError(
            "mupscale run --when trains its own base model, so its recipe cannot start from a checkpoint (from)"
        )
    read_system(recipe, settings, ground, "when to grow")  # refuses a recipe that does not grow
    growth, lr, own = recipe.grow[0], float(recipe.optimizer.init_args["lr"]), recipe.schedule
    narrow, wide = ground.cost_per_step(recipe.width), ground.cost_per_step(growth.width)
    budget = growth.at * narrow + (recipe.steps - growth.at) * wide
    arms = {part: Arm(part, growth.width, f"grown after {part:.0%}", FRESH.name) for part in PARTS}
    arms = {0.0: Arm(0.0, growth.width, "wide from scratch", FROM_SCRATCH.name), **arms}
    arms[1.0] = Arm(1.0, recipe.width, "never grown", CONTINUED.name)
    for seed in range(settings.seeds):
        first = Stretch(width=recipe.width, steps=0, lr=lr, seed=seed, schedule=Schedule(warmup=own.warmup))
        scratch = replace(first, width=growth.width)
        arms[0.0].leaves.append(branch_off(scratch, round(budget / wide), [1.0], "wsd", own)[1.0])
        trunk: Stretch | None = None
        done = 0
        for part in PARTS:
            steps = round(part * budget / narrow) - done
            if steps < 1 or (trunk is None and own.warmup >= steps):
                raise MupscaleError(
                    f"{part:.0%} of the FLOPs are {done + steps} steps of the narrow model, too few to grow after"
                    f"{f' with {own.warmup} of warm-up' if own.warmup else ''}: give more steps"
                )
            trunk = replace(first, steps=steps) if trunk is None else trunk.then(steps=steps, schedule=Schedule())
            done += steps
            left = round((budget - done * narrow) / wide)
            decay = min(left - 1, round(budget / wide / DECAY))
            grown = trunk.then(width=growth.width, steps=left - decay, how="fresh", schedule=Schedule(), order=50)
            arms[part].leaves.append(grown.decayed(decay, own.floor))
        assert trunk is not None
        decay = round(budget / narrow) // DECAY
        last = trunk.then(steps=round(budget / narrow) - decay - done, schedule=Schedule())
        arms[1.0].leaves.append(last.decayed(decay, own.floor))
    return list(arms.values())


def estimate_when(recipe: Recipe, settings: StudySettings) -> str:
    """What it would train, and its cost."""
    ground = Ground(replace(recipe, grow=[]))
    arms = plan_when(recipe, settings, ground)
    return describe_stages({arm.label: arm.leaves for arm in arms}, ground, settings.engine)


def run_when(
    recipe: Recipe, settings: StudySettings, folder: str | Path, *, command: str = "", note: Note = print_at_once
) -> StudySummary:
    """Train all arms, and say after which part of the budget growing ends lowest; summary.json."""
    settings = settings.resolved([], "held-out")
    ground = Ground(replace(recipe, grow=[]), settings.measure or "held-out")
    arms = plan_when(recipe, settings, ground)
    trainer = Trainer(ground, Path(folder), "when", settings.engine, note, stages=1, command=command)
    with trainer.alone():
        label = f"{Width.of(recipe.width)} → {Width.of(recipe.grow[0].width)}"
        with trainer.stage("when", f"one trunk that grows after 10, 25 and 50 % of the FLOPs, {label}"):
            trainer.train([leaf for arm in arms for leaf in arm.leaves])
        runs = {arm.label: _runs(arm, trainer) for arm in arms}
        sentence = rank_arms(runs)
        return trainer.save_summary(
            recipe,
            settings,
            sentences=[sentence],
            large=SystemRuns(recipe.width, recipe.grow[0].width, 0.0, ground.unit, list(runs.values())),
            diverged=all(one.final is None for one in runs.values()),
            answer={"sentence": sentence, "losses": {label: one.points[0].losses for label, one in runs.items()}},
        )


def _runs(arm: Arm, trainer: Trainer) -> ContenderRuns:
    name, points = f"grown-after-{arm.part:g}", [trainer.ends_of_seeds(arm.leaves)]
    return ContenderRuns(name, arm.width, arm.leaves[0].lr, 0.0, points, label=arm.label, like=arm.like)


def rank_arms(runs: dict[str, ContenderRuns]) -> str:
    """The order of the arms, the lowest first.

    >>> from mupscale.study.results import BudgetPoint
    >>> def ended(*losses: float) -> ContenderRuns:
    ...     return ContenderRuns("fresh", 64, 0.1, 0.0, [BudgetPoint(1.0, 9, 9.0, list(losses))])
    >>> rank_arms({"grown after 10%": ended(1.0, 1.02), "grown after 50%": ended(1.1, 1.12)})
    'Grown after 10% ends lowest, at 1.01 (1 to 1.02); grown after 50% ends 9.9 % higher.'
    """
    ended = {label: one.finals for label, one in runs.items() if one.final is not None}
    if not ended:
        return "Every model diverged: give a smaller learning rate (--optimizer.lr)."
    order = sorted(ended, key=lambda label: fmean(ended[label]))
    best = ended[order[0]]
    span = f" ({min(best):.4g} to {max(best):.4g})" if len(best) > 1 else ""
    gap = choose_gap_kind(loss for losses in ended.values() for loss in losses)
    others = list[str]()
    for label in order[1:]:
        above = gap_above(fmean(ended[label]), fmean(best), gap)
        others.append(f"{label} ends {format_gap(above, gap)} higher")
    lost = [f"{label} diverged" for label in runs if label not in ended]
    first = f"{order[0][0].upper()}{order[0][1:]} ends lowest, at {fmean(best):.4g}{span}"
    return "; ".join([first, *others, *lost]) + "."
