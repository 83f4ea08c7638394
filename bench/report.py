"""Pictures of runs of a million steps: python bench/report.py

CPU seconds (user and system) of whole commands, from the start of Python to the last byte, and what they write:
`mupscale report` of a summary that holds every step of a curve, `mupscale report` of the same run as `mupscale run`
would thin it, and `mupscale curves` of its metrics, a line for every step. The first round, which may have to compile
modules of Python, does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mupscale.study import ContenderRuns, Curve, StudySummary, SystemRuns
from mupscale.study.paper import thin_curve
from mupscale.study.results import BudgetPoint


def write_runs(folder: Path, steps: int) -> None:
    """A run of so many steps with a peak and a pit, as two summaries and as metrics."""
    losses = [3.0 / math.sqrt(step) + 2.0 + step % 7 / 100 for step in range(1, steps + 1)]
    losses[steps // 3], losses[2 * steps // 3] = 77.0, 0.25
    curve = list(enumerate(losses, 1))
    write_summary(folder / "every-step", steps, Curve(0, "finished", [step for step, _ in curve], losses))
    write_summary(folder / "thinned", steps, Curve(0, "finished", **thin_curve(curve)))
    (folder / "metrics").mkdir()
    with open(folder / "metrics" / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step, loss in curve:
            values = {"step": step, "loss": loss, "lr": 0.001, "width": 128, "flops": 1e6 * step, "seconds": step / 100}
            file.write(json.dumps({"kind": "train", **values}) + "\n")


def write_summary(folder: Path, steps: int, curve: Curve) -> None:
    """A summary with this curve in it."""
    points = [BudgetPoint(1.0, steps, 1e6 * steps, [curve.final()])]
    runs = ContenderRuns("from-scratch", 128, 0.1, 0.0, points, cost_per_step=1e6, curves=[curve])
    large = SystemRuns(32, 128, 0.0, "FLOPs", [runs])
    StudySummary("long", "mupscale run --paper", "paper", {}, {"measure": "train"}, ["A long run."], large=large).save(
        folder
    )


def cpu_seconds(words: list[str]) -> float:
    """User and system seconds of one command."""
    keeps_compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "mupscale", *words], stdout=subprocess.DEVNULL, env=keeps_compiled, check=True
    )
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_runs(folder, options.steps)
        commands = {
            "mupscale report, every step in summary.json": ["report", str(folder / "every-step"), "--out"],
            "mupscale report, thinned as a run does it": ["report", str(folder / "thinned"), "--out"],
            "mupscale curves, every step a line": ["curves", str(folder / "metrics"), "--out"],
        }
        for number, (name, words) in enumerate(commands.items()):
            out = folder / (f"{number}.png" if words[0] == "curves" else str(number))
            seconds = [cpu_seconds([*words, str(out)]) for _ in range(1 + options.rounds)][1:]
            written = sum(path.stat().st_size for path in [out, *out.rglob("*")] if path.is_file())
            print(f"{name:<46}{statistics.median(seconds):6.2f} s (best {min(seconds):.2f}), {written / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
