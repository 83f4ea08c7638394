"""Does growing pay, and was it foretold: the comparisons of docs/results/forecast.md.

    python results/comparisons.py NAME ... --data path=covtype.data.gz [--work work]

Each folder comparison-NAME beside this file holds a recipe with a section `study`, which `mupscale run` takes as
well. Its summary.json, of which `mupscale report` draws a page, is written at the end; a run that was stopped goes on
in the work folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from mupscale.study import StudySettings, StudySummary, load_summary, run_pay
from mupscale.study.forecast import LOSS_ROW
from mupscale.train import Recipe

HERE = Path(__file__).parent


def stored() -> dict[str, StudySummary]:
    """The summaries beside this file, by name."""
    folders = sorted(HERE.glob("comparison-*"))
    return {folder.name.removeprefix("comparison-"): load_summary(folder) for folder in folders}


def markdown() -> str:
    """Forecast against outcome, a row for every contender: by how much it ends above the base model continued."""
    lines = ["| comparison | contender | forecast | measured |", "| --- | --- | --- | --- |"]
    for name, summary in stored().items():
        for row in summary.forecast["held"]:
            contender, _, what = row["what"].partition(", ")
            if f", {what}" == LOSS_ROW:
                lines.append(f"| {name} | {contender} | {_range(row['forecast'])} | {_outcome(row)} |")
    return "\n".join(lines)


def _range(forecast: dict[str, Any]) -> str:
    low, value, high = (100 * forecast[part] for part in ("low", "value", "high"))
    return f"{value:+.0f} % ({low:+.0f} to {high:+.0f})"


def _outcome(row: dict[str, Any]) -> str:
    return f"{100 * row['measured']:+.0f} %" + ("" if row["held"] else ", outside")


def main(words: Sequence[str] | None = None) -> int:
    """Run the comparisons that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="folders comparison-NAME beside this file")
    parser.add_argument("--data", action="append", default=[], metavar="ARGUMENT=PATH", help="of the recipe's data")
    parser.add_argument("--work", type=Path, default=Path("comparison-work"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=HERE, help="where comparison-NAME/summary.json is written")
    asked = parser.parse_args(words)
    for name in asked.names:
        values = yaml.safe_load((HERE / f"comparison-{name}" / "comparison.yaml").read_text(encoding="utf-8"))
        settings = StudySettings(**values.pop("study", {}))
        described = Recipe.from_json(values).to_json()  # with the paths of the file
        values["data"]["init_args"] |= dict(pair.split("=", 1) for pair in asked.data)
        command = f"mupscale run results/comparison-{name}/comparison.yaml"
        summary = run_pay(Recipe.from_json(values), settings, asked.work / name, command=command)
        print(f"{name}: {summary.answer['sentence']}", *summary.notes, sep="\n", flush=True)
        folder = asked.out / f"comparison-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        values = asdict(replace(summary, name=name, recipe=described))
        (folder / "summary.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
