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


def take_turns(commands: dict[str, list[str]], rounds: int, *, check: bool) -> dict[str, list[float]]:
    """CPU seconds of each command, in rounds; the first one does not count."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(1 + rounds):
        for name, words in commands.items():
            found[name].append(cpu_seconds(words, check=check))
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = take_turns(COMMANDS, options.rounds, check=False)
    pairs = zip(found["import torch, mupscale"], found["import torch"], strict=True)
    found["import mupscale adds to torch"] = [ours - theirs for ours, theirs in pairs]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_runs(folder, options.steps)
        drawn = {
            "mupscale report, every step in summary.json": ["report", "every-step", "0"],
            "mupscale report, thinned as a run does it": ["report", "thinned", "1"],
            "mupscale curves, every step a line": ["curves", "metrics", "2.png"],
        }
        words = {
            n: ["-m", "mupscale", w, str(folder / of), "--out", str(folder / out)] for n, (w, of, out) in drawn.items()
        }
        found |= take_turns(words, options.rounds, check=True)
        for name, seconds in found.items():
            out = folder / drawn[name][2] if name in drawn else None
            files = [path for path in [out, *out.rglob("*")] if path.is_file()] if out is not None else []
            written = f", {sum(path.stat().st_size for path in files) / 1e6:.2f} MB" if files else ""
            print(f"{name:<46}{statistics.median(seconds):6.2f} s (best {min(seconds):.2f}){written}")


if __name__ == "__main__":
    main()
