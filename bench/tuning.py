"""What stopping candidates early saves in the tuning of a comparison, and whether the same values are chosen.

Every candidate of a recipe's smallest width is trained to the end once. Then the tuning is repeated with other margins
(`study.prune`), reading what has been trained: the share of the cost that is left, and of every contender the
values that it chooses, and how much higher their final loss was with one seed.

    python bench/tuning.py recipes/mlp-covtype-demo.yaml
    python bench/tuning.py results/comparison-covtype-*/comparison.yaml --device cuda --data path=covtype.data.gz
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from mupscale.study import Sweep
from mupscale.study.contenders import contender_named
from mupscale.study.pay import PayStudy, tune_contenders
from mupscale.study.results import Tuning
from mupscale.study.settings import StudySettings
from mupscale.study.systems import System
from mupscale.study.training import Trainer
from mupscale.study.tree import list_stretches
from mupscale.train import Recipe, Seeds

MARGINS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
NO_MARGIN = 1e9


def tune(recipe: Recipe, settings: StudySettings, folder: Path) -> tuple[System, Tuning]:
    """The tuning alone, in a folder in which what is finished is read."""
    run = PayStudy(recipe, settings, folder, lambda text: None)
    system = run.small[0]
    trainer = Trainer(run.ground, folder, "tuning", settings.engine, lambda text: None, 3)
    with trainer.alone():
        return system, tune_contenders(system, trainer, float(recipe.optimizer.init_args["lr"]))


def contenders(tuning: Tuning) -> list[Sweep]:
    """What was tried for each of them."""
    return [one for name, one in tuning.items() if name != "base"]


def candidates_cost(system: System, tuning: Tuning) -> float:
    """Of the first seed of all candidates: those that were stopped had their first budget alone."""
    total = 0.0
    for tuned in contenders(tuning):
        one = contender_named(tuned.name)
        early, full = system.candidate(one, 1.0, 1.0, 0.0, 0)
        base = system.base_steps or 0
        leaves = [leaf for leaf in (early, full) if leaf is not None]
        whole = sum(each.steps for each in list_stretches(leaves)) - (base if one.from_base else 0)
        first = whole - full.steps
        each = system.costs.cost_per_step(system.width_of(one))
        total += each * sum(first if cell.status == "stopped" else whole for cell in tuned.trials)
    return total


def report(name: str, recipe: Recipe, settings: StudySettings, margins: Sequence[float]) -> None:
    """A table for one recipe."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        system, all_of_them = tune(recipe, replace(settings, prune=NO_MARGIN), folder)
        final = {(t.name, cell.lr, cell.noise): cell.loss for t in contenders(all_of_them) for cell in t.trials}
        in_one_go = sum(
            system.steps(one) * system.costs.cost_per_step(system.width_of(one)) * len(tuned.trials)
            for tuned in contenders(all_of_them)
            for one in [contender_named(tuned.name)]
        )
        print(f"{name}: {sum(len(t.trials) for t in contenders(all_of_them))} candidates")
        for margin in margins:
            system, tuning = tune(recipe, replace(settings, prune=margin), folder)
            changes = []
            for ours, theirs in zip(contenders(tuning), contenders(all_of_them), strict=True):
                if (ours.lr, ours.noise) != (theirs.lr, theirs.noise):
                    was, now = (final[one.name, one.lr, one.noise] for one in (theirs, ours))
                    higher = "" if was is None or now is None else f", {now / was - 1:+.2%}"
                    changes.append(f"{ours.name} {theirs.lr:g}/{theirs.noise:g} → {ours.lr:g}/{ours.noise:g}{higher}")
            stopped = sum(cell.status == "stopped" for one in contenders(tuning) for cell in one.trials)
            share = candidates_cost(system, tuning) / in_one_go
            print(
                f"  margin {margin:5.0%}: {stopped:>2} stopped, {share:.2f} of the cost of all in one go; "
                f"{'; '.join(changes) or 'the same values'}",
                flush=True,
            )


def main() -> None:
    """Print a table for every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", action="append", default=[], metavar="ARGUMENT=PATH", help="of the recipe's data")
    parser.add_argument("--seeds", type=int, default=1, help="how often to repeat it, with other initial seeds")
    asked = parser.parse_args()
    for path in asked.recipes:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings = StudySettings(**values.pop("study", {}))
        values.pop("method", None)
        data = values["data"]
        data["init_args"] = data.get("init_args", {}) | dict(pair.split("=", 1) for pair in asked.data)
        recipe = replace(Recipe.from_json(values), device=asked.device)
        for seed in range(0, 100 * asked.seeds, 100):
            seeds = Seeds(init=seed, data=seed, noise=seed)
            report(f"{path.parent.name}/{path.name}, seed {seed}", replace(recipe, seeds=seeds), settings, MARGINS)


if __name__ == "__main__":
    main()
