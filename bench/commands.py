"""How long commands take to answer, and to draw runs of a million steps: python bench/commands.py

CPU seconds (user and system) of whole processes, from the start of Python (the first line) to the last byte: medians of
several rounds. The first round, which may have to compile modules of Python, does not count. `mupscale report` is given
a summary that holds every step of a curve, and the same run as `mupscale run` would thin it, and `mupscale curves` its
metrics, a line for every step; what they write is shown, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

from _measuring import cpu_seconds
from mupscale.study import ContenderRuns, Curve, StudySummary, SystemRuns
from mupscale.study.paper import thin_curve
from mupscale.study.results import BudgetPoint

COMMANDS = {
    "python alone": ["-c", "pass"],
    "mupscale --help": ["-m", "mupscale", "--help"],
    "mupscale --version": ["-m", "mupscale", "--version"],
    "mupscale trian (a typo)": ["-m", "mupscale", "trian"],
    "mupscale recipes": ["-m", "mupscale", "recipes"],
    "mupscale upscale --help": ["-m", "mupscale", "upscale", "--help"],
    "mupscale train --help": ["-m", "mupscale", "train", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch, mupscale": ["-c", "import torch, mupscale"],
    "import torch, mupscale; mupscale.upscale": ["-c", "import torch, mupscale; mupscale.upscale"],
}


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
    large, told = SystemRuns(32, 128, 0.0, "FLOPs", [runs]), ("long", "mupscale run --paper", "paper")
    StudySummary(*told, {}, {"measure": "train"}, ["A long run."], large=large).save(folder)


def measure(name: str, words: list[str], rounds: int, out: Path | None = None) -> float:
    """Print what a command takes, and what it writes; the median."""
    found = [cpu_seconds([*words, *([] if out is None else [str(out)])], check=out is not None) for _ in range(rounds)]
    middle, written = statistics.median(found[1:]), ""
    if out is not None:
        files = [path for path in [out, *out.rglob("*")] if path.is_file()]
        written = f", {sum(path.stat().st_size for path in files) / 1e6:.2f} MB"
    print(f"{name:<46}{middle:6.2f} s (best {min(found[1:]):.2f}){written}", flush=True)
    return middle


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = 1 + options.rounds
    found = {name: measure(name, words, rounds) for name, words in COMMANDS.items()}
    added = found["import torch, mupscale"] - found["import torch"]
    print(f"{'import mupscale adds to torch':<46}{added:6.2f} s")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_runs(folder, options.steps)
        for name, command, out in (
            ("mupscale report, every step in summary.json", ["report", "every-step"], "0"),
            ("mupscale report, thinned as a run does it", ["report", "thinned"], "1"),
            ("mupscale curves, every step a line", ["curves", "metrics"], "2.png"),
        ):
            words = ["-m", "mupscale", command[0], str(folder / command[1]), "--out"]
            measure(name, words, rounds, folder / out)


if __name__ == "__main__":
    main()
