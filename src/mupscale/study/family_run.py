"""The preset `family`: one run, every size. A trunk grows from size to size, and a finished model branches off at each.

    32 ────┬─ 48 ────┬─ 64 ────┬─ 96 ────┐
           └ decay   └ decay   └ decay   └ decay
             32        48        64        96

All that the trunk has cost so far is charged to a size. When three quarters of the size's own budget are spent, its
branch leaves the trunk and decays over the last quarter, while the trunk grows and goes on.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal, NamedTuple

from torch import nn

from mupscale.core import WholeWidth, Width
from mupscale.growth import Deepen, GrowthSettings
from mupscale.study.contenders import CONTINUED, FRESH, FROM_SCRATCH
from mupscale.study.loss_gaps import choose_gap_kind, format_gap, gap_above
from mupscale.study.results import BudgetPoint, Card, ContenderRuns, PageTable, StudySummary, SystemRuns
from mupscale.study.space import Sweep, Tried, joined_edges
from mupscale.study.training import Ground, MakeGround, Note, Stopwatch, Trainer, describe_epochs
from mupscale.study.tree import Stretch, list_stretches
from mupscale.system import (
    Diverged,
    MupscaleError,
    appearing,
    as_asked,
    move,
    print_at_once,
    read_json,
    recipe_entry,
    replace_text,
    rough_time,
    text_table,
    words,
    write_json,
)
from mupscale.train import (
    Recipe,
    Schedule,
    check_growing_sizes,
    describe_start,
    find_checkpoint,
    join_processes,
    read_snapshot,
    sign_run,
    sizes_like,
    stored_values,
)

Unit = Literal["steps", "tokens", "flops", "tokens_per_parameter"]
_STAGES = {"tuning": "Tuning, two sizes", "family": "One trunk, every size", "checks": "From scratch, to check"}
RATES, FALLS = (0.5, 1.0, 2.0), (0.7, 0.85, 1.0)
"""What tuning tries: multiples of the optimizer's learning rate, and factors by which it falls at a growth."""


@dataclass(frozen=True, kw_only=True)
class FamilySettings(GrowthSettings):
    """The section `family` of a recipe, for `mupscale family`.

    The fields of `GrowthSettings` say how the trunk grows.

    Args:
        sizes: widths, such as [32, 48, 64, 96], or sizes by name, such as {width: 256, layers: 4}; smallest first
        budget: what each size may spend, including everything the trunk has spent so far: one number for all sizes, or
            one per size (default: the recipe's steps)
        unit: unit of the budget: steps (of this size, trained from scratch), tokens, flops, or tokens_per_parameter
        decay: fraction of a size's budget over which the learning rate of its branch decays to zero
        ends: fraction of a size's budget after which the trunk grows (default: where the branch starts)
        schedule: schedule of the trunk: constant, or one cosine that ends with the largest size
        fall: factor by which the learning rate falls at each growth
        how: how to fill new units, as in a growth event
        state: whether to keep or reset the optimizer state when the trunk grows
        deepen: what new blocks are, as in a growth event
        tune: first try several values of lr and `fall` on the two smallest sizes, and use the best
        lrs: learning rates to try with `tune` (default: the optimizer's, times 1/2 to 2)
        check: sizes to also train from scratch, at equal FLOPs, with the same schedule and the best of `check_lrs`
        check_lrs: learning rates to try from scratch (default: the trunk's, times 1/2, 1 and 2)
        seeds: number of trunks to train
        sunk: with --from, leave the checkpoint's FLOPs out of the cost of every size
        base_steps: with --from, how many steps the checkpoint has trained, if it does not record it
        engine: auto trains models of one shape together, serial one at a time

    Example:
        >>> FamilySettings(sizes=[32, 48]).decay
        0.25
    """

    sizes: list[WholeWidth] = field(default_factory=list)
    budget: float | list[float] | None = None
    unit: Unit = "steps"
    decay: float = 0.25
    ends: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    fall: float = 1.0
    how: Literal["fresh", "lossless", "copies", "paired"] = "fresh"
    state: Literal["keep", "reset"] = "keep"
    deepen: Deepen = "interleaved"
    tune: bool = False
    lrs: list[float] = field(default_factory=list)
    check: list[WholeWidth] = field(default_factory=list)
    check_lrs: list[float] = field(default_factory=list)
    seeds: int = 1
    sunk: bool = False
    base_steps: int | None = None
    engine: Literal["auto", "vectorised", "serial"] = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise MupscaleError(f"{recipe_entry('family.decay')} is {self.decay}, but must lie between 0 and 1")
        for name, part in {"fall": self.fall, "ends": 1.0 if self.ends is None else self.ends}.items():
            if not 0 < part <= 1:
                raise MupscaleError(f"{recipe_entry(f'family.{name}')} is {part}, but must be above 0 and at most 1")
        operator = self.build_operator()
        if self.seeds < 1:
            raise MupscaleError(f"{recipe_entry('family.seeds')} is {self.seeds}, but must be at least 1")
        for value in self.budget if isinstance(self.budget, list) else [self.budget]:
            if value is not None and not (math.isfinite(value) and value > 0):
                raise MupscaleError(f"{recipe_entry('family.budget')} holds {value!r}, but must be numbers above 0")
        if isinstance(self.budget, list) and len(self.budget) != len(self.sizes):
            raise MupscaleError(
                f"{recipe_entry('family.budget')} has {len(self.budget)} values for {len(self.sizes)} sizes: give one "
                f"per size, or a single one"
            )
        widths = [Width.of(size, recipe_entry("family.sizes"), whole=True) for size in self.sizes]
        for smaller, larger in pairwise(widths):
            larger.check_wider_than(smaller, f"{recipe_entry('family.sizes')} must rise")
            if operator.needs_multiples:
                check_growing_sizes(larger.whole, smaller.whole, True, f"family.how is {self.how}, and")
            if smaller == larger:
                raise MupscaleError(f"{recipe_entry('family.sizes')} holds {smaller} twice")
        for size in self.check:
            if Width.of(size) not in widths:
                raise MupscaleError(
                    f"{recipe_entry('family.check')} names {Width.of(size)}, which is not one of the sizes"
                )

    def rates(self, lr: float) -> list[float]:
        """The learning rates that tuning tries, rising; lr: the optimizer's own."""
        return sorted(set(self.lrs)) or [factor * lr for factor in RATES]

    def check_rates(self, lr: float) -> list[float]:
        """The learning rates to try from scratch, rising; lr: the trunk's."""
        return sorted(set(self.check_lrs)) or [factor * lr for factor in RATES]


@dataclass(frozen=True)
class PlannedSize:
    """A size of the family: what it may spend, the last stretch of its trunk, and its finished model.

    spent: all that is charged to it, which is its budget but for rounding.
    """

    size: WholeWidth
    budget: float
    spent: float
    trunk: Stretch
    leaf: Stretch

    @property
    def steps(self) -> tuple[int, int]:
        """Before its decay and in it, at this size."""
        before = (one.steps for one in self.leaf.path[:-1] if one.width == self.size)
        return sum(before), self.leaf.steps

    @property
    def branch(self) -> list[Stretch]:
        """From the last stretch that it shares with the trunk to the finished model."""
        shared = [one for one in self.leaf.path if one in self.trunk.path]
        return self.leaf.path[len(shared) - 1 :]


class _Cut(NamedTuple):
    """Steps of a size: with the trunk, alone at its rate, in the decay; and those that the trunk goes on with."""

    shared: int
    alone: int
    decay: int
    on: int


@dataclass
class FamilyPlanner:
    """Builds the trees of a family.

    base_steps, base_cost: of the checkpoint that the trunk starts from, where these count; sizes then count both its
    steps and its FLOPs as their own. lr: the optimizer's. ends: the part of a size's budget after which the trunk grows
    on. tokens_per_step: or examples, where data is no text. asked: every size's budget in the settings' unit.
    """

    recipe: Recipe
    settings: FamilySettings
    ground: Ground
    base_steps: int = 0
    start: Stretch | None = None

    def __post_init__(self) -> None:
        settings, start = self.settings, self.start
        self.lr = float(self.recipe.optimizer.init_args["lr"])
        self.ends = 1 - settings.decay if settings.ends is None else settings.ends
        self.base_cost = 0.0 if start is None else self.base_steps * self.ground.cost_per_step(start.width)
        self.tokens_per_step = float(self.recipe.batch * self.ground.example[0])
        given = float(self.recipe.steps) if settings.budget is None else settings.budget
        self.asked = given if isinstance(given, list) else [given] * len(settings.sizes)

    def cost_to(self, stretch: Stretch) -> float:
        """FLOPs up to the end of a stretch, from the first that counts."""
        return self.base_cost + self.ground.total_cost(stretch.path)

    def steps_to(self, stretch: Stretch) -> int:
        return self.base_steps + sum(one.steps for one in stretch.path)

    def parameters(self, size: WholeWidth) -> int:
        return sum(p.numel() for p in self.recipe.family().sketch(size).parameters())

    def count(self, one: PlannedSize) -> dict[str, Any]:
        """What a size's model has trained on all its way, from the first step; metrics.jsonl has its branch."""
        steps = self.steps_to(one.leaf)
        seen = {"steps": steps, self.ground.example[1]: round(steps * self.tokens_per_step), "flops": one.spent}
        return {"size": one.size, "parameters": self.parameters(one.size), **seen}

    def budgets(self, sizes: Sequence[WholeWidth]) -> list[float]:
        """What every size may spend, in FLOPs; sizes: the first of the family's, or all."""
        unit, found = self.settings.unit, list[float]()
        for size, value in zip(sizes, self.asked, strict=False):
            tokens = value * (self.parameters(size) if unit == "tokens_per_parameter" else 1)
            steps = value if unit == "steps" else tokens / self.tokens_per_step
            found.append(value if unit == "flops" else steps * self.ground.cost_per_step(size))
        return found

    def plan(self, sizes: Sequence[WholeWidth], lr: float, fall: float, seed: int) -> list[PlannedSize]:
        """The trunk and its branches; refused where a size's budget is spent before its trunk can begin."""
        planned, trunk, done = list[PlannedSize](), self.start, 0
        growing = {**self.settings.growth_settings, "state": self.settings.state}
        cuts = self._cut_budgets(sizes)
        whole = sum(cut.shared + cut.on for cut in cuts[:-1]) + cuts[-1].shared + cuts[-1].alone + cuts[-1].decay
        for number, (size, budget, cut) in enumerate(zip(sizes, self.budgets(sizes), cuts, strict=True)):
            own: dict[str, Any] = {"width": size, "lr": lr * fall**number, "seed": seed, "order": 2 * number}
            own |= self._trunk_piece(cut.shared, done, whole)
            trunk = Stretch(**own) if trunk is None else trunk.then(**own, **growing)
            done += cut.shared
            leaf, last = trunk, self.settings.schedule == "cosine" and done + cut.alone + cut.decay == whole
            if last:  # the largest ends the trunk's cosine
                leaf = leaf.then(**self._trunk_piece(cut.alone + cut.decay, done, whole))
            else:  # on at the rate that the trunk has there, then down to zero
                rate = trunk.lr * trunk.schedule.at(trunk.steps, trunk.steps)
                leaf = leaf.then(steps=cut.alone, lr=rate, schedule=Schedule()) if cut.alone else leaf
                leaf = replace(leaf.decayed(cut.decay, self.recipe.schedule.floor), lr=rate)
            if cut.on and number + 1 < len(sizes):
                trunk = trunk.then(**self._trunk_piece(cut.on, done, whole))
                done += cut.on
            planned.append(PlannedSize(size, budget, self.cost_to(leaf), trunk, leaf))
        return planned

    def _cut_budgets(self, sizes: Sequence[WholeWidth]) -> list[_Cut]:
        """What every size trains with the trunk, after it, and what the trunk goes on with."""
        cuts, spent, part = list[_Cut](), self.base_cost, self.settings.decay
        for number, (size, budget) in enumerate(zip(sizes, self.budgets(sizes), strict=True)):
            each = self.ground.cost_per_step(size)
            leaves, ends = (round((share * budget - spent) / each) for share in (1 - part, self.ends))
            shared, warmup = min(leaves, ends), 0 if number else self.recipe.schedule.warmup
            if shared <= warmup:
                share, needed = min(1 - part, self.ends), spent + (warmup + 1) * each
                least = math.ceil(self.asked[number] * (needed / share) / budget)
                raise MupscaleError(
                    f"size {Width.of(size)} may spend {words.format_flops(budget)}, and the trunk has spent "
                    f"{words.format_flops(spent)} when it gets there, which leaves nothing of the {share:.0%} before "
                    f"it branches off: give it a budget of at least {least:,} {self.settings.unit.replace('_', ' ')}, "
                    f"or leave the size out"
                )
            cuts.append(_Cut(shared, leaves - shared, max(1, round(part * budget / each)), ends - shared))
            spent += ends * each
        return cuts

    def _trunk_piece(self, steps: int, done: int, whole: int) -> dict[str, Any]:
        """So many steps of the trunk, which has taken `done` and will have taken `whole` when the largest is there."""
        own = self.recipe.schedule
        schedule = Schedule(warmup=0 if done else own.warmup)
        if self.settings.schedule == "cosine":
            schedule = Schedule("cosine", own.warmup, 0, own.floor, before=done, after=whole - done - steps)
        return {"steps": steps, "schedule": schedule}

    def scratch(self, one: PlannedSize, lr: float, seed: int) -> Stretch:
        """The same size trained from scratch with as many FLOPs as are charged to it, under the same schedule."""
        steps = max(2, round(one.spent / self.ground.cost_per_step(one.size)))
        own, decay = self.recipe.schedule, max(1, int(self.settings.decay * steps))
        first = Stretch(width=one.size, steps=steps, lr=lr, seed=seed, order=100)
        if self.settings.schedule == "cosine":
            return replace(first, schedule=Schedule("cosine", own.warmup, 0, own.floor))
        trunk = replace(first, steps=steps - decay, schedule=Schedule(warmup=own.warmup))
        return trunk.decayed(decay, own.floor)

    def tuning_trees(self) -> dict[tuple[float, float], list[PlannedSize]]:
        """The two smallest sizes with every learning rate and every factor by which it falls."""
        rates, sizes = self.settings.rates(self.lr), self.settings.sizes[:2]
        return {(lr, fall): self.plan(sizes, lr, fall, 0) for lr in rates for fall in FALLS}

    def checked(self, planned: Sequence[PlannedSize]) -> dict[int, PlannedSize]:
        asked = {Width.of(size) for size in self.settings.check}
        return {number: one for number, one in enumerate(planned) if Width.of(one.size) in asked}

    def costs(self, planned: Sequence[PlannedSize]) -> tuple[float, float]:
        """Of the whole family, and of training every size alone with its own budget."""
        stretches = list_stretches(one.leaf for one in planned)
        return self.base_cost + self.ground.total_cost(stretches), math.fsum(one.budget for one in planned)


def make_planner(recipe: Recipe, settings: FamilySettings, make_ground: MakeGround = Ground) -> FamilyPlanner:
    """Read where the family begins: at an initialisation, or at a checkpoint of the smallest size or below.

    Its settings have the sizes with the names of the recipe's width.
    """
    told: dict[str, Any] = {
        name: [sizes_like(size, recipe.width) for size in getattr(settings, name)] for name in ("sizes", "check")
    }
    settings = replace(settings, **told)
    for size in settings.sizes:
        Width.of(size).check_form(Width.of(recipe.width), recipe_entry("family.sizes"), "the recipe's width")
    if len(settings.sizes) < 2:
        raise MupscaleError(
            f"a family needs two sizes or more: {as_asked('FamilySettings(sizes=[32, 48, 64])', '--sizes 32,48,64,96')}"
        )
    for smaller, larger in pairwise(settings.sizes):  # refused before the first size is trained
        recipe.family().check_growth(smaller, larger, settings.build_operators())
    ground = make_ground(replace(recipe, grow=[], width=settings.sizes[0]), "held-out")
    if ground.unit != "FLOPs":
        raise MupscaleError(
            "the model's FLOPs cannot be counted, and a family needs them to compare the cost of its sizes"
        )
    if recipe.start is None:
        return FamilyPlanner(recipe, settings, ground)
    begun = describe_start(recipe)
    steps = settings.base_steps if begun.steps is None else begun.steps
    if steps is None and not settings.sunk:
        raise MupscaleError(
            f"{recipe.start} does not record how many steps its model has trained, and its FLOPs are part of the cost "
            f"of every size: give family.base_steps, or set family.sunk to leave them out"
        )
    start = Stretch(width=begun.width, steps=0, lr=0.0, start=ground.start)
    return FamilyPlanner(recipe, settings, ground, 0 if settings.sunk else steps or 0, start)


# ---------------------------------------------------------------------------------------------- before it is trained


def list_sizes(planner: FamilyPlanner, planned: Sequence[PlannedSize]) -> tuple[list[str], list[list[str]]]:
    """Head and a row for every size. FLOPs here: what it adds to those before it; alone: what it would cost alone."""
    rows, before = [], 0.0
    for number, one in enumerate(planned, start=1):
        together, _ = planner.costs(planned[:number])
        rows.append(
            [
                str(Width.of(one.size)),
                f"{planner.parameters(one.size):,}",
                f"{one.steps[0]:,} + {one.steps[1]:,}",
                words.format_count(round(planner.steps_to(one.leaf) * planner.tokens_per_step)),
                words.format_flops(together - before),
                words.format_flops(one.budget),
            ]
        )
        before = together
    unit = planner.ground.example[1]
    return ["size", "parameters", "steps, trunk + branch", unit, "FLOPs here", "FLOPs alone"], rows


def describe_saving(planner: FamilyPlanner, planned: Sequence[PlannedSize]) -> str:
    """What the family costs, as a part of what every size alone would."""
    together, alone = planner.costs(planned)
    names = ("Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    count = names[len(planned) - 2] if len(planned) - 2 < len(names) else str(len(planned))
    each = f"training each{' (without the tuning)' if planner.settings.tune else ''}"
    return f"{count} sizes for {together / alone:.2f} of the FLOPs of {each}"


def estimate_family(recipe: Recipe, settings: FamilySettings) -> str:
    """The table that `mupscale family --dry-run` prints; nothing is written."""
    planner = make_planner(recipe, settings)
    settings = planner.settings
    planned = planner.plan(settings.sizes, planner.lr, settings.fall, 0)
    together, alone = planner.costs(planned)
    costs = f"({words.format_flops(together)} against {words.format_flops(alone)})"
    lines = [text_table(*list_sizes(planner, planned), left=0), f"{describe_saving(planner, planned)} {costs}."]
    leaves, extra = [one.leaf for one in planned], dict[str, list[Stretch]]()
    if settings.tune:
        extra["tuning"] = [one.leaf for trial in planner.tuning_trees().values() for one in trial]
    if settings.check:
        rates, checked = settings.check_rates(planner.lr), planner.checked(planned).values()
        extra["checks from scratch"] = [planner.scratch(one, lr, 0) for one in checked for lr in rates]
    for name, stretches in extra.items():
        leaves += stretches
        cost = planner.ground.total_cost(list_stretches(stretches))
        lines.append(f"{name}: {words.format_flops(cost)} more, {cost / together:.2f} of the family's")
    with Stopwatch(planner.ground, settings.engine) as clock:
        seconds = clock.measure([stretch for stretch in list_stretches(leaves) if stretch.start is None])
    if settings.seeds > 1:
        lines.append(f"All of it runs {settings.seeds} times, once for each seed.")
    time = "" if seconds is None else f"All of it takes about {rough_time(settings.seeds * seconds)}. "
    lines += [time + clock.remark(seconds), *describe_epochs(leaves, planner.ground)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- the run


def run_family(
    recipe: Recipe,
    settings: FamilySettings,
    folder: str | Path,
    *,
    command: str = "",
    note: Note = print_at_once,
    notes: Sequence[str] = (),
    make_ground: MakeGround = Ground,
) -> StudySummary:
    """Train a model of every size out of one growing trunk; summary.json, and a folder for every size.

    The same call goes on where an earlier one was stopped; one more size trains only what is new. Under torchrun the
    processes train every stretch together. notes: what is to be kept in mind, for the page.
    """
    with join_processes(recipe.device, recipe.parallel) as processes:
        planner = make_planner(recipe, settings, make_ground)
        settings = planner.settings
        planner.plan(settings.sizes, planner.lr, settings.fall, 0)  # refuses
        stages = 1 + settings.tune + bool(settings.check)
        trainer = planner.ground.make_trainer(
            Path(folder), "family", settings.engine, note, stages, processes=processes, command=command
        )
        return _FamilyRun(planner, trainer, list(notes)).run()


@dataclass
class _FamilyRun:
    """tuned: what tuning found; tuned_on: the leaves that it has trained."""

    planner: FamilyPlanner
    trainer: Trainer
    notes: list[str]
    tuned: list[Sweep] = field(default_factory=list)
    tuned_on: set[str] = field(default_factory=set)

    @property
    def settings(self) -> FamilySettings:
        return self.planner.settings

    def run(self) -> StudySummary:
        settings = self.settings
        with self.trainer.alone():
            lr, fall = self._tune() if settings.tune else (self.planner.lr, settings.fall)
            trees = [self.planner.plan(settings.sizes, lr, fall, seed) for seed in range(settings.seeds)]
            self._train(trees)
            summary = self._summarise(trees, {}, lr, fall)
            if settings.check:
                summary = self._summarise(trees, self._check(trees, lr), lr, fall)
            return summary

    def _tune(self) -> tuple[float, float]:
        """The learning rate, and its fall, with which the two smallest sizes end lowest in their mean."""
        trees = self.planner.tuning_trees()
        small = " and ".join(str(Width.of(size)) for size in self.settings.sizes[:2])
        with self.trainer.stage("tuning", f"the learning rate and its fall, on sizes {small}: {len(trees)} trunks"):
            leaves = [one.leaf for tree in trees.values() for one in tree]
            losses = self.trainer.train(leaves)
        self.tuned_on = {leaf.key for leaf in leaves}
        # the geometric mean gives both sizes the same weight, and needs losses above zero
        mean_of_both = geometric_mean if choose_gap_kind(losses) == "share" else fmean
        means = [
            None if small is None or large is None else mean_of_both([small, large])
            for small, large in zip(losses[::2], losses[1::2], strict=True)
        ]
        trials = [Tried(*values, [mean]) for values, mean in zip(trees, means, strict=True)]
        alive = [trial for trial in trials if trial.mean is not None]
        if not alive:
            raise Diverged(
                f"every trunk of the tuning diverged: give smaller learning rates ({recipe_entry('family.lrs')})"
            )
        lr, fall = min(alive, key=lambda trial: trial.mean or 0.0).cell
        self.trainer.note(f"  learning rate {lr:g}, times {fall:g} at every growth")
        label, second = f"the trunk, on sizes {small}", "factor at a growth"
        self.tuned = [Sweep("trunk", trials, lr=lr, noise=fall, label=label, second=second)]
        self.notes += joined_edges(self.tuned, "family.lrs")
        if fall == FALLS[0]:
            self.notes.append(
                f"the trunk's best factor at a growth ({fall:g}) is the lowest that was tried. It might end lower with "
                f"a lower one (family.fall)"
            )
        return lr, fall

    def _train(self, trees: Sequence[Sequence[PlannedSize]]) -> None:
        """Size by size, so that a size is finished and its folder there while the trunk goes on."""
        sizes = " → ".join(str(Width.of(size)) for size in self.settings.sizes)
        with self.trainer.stage("family", f"one trunk, every size: {sizes}"):
            if self.planner.start is not None:
                whose = f"the {self.planner.base_steps:,} steps" if self.planner.base_steps else "none of the steps"
                self.trainer.note(
                    f"  steps and FLOPs from the start include {whose} of the model that the trunk starts from"
                )
            for same in zip(*trees, strict=True):
                already = self.trainer.trained
                losses = self.trainer.train([one.leaf for one in same])
                shown = ", ".join("diverged" if loss is None else f"{loss:.4f}" for loss in losses)
                place = self._keep(same, losses)
                spent = self.planner.count(same[0])
                counted = f"{spent['steps']:,} steps, {words.format_flops(spent['flops'])}"
                state = "finished" if self.trainer.trained > already else "reused, and not trained again"
                if self.trainer.trained == already and same[0].leaf.key in self.tuned_on:
                    state = "finished (the tuning stage trained it)"
                size = Width.of(same[0].size)
                self.trainer.note(f"  size {size} is {state}: loss {shown} after {counted} from the start; {place}")

    def _keep(self, seeds: Sequence[PlannedSize], losses: Sequence[float | None]) -> Path:
        """A folder of the size's own, which is an ordinary finished run; a second seed has one beside it."""
        first = self.trainer.folder / "sizes" / Width.of(seeds[0].size).label
        for seed, (one, loss) in enumerate(zip(seeds, losses, strict=True)):
            target = first if seed == 0 else first.with_name(f"{first.name}-seed-{seed}")
            told = json.dumps(stored_values(self.trainer.recipe_of(one.leaf), target), indent=2) + "\n"
            if loss is None or self.trainer.processes.by_main(partial(_is_kept, target, told)):
                continue
            model, family = None, self.planner.recipe.family()
            if callable(getattr(family.sketch(one.size), "save_pretrained", None)):  # all processes read its shards
                model = family.build(one.size)
                read_snapshot(find_checkpoint(str(self.trainer.recipe_of(one.leaf).out))).restore_model(model)
            self.trainer.by_main(partial(self._write_size, one, loss, target, told, model))
        return first

    def _write_size(self, one: PlannedSize, loss: float, target: Path, told: str, model: Any) -> None:
        """Whole or not at all, whenever the process is killed; what another family left under its name stays."""
        if target.exists():
            aside = next(
                place for n in count(1) if not (place := target.with_name(f"{target.name}-before-{n}")).exists()
            )
            move(target, aside)
            moved, before = f"{target} was of another family, and is in {aside} now", math.inf
            with suppress(OSError, MupscaleError, KeyError, TypeError, ValueError):
                before = float(read_json(aside / "size.json")["held_out_loss"])
                moved += f". It ended at a held-out loss of {before:.4f}, the new one at {loss:.4f}"
            self.trainer.note(f"  {moved}")
            if before < loss:
                self.notes.append(f"{moved}: the new one is worse")
        run = self.trainer.recipe_of(one.leaf)
        with appearing(target) as hidden:
            shutil.copytree(str(run.out), hidden, dirs_exist_ok=True)
            replace_text(hidden / "recipe.json", told)
            if model is not None:
                model.save_pretrained(hidden / "hf")
                replace_text(hidden / "hf" / "README.md", write_card(self.planner, one, loss, model))
            write_json(hidden / "size.json", {**self.planner.count(one), "held_out_loss": loss})
        sign_run(target, run)

    def _check(self, trees: Sequence[Sequence[PlannedSize]], lr: float) -> dict[str, Check]:
        """Sizes from scratch at equal FLOPs, each at the best of its learning rates."""
        rates, checked = self.settings.check_rates(lr), self.planner.checked(trees[0])
        leaves = {
            (number, rate): [self.planner.scratch(tree[number], rate, seed) for seed, tree in enumerate(trees)]
            for number in checked
            for rate in rates
        }
        shown = ", ".join(str(Width.of(one.size)) for one in checked.values())
        with self.trainer.stage("checks", f"from scratch at equal FLOPs, {len(rates)} learning rates: {shown}"):
            self.trainer.train([leaf for some in leaves.values() for leaf in some])
        found: dict[str, Check] = {}
        for number, one in checked.items():
            tried = [Tried(rate, 0.0, self.trainer.ends(leaves[number, rate])) for rate in rates]
            label = Width.of(one.size).label
            if (search := Sweep(f"{label} from scratch", tried)).finished:
                family = self.trainer.ends([tree[number].leaf for tree in trees])
                found[label] = Check(search, family, leaves[number, search.best.lr])
        return found

    def _summarise(
        self, trees: Sequence[Sequence[PlannedSize]], checks: Mapping[str, Check], lr: float, fall: float
    ) -> StudySummary:
        planner, first, settings = self.planner, trees[0], self.settings
        (head, rows), by_size = list_sizes(planner, first), dict[str, list[float | None]]()
        for one, same, row in zip(first, zip(*trees, strict=True), rows, strict=True):
            losses = by_size[str(Width.of(one.size))] = self.trainer.ends([each.leaf for each in same])
            check = checks.get(Width.of(one.size).label)
            row += [_spread(losses), "" if check is None else _spread(check.scratch)]
        tables = [PageTable("Every size", [*head, "held-out loss", "from scratch"], rows)]
        if tried := sorted({rate for check in checks.values() for rate in check.tried}):
            shown = [[label, *(_spread(check.tried[rate]) for rate in tried)] for label, check in checks.items()]
            title = "From scratch, at every learning rate that was tried"
            tables.append(PageTable(title, ["size", *(f"at {rate:g}" for rate in tried)], shown))
        has_diverged = all(loss is None for losses in by_size.values() for loss in losses)
        sentence = EVERY_SIZE_DIVERGED
        if not has_diverged:
            sentence = write_family_sentence(describe_saving(planner, first), checks, list_lost_sizes(by_size))
        notes = [*self.notes, *describe_disorder(by_size, bool(self.tuned))]
        notes += joined_edges((check.search for check in checks.values()), "family.check_lrs")
        better = sorted({check.lr for check in checks.values() if len(check.tried) > 1 and check.lr != lr})
        if better and not self.tuned:
            notes.append(
                f"from scratch, the best learning rate was {' and '.join(f'{rate:g}' for rate in better)}, and the "
                f"trunk trained at {lr:g}, untuned. That favours from scratch: family.tune tunes the trunk, too"
            )
        together, alone = planner.costs(first)
        spent = self.trainer.spent["tuning"].cost if self.tuned else None
        beside = f"tuning took {spent / together:.2g}× the family's FLOPs more" if spent else ""
        stages = _STAGES | ({"family": "One trunk, every size: what tuning has not trained"} if self.tuned else {})
        cards = (
            []
            if has_diverged
            else [
                Card("FLOPs of the family, compared with training each size alone", f"{together / alone:.2f}×", beside),
                *(
                    Card(f"Checked at {label}", check.difference, "against from scratch")
                    for label, check in checks.items()
                ),
            ]
        )
        return self.trainer.save_summary(
            planner.recipe,
            settings,
            sentences=[sentence],
            cards=cards,
            measured=[
                f"The trunk trains at learning rate {lr:g}{f', times {fall:g} at every growth' if fall < 1 else ''}; "
                f"each branch decays over the last {settings.decay:.0%} of its size's budget.",
                "A size's budget includes everything that the trunk spent before its branch. FLOPs here: what it adds.",
                "From scratch: the same size and schedule with as many FLOPs, at the best of "
                f"{len(settings.check_rates(lr))} learning rates.",
            ],
            tables=tables,
            diverged=has_diverged,
            tuned=self.tuned,
            large=self._runs(trees, checks),
            answer={
                "sentence": sentence,
                "lr": lr,
                "fall": fall,
                "cost": together,
                "cost_alone": alone,
                "checks": {
                    label: {name: getattr(check, name) for name in ("lr", "scratch", "family", "tried")}
                    for label, check in checks.items()
                },
            },
            stages=[replace(stage, label=stages[stage.name]) for stage in self.trainer.spent.values()],
            notes=notes,
        )

    def _runs(self, trees: Sequence[Sequence[PlannedSize]], checks: Mapping[str, Check]) -> SystemRuns:
        """The trunk as a line, a branch that falls off it at every size, and points from scratch where checked."""
        planner, first = self.planner, trees[0]
        branches, scratch = list[ContenderRuns](), list[ContenderRuns]()

        def points(paths: Sequence[Sequence[Stretch]], whole: float) -> list[BudgetPoint]:
            return [
                BudgetPoint(cost / whole, planner.steps_to(same[0]), cost, self.trainer.ends(same))
                for same in zip(*paths, strict=True)
                for cost in [planner.cost_to(same[0])]
            ]

        for number, one in enumerate(first):
            width = Width.of(one.size)
            name, ends = f"size-{width.label}", points([tree[number].branch for tree in trees], one.spent)
            branches.append(
                ContenderRuns(name, one.size, one.leaf.lr, 0.0, ends, label=f"size {width}", like=FRESH.name)
            )
            if (check := checks.get(width.label)) is not None:
                ends, label, like = (
                    [self.trainer.ends_of_seeds(check.leaves)],
                    f"{width} from scratch",
                    FROM_SCRATCH.name,
                )
                scratch.append(ContenderRuns(f"{name}-scratch", one.size, check.lr, 0.0, ends, label, like=like))
        trunk = points([[one for one in tree[-1].trunk.path if one.start is None] for tree in trees], first[-1].spent)
        line = ContenderRuns("trunk", first[-1].size, first[0].trunk.lr, 0.0, trunk, "trunk", like=CONTINUED.name)
        return SystemRuns(first[0].size, first[-1].size, 0.0, planner.ground.unit, [line, *branches, *scratch])


def _is_kept(folder: Path, recipe: str) -> bool:
    kept = folder / "recipe.json"
    return kept.is_file() and kept.read_text(encoding="utf-8") == recipe


def write_card(planner: FamilyPlanner, one: PlannedSize, loss: float, model: nn.Module) -> str:
    """README.md of a size that is a Hugging Face folder: what it is, what it has cost, and how it is loaded.

    By transformers' own class, which the model is, or that it holds.
    """
    size = Width.of(one.size)
    bases = (base for module in model.modules() for base in type(module).__mro__)
    own = (base.__name__ for base in bases if base.__module__.startswith("transformers.models."))
    unit = planner.ground.example[1]
    seen = f"{words.format_count(planner.count(one)[unit])} {unit}"
    family = ", ".join(str(Width.of(each)) for each in planner.settings.sizes)
    return f"""\
---
library_name: transformers
tags:
- mupscale
---

# Size {size}

This model of size {size} ({planner.parameters(one.size):,} parameters) is one of a family: {family}. mupscale trained
them as one run that grows from size to size. This one trained for {one.steps[0]:,} steps at its own size, and for
{one.steps[1]:,} more in a branch of its own, in which the learning rate decayed.

- Held-out loss: {loss:.4f}
- Trained on {seen}, with {words.format_flops(one.spent)}; both include the smaller sizes before it

```python
import transformers

model = transformers.{next(own, "AutoModel")}.from_pretrained("hf")
```
"""


# ---------------------------------------------------------------------------------------------- what it says


@dataclass
class Check:
    """A size from scratch at several learning rates, beside the family's losses by seed.

    lr, scratch: the best rate, and the losses there. tried: those at every rate. leaves: the models from scratch at
    their best rate, by seed.
    """

    search: Sweep
    family: list[float | None]
    leaves: list[Stretch]

    def __post_init__(self) -> None:
        self.lr, self.scratch = self.search.best.lr, self.search.best.losses
        self.tried = {trial.lr: trial.losses for trial in self.search.trials}

    @property
    def difference(self) -> str:
        """By how much the family's model ends above the one from scratch, with the range over seeds."""
        pairs = zip(self.family, self.scratch, strict=True)
        gap = choose_gap_kind([*self.family, *self.scratch])
        gaps = [gap_above(ours, theirs, gap) for ours, theirs in pairs if ours is not None and theirs is not None]
        if not gaps:
            return "diverged"
        mean = fmean(gaps)
        size = f"{format_gap(mean, gap)} {'lower' if mean < 0 else 'higher'}"
        if len(gaps) < 2:
            return f"{size} (one seed: no range)"
        times, unit = (100, " %") if gap == "share" else (1, "")
        low, high = (f"{'+' * (x > 0)}{words.format_digits(times * x)}" for x in (min(gaps), max(gaps)))
        return f"{size} ({low} to {high}{unit})"


def describe_disorder(losses: Mapping[str, Sequence[float | None]], tuned: bool = False) -> list[str]:
    """Which sizes ended above a smaller one, in the mean over seeds; losses: by size, smallest first."""
    rate = "" if tuned else "another learning rate (family.tune), "
    notes, best = list[str](), ("", math.inf)
    for size, some in losses.items():
        mean = math.nan if None in some else fmean(loss for loss in some if loss is not None)
        if mean > best[1]:
            notes.append(
                f"size {size} ended above size {best[0]} ({mean:.3f} against {best[1]:.3f}): it may need a larger "
                f"budget (family.budget), {rate}or more data"
            )
        elif mean < best[1]:
            best = size, mean
    return notes


EVERY_SIZE_DIVERGED = (
    "Every size diverged, so there is no family: give a smaller learning rate (optimizer.lr), or let several be tried "
    "(family.tune)."
)


def list_lost_sizes(losses: Mapping[str, Sequence[float | None]]) -> list[str]:
    """What is to be said of sizes of which some seed diverged; losses: by size.

    >>> list_lost_sizes({"32": [1.0, 1.1], "48": [None, 1.0], "64": [None, None]})
    ['size 48 diverged with 1 of 2 seeds', 'size 64 diverged']
    """
    lost = list[str]()
    for size, some in losses.items():
        count = some.count(None)
        if count:
            lost.append(f"size {size} diverged" + (f" with {count} of {len(some)} seeds" if count < len(some) else ""))
    return lost


def write_family_sentence(saving: str, checks: Mapping[str, Check], lost: Sequence[str] = ()) -> str:
    """The answer in one sentence. lost: what is to be said of sizes that diverged."""
    checked = [f"checked at {label}: {check.difference} than from scratch" for label, check in checks.items()]
    return "; ".join([saving, *lost, *checked]) + "."


def _spread(losses: Sequence[float | None]) -> str:
    finite = [loss for loss in losses if loss is not None]
    return words.format_spread(finite) if len(finite) == len(losses) else "diverged"
