"""What widening costs, against writing the output once, and the memory it takes: python bench/widen.py

A GPT-2 of about 1.2 GB comes out. Both write to fresh memory, as a wide model built on the meta device does (the
allocator is told to give pages back, else the later repeats would find them ready); they alternate in one process,
and the figures are medians of ratios, so that the machine's speed cancels: against filling the output with a
constant, which only writes, and against copying it from memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

import torch
from torch import nn

import mupscale as mu
from _measuring import peak_memory, seconds
from mupscale.models import GPT2


def build(heads: int, layers: int) -> nn.Module:
    return GPT2(50257, 1024, layers=layers, heads=heads, head_dim=64)


def write_once(shapes: list[torch.Size], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, device=device).fill_(1.0) for shape in shapes]


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

    with peak_memory() as most:
        kept = widen()
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
    if device.type == "cpu":
        print(f"memory / (output + largest tensor): {most[0] / (output + largest):.2f}  (target ≤ 1)")


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # glibc reads it when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(4 << 20)})
    main()
