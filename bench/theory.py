"""What the infinite-width limit costs: python bench/theory.py

A 3-layer tanh MLP on 4 inputs, 5 steps, an upscaling with noise, 5 steps more. Time is that of one core, or by the
clock on a GPU and with more --threads, the median of several runs; memory is what the program and the network hold at
the end.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from mupscale.theory import Limit, MLPSetup, Network, Stage, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[5000, 20_000, 80_000])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 1)
    mlp, stages = MLPSetup(args.layers, "tanh"), [Stage(5, 0.3), Stage(5, 0.2, args.times, 0.5)]
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter

    def once(samples: int, seed: int) -> tuple[float, int]:
        start = clock()
        program = Limit(samples, args.times, seed, device=args.device)
        float(run(program, mlp, inputs, targets, stages).losses[-1])
        return clock() - start, program.latents

    once(1000, 0)
    for samples in args.samples:
        runs = [once(samples, seed) for seed in range(args.runs)]
        seconds, latents = statistics.median(t for t, _ in runs), runs[0][1]
        size = held(samples, args)
        print(
            f"{samples} samples, {args.layers} layers, 4 inputs, 10 steps, k = {args.times}: {seconds:.2f} s"
            f"{'  (target ≤ 1.5)' if samples == 20_000 and args.layers == 3 else ''}; {latents} latents; "
            f"{size / 2**20:.0f} MiB, {size / (samples * latents):.0f} bytes a sample and latent  ({args.device})"
        )


def held(samples: int, args: argparse.Namespace) -> int:
    """Bytes of the rows that a program, its matrices and its updates keep after 10 steps."""
    program = Limit(samples, args.times, device=args.device)
    net = Network(program, MLPSetup(args.layers, "tanh"), 3, 1)
    inputs = torch.randn(4, 3, device=args.device, dtype=torch.float64)
    for step in range(10):
        if step == 5:
            net.upscale(args.times, 0.5)
        net.step(net.forward(inputs), 0.1)
    rows = list(program._fresh.values())
    for weight in net.hidden:
        rows += [weight.updates.left, weight.updates.right]  # type: ignore[union-attr]
        rows += [r for _, matrix in weight.parts for side in matrix.sides for r in (side.directions, side.products)]  # type: ignore[attr-defined]
    return sum(r._memory.nbytes for r in rows)


if __name__ == "__main__":
    main()
