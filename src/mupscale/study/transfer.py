"""Does the best learning rate stay where it is? Two presets train the same grid at several sizes.

`transfer`: base models of several widths n are grown to k·n, with learning rate or noise varied and the other fixed
(the paper's 'Verification of hyperparameter transfer'). Models grow as the recipe's do; without noise, as by fresh
units, only the learning rate is varied.

`rules`: models are trained from scratch at several widths (or batches, or durations), each over a grid of learning
rates, once for each rule set. Three numbers say how well a rate transfers, each with its error bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from mupscale.core import RuleSet, WholeWidth, Width
from mupscale.engine import Engine
from mupscale.growth import OPERATORS
from mupscale.study.contenders import COPIES
from mupscale.study.forecast import vertex
from mupscale.study.loss_gaps import GapKind, choose_gap_kind, format_gap, gap_above, stored_gap_kind
from mupscale.study.paper import Protocol
from mupscale.study.space import Cell, Space
from mupscale.study.systems import StudySettings, System
from mupscale.study.training import Ground, Note, Trainer, describe_stages
from mupscale.study.tree import Stretch
from mupscale.study.wording import count_of
from mupscale.system import Diverged, MupscaleError, recipe_entry, text_table, words, write_json
from mupscale.train import Recipe, TunedAt

TRANSFER_FILE, RULES_FILE = "transfer-check.json", "rules-check.json"


def _begin(ground: Ground, out: Path, study: str, engine: Engine, note: Note | None) -> Trainer:
    """Who trains a grid; without somebody to tell, nothing shows how far it is."""
    return Trainer(ground, Path(out), study, engine, note or (lambda text: None), stages=0, visible=note is not None)


def _train_grid(trainer: Trainer, leaves: Sequence[Stretch], seeds: int) -> list[list[float | None]]:
    """The losses of every cell by seed; only these are kept. leaves: all seeds of a cell, then those of the next."""
    losses = trainer.train(leaves, keep=False)
    return [losses[at : at + seeds] for at in range(0, len(losses), seeds)]


def transfer_check(
    recipe: Recipe,
    *,
    widths: Sequence[WholeWidth],
    lrs: Sequence[float],
    noises: Sequence[float] = (),
    lr: float,
    noise: float = 0.0,
    out: Path,
    seeds: int = 3,
    base_lr: float | None = None,
    engine: Engine = "auto",
    note: Note | None = None,
) -> dict[str, Any]:
    """Loss against learning rate at the fixed noise, and against noise at the fixed learning rate, at each width.

    The recipe's growth says how models grow, how many times wider they become, how long base models train and how long
    grown ones do. The result is also written to `out`; trials that are there already are not trained again.

    Args:
        recipe: a recipe with one growth event
        widths: base widths to compare, two or more
        lrs, noises: what is varied; lr, noise: what the other one is fixed at meanwhile. For growths that take no
            noise, leave noises and noise out
        base_lr: the base models' learning rate; none takes the optimizer's
        note: is told what is done, line by line; without one, nothing shows how far it is
    """
    asked = TransferCheck(recipe, widths, lrs, lr, noises, noise, seeds, base_lr)
    trainer = _begin(asked.protocol, out, "transfer", engine, note)
    large, lines, systems = asked.large, asked.lines, asked.systems
    values: dict[str, Any] = {
        "times": Width.of(large.wide).size / Width.of(large.narrow).size,
        "steps": large.grown_steps,
        "fixed": {"lr": lr, "noise": noise},
        "unit": large.noise_unit,
        "growth": asked.contender.how,
        "lr": [],
        "noise": [],
    }
    with trainer.alone():
        for system in systems:
            width, cells = Width.of(system.narrow), asked.cells
            with trainer.stage(f"base-{width.label}", f"width {width}: {count_of(seeds, 'base model')}"):
                if None in trainer.train([system.base_model(asked.base_rate, seed) for seed in range(seeds)]):
                    raise Diverged(
                        f"the base model of width {width} diverged at learning rate {asked.base_rate:g}: take a "
                        f"smaller one (--optimizer.lr)"
                    )
            about = f"width {system.label}: {count_of(len(cells), 'trial')} × {count_of(seeds, 'seed')}"
            with trainer.stage(f"trials-{width.label}", about):
                losses = dict(zip(cells, _train_grid(trainer, asked.trials(system), seeds), strict=True))
            for axis, line in lines.items():
                points = [{"x": getattr(cell, axis), "losses": losses[cell]} for cell in line]
                values[axis].append({"width": system.wide, "from": system.narrow, "points": points})
        values["verdict"] = judge_transfer(values)
        write_json(Path(out) / TRANSFER_FILE, values)
    return values


@dataclass
class TransferCheck:
    """What `transfer_check` trains; its arguments are those of that function.

    lines: what is tried, with one hyperparameter varied and the other fixed. cells: all of it, each once.
    """

    recipe: Recipe
    widths: Sequence[WholeWidth]
    lrs: Sequence[float]
    lr: float
    noises: Sequence[float] = ()
    noise: float = 0.0
    seeds: int = 3
    base_lr: float | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise MupscaleError(f"seeds is {self.seeds}, but a transfer check needs at least 1")
        if not self.widths:
            raise MupscaleError("a transfer check needs base widths, two or more, such as [64, 128]")
        self.protocol = Protocol(self.recipe, "train")
        self.large = self.protocol.system(StudySettings())  # refuses recipes with more growth events than one, or none
        self.growth = self.recipe.grow[0]
        if not self.growth.takes_noise and (self.noise or any(self.noises)):
            raise MupscaleError(
                f"the recipe grows by {self.growth.how} units, which take no noise: leave noises and noise out, or "
                f"grow by copies (how: copies)"
            )
        how = self.growth.how if self.growth.how in OPERATORS else COPIES.how
        self.contender = replace(COPIES, name=how, how=how)
        space = Space(tuple(self.lrs), (*self.noises, self.noise))  # which refuses values that cannot be
        Space((self.lr,))  # so does this
        self.lines = {"lr": [Cell(x, float(self.noise)) for x in space.lrs]}
        if self.growth.takes_noise:
            self.lines["noise"] = [Cell(float(self.lr), x) for x in sorted({float(x) for x in self.noises})]
        self.cells = list(dict.fromkeys(cell for line in self.lines.values() for cell in line))
        self.systems = self.protocol.small_systems(self.large, self.widths, self.growth.build_operator())
        self.base_rate = float(self.recipe.optimizer.init_args["lr"] if self.base_lr is None else self.base_lr)

    def trials(self, system: System) -> list[Stretch]:
        return [
            system.leaf(self.contender, self.base_rate, *cell, seed)
            for cell in self.cells
            for seed in range(self.seeds)
        ]

    def describe(self, engine: Engine = "auto") -> str:
        return describe_stages({one.label: self.trials(one) for one in self.systems}, self.protocol, engine)


# ---------------------------------------------------------------------------------------------- what it says

_MOST_EXTRA = 0.05  # of the loss: what transferring may cost for an optimum to be said to transfer


def what_was_measured(values: Mapping[str, Any]) -> str:
    """Which widths, and which losses, a check is about.

    >>> what_was_measured({"times": 4.0, "steps": 300, "growth": "fresh"})[:98]
    "Models grow by fresh units. Widths are those of the grown models, 4 times their base models'. Loss"
    """
    how = values.get("growth")
    by = "" if how is None else f"Models grow by {how}{'' if how == 'copies' else ' units'}. "
    times = f", {values['times']:g} times their base models'" if "times" in values else ""
    after = f" after {values['steps']:,} more steps" if "steps" in values else ""
    return f"{by}Widths are those of the grown models{times}. Losses are training losses{after}, and not held-out ones."


def judge_transfer(values: Mapping[str, Any]) -> list[str]:
    """What transferring the best learning rate and the best noise costs, and how far they move over the widths.

    Sentences, with what it costs first: an optimum may move by several grid steps where the loss hardly depends on it.
    """
    return [*_moves(values["lr"], "learning rate"), *_moves(values["noise"], "noise")]


@dataclass(frozen=True)
class WidthLine:
    """One width's losses by seed, at the values where no seed diverged; diverged: the other values.

    seeds: at every value, the losses of the seeds that did not diverge.
    """

    width: Any
    losses: dict[float, list[float]]
    diverged: list[float]
    seeds: dict[float, list[float]]

    def __str__(self) -> str:
        return str(Width.of(self.width))

    @property
    def best(self) -> float:
        return min(self.losses, key=self.loss)

    def loss(self, x: float) -> float:
        return fmean(self.losses[x])

    def tells_apart(self, x: float) -> bool:
        """Whether every seed, with its own base model, does worse at x than at the best."""
        return x not in self.losses or all(a > b for a, b in zip(self.losses[x], self.losses[self.best], strict=True))


def read_width_line(entry: Mapping[str, Any]) -> WidthLine:
    """One line of a check, as it is stored."""
    points = {float(point["x"]): point["losses"] for point in sorted(entry["points"], key=lambda one: float(one["x"]))}
    diverged = [x for x, losses in points.items() if None in losses or not losses]
    seeds = {x: [loss for loss in losses if loss is not None] for x, losses in points.items()}
    return WidthLine(entry["width"], {x: some for x, some in seeds.items() if x not in diverged}, diverged, seeds)


def nothing_finished(sizes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every run of these sizes diverged, as their points tell."""
    return all(loss is None for loss in _losses(sizes))


def _losses(sizes: Iterable[Mapping[str, Any]]) -> list[float | None]:
    return [loss for size in sizes for point in size["points"] for loss in point["losses"]]


def _moves(entries: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    grid = sorted({float(point["x"]) for entry in entries for point in entry["points"]})
    if len(grid) < 2:
        return []
    lines = [read_width_line(entry) for entry in entries]
    said = [f"at width {line} every {what} tried diverged" for line in lines if not line.losses]
    lines = [line for line in lines if line.losses]
    if not lines:
        rates = recipe_entry("study.grown_lrs")
        return [f"every {what} tried diverged at every width: give smaller learning rates ({rates})"]
    if len(lines) < 2:
        return [*said, f"whether the best {what} transfers cannot be seen at {len(lines)} width(s): give two or more"]
    small, large, at = lines[0], lines[-1], [grid.index(line.best) for line in lines]
    # the optimum may lie beyond the grid; below no noise at all there is nothing
    on_edge = [line for line in lines if line.best == grid[-1] or 0 < line.best == grid[0]]
    gap = choose_gap_kind(_losses(entries))
    moved, over = max(at) - min(at), f"over grown widths {small} … {large}"
    steps = [(grid[i], grid[i + 1]) for i in range(min(at), max(at))]
    ratios = {f"{after / before:.3g}" if before > 0 else "" for before, after in steps}
    ratio = f" (×{ratios.pop()}{' each' if moved > 1 else ''})" if len(ratios) == 1 and "" not in ratios else ""
    taken = f"taking the best {what} of width {small}, {small.best:.3g}, to width {large}"
    if moved and small.best == large.best:
        said.append(f"the best {what} of width {small}, {small.best:.3g}, is the best at width {large}, too")
    elif moved and small.best not in large.losses:
        said.append(f"{taken} diverges there")
    elif moved and gap == "difference":
        said.append(f"{taken} ends {format_gap(_extra_loss(small, large, gap), gap)} higher in loss there")
    elif moved:
        said.append(f"{taken} costs {_extra_loss(small, large, gap):.1%} of the loss there")
    if moved == 0:
        end = "whether it transfers cannot be seen on the edge" if on_edge else "it transfers"
        said.append(f"the best {what}, {small.best:.3g}, does not move {over}: {end}")
    elif moved == 1:
        end = "the optimum transfers"
        if on_edge:
            end = "whether it transfers cannot be seen on the edge"
        elif gap == "difference":  # nothing says which difference is large but the seeds
            apart = any(line.tells_apart(small.best) for line in lines if line.best != small.best)
            end = "the optimum does not transfer, since every seed ends higher there" if apart else end
        elif max(_extra_loss(small, line, gap) for line in lines) > _MOST_EXTRA:
            end = f"the optimum does not transfer, since that costs more than {_MOST_EXTRA:.0%} of the loss"
        said.append(f"the best {what} moves by at most 1 grid step{ratio} {over}: {end}")
    else:
        path = ", ".join(f"{line.best:.3g} at {line}" for line in lines)
        apart = any(line.tells_apart(small.best) for line in lines)
        end = "the optimum does not transfer" if apart else "but not every seed agrees, so the optimum may transfer"
        said.append(f"the best {what} moves by {moved} grid steps{ratio} {over} ({path}): {end}")
    if on_edge:
        where = ", ".join(map(str, on_edge))
        said.append(f"the best {what} lies on the edge of the grid at width {where}: try a wider range")
    return said


def _extra_loss(small: WidthLine, large: WidthLine, gap: GapKind) -> float:
    """By how much the small width's best value ends above the lowest loss."""
    if small.best == large.best:
        return 0.0
    if small.best not in large.losses:
        return math.inf
    return gap_above(large.loss(small.best), large.loss(large.best), gap)


# ---------------------------------------------------------------------------------------------- rule sets

NUMBERS = {
    "moved": ("best rate moves by (doublings)", 1),
    "wrong_rate": ("a rate wrong by ×2 costs, %", 100),
    "transferred": ("the smallest size's best rate costs, %", 100),
    "lowest": ("lowest loss", 1),
}
"""What is measured of a rule set: how a table calls it, and by what it is multiplied there.

Rates move by doublings; costs are shares of the lowest loss at the largest size, or differences from it."""


def compare_rules(
    recipe: Recipe,
    *,
    rules: Sequence[RuleSet],
    lrs: Sequence[float],
    out: Path,
    widths: Sequence[WholeWidth] = (),
    batches: Sequence[int] = (),
    durations: Sequence[int] = (),
    seeds: int = 3,
    engine: Engine = "auto",
    note: Note | None = None,
) -> dict[str, Any]:
    """How far the best rate moves, what a wrong one costs, and what taking it from small to large costs, by rule set.

    The result is written to `out` after each size, and what has been trained there is not trained again.

    Args:
        recipe: what is trained; its growth events are left out
        rules: rule sets to compare
        lrs: learning rates to try, at the base width, and at the first batch and duration
        widths, batches, durations: one of them, rising, two or more; durations are steps, and a larger batch takes
            fewer steps
        note: is told what is done, line by line
    """
    compared = RuleComparison(recipe, rules, lrs, widths, batches, durations, seeds)
    trainer = _begin(compared.ground, out, "rules", engine, note)
    values: dict[str, Any] = {"over": compared.over, "lrs": list(lrs), "seeds": seeds, "rules": {}}
    with trainer.alone():
        for chosen, size, leaves in compared.runs():
            reused = ", reused" if trainer.has_losses(leaves) else ""
            where = f"{chosen}, {compared.over} {size}"
            with trainer.stage(where, f"{where}: {len(lrs)} rates × {count_of(seeds, 'seed')}{reused}"):
                losses = _train_grid(trainer, leaves, seeds)
            points = [{"x": lr, "losses": each} for lr, each in zip(lrs, losses, strict=True)]
            lines = values["rules"].setdefault(str(chosen), {"sizes": []})
            lines["sizes"].append({"size": size, "points": points})
            _measure_all(values)
            write_json(Path(out) / RULES_FILE, values)
        values["verdict"] = rules_in_words(values)
        write_json(Path(out) / RULES_FILE, values)
    return values


def _measure_all(values: dict[str, Any]) -> None:
    """The numbers of every rule set so far, with losses of all compared in the same way."""
    gap = choose_gap_kind(_losses(size for lines in values["rules"].values() for size in lines["sizes"]))
    values["gap"] = gap
    for lines in values["rules"].values():
        lines["numbers"] = measure_transfer(lines["sizes"], gap)


@dataclass
class RuleComparison:
    """What `compare_rules` trains; its arguments are those of that function. over: what a size is."""

    recipe: Recipe
    rules: Sequence[RuleSet]
    lrs: Sequence[float]
    widths: Sequence[WholeWidth] = ()
    batches: Sequence[int] = ()
    durations: Sequence[int] = ()
    seeds: int = 3

    def __post_init__(self) -> None:
        self.sizes()  # refuses
        Space(tuple(self.lrs))  # refuses
        if self.seeds < 1 or len(self.lrs) < 3 or not self.rules:
            raise MupscaleError(
                f"a comparison takes a rule set, three learning rates and one seed at least, not {len(self.rules)}, "
                f"{len(self.lrs)} and {self.seeds}"
            )
        self.over = "width" if self.widths else "batch" if self.batches else "steps"
        # growth, what it starts from and what is told of its runs are left out
        fresh: dict[str, Any] = {"grow": [], "out": None, "callbacks": [], "start": None, "how": None}
        self.ground = Ground(replace(self.recipe, **fresh))

    def sizes(self) -> list[tuple[Any, dict[str, Any]]]:
        """What the runs of each size have of their own."""
        recipe, batches = self.recipe, self.batches
        given = [part for part in (self.widths, batches, self.durations) if part]
        if len(given) != 1 or len(given[0]) < 2:
            raise MupscaleError(
                "rule sets are compared over two or more widths, or batches, or durations: give one list"
            )
        usual: dict[str, Any] = {"width": recipe.width, "steps": recipe.steps}
        if self.widths:
            return [(Width.of(width).plain, {**usual, "width": width}) for width in self.widths]
        first = TunedAt(batches[0] if batches else recipe.batch, recipe.steps if batches else self.durations[0])
        tuned = [None, *[first] * (len(given[0]) - 1)]  # the first size is what is tuned at
        if batches:
            own = [{"batch": b, "steps": max(1, round(recipe.steps * batches[0] / b))} for b in batches]
        else:
            own = [{"steps": steps} for steps in self.durations]
        return [(size, {**usual, **each, "tuned_at": at}) for size, each, at in zip(given[0], own, tuned, strict=True)]

    def runs(self) -> Iterator[tuple[RuleSet, Any, list[Stretch]]]:
        schedule = self.recipe.schedule
        for chosen in self.rules:
            for size, own in self.sizes():
                share, rules = own["steps"] / self.recipe.steps, chosen  # the schedule is a share of the run
                warmup, decay = round(schedule.warmup * share), round(schedule.decay * share)
                # where rules do not act, those that differ in them alone share their runs
                if own.get("tuned_at") is None:
                    rules = replace(rules, batch=RuleSet.batch, duration=RuleSet.duration)
                if Width.of(own["width"]) == Width.of(self.recipe.base):
                    rules = replace(rules, decay=RuleSet.decay)
                own = {**own, "rules": rules, "schedule": replace(schedule, warmup=warmup, decay=decay)}
                cells = [(lr, seed) for lr in self.lrs for seed in range(self.seeds)]
                yield chosen, size, [Stretch(lr=lr, seed=seed, **own) for lr, seed in cells]

    def describe(self, engine: Engine) -> str:
        stages: dict[str, list[Stretch]] = {}
        seen: set[str] = set()
        for chosen, size, leaves in self.runs():
            stages[f"{chosen}, {self.over} {size}"] = [leaf for leaf in leaves if leaf.key not in seen]
            seen |= {leaf.key for leaf in leaves}
        return describe_stages(stages, self.ground, engine)


def measure_transfer(sizes: Sequence[Mapping[str, Any]], gap: GapKind = "share") -> dict[str, dict[str, float | None]]:
    """The numbers of a rule set, each as a mean over seeds and its standard error; None: it cannot be said.

    moved: log2 of the best rate at the largest size over that at the smallest, each the vertex of a parabola through
    the best of the grid and its neighbours. wrong_rate: what a rate that is wrong by a factor of 2 costs at the largest
    size. transferred: what the best rate of the smallest costs there. gap: whether costs are shares of
    the lowest loss, or differences from it.
    """
    seeds = range(len(sizes[0]["points"][0]["losses"]))
    by_seed = [_of_seed(sizes, seed, gap) for seed in seeds]
    return {name: _with_error([one[name] for one in by_seed]) for name in NUMBERS}


def _of_seed(sizes: Sequence[Mapping[str, Any]], seed: int, gap: GapKind) -> dict[str, float]:
    """The numbers of one seed; a loss is infinite where it diverged."""
    small, large = (
        {
            math.log2(point["x"]): math.inf if (loss := point["losses"][seed]) is None else loss
            for point in sorted(size["points"], key=itemgetter("x"))
        }
        for size in (sizes[0], sizes[-1])
    )
    best, lowest = min(small, key=lambda x: small[x]), min(large.values())
    if not math.isfinite(lowest):
        return dict.fromkeys(NUMBERS, math.inf)
    at = vertex(large)
    wrong = [_between(large, at + side) for side in (-1.0, 1.0)]
    costs = [gap_above(loss, lowest, gap) for loss in wrong if loss is not None]
    return {
        "moved": at - vertex(small),
        "wrong_rate": fmean(costs) if costs else math.inf,
        "transferred": gap_above(large[best], lowest, gap),
        "lowest": lowest,
    }


def _between(curve: Mapping[float, float], x: float) -> float | None:
    """The loss at a rate between those of the grid, linearly in log2; None beyond it."""
    xs = sorted(curve)
    return float(np.interp(x, xs, [curve[each] for each in xs])) if xs[0] <= x <= xs[-1] else None


def _with_error(values: Sequence[float]) -> dict[str, float | None]:
    if not all(map(math.isfinite, values)):
        return {"mean": None, "error": None}
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": fmean(values), "error": error}


def rules_table(values: Mapping[str, Any]) -> str:
    """The numbers of every rule set, each with its standard error over seeds; and below, the best rate at each size."""
    columns = NUMBERS
    if stored_gap_kind(values) == "difference":
        columns = {key: (what.replace("costs, %", "costs, in loss"), 1) for key, (what, _) in NUMBERS.items()}
    header = ("rules", *(what for what, _ in columns.values()))
    rows = [
        (name, *(_shown(lines["numbers"][key], times) for key, (_, times) in columns.items()))
        for name, lines in values["rules"].items()
    ]
    sizes = [one["size"] for one in next(iter(values["rules"].values()))["sizes"]]
    rates_header = ("best rate tried", *(f"{values['over']} {size}" for size in sizes))
    best = {name: map(_best_rate, lines["sizes"]) for name, lines in values["rules"].items()}
    rates = [(name, *("diverges" if rate is None else f"{rate:g}" for rate in some)) for name, some in best.items()]
    return f"{text_table(header, rows)}\n\n{text_table(rates_header, rates)}"


def _best_rate(size: Mapping[str, Any]) -> float | None:
    """The rate with the lowest mean loss over seeds, at the base width; None where some seed diverges at every rate."""
    line = read_width_line({**size, "width": size["size"]})
    return line.best if line.losses else None


def rules_in_words(values: Mapping[str, Any]) -> list[str]:
    """With which rule set the rate of the smallest size costs least at the largest, and what to know of the grid."""
    costs = {name: lines["numbers"]["transferred"] for name, lines in values["rules"].items()}
    costs = {name: cost for name, cost in costs.items() if cost["mean"] is not None}
    sizes = [str(one["size"]) for one in next(iter(values["rules"].values()))["sizes"]]
    told = []
    if costs:
        best = min(costs, key=lambda name: float(costs[name]["mean"] or 0.0))
        lowest, spread = costs[best]["mean"] or 0.0, costs[best]["error"] or 0.0
        alike = [  # two means lie within twice the error of their difference; one seed has none
            name
            for name, one in costs.items()
            if name != best and abs((one["mean"] or 0.0) - lowest) <= 2 * math.hypot(one["error"] or 0.0, spread)
        ]
        within = f"; within the errors, as little with {', '.join(alike)}" if alike else ""
        is_share = stored_gap_kind(values) == "share"
        cost = f"{_shown(costs[best], 100)} % of the loss" if is_share else f"{_shown(costs[best], 1)} in loss"
        told.append(
            f"from {values['over']} {sizes[0]} to {sizes[-1]}, taking the best rate along costs least with {best}: "
            f"{cost}{within}"
        )
    if nothing_finished(size for lines in values["rules"].values() for size in lines["sizes"]):
        return [f"every run diverged: give smaller learning rates ({recipe_entry('study.lrs')})"]
    ends, edges = (None, min(values["lrs"]), max(values["lrs"])), dict[str, list[str]]()
    for name, lines in values["rules"].items():
        if at_edge := [str(one["size"]) for one in lines["sizes"] if _best_rate(one) in ends]:
            edges.setdefault(f"{values['over']} {', '.join(at_edge)}", []).append(name)
    for where, names in edges.items():
        whose = "with every rule set" if len(names) == len(values["rules"]) > 1 else f"with {', '.join(names)}"
        wider = f"try a wider range ({recipe_entry('study.lrs')})"
        told.append(f"{whose} the best rate lies on the edge of the grid at {where}: {wider}")
    return told


def _shown(number: Mapping[str, float | None], times: int) -> str:
    mean, error = number["mean"], number["error"]
    if mean is None:
        return "diverges"
    return words.format_digits(times * mean, 3) + ("" if error is None else f" ± {words.format_digits(times * error)}")
