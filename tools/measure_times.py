"""Measure the times that the docs promise: python tools/measure_times.py [WORDS OF A COMMAND …]

Each command runs with one thread, and what is told is the CPU time of its processes: seconds of one core, whatever else
the machine does (a busy one has slower cores, so measure on a quiet one). With two cores it takes less than that.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time

COMMANDS = (
    "train mlp-covtype-tiny",
    "train gpt2-text-tiny",
    "train resnet-cifar100-tiny",
    "run mlp-covtype-demo",
    "family gpt2-text-tiny",
    "run mlp-covtype-tiny --paper",
    "transfer-check mlp-covtype-demo --widths '[8, 16, 32]' --study.seeds 2",
    "limit mlp",
    "limit examples",
    "limit sweep",
    "limit grow",
)
"""Those beside which a time stands: in README.md, docs/, `--help`, the recipes and the Makefile."""


def main() -> None:
    """Measure all, or those that contain the words given."""
    asked = " ".join(sys.argv[1:])
    for command in (command for command in COMMANDS if asked in command):
        with tempfile.TemporaryDirectory() as folder:
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            words = [sys.executable, "-m", "mupscale", *shlex.split(command), "--out", os.path.join(folder, "out")]
            subprocess.run(
                words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=True
            )
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{cpu:6.0f} s of one core ({wall:.0f} s by the clock)  mupscale {command}", flush=True)


if __name__ == "__main__":
    main()
