"""One run, every size: the families of docs/results/family.md, beside every size from scratch at equal FLOPs.

    python results/family.py NAME ... --data tokens=data/bytes [--work work]
    python results/family.py --draw docs/family.png [NAME]      # README's picture; of language models

Each folder family-NAME beside this file holds a recipe with a section `family`, which `mupscale family` takes as well.
Here every size is trained from scratch at several learning rates, with every seed, and the section `evidence` may add

    falls: factors by which the rate falls at a growth, among which tuning chooses (else 1)
    arms: families that differ in one setting from the tuned one, by name
    controls: a family beside this one whose runs from scratch are the same

The rate of the trunk is tuned on the two smallest sizes with the first seed alone. family.json is written after every
stage. A run that was stopped goes on in the work folder, and rates that family.json has already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from mupscale.core import Width
from mupscale.plots import COLORS, EndLabel, add_end_labels, figure, save_figure
from mupscale.study.family_run import FamilyPlanner, FamilySettings, PlannedSize, make_planner
from mupscale.study.training import Trainer
from mupscale.train import Recipe, Spec

HERE = Path(__file__).parent


class Evidence:
    """One family and its controls, stage by stage, in family.json."""

    def __init__(self, name: str, data: dict[str, str], work: Path, out: Path) -> None:
        values = yaml.safe_load((HERE / f"family-{name}" / "family.yaml").read_text(encoding="utf-8"))
        self.more = values.pop("evidence", {})
        self.settings = FamilySettings(**values.pop("family"))
        values["data"].setdefault("init_args", {}).update(data)
        self.planner = make_planner(Recipe.from_json(values), self.settings)
        self.trainer = Trainer(self.planner.ground, work / name, "family", self.settings.engine, print, stages=4)
        self.path = out / f"family-{name}" / "family.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.seeds = name, range(self.settings.seeds)
        planned = self.plan(self.planner, self.settings.lrs[0], 1.0)[0]
        together, alone = self.planner.costs(planned)
        self.found: dict[str, Any] = {
            "name": name,
            "sizes": [Width.of(size).label for size in self.settings.sizes],
            "parameters": [self.planner.parameters(size) for size in self.settings.sizes],
            "steps": [list(one.steps) for one in planned],
            "tokens": [sum(s.steps for s in one.leaf.path) * self.planner.tokens_per_step for one in planned],
            "cost": together,
            "cost_alone": alone,
            "tuning": [],
            "family": [],
            "scratch": [],
            "arms": {},
            "seconds": {},
        }
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if all(stored[key] == self.found[key] for key in ("sizes", "steps", "cost")):
                self.found |= stored

    def plan(self, planner: FamilyPlanner, lr: float, fall: float) -> list[list[PlannedSize]]:
        """The trunk and its branches, for every seed."""
        return [planner.plan(self.settings.sizes, lr, fall, seed) for seed in self.seeds]

    def save(self) -> None:
        """What is known so far."""
        self.found["seconds"] |= {one.name: one.seconds for one in self.trainer.spent.values()}
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def run(self) -> dict[str, Any]:
        """Tune, train the family, its controls and its arms."""
        with self.trainer.alone():
            self.tune()
            lr, fall = choose(self.found)
            if not any((one["lr"], one["fall"]) == (lr, fall) for one in self.found["family"]):
                trees = self.plan(self.planner, lr, fall)
                with self.trainer.stage("trunks", f"{self.name}: trunks at {lr:g}, times {fall:g} at a growth"):
                    self.trainer.train([one.leaf for tree in trees for one in tree])
                self.found["family"].append({"lr": lr, "fall": fall, "losses": self.ends(trees)})
                self.save()
            self.train_controls()
            self.train_arms(lr, fall)
        return self.found

    def tune(self) -> None:
        """Trunks of the two smallest sizes with the first seed, at rates that are not known yet."""
        sizes, known = self.settings.sizes[:2], {(one["lr"], one["fall"]) for one in tuning(self.found)}
        falls = self.more.get("falls", [1.0])
        asked = [(lr, fall) for lr in self.settings.lrs for fall in falls if (lr, fall) not in known]
        trees = {(lr, fall): self.planner.plan(sizes, lr, fall, 0) for lr, fall in asked}
        if trees:
            with self.trainer.stage("tuning", f"{self.name}: {len(trees)} trunks of two sizes"):
                self.trainer.train([one.leaf for tree in trees.values() for one in tree])
        for (lr, fall), tree in trees.items():
            losses = [self.trainer.ended[one.leaf.key] for one in tree]
            self.found["tuning"].append({"lr": lr, "fall": fall, "losses": losses})
        self.save()

    def train_controls(self) -> None:
        """Every size from scratch at every rate, with as many FLOPs as are charged to it."""
        if other := self.more.get("controls"):
            theirs = json.loads((HERE / f"family-{other}" / "family.json").read_text(encoding="utf-8"))
            places = [theirs["sizes"].index(size) for size in self.found["sizes"]]
            self.found["scratch"] = [
                {"lr": one["lr"], "losses": [one["losses"][place] for place in places]} for one in theirs["scratch"]
            ]
            return
        planned, known = self.plan(self.planner, self.settings.lrs[0], 1.0)[0], {s["lr"] for s in self.found["scratch"]}
        rates = [lr for lr in self.settings.check_lrs if lr not in known]
        sizes = range(len(planned))
        leaves = {
            (lr, i): [self.planner.scratch(planned[i], lr, seed) for seed in self.seeds] for lr in rates for i in sizes
        }
        if leaves:
            with self.trainer.stage("scratch", f"{self.name}: from scratch at {len(rates)} rates"):
                self.trainer.train([leaf for some in leaves.values() for leaf in some])
        for lr in rates:
            losses = [[self.trainer.ended[leaf.key] for leaf in leaves[lr, i]] for i in sizes]
            self.found["scratch"].append({"lr": lr, "losses": losses})
        self.found["scratch"].sort(key=lambda one: one["lr"])
        self.save()

    def train_arms(self, lr: float, fall: float) -> None:
        """What the result depends on: the tuned family with one setting changed."""
        trees = {}
        for name, changes in self.more.get("arms", {}).items():
            if name not in self.found["arms"]:
                arm = replace(self.planner, settings=replace(self.settings, **changes))
                trees[name] = self.plan(arm, lr * changes.get("lr", 1.0), changes.get("fall", fall))
        if trees:
            with self.trainer.stage("arms", f"{self.name}: {', '.join(trees)}"):
                self.trainer.train([one.leaf for some in trees.values() for tree in some for one in tree])
        for name, some in trees.items():
            self.found["arms"][name] = {"settings": self.more["arms"][name], "losses": self.ends(some)}
        self.save()

    def ends(self, trees: Sequence[Sequence[PlannedSize]]) -> list[list[float | None]]:
        """Held-out losses of every size, seed by seed."""
        return [[self.trainer.ended[one.leaf.key] for one in same] for same in zip(*trees, strict=True)]


def tuning(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rate of the trunk that was tried, with the losses of the two smallest sizes and the first seed."""
    whole = [{**one, "losses": [one["losses"][size][0] for size in range(2)]} for one in found["family"]]
    return [*found.get("tuning", []), *whole]


def choose(found: dict[str, Any]) -> tuple[float, float]:
    """The trunk's rate, and its factor at a growth, that tuning on the two smallest sizes takes."""

    def score(one: dict[str, Any]) -> float:
        return math.inf if None in one["losses"] else fmean(math.log(loss) for loss in one["losses"])

    best = min(tuning(found), key=score)
    return best["lr"], best["fall"]


def chosen_family(found: dict[str, Any]) -> dict[str, Any]:
    """The family at the rate that tuning takes."""
    return next(one for one in found["family"] if (one["lr"], one["fall"]) == choose(found))


def mean(losses: Sequence[float | None]) -> float:
    """Over the seeds; infinite where one diverged."""
    return math.inf if None in losses else fmean(loss for loss in losses if loss is not None)


def stored() -> dict[str, dict[str, Any]]:
    """What was found, by name."""
    paths = sorted(HERE.glob("family-*/family.json"))
    return {path.parent.name.removeprefix("family-"): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def count_flops(name: str, found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """All that is spent until each size is there: out of one run, and one size after the other.

    The recipe's plan tells, on embedded text with windows of the same length; it must give what family.json has.
    """
    values = yaml.safe_load((HERE / f"family-{name}" / "family.yaml").read_text(encoding="utf-8"))
    values.pop("evidence", None)
    settings, recipe = FamilySettings(**values.pop("family")), Recipe.from_json(values)
    text = Spec("mupscale.data.Shakespeare", {"context": recipe.data.init_args["context"]})
    planner = make_planner(replace(recipe, data=text), settings)
    planned = planner.plan(settings.sizes, 1.0, 1.0, 0)
    together = [planner.costs(planned[: number + 1])[0] for number in range(len(planned))]
    alone = list(accumulate(one.budget for one in planned))
    if (together[-1], alone[-1]) != (found["cost"], found["cost_alone"]):
        raise SystemExit(f"family-{name}/family.json has other FLOPs than its recipe: {found['cost']}, {together[-1]}")
    return together, alone


def draw(name: str, picture: Path) -> Path:
    """Loss of every size against all FLOPs that were spent until it is there: out of one run, and each from scratch."""
    found = stored()[name]
    together, alone = count_flops(name, found)
    ours = list(map(mean, chosen_family(found)["losses"]))
    theirs = [min(mean(one["losses"][i]) for one in found["scratch"]) for i in range(len(ours))]
    unit = 1e12
    fig, ax = figure(7.6, 3.9)
    lines = ((alone, theirs, COLORS[0], "each from scratch"), (together, ours, COLORS[1], "out of one run"))
    labels = []
    for costs, losses, color, name in lines:
        at = [cost / unit for cost in costs]
        ax.plot(at, losses, "o-", color=color, lw=2.2, ms=6)
        labels.append(EndLabel(f"{name}:\n{losses[-1]:.3f} after {at[-1]:,.0f} TFLOPs", color, (at[-1], losses[-1])))
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    sizes = ["×".join(re.findall(r"\d+", size)) for size in found["sizes"]]
    for size, cost, loss in zip(sizes[1:], together[1:], ours[1:], strict=True):
        ax.annotate(size, (cost / unit, loss), (-5, -5), ha="right", va="top", **beside)
    first = f"width × layers: {sizes[0]}" if "×" in sizes[0] else f"width {sizes[0]}"
    for size, cost, loss in zip([first, *sizes[1:-1]], alone[:-1], theirs[:-1], strict=True):
        ax.annotate(size, (cost / unit, loss), (6, 3), va="bottom", **beside)
    ax.annotate(sizes[-1], (alone[-1] / unit, theirs[-1]), (0, 7), ha="right", va="bottom", **beside)
    ax.set_xlabel("training FLOPs spent until that size is finished, in all (TFLOPs)")
    ax.set_ylabel("held-out loss")
    ax.set_xlim(0, 1.03 * alone[-1] / unit)
    ax.margins(y=0.1)
    add_end_labels(ax, labels)
    return save_figure(fig, picture)


def markdown(found: dict[str, Any]) -> str:
    """A row for every size: out of one run, from scratch at its best rate, and by how much they differ, by seed."""
    lr, fall = choose(found)
    chosen = chosen_family(found)
    lines = [
        "| size | parameters | out of one run | from scratch, equal FLOPs | difference by seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for i, size in enumerate(found["sizes"]):
        if not found["scratch"]:
            lines.append(f"| {size} | {found['parameters'][i]:,} | {mean(chosen['losses'][i]):.4f} | not trained | |")
            continue
        best = min(found["scratch"], key=lambda one: mean(one["losses"][i]))
        rates = [one["lr"] for one in found["scratch"]]
        edge = " at the edge" if best["lr"] in (min(rates), max(rates)) else ""
        cells = [
            size,
            f"{found['parameters'][i]:,}",
            f"{mean(chosen['losses'][i]):.4f}",
            f"{mean(best['losses'][i]):.4f} (lr {best['lr']:g}{edge})",
            compare(chosen["losses"][i], best["losses"][i]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    share = found["cost"] / found["cost_alone"]
    lines.append(f"\nTuned: lr {lr:g}, times {fall:g} at a growth. All sizes for {share:.2f} of the FLOPs.")
    if found.get("arms"):
        lines += ["", f"| what differs | {' | '.join(found['sizes'])} |", "| --- |" + " --- |" * len(found["sizes"])]
        for name, arm in found["arms"].items():
            each = [compare(ours, base) for ours, base in zip(arm["losses"], chosen["losses"], strict=True)]
            lines.append(f"| {name} | {' | '.join(each)} |")
    return "\n".join(lines)


def compare(ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """By how much the one is above the other, from seed to seed; controls of another family may have more seeds."""
    pairs = zip(ours, theirs, strict=False)
    apart = [100 * (a / b - 1) for a, b in pairs if a is not None and b is not None]
    lost = sum(loss is None for loss in ours)
    ends = f"{min(apart):+.2f} to {max(apart):+.2f} %" if apart else ""
    return f"{ends}{', ' if ends and lost else ''}{f'{lost} of {len(ours)} diverged' if lost else ''}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the families that are named, or print what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="folders family-NAME beside this file; none prints what is stored")
    parser.add_argument("--data", action="append", default=[], metavar="ARGUMENT=PATH", help="of the recipe's data")
    parser.add_argument("--work", type=Path, default=Path("family-work"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=HERE, help="where family-NAME/family.json is written")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="draw a stored result (bpe unless named) instead")
    asked = parser.parse_args(words)
    if asked.draw is not None:
        print(draw(asked.names[0] if asked.names else "bpe", asked.draw))
        return 0
    for name in asked.names:
        found = Evidence(name, dict(pair.split("=", 1) for pair in asked.data), asked.work, asked.out).run()
        print(f"{name}\n{markdown(found)}", flush=True)
    if not asked.names:
        for name, found in stored().items():
            print(f"## {name}\n\n{markdown(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
