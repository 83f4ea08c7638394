"""Does more depth pay, and do learning rates transfer over it: all of docs/results/depth.md and depth-rates.md.

    python results/depth.py bytes-4-8 bytes-64x4-128x8 rates --data tokens=data/bytes --work work
    python results/depth.py rates-mlp-sgd rates-mlp-adamw

Each folder depth-NAME beside this file holds a recipe. Where it has a growth event, there follow from it
- base models with the recipe's learning rate, at a constant rate until the event;
- from these, for the remaining steps: new blocks as identity, stacked, stacked with each copy behind its block; where
  the width grows, too: in one event, and in two (first wider, then deeper, and the other way round) of the same FLOPs;
- from scratch for as many steps, and with the FLOPs of base model and growth together; the base model continued with
  the growth's FLOPs.
All have one schedule: constant, then linear to 0 over the last quarter. Every arm is trained at three learning rates
with every seed, and the best one (by held-out loss) is kept.

A recipe with `rates` is trained from scratch at several depths, each over a grid of learning rates, with and without
the depth rule; the verdict is how far the best rate moves. Finished stages are kept in the work folder, so the same
command goes on after an interruption; depth.json is written at the end. `--shakespeare` takes the embedded text
instead of the data that the recipe names.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mupscale import RuleSet
from mupscale.engine import train_many
from mupscale.study.forecast import vertex
from mupscale.system import MupscaleError
from mupscale.train import Recipe, Schedule, Seeds, Spec, cost_per_example

HERE = Path(__file__).parent
FACTORS = (0.5, 1.0, 2.0)
SEEDS = 3


class Stages:
    """Runs that are trained stage by stage, each kept in a file of the work folder."""

    def __init__(self, name: str, work: Path, overrides: Mapping[str, Any], until: float) -> None:
        self.name, self.work, self.until, self.started = name, work / name, until, time.monotonic()
        self.work.mkdir(parents=True, exist_ok=True)
        values = yaml.safe_load((HERE / f"depth-{name}" / "depth.yaml").read_text(encoding="utf-8"))
        self.rates = values.pop("rates", None)
        self.described = Recipe.from_json(values)  # with the paths of the file
        self.recipe = Recipe.from_json({**values, **overrides})
        self.lr = float(self.recipe.optimizer.init_args["lr"])
        self.lrs = [self.lr * factor for factor in FACTORS]
        self.data = self.recipe.make_data()

    def cost(self, width: Any) -> float:
        """FLOPs of an example."""
        cost = cost_per_example(self.recipe.family(), width, self.data, self.recipe)
        assert cost is not None
        return cost

    def changed(self, lr: float, seed: int, order: int, **changes: Any) -> Recipe:
        """The recipe with another learning rate, seed and order of the data."""
        optimizer = replace(self.recipe.optimizer, init_args={**self.recipe.optimizer.init_args, "lr": lr})
        seeds = Seeds(init=seed, data=order, noise=seed, dropout=seed)
        return replace(self.recipe, optimizer=optimizer, seeds=seeds, **{"grow": [], "out": None, **changes})

    def stage(self, name: str, recipes: Sequence[Recipe], *, keep: bool = False) -> list[dict[str, Any]]:
        """Train these, or read what an earlier call has trained."""
        path = self.work / f"{name}.json"
        if path.exists():
            kept: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        if time.monotonic() > self.until:
            raise TimeoutError(f"{self.name}: no time left before {name}; the same command goes on here")
        began = time.monotonic()
        print(f"{self.name}: {name}, {len(recipes)} runs of {recipes[0].steps} steps", flush=True)
        trained = train_many(recipes, points=20, evaluate=True, resume=keep, data=self.data)
        outcomes = [
            {
                "status": one.status,
                "loss": one.loss,
                "scores": one.scores,
                "flops": one.flops,
                "curve": [[step, round(loss, 5)] for step, loss in one.curve],
            }
            for one in trained
        ]
        print(f"{self.name}: {name} took {time.monotonic() - began:.1f} s", flush=True)
        path.write_text(json.dumps(outcomes), encoding="utf-8")
        return outcomes

    def summary(self, **more: Any) -> dict[str, Any]:
        """What depth.json holds."""
        seconds = round(time.monotonic() - self.started, 1)
        return {"name": self.name, "recipe": self.described.to_json(), **more, "seconds": seconds}


class Growths(Stages):
    """Base models, what grows from them, and what they are compared with."""

    def run(self) -> dict[str, Any]:
        """Every stage, and the summary."""
        (growth,) = self.recipe.grow
        self.small, self.large = dict(self.recipe.width), dict(growth.width)  # type: ignore[call-overload]
        self.at, self.after = growth.at, self.recipe.steps - growth.at
        base = self.stage("base", [self.base(seed) for seed in range(SEEDS)], keep=True)
        ratio = self.cost(self.large) / self.cost(self.small)
        how = {} if self.large["width"] == self.small["width"] else {"how": "fresh"}
        steps = self.after + round(self.at / ratio)
        starts = {"identity": "identity", "stacked": "stack", "interleaved": "interleaved"}
        grown = {name: {"start": self.folder, "deepen": deepen, **how} for name, deepen in starts.items()}
        arms = self.arms("grown", {**grown, "from scratch, equal steps": {}}, self.large, self.after)
        if how:
            for name, size in (("wider, then deeper", "layers"), ("deeper, then wider", "width")):
                arms[name] = self.two_events(name, {**self.large, size: self.small[size]})
        arms |= self.arms("scratch", {"from scratch, equal FLOPs": {}}, self.large, steps)
        going_on = {"base model continued": {"start": self.folder}}
        arms |= self.arms("continued", going_on, self.small, round(self.after * ratio))
        return self.summary(base={"lr": self.lr, "runs": base}, arms=arms, flops_ratio=ratio)

    def folder(self, seed: int, lr: float = 0.0) -> str:
        return str(self.work / f"base-{seed}")

    def base(self, seed: int) -> Recipe:
        """A base model's recipe."""
        return self.changed(self.lr, seed, seed, steps=self.at, schedule=Schedule(), out=self.folder(seed))

    def arms(
        self, stage: str, arms: Mapping[str, Mapping[str, Any]], width: Any, steps: int, *, decay: int = 0
    ) -> dict[str, Any]:
        """Arms of one size and length, each at three learning rates with all seeds: all of them as one program.

        arms: for each, how it starts; `start` gives the folder of a seed and learning rate.
        """
        schedule = Schedule("wsd", decay=decay or steps // 4)
        cells = [(name, rate, seed) for name in arms for rate in self.lrs for seed in range(SEEDS)]
        recipes = []
        for name, rate, seed in cells:
            how = dict(arms[name])
            if "start" in how:
                how["start"] = how["start"](seed, rate)
            recipes.append(self.changed(rate, seed, 1000 + seed, width=width, steps=steps, schedule=schedule, **how))
        outcomes = dict(zip(cells, self.stage(stage, recipes), strict=True))
        return {name: self.best(name, outcomes, steps) for name in arms}

    def best(self, name: str, outcomes: Mapping[tuple[str, float, int], dict[str, Any]], steps: int) -> dict[str, Any]:
        """An arm at the learning rate that is best for it."""
        runs = [[outcomes[name, rate, seed] for seed in range(SEEDS)] for rate in self.lrs]
        scores = [mean([held_out(run) for run in part]) for part in runs]
        best = min(range(len(runs)), key=lambda i: scores[i])
        return {"lrs": self.lrs, "held_out_by_lr": scores, "lr": self.lrs[best], "runs": runs[best], "steps": steps}

    def two_events(self, name: str, middle: Any) -> dict[str, Any]:
        """Half of the steps at a size in between, the others at the large one, with the FLOPs of one event."""
        total = self.after * self.cost(self.large)
        half = round(total / (self.cost(middle) + self.cost(self.large)))

        def between(seed: int, lr: float) -> str:
            return str(self.work / f"{name.replace(', ', '-').replace(' ', '-')}-{lr:g}-{seed}")

        cells = [(rate, seed) for rate in self.lrs for seed in range(SEEDS)]
        how = {"how": "fresh", "deepen": "identity"}
        recipes = [
            self.changed(
                rate,
                seed,
                1000 + seed,
                width=middle,
                steps=half,
                schedule=Schedule(),
                out=between(seed, rate),
                start=self.folder(seed),
                **how,
            )
            for rate, seed in cells
        ]
        self.stage(f"{name}, first", recipes, keep=True)
        arm = {name: {**how, "start": between}}
        return dict(self.arms(name, arm, self.large, half, decay=half // 2)[name])


class Rates(Stages):
    """Models from scratch at several depths, over a grid of learning rates, with and without the depth rule."""

    def run(self) -> dict[str, Any]:
        """Every stage, and the summary."""
        factors = [float(factor) for factor in self.rates["factors"]]
        rules: dict[str, Any] = {}
        for rule in ("none", "complete"):
            lines = []
            for depth in self.rates["depths"]:
                width = {**self.recipe.width, "layers": depth}  # type: ignore[dict-item]
                seeds = range(int(self.rates["seeds"]))
                recipes = [
                    self.changed(self.lr * factor, seed, seed, width=width, rules=RuleSet(depth=rule))
                    for factor in factors
                    for seed in seeds
                ]
                outcomes = self.stage(f"{rule}-{depth}", recipes)
                parts = [outcomes[place : place + len(seeds)] for place in range(0, len(outcomes), len(seeds))]
                lines.append({"depth": depth, "losses": [mean([training(run) for run in part]) for part in parts]})
            rules[rule] = lines
        grid = [self.lr * factor for factor in factors]
        return self.summary(lrs=grid, rules=rules, verdict=verdict(grid, rules))


def verdict(lrs: Sequence[float], rules: Mapping[str, Any]) -> str:
    """How far the best learning rate moves from the least to the largest depth, in steps of the grid."""
    parts = []
    for rule, lines in rules.items():
        places = [vertex(dict(enumerate(line["losses"]))) for line in lines]
        rates = ", ".join(f"{lrs[0] * (lrs[-1] / lrs[0]) ** (place / (len(lrs) - 1)):.2g}" for place in places)
        steps = max(places) - min(places)
        parts.append(f"rules.depth {rule}: the best rate spans {steps:.1f} steps of 2 over the depths ({rates}).")
    return " ".join(parts)


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def training(outcome: Mapping[str, Any]) -> float:
    """The training loss; infinite for a run that diverged."""
    return math.inf if outcome["loss"] is None or outcome["status"] != "finished" else float(outcome["loss"])


def held_out(outcome: Mapping[str, Any]) -> float:
    """The held-out loss; infinite for a run that diverged."""
    return float(outcome["scores"]["loss"]) if outcome["status"] == "finished" else math.inf


def markdown(summary: Mapping[str, Any]) -> str:
    """What the docs show of an experiment."""
    if "rules" in summary:
        head = "| rules.depth | depth | " + " | ".join(f"{lr:g}" for lr in summary["lrs"]) + " |"
        lines = [head, "| --- " * (len(summary["lrs"]) + 2) + "|"]
        for rule, depths in summary["rules"].items():
            for line in depths:
                cells = [f"{loss:.3f}" if loss < 100 else "–" for loss in line["losses"]]
                lines.append(f"| {rule} | {line['depth']} | " + " | ".join(cells) + " |")
        return "\n".join([*lines, "", summary["verdict"]])
    lines = ["| | held-out loss | each seed | learning rate |", "| --- | --- | --- | --- |"]
    arms = {name: [held_out(run) for run in arm["runs"]] for name, arm in summary["arms"].items()}
    for name in sorted(arms, key=lambda name: mean(arms[name])):
        each = ", ".join(f"{loss:.4f}" for loss in arms[name])
        factor = summary["arms"][name]["lr"] / summary["base"]["lr"]
        lines.append(f"| {name} | {mean(arms[name]):.4f} | {each} | x {factor:g} |")
    return "\n".join(lines)


def draw_rates(summary: Mapping[str, Any], path: Path) -> None:
    """Training loss over the learning rate, a line for each depth and a panel for each rule."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from mupscale.plots import save_figure

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained", dpi=150)
    for ax, (rule, lines) in zip(axes, summary["rules"].items(), strict=True):
        for number, line in enumerate(lines):
            color = plt.get_cmap("viridis")(number / max(1, len(lines) - 1))
            points = [(lr, loss) for lr, loss in zip(summary["lrs"], line["losses"], strict=True) if loss < 1e9]
            ax.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, label=f"{line['depth']} blocks")
            ax.plot(*min(points, key=lambda point: point[1]), "o", color=color, markersize=7)
        ax.set_xscale("log", base=2)
        ax.set_title(f"rules.depth: {rule}", fontsize=9)
        ax.set_xlabel("learning rate at the base", fontsize=8)
        ax.grid(alpha=0.25, linewidth=0.6)
    all_losses = [line["losses"] for lines in summary["rules"].values() for line in lines]
    axes[0].set_ylim(0.97 * min(map(min, all_losses)), 1.03 * max(losses[0] for losses in all_losses))
    axes[0].set_ylabel("training loss", fontsize=8)
    axes[1].legend(fontsize=7, frameon=False)
    save_figure(fig, path)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is asked for, and write depth.json beside each recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="an argument of the data")
    parser.add_argument("--shakespeare", action="store_true", help="the embedded text, for machines without the books")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="another field of the recipe")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no stage after so many seconds")
    parser.add_argument("--draw", type=Path, help="draw the rates of every depth.json into this folder")
    asked = parser.parse_args(words)
    until = time.monotonic() + asked.seconds
    for name in asked.names:
        file = HERE / f"depth-{name}" / "depth.yaml"
        if not file.exists():
            print(f"there is no recipe at {file}", file=sys.stderr)
            return 2
        data = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
        data.setdefault("init_args", {}).update(word.split("=", 1) for word in asked.data)
        if asked.shakespeare:
            data = {"class_path": "mupscale.data.Shakespeare", "init_args": {"context": data["init_args"]["context"]}}
        more = {key: json.loads(value) for key, value in (word.split("=", 1) for word in asked.set)}
        kind = Growths if "grow" in yaml.safe_load(file.read_text(encoding="utf-8")) else Rates
        try:
            summary = kind(name, asked.work, {"data": Spec(**data).__dict__, **more}, until).run()
        except (TimeoutError, MupscaleError) as error:
            print(error, file=sys.stderr)
            return 1
        (file.parent / "depth.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        print(markdown(summary), flush=True)
    if asked.draw is not None:
        for file in sorted(HERE.glob("depth-rates*/depth.json")):
            draw_rates(json.loads(file.read_text(encoding="utf-8")), asked.draw / f"{file.parent.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
