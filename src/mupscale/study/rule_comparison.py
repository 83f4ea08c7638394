"""The preset that compares rule sets: with which of them does the best learning rate stay where it is?

Models are trained from scratch at several widths (or batches, or durations), each over a grid of learning rates and
with several seeds, once for each rule set. Three numbers say how well a rate transfers, each with its error bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mupscale.core import RuleSet, WholeWidth, Width
from mupscale.engine import Engine
from mupscale.study.dry_run import describe_stages
from mupscale.study.forecast import vertex
from mupscale.study.space import check_learning_rates
from mupscale.study.training import Ground, Note, Trainer
from mupscale.study.tree import Stretch
from mupscale.study.wording import count_of
from mupscale.system import MupscaleError, recipe_entry, text_table, words, write_json, writes_into
from mupscale.train import Recipe, TunedAt

RULES_FILE = "rules-check.json"
NUMBERS = {
    "moved": ("best rate moves by (doublings)", 1),
    "wrong_rate": ("a rate wrong by ×2 costs, %", 100),
    "transferred": ("the smallest size's best rate costs, %", 100),
    "lowest": ("lowest loss", 1),
}
"""What is measured of a rule set: how a table calls it, and by what it is multiplied there.

Rates move by doublings; costs are shares of the lowest loss at the largest size."""


@writes_into("out")
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
    trainer = Trainer(compared.ground, Path(out), "rules", engine, cache(note or (lambda text: None)), stages=0)
    trainer.visible = note is not None
    values: dict[str, Any] = {"over": compared.over, "lrs": list(lrs), "seeds": seeds, "rules": {}}
    with trainer.alone():
        for chosen, size, leaves in compared.runs():
            reused = ", reused" if trainer.has_losses(leaves) else ""
            where = f"{chosen}, {compared.over} {size}"
            with trainer.stage(where, f"{where}: {len(lrs)} rates × {count_of(seeds, 'seed')}{reused}"):
                losses = iter(trainer.train(leaves, keep=False))
            points = [{"x": lr, "losses": [next(losses) for _ in range(seeds)]} for lr in lrs]
            lines = values["rules"].setdefault(str(chosen), {"sizes": []})
            lines["sizes"].append({"size": size, "points": points})
            lines["numbers"] = measure_transfer(lines["sizes"])
            write_json(Path(out) / RULES_FILE, values)
    values["verdict"] = rules_in_words(values)
    write_json(Path(out) / RULES_FILE, values)
    return values


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
        check_learning_rates(self.lrs)
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
        """Every rule set at every size, with every learning rate and seed."""
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
        """What it trains, as a table of rule sets and sizes, with cost and time; runs that coincide count once."""
        stages: dict[str, list[Stretch]] = {}
        seen: set[str] = set()
        for chosen, size, leaves in self.runs():
            stages[f"{chosen}, {self.over} {size}"] = [leaf for leaf in leaves if leaf.key not in seen]
            seen |= {leaf.key for leaf in leaves}
        return describe_stages(stages, self.ground, engine)


# ---------------------------------------------------------------------------------------------- what it says


def measure_transfer(sizes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The numbers of a rule set, each as a mean over seeds and its standard error; None: it cannot be said.

    moved: log2 of the best rate at the largest size over that at the smallest, each the vertex of a parabola through
    the best of the grid and its neighbours. wrong_rate: what a rate that is wrong by a factor of 2 costs at the largest
    size. transferred: what the best rate of the smallest costs there. Costs are shares of the lowest loss.
    """
    seeds = range(len(sizes[0]["points"][0]["losses"]))
    by_seed = [_of_seed(sizes, seed) for seed in seeds]
    return {name: _with_error([one[name] for one in by_seed]) for name in NUMBERS}


def _of_seed(sizes: Sequence[Mapping[str, Any]], seed: int) -> dict[str, float]:
    """The numbers of one seed; a loss is infinite where it diverged."""
    small, large = (
        {math.log2(point["x"]): _finite(point["losses"])[seed] for point in sorted(size["points"], key=itemgetter("x"))}
        for size in (sizes[0], sizes[-1])
    )
    best, lowest = min(small, key=lambda x: small[x]), min(large.values())
    if not math.isfinite(lowest):
        return dict.fromkeys(NUMBERS, math.inf)
    at = vertex(large)
    wrong = [_between(large, at + side) for side in (-1.0, 1.0)]
    costs = [loss / lowest - 1 for loss in wrong if loss is not None]
    return {
        "moved": at - vertex(small),
        "wrong_rate": fmean(costs) if costs else math.inf,
        "transferred": large[best] / lowest - 1,
        "lowest": lowest,
    }


def _between(curve: Mapping[float, float], x: float) -> float | None:
    """The loss at a rate between those of the grid, linearly in log2; None beyond it."""
    xs = sorted(curve)
    if not xs[0] <= x <= xs[-1]:
        return None
    after = next(i for i, one in enumerate(xs) if one >= x)
    if xs[after] == x:
        return curve[x]
    share = (x - xs[after - 1]) / (xs[after] - xs[after - 1])
    return (1 - share) * curve[xs[after - 1]] + share * curve[xs[after]]


def _with_error(values: Sequence[float]) -> dict[str, float | None]:
    if not all(map(math.isfinite, values)):
        return {"mean": None, "error": None}
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": fmean(values), "error": error}


def rules_table(values: Mapping[str, Any]) -> str:
    """The numbers of every rule set, each with its standard error over seeds; and below, the best rate at each size."""
    header = ("rules", *(words for words, _ in NUMBERS.values()))
    rows = [
        (name, *(_shown(lines["numbers"][key], times) for key, (_, times) in NUMBERS.items()))
        for name, lines in values["rules"].items()
    ]
    sizes = [one["size"] for one in next(iter(values["rules"].values()))["sizes"]]
    rates_header = ("best rate tried", *(f"{values['over']} {size}" for size in sizes))
    rates = [(name, *map(_best_rate, lines["sizes"])) for name, lines in values["rules"].items()]
    return f"{text_table(header, rows)}\n\n{text_table(rates_header, rates)}"


def _best_rate(size: Mapping[str, Any]) -> str:
    """The rate with the lowest mean loss over seeds, at the base width."""
    best = min(means := _mean_losses(size), key=means.__getitem__)
    return f"{best:g}" if math.isfinite(means[best]) else "diverges"


def _mean_losses(size: Mapping[str, Any]) -> dict[float, float]:
    """Over seeds, by rate; infinite where one diverged."""
    return {point["x"]: fmean(_finite(point["losses"])) for point in size["points"]}


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
        told.append(
            f"from {values['over']} {sizes[0]} to {sizes[-1]}, taking the best rate along costs least with {best}: "
            f"{_shown(costs[best], 100)} % of the loss{within}"
        )
    ends, edges = {min(values["lrs"]), max(values["lrs"])}, dict[str, list[str]]()
    for name, lines in values["rules"].items():
        at_edge = []
        for one in lines["sizes"]:
            means = _mean_losses(one)
            at_edge += [str(one["size"])] if min(means, key=means.__getitem__) in ends else []
        if at_edge:
            edges.setdefault(f"{values['over']} {', '.join(at_edge)}", []).append(name)
    for where, names in edges.items():
        whose = "with every rule set" if len(names) == len(values["rules"]) > 1 else f"with {', '.join(names)}"
        wider = f"try a wider range ({recipe_entry('study.lrs')})"
        told.append(f"{whose} the best rate lies on the edge of the grid at {where}: {wider}")
    return told


def _finite(losses: Sequence[float | None]) -> list[float]:
    return [math.inf if loss is None else loss for loss in losses]


def _shown(number: Mapping[str, float | None], times: int) -> str:
    mean, error = number["mean"], number["error"]
    if mean is None:
        return "diverges"
    return words.format_digits(times * mean, 3) + ("" if error is None else f" ± {words.format_digits(times * error)}")
