"""One run, every size: the families of docs/results/family.md, beside every size from scratch at equal FLOPs.

    python results/family.py NAME ... --data tokens=data/bytes [--work work]

Each folder family-NAME beside this file holds a recipe with a section `family`, which `mupscale family` takes as well.
Here more is trained, to see what the result depends on: the trunk at several learning rates, each with several factors
by which the rate falls at a growth, and every size from scratch at several rates; all with every seed. The family that
is reported is the one that tuning on the two smallest sizes, with the first seed, would have taken. family.json is
written after every stage; a run that was stopped goes on in the work folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from mupscale.core import Width
from mupscale.study.family_run import FamilySettings, make_planner
from mupscale.study.training import Trainer
from mupscale.train import Recipe

HERE = Path(__file__).parent
FALLS = (0.7, 0.85, 1.0)


def run(name: str, data: dict[str, str], work: Path, out: Path) -> dict[str, Any]:
    """Train all of it, and write family.json after each of the two stages."""
    values = yaml.safe_load((HERE / f"family-{name}" / "family.yaml").read_text(encoding="utf-8"))
    settings = FamilySettings(**values.pop("family"))
    values["data"].setdefault("init_args", {}).update(data)
    planner = make_planner(Recipe.from_json(values), settings)
    trainer = Trainer(planner.ground, work / name, "family", settings.engine, print, stages=2)
    sizes, seeds = settings.sizes, range(settings.seeds)
    trees = {
        (lr, fall, seed): planner.plan(sizes, lr, fall, seed) for lr in settings.lrs for fall in FALLS for seed in seeds
    }
    planned = trees[settings.lrs[0], FALLS[0], 0]
    together, alone = planner.costs(planned)
    found: dict[str, Any] = {
        "name": name,
        "sizes": [Width.of(size).label for size in sizes],
        "parameters": [planner.parameters(size) for size in sizes],
        "steps": [one.steps for one in planned],
        "tokens": [sum(s.steps for s in one.leaf.path) * planner.tokens_per_step for one in planned],
        "cost": together,
        "cost_alone": alone,
        "family": [],
        "scratch": [],
    }
    path = out / f"family-{name}" / "family.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with trainer.alone():
        with trainer.stage("trunks", f"{name}: trunks at {len(settings.lrs)} rates, {len(FALLS)} falls"):
            trainer.train([one.leaf for tree in trees.values() for one in tree])
        for lr in settings.lrs:
            for fall in FALLS:
                ends = [[trainer.ended[trees[lr, fall, seed][i].leaf.key] for seed in seeds] for i in range(len(sizes))]
                found["family"].append({"lr": lr, "fall": fall, "losses": ends})
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        leaves = {
            (lr, i, seed): planner.scratch(one, lr, seed)
            for lr in settings.check_lrs
            for i, one in enumerate(planned)
            for seed in seeds
        }
        with trainer.stage("scratch", f"{name}: from scratch at {len(settings.check_lrs)} rates"):
            trainer.train(list(leaves.values()))
        for lr in settings.check_lrs:
            ends = [[trainer.ended[leaves[lr, i, seed].key] for seed in seeds] for i in range(len(sizes))]
            found["scratch"].append({"lr": lr, "losses": ends})
        found["seconds"] = {one.name: one.seconds for one in trainer.spent.values()}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def choose(found: dict[str, Any]) -> dict[str, Any]:
    """The trunk that tuning on the two smallest sizes with the first seed would take."""

    def score(one: dict[str, Any]) -> float:
        losses = [one["losses"][size][0] for size in range(2)]
        return math.inf if None in losses else fmean(math.log(loss) for loss in losses)

    return dict(min(found["family"], key=score))


def mean(losses: Sequence[float | None]) -> float:
    """Over the seeds; infinite where one diverged."""
    return math.inf if None in losses else fmean(loss for loss in losses if loss is not None)


def stored() -> dict[str, dict[str, Any]]:
    """What was found, by name."""
    paths = sorted(HERE.glob("family-*/family.json"))
    return {path.parent.name.removeprefix("family-"): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def markdown(found: dict[str, Any]) -> str:
    """A row for every size: out of one run, from scratch at its best rate, and by how much they differ, by seed."""
    chosen = choose(found)
    lines = [
        "| size | parameters | out of one run | from scratch, equal FLOPs | difference by seed | best trunk of all |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for i, size in enumerate(found["sizes"]):
        ours = chosen["losses"][i]
        best = min(found["scratch"], key=lambda one: mean(one["losses"][i]))
        theirs = best["losses"][i]
        apart = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        rates = [one["lr"] for one in found["scratch"]]
        edge = " at the edge" if best["lr"] in (min(rates), max(rates)) else ""
        top = min(found["family"], key=lambda one: mean(one["losses"][i]))
        cells = [
            size,
            f"{found['parameters'][i]:,}",
            f"{mean(ours):.4f}",
            f"{mean(theirs):.4f} (lr {best['lr']:g}{edge})",
            f"{min(apart):+.2f} to {max(apart):+.2f} %",
            f"{mean(top['losses'][i]):.4f} (lr {top['lr']:g} × {top['fall']:g})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    share = found["cost"] / found["cost_alone"]
    lines.append(
        f"\nTuned: lr {chosen['lr']:g}, times {chosen['fall']:g} at a growth. All sizes for {share:.2f} of the FLOPs."
    )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run the families that are named, or print what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="folders family-NAME beside this file; none prints what is stored")
    parser.add_argument("--data", action="append", default=[], metavar="ARGUMENT=PATH", help="of the recipe's data")
    parser.add_argument("--work", type=Path, default=Path("family-work"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=HERE, help="where family-NAME/family.json is written")
    asked = parser.parse_args(words)
    for name in asked.names:
        found = run(name, dict(pair.split("=", 1) for pair in asked.data), asked.work, asked.out)
        print(f"{name}\n{markdown(found)}", flush=True)
    if not asked.names:
        for name, found in stored().items():
            print(f"## {name}\n\n{markdown(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
