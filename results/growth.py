"""Which operator pays: every contender of docs/results/operators.md, trained by the library's own engine.

    python results/growth.py NAME ... --data gutenberg-bytes=data/bytes --work work [--seconds 540]

Each folder growth-NAME beside this file holds a recipe with one growth event. From it follow
- base models: constant learning rate, the best of three rates by their training loss;
- grown contenders, from these base models, for the recipe's remaining steps: fresh units (outgoing 1, outgoing 0,
  lossless), copies with four levels of noise, copies with two levels of paired noise, and from scratch for as many
  steps;
- from scratch with the FLOPs of base model and growth together; the base model continued with the growth's FLOPs.
All have one schedule: constant, then linear to 0 over the last quarter. Every contender is trained at three learning
rates, and the best one (by held-out loss) is kept: grown contenders with the first seed first, then with the others.
Finished stages are kept in the work folder, so the same command goes on after an interruption; growth.json is written
at the end.

Under `experiment:` a recipe may name fewer `arms`, and steps `after` which base models stop: then every contender is
trained from each of these base models (all at the recipe's own learning rate), and they are called 'fresh after
1500', ...
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mupscale.engine import Outcome, train_many
from mupscale.system import MupscaleError
from mupscale.train import Recipe, Schedule, Seeds, cost_per_example

HERE = Path(__file__).parent
T = TypeVar("T")
FACTORS = (0.5, 1.0, 2.0)
LOWER_FACTORS = (0.25, 0.5, 1.0)
NOISES = (0.5, 1.0, 2.0, 4.0)
PAIRED = (0.5, 1.0)


@dataclass(frozen=True)
class Arm:
    """One way to a wide model, or to none: its name, where it starts, and what its recipes change."""

    name: str
    stage: str
    change: Mapping[str, Any]
    from_base: bool = True

    @property
    def factors(self) -> tuple[float, ...]:
        """The learning rates to try, over the base model's."""
        return LOWER_FACTORS if self.name.startswith("fresh") else FACTORS


ARMS = [
    Arm("fresh", "grown", {"how": "fresh"}),
    Arm("fresh, outgoing 0", "grown", {"how": "fresh", "outgoing": 0.0}),
    Arm("fresh, lossless", "grown", {"how": "lossless"}),
    *(Arm(f"copies, noise {noise:g}", "grown", {"noise": noise}) for noise in NOISES),
    *(Arm(f"copies, paired noise {noise:g}", "grown", {"how": "paired", "noise": noise}) for noise in PAIRED),
    Arm("from scratch, equal steps", "grown", {}, from_base=False),
    Arm("from scratch, equal FLOPs", "scratch", {}, from_base=False),
    Arm("base model continued", "continued", {}),
]


class Experiment:
    """The stages of one experiment, kept in a work folder."""

    def __init__(self, name: str, work: Path, overrides: Mapping[str, Any], until: float) -> None:
        self.name, self.work, self.until = name, work / name, until
        self.work.mkdir(parents=True, exist_ok=True)
        values = yaml.safe_load((HERE / f"growth-{name}" / "growth.yaml").read_text(encoding="utf-8"))
        self.settings = values.pop("experiment", {})
        self.described = Recipe.from_json(values)  # with the paths of the file
        self.recipe = Recipe.from_json({**values, **overrides})
        self.seeds = int(self.settings.get("seeds", 3))
        (self.growth,) = self.recipe.grow
        self.after = self.recipe.steps - self.growth.at
        self.data = self.recipe.make_data()
        family = self.recipe.family()
        self.cost = {
            width: cost_per_example(family, width, self.data, self.recipe)
            for width in (self.recipe.width, self.growth.width)
        }

    def run(self) -> dict[str, Any]:
        """Every stage, and the summary."""
        started = time.monotonic()
        base = self.base_models()
        ratio = self.cost[self.growth.width] / self.cost[self.recipe.width]  # type: ignore[operator]
        steps = {
            "grown": self.after,
            "scratch": self.after + round(self.growth.at / ratio),
            "continued": round(self.after * ratio),
        }
        results: dict[str, Any] = {}
        arms = [arm for arm in ARMS if self.is_asked_for(arm)]
        results.update(self.grown([arm for arm in arms if arm.stage == "grown"], steps["grown"], base["lr"]))
        for arm in arms:
            if arm.stage != "grown":
                results.update(self.alone(arm, steps[arm.stage], base["lr"]))
        return self.summary(base, steps, results, started)

    def summary(
        self, base: Mapping[str, Any], steps: Mapping[str, int], results: Mapping[str, Any], started: float
    ) -> dict[str, Any]:
        """What growth.json holds."""
        return {
            "name": self.name,
            "recipe": self.described.to_json(),
            "steps": steps,
            "flops_per_example": {str(width): cost for width, cost in self.cost.items()},
            "base": base,
            "arms": results,
            "seconds": round(time.monotonic() - started, 1),
        }

    def is_asked_for(self, arm: Arm) -> bool:
        """Copies need a multiple, and a recipe may name its contenders."""
        multiple = self.growth.width % self.recipe.width == 0  # type: ignore[operator]
        possible = multiple or not arm.name.startswith("copies")
        return possible and arm.name in self.settings.get("arms", [arm.name])

    def base_models(self) -> dict[str, Any]:
        """Base models at three learning rates; others go on from the best of these by their mean training loss."""
        rates = [self.lr * factor for factor in FACTORS]
        cells = [(rate, seed) for rate in rates for seed in range(self.seeds)]
        runs = self.stage("base", [self.base(*cell) for cell in cells], keep=True)
        losses = [_mean([_training(run) for run in part]) for part in _parts(runs, self.seeds)]
        best = min(range(len(rates)), key=lambda i: losses[i])
        return {"lrs": rates, "losses": losses, "lr": rates[best], "runs": _parts(runs, self.seeds)[best]}

    def grown(self, arms: Sequence[Arm], steps: int, lr: float) -> dict[str, Any]:
        """Many contenders: three rates with the first seed, then the best of them with the others."""
        cells = [(arm, lr * factor) for arm in arms for factor in arm.factors]
        tried = self.stage("grown-rates", [self.of(arm, lr, rate, 0, steps) for arm, rate in cells])
        results, more = {}, []
        for arm, mine in zip(arms, _parts(tried, len(FACTORS)), strict=True):
            rates = [lr * factor for factor in arm.factors]
            scores = [_held_out(outcome) for outcome in mine]
            best = min(range(len(rates)), key=lambda i: scores[i])
            results[arm.name] = {"lrs": rates, "held_out_by_lr": scores, "lr": rates[best], "runs": [mine[best]]}
            more += [self.of(arm, lr, rates[best], seed, steps) for seed in range(1, self.seeds)]
        rest = self.stage("grown-seeds", more)
        for arm, theirs in zip(arms, _parts(rest, self.seeds - 1), strict=True):
            results[arm.name]["runs"] += theirs
        return results

    def alone(self, arm: Arm, steps: int, lr: float) -> dict[str, Any]:
        """One contender: three rates, all seeds, in one stack."""
        rates = [lr * factor for factor in arm.factors]
        cells = [(rate, seed) for rate in rates for seed in range(self.seeds)]
        runs = _parts(self.stage(arm.stage, [self.of(arm, lr, *cell, steps) for cell in cells]), self.seeds)
        scores = [_mean([_held_out(run) for run in part]) for part in runs]
        best = min(range(len(rates)), key=lambda i: scores[i])
        return {arm.name: {"lrs": rates, "held_out_by_lr": scores, "lr": rates[best], "runs": runs[best]}}

    def base(self, lr: float, seed: int, after: int | None = None) -> Recipe:
        """A base model's recipe."""
        out = str(self.folder(lr, seed, after))
        return self.changed(lr, seed, steps=after or self.growth.at, grow=[], schedule=Schedule(), out=out)

    def of(self, arm: Arm, base_lr: float, lr: float, seed: int, steps: int, after: int | None = None) -> Recipe:
        """A contender's recipe."""
        width = self.recipe.width if arm.stage == "continued" else self.growth.width
        start = str(self.folder(base_lr, seed, after)) if arm.from_base else None
        schedule = Schedule("wsd", decay=steps // 4)
        return self.changed(
            lr, seed, steps=steps, grow=[], width=width, start=start, schedule=schedule, out=None, **arm.change
        )

    def changed(self, lr: float, seed: int, **changes: Any) -> Recipe:
        """The recipe with another learning rate and seed; data of base models and of what follows them differ."""
        optimizer = replace(self.recipe.optimizer, init_args={**self.recipe.optimizer.init_args, "lr": lr})
        order = 1000 + seed if changes.get("schedule") != Schedule() else seed
        seeds = Seeds(init=seed, data=order, noise=seed, dropout=seed)
        return replace(self.recipe, optimizer=optimizer, seeds=seeds, **changes)

    def stage(self, name: str, recipes: Sequence[Recipe], *, keep: bool = False) -> list[dict[str, Any]]:
        """Train these, or read what an earlier call has trained."""
        path = self.work / f"{name}.json"
        if path.exists():
            outcomes: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return outcomes
        if time.monotonic() > self.until:
            raise TimeoutError(f"{self.name}: no time left before {name}; the same command goes on here")
        print(f"{self.name}: {name}, {len(recipes)} runs of {recipes[0].steps if recipes else 0} steps", flush=True)
        began = time.monotonic()
        engine = self.settings.get("engine", "vectorised")
        trained = (
            train_many(recipes, engine=engine, points=20, evaluate=True, resume=keep, data=self.data) if recipes else []
        )
        outcomes = [_facts(outcome) for outcome in trained]
        print(f"{self.name}: {name} took {time.monotonic() - began:.1f} s", flush=True)
        path.write_text(json.dumps(outcomes), encoding="utf-8")
        return outcomes

    def folder(self, lr: float, seed: int, after: int | None = None) -> Path:
        return self.work / (f"base-{lr:g}-{seed}" if after is None else f"base-{lr:g}-{seed}-{after}")

    @property
    def lr(self) -> float:
        return float(self.recipe.optimizer.init_args["lr"])


class AfterManySteps(Experiment):
    """The same contenders from base models that stopped at several points of their training."""

    def run(self) -> dict[str, Any]:
        """Base models, then all points and contenders of one stage in one stack; every seed at every rate."""
        started = time.monotonic()
        points = [int(point) for point in self.settings["after"]]
        seeds = range(self.seeds)
        base = {
            str(point): self.stage(f"base-{point}", [self.base(self.lr, seed, point) for seed in seeds], keep=True)
            for point in points
        }
        ratio = self.cost[self.growth.width] / self.cost[self.recipe.width]  # type: ignore[operator]
        steps = {"grown": self.after, "continued": round(self.after * ratio)}
        arms = [arm for arm in ARMS if self.is_asked_for(arm)]
        results: dict[str, Any] = {}
        for stage in steps:
            cells = [(point, arm) for point in points for arm in arms if arm.stage == stage and arm.from_base]
            recipes = [
                self.of(arm, self.lr, self.lr * factor, seed, steps[stage], point)
                for point, arm in cells
                for factor in arm.factors
                for seed in seeds
            ]
            parts = _parts(self.stage(stage, recipes), self.seeds)
            for (point, arm), runs in zip(cells, _parts(parts, len(FACTORS)), strict=True):
                rates = [self.lr * factor for factor in arm.factors]
                scores = [_mean([_held_out(run) for run in part]) for part in runs]
                best = min(range(len(rates)), key=lambda i: scores[i])
                arm_facts = {"lrs": rates, "held_out_by_lr": scores, "lr": rates[best], "runs": runs[best]}
                results[f"{arm.name} after {point}"] = arm_facts
        return self.summary({"lr": self.lr, "runs": base}, steps, results, started)


def _facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "loss": outcome.loss,
        "scores": outcome.scores,
        "flops": outcome.flops,
        "curve": [[step, round(loss, 5)] for step, loss in outcome.curve],
    }


def _parts(runs: Sequence[T], size: int) -> list[list[T]]:
    return [list(runs[start : start + size]) for start in range(0, len(runs), size)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _training(outcome: Mapping[str, Any]) -> float:
    """The training loss; infinite for a run that diverged."""
    return float("inf") if outcome["loss"] is None else float(outcome["loss"])


def _held_out(outcome: Mapping[str, Any]) -> float:
    """The held-out loss; infinite for a run that diverged."""
    return float(outcome["scores"]["loss"]) if outcome["status"] == "finished" else float("inf")


def table(summary: Mapping[str, Any]) -> str:
    """The arms by their mean held-out loss."""
    lines = [f"{summary['name']}: base lr {summary['base']['lr']:g}, {summary['seconds']:.0f} s"]
    rows = []
    for name, arm in summary["arms"].items():
        held = [_held_out(run) for run in arm["runs"]]
        train = [_training(run) for run in arm["runs"]]
        rows.append((_mean(held), name, arm["lr"] / summary["base"]["lr"], held, _mean(train)))
    for mean, name, factor, held, train in sorted(rows):
        each = " ".join(f"{value:.4f}" for value in held)
        lines.append(f"  {mean:.4f}  {name:<28} lr x {factor:g}  train {train:.4f}  ({each})")
    return "\n".join(lines)


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str, list[float], float]]:
    """What docs/results/operators-*.md show: of copies and of paired noise the best level, by mean held-out loss.

    Each row: the arm, its setting, the held-out losses of its seeds, and its learning rate over the base model's.
    """
    best: dict[str, tuple[str, str, list[float], float]] = {}
    for name, arm in summary["arms"].items():
        kind, _, level = name.partition(" noise ")
        kind = {"copies,": "copies with noise", "copies, paired": "copies with paired noise"}.get(kind, kind)
        row = (kind, f"noise {level}" if level else "", [_held_out(run) for run in arm["runs"]])
        if kind not in best or _mean(row[2]) < _mean(best[kind][2]):
            best[kind] = (*row, arm["lr"] / summary["base"]["lr"])
    return sorted(best.values(), key=lambda row: _mean(row[2]))


def has_points(summary: Mapping[str, Any]) -> bool:
    """Whether base models stopped at several points."""
    return all(" after " in name for name in summary["arms"])


def by_point(summary: Mapping[str, Any]) -> dict[int, dict[str, list[float]]]:
    """Of an experiment with several points: for each, the held-out losses of each kind of arm, copies at their best."""
    points: dict[int, dict[str, Any]] = {}
    for name, arm in summary["arms"].items():
        kind, _, point = name.rpartition(" after ")
        points.setdefault(int(point), {})[kind] = arm
    return {
        point: {kind: losses for kind, _, losses, _ in rows({**summary, "arms": arms})}
        for point, arms in sorted(points.items())
    }


def markdown(summary: Mapping[str, Any]) -> str:
    """The rows as a table; for an experiment with several points a row for each of them."""
    if has_points(summary):
        kinds = ["base model continued", "fresh", "copies with noise"]
        lines = [f"| base model's steps | {' | '.join(kinds)} |", "| --- " * (len(kinds) + 1) + "|"]
        for point, losses in by_point(summary).items():
            lines.append(f"| {point:,} | " + " | ".join(f"{_mean(losses[kind]):.4f}" for kind in kinds) + " |")
        return "\n".join(lines)
    lines = ["| | held-out loss | each seed | learning rate |", "| --- | --- | --- | --- |"]
    for kind, setting, losses, factor in rows(summary):
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        label = f"{kind} ({setting})" if setting else kind
        lines.append(f"| {label} | {_mean(losses):.4f} | {each} | x {factor:g} |")
    return "\n".join(lines)


def draw(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel for each experiment: the seeds of every arm, by how much they lie above the base model continued."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from mupscale.plots import COLORS, GREY, save_figure

    order = ["base model continued", "from scratch, equal FLOPs", "copies with paired noise", "copies with noise"]
    order += ["fresh, lossless", "fresh"]
    lines = -(-len(summaries) // 3)
    fig, grid = plt.subplots(
        lines, 3, figsize=(10, 2.1 * lines + 0.4), sharey=True, layout="constrained", dpi=150, squeeze=False
    )
    for ax in grid.flat[len(summaries) :]:
        ax.set_visible(False)
    for ax, summary in zip(grid.flat, summaries, strict=False):
        values = {kind: losses for kind, _, losses, _ in rows(summary)}
        zero = _mean(values["base model continued"])
        for place, kind in enumerate(order):
            color = COLORS[1] if kind.startswith("fresh") else COLORS[2] if kind.startswith("copies") else GREY
            gaps = [100 * (loss / zero - 1) for loss in values.get(kind, [])]
            ax.plot(gaps, [place] * len(gaps), "o", color=color, alpha=0.5, markersize=4)
            if gaps:  # copies need a multiple
                ax.plot([_mean(gaps)], [place], "|", color=color, markersize=13, mew=2)
        ax.axvline(0, color=GREY, linewidth=0.8)
        ax.set_yticks(range(len(order)), order, fontsize=8)
        ax.set_ylim(-0.6, len(order) - 0.4)
        ax.set_title(summary["name"], fontsize=9)
        ax.tick_params(axis="x", labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    fig.supxlabel("held-out loss above that of the base model continued with the same FLOPs (%)", fontsize=9)
    save_figure(fig, path)


def draw_points(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out loss relative to the base model continued, over the steps that base models had trained."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from mupscale.plots import COLORS, GREY, save_figure

    fig, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained", dpi=150)
    ax.axhline(0, color=GREY, linewidth=1)
    ax.annotate("base model continued", (1, 0), (-4, 4), xycoords=("axes fraction", "data"), color=GREY,
                textcoords="offset points", fontsize=8, ha="right")  # fmt: skip
    for kind, color in (("fresh", COLORS[1]), ("copies with noise", COLORS[2])):
        for number, summary in enumerate(summaries):
            points = by_point(summary)
            zero = {point: _mean(losses["base model continued"]) for point, losses in points.items()}
            gaps = [100 * (_mean(losses[kind]) / zero[point] - 1) for point, losses in points.items()]
            ax.plot(list(points), gaps, "o-", color=color, markersize=4, linewidth=1.6)
            for point, losses in points.items():
                each = [100 * (loss / zero[point] - 1) for loss in losses[kind]]
                ax.plot([point] * len(each), each, ".", color=color, alpha=0.4, markersize=5)
            if number == len(summaries) - 1:
                ax.annotate(kind, (list(points)[-1], gaps[-1]), (6, 0), textcoords="offset points", color=color,
                            fontsize=8, va="center")  # fmt: skip
    ax.set_xscale("log")
    ticks = sorted({point for summary in summaries for point in by_point(summary)})
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_xlim(right=ticks[-1] * 2.8)
    for summary in summaries:
        grown = f"grown for {summary['steps']['grown']:,} steps"
        middle = math.prod(by_point(summary)) ** (1 / len(by_point(summary)))
        ax.annotate(grown, (middle, 1), (0, -8), xycoords=("data", "axes fraction"), textcoords="offset points",
                    fontsize=8, ha="center", va="top", color=GREY)  # fmt: skip
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel("steps of the base model before it grows", fontsize=9)
    ax.set_ylabel("held-out loss against\ncontinuing, equal FLOPs (%)", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    save_figure(fig, path)


def stored() -> list[dict[str, Any]]:
    """The summaries beside this file."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("growth-*/growth.json"))]


def main(words: Sequence[str] | None = None) -> int:
    """Run the experiments that are named, as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the stored summaries, and print their tables")
    parser.add_argument("names", nargs="*", help="folders growth-NAME beside this file")
    parser.add_argument("--data", action="append", default=[], metavar="ARGUMENT=PATH", help="of the recipe's data")
    parser.add_argument("--work", type=Path, default=Path("growth-work"), help="where stages are kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no stage after so many")
    parser.add_argument("--out", type=Path, default=HERE, help="where growth-NAME/growth.json is written")
    asked = parser.parse_args(words)
    given = dict(pair.split("=", 1) for pair in asked.data)
    if asked.draw is not None:
        draw([summary for summary in stored() if not has_points(summary)], asked.draw)
        by_points = sorted(filter(has_points, stored()), key=lambda summary: min(by_point(summary)))
        draw_points(by_points, asked.draw.with_stem(f"{asked.draw.stem}-when"))
        print("\n\n".join(f"{summary['name']}\n\n{markdown(summary)}" for summary in stored()))
    until = time.monotonic() + asked.seconds
    for name in asked.names:
        values = yaml.safe_load((HERE / f"growth-{name}" / "growth.yaml").read_text(encoding="utf-8"))
        data = values["data"]
        known = data["init_args"]
        overrides = {"data": {**data, "init_args": {**known, **{k: v for k, v in given.items() if k in known}}}}
        try:
            kind = AfterManySteps if "after" in values.get("experiment", {}) else Experiment
            summary = kind(name, asked.work, overrides, until).run()
        except TimeoutError as error:
            print(error, flush=True)
            return 1
        except MupscaleError as error:  # the others may do
            print(f"{name}: {error}", flush=True)
            continue
        folder = asked.out / f"growth-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "growth.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
        print(table(summary), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
