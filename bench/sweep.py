"""Many runs as one program against the same runs one after another, side by side; `--cpu-only` where there is no time.

For the paper's MLP with AdamW: 125 trials (25 learning rates × 5 seeds of initial weights), each step of all of them by the
engine, against 125 steps of a plain eager loop. On a GPU with batches of 2000 at widths 100 and 400, on the CPU with
batches of 256 at width 100. Beside each figure: the engine's model FLOPs as a share of what a large matrix product reaches
on the same device in the same precision in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mupscale.data import CoverTypeSample
from mupscale.flops import mlp_flops
from mupscale.models import MLP
from mupscale.sweep.stack import Stack
from mupscale.train.loop import matmul_precision
from mupscale.train.recipe import Recipe, Seeds, Spec

LRS, SEEDS = 25, 5
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


def recipes(width: int, batch: int, precision: str, compiled: bool, streams: int) -> list[Recipe]:
    """The trials; `streams`: how many orders of the data there are among them."""
    recipe = Recipe(
        model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        data=Spec("mupscale.data.CoverTypeSample"),
        optimizer=Spec("torch.optim.AdamW", {"lr": 0.1, "weight_decay": 1e-4}),
        width=width,
        base=1,
        init_at=100,
        steps=1_000_000,
        batch=batch,
        precision=precision,  # type: ignore[arg-type]
        compile=compiled,
    )
    rates = [0.001 * 1.3**number for number in range(LRS)]
    return [
        replace(
            recipe,
            optimizer=replace(recipe.optimizer, init_args={**recipe.optimizer.init_args, "lr": lr}),
            seeds=Seeds(init=seed, data=seed % streams),
        )
        for lr in rates
        for seed in range(SEEDS)
    ]


def timed(step: Callable[[int], object], device: torch.device, seconds: float, rounds: int = 3) -> float:
    """Seconds a step, the best of a few rounds after a warm-up."""
    step(3)
    _wait(device)
    began = time.perf_counter()
    step(3)
    _wait(device)
    count = max(3, int(seconds / rounds / max(1e-6, (time.perf_counter() - began) / 3)))
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        step(count)
        _wait(device)
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def eager(width: int, batch: int, precision: str, device: torch.device) -> Callable[[int], None]:
    """What a person writes: a plain model, AdamW as torch sets it up, data on the device, nothing waited for."""
    model = MLP(54, width, 7).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    data = CoverTypeSample().to(device)
    position = 0

    def steps(count: int) -> None:
        nonlocal position
        for _ in range(count):
            x, y = data.batch(0, position, batch)
            position += batch
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


def peak(device: torch.device, precision: str) -> float:
    """FLOPs a second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))

    def products(count: int) -> None:
        out: Tensor = a
        for _ in range(count):
            out = a @ b
        del out

    return 2 * size**3 / timed(products, device, 0.5)


def compare(width: int, batch: int, precision: str, compiled: bool, streams: int, device: torch.device) -> str:
    """One line of the table."""
    trials = LRS * SEEDS
    with matmul_precision(precision):
        best = peak(device, precision)
        began = time.perf_counter()
        stack = Stack(recipes(width, batch, precision, compiled, streams), device)
        stack.advance(3)
        _wait(device)
        ready = time.perf_counter() - began
        together = timed(stack.advance, device, 1.0 if device.type == "cuda" else 6.0)
        del stack
        alone = timed(eager(width, batch, precision, device), device, 1.0)
    flops = mlp_flops(54, width, 7) * batch * trials
    return (
        f"width {width:>4}  batch {batch:>4}  {precision}{' compiled' if compiled else '         '}  "
        f"{streams} stream{'s' if streams > 1 else ' '}  engine {1e3 * together:8.3f} ms for {trials} steps   "
        f"eager {1e3 * alone:6.3f} ms a step   {trials * alone / together:6.1f}×   "
        f"{flops / together / 1e12:7.2f} TFLOP/s, {flops / together / best:5.1%} of a large product   "
        f"(ready in {ready:.0f} s)"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-only", action="store_true", help="leave the GPU out even if there is one")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes its time")
    options = parser.parse_args()
    if torch.cuda.is_available() and not options.cpu_only:
        device = torch.device("cuda", 0)
        print(f"On {torch.cuda.get_device_name(device)}, torch {torch.__version__}:")
        for width in (100, 400):
            for precision in ("tf32", "bf16"):
                for compiled in (False,) if options.no_compile else (False, True):
                    print(compare(width, 2000, precision, compiled, 1, device), flush=True)
            print(compare(width, 2000, "bf16", not options.no_compile, SEEDS, device), flush=True)
    print(f"On the CPU, {torch.get_num_threads()} threads:")
    print(compare(100, 256, "fp32", False, 1, torch.device("cpu")), flush=True)


if __name__ == "__main__":
    main()
