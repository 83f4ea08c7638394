"""How long the command line takes to answer, and what `import mupscale` adds to torch: python bench/startup.py

CPU seconds (user and system) of whole processes, medians of several rounds; the first line is Python itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

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


def cpu_seconds(words: list[str]) -> float:
    """User and system seconds of one process."""
    before = os.times()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, words in COMMANDS.items():
            seconds[name].append(cpu_seconds(words))
    for name, values in seconds.items():
        print(f"{name:<42}{statistics.median(values):6.2f} s   (best {min(values):.2f})")
    added = [
        mine - torch for mine, torch in zip(seconds["import torch, mupscale"], seconds["import torch"], strict=True)
    ]
    print(f"{'import mupscale adds to torch':<42}{statistics.median(added):6.2f} s")


if __name__ == "__main__":
    main()
