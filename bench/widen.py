"""What widening costs, against writing the output once, and the memory it takes: python bench/widen.py

A GPT-2 of about 1.2 GB comes out. Both write to fresh memory, as a wide model built on the meta device does (the
allocator is told to give pages back, else the later repeats would find them ready); they alternate in one process,
and the figures are medians of ratios, so that the machine's speed cancels: against filling the output with a
constant, which only writes, and against copying it from memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import mupscale as mu
from mupscale.models import GPT2


def build(heads: int, layers: int) -> nn.Module:
    return GPT2(50257, 1024, layers=layers, heads=heads, head_dim=64)


def write_once(shapes: list[torch.Size], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, device=device).fill_(1.0) for shape in shapes]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of the work, its result kept alive till the end so that its memory is fresh."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def peak_resident() -> int | None:
    """Highest resident memory since the last reset, in bytes, where the system tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=10, help="of the narrow model; the wide one has twice as many")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)

    narrow = build(args.heads, args.layers).to(device)
    with torch.device("meta"):
        wide = build(2 * args.heads, args.layers)
    plan = mu.plan(narrow, wide)
    shapes = [p.shape for p in wide.parameters()]
    output = sum(4 * shape.numel() for shape in shapes)
    largest = max(4 * shape.numel() for shape in shapes)

    targets = []
    for _ in range(args.repeats + 1):
        with torch.device("meta"):
            targets.append(build(2 * args.heads, args.layers))

    def widen() -> nn.Module:
        return mu.widen(narrow, targets.pop(), plan)

    reset_peak()
    before = peak_resident()
    kept = widen()
    after = peak_resident()
    outputs = [p.detach() for p in kept.parameters()]
    times: dict[str, list[float]] = {"fill": [], "copy": [], "widen": []}
    for _ in range(args.repeats):
        times["fill"].append(seconds(lambda: write_once(shapes, device), device))
        times["widen"].append(seconds(widen, device))
        times["copy"].append(seconds(lambda: [output.clone() for output in outputs], device))
    print(f"output {output / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB, on {device}")
    for name in ("fill", "copy"):
        ratio = statistics.median(g / w for g, w in zip(times["widen"], times[name], strict=True))
        grow, write = statistics.median(times["widen"]), statistics.median(times[name])
        print(f"widen / {name} the output once: {ratio:.2f}  (target ≤ 1.5; {grow:.3f} s against {write:.3f} s)")
    if device.type == "cpu" and before is not None and after is not None:
        print(f"memory / (output + largest tensor): {(after - before) / (output + largest):.2f}  (target ≤ 1)")


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # glibc reads it when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(4 << 20)})
    main()
