"""Many runs as one program against the same runs one after another, side by side; `--cpu-only` where there is no time.

For the paper's MLP with AdamW: 125 trials (25 learning rates × 5 seeds of initial weights), each step of all of them by
the engine, against 125 steps of an eager loop. On a GPU with batches of 2000 at widths 100 and 400, on the CPU with
batches of 256 at width 100. Beside each figure: the engine's model FLOPs as a share of what a large matrix product
reaches on the same device in the same precision in the same run. On a GPU also small GPTs, each step of all of them by
the engine, compiled and not, against a program that was stacked by hand. Then what a pruned search costs and finds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from _measuring import seconds, wait
from _pruned import pruned_search
from _stacked_gpt import Sizes, stacked_by_hand
from mupscale.data import CoverTypeSample
from mupscale.engine.stack import RunStack
from mupscale.models.flop_counts import mlp_flops
from mupscale.train import Recipe, Seeds, Spec, matmul_precision

LRS, SEEDS = 25, 5
ROUNDS = 7
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
        compile=compiled or "never",
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


def taking_turns(steps: Sequence[Callable[[int], object]], device: torch.device, budget: float) -> list[float]:
    """Seconds a step of each, in blocks that alternate, so that what else the machine does hits all alike; medians."""
    counts = []
    for step in steps:
        step(3)
        counts.append(max(2, int(budget / ROUNDS / max(1e-6, _seconds(step, 3, device)))))
    found = [[_seconds(s, n, device) for s, n in zip(steps, counts, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def _seconds(step: Callable[[int], object], count: int, device: torch.device) -> float:
    return seconds(lambda: step(count), device) / count


def eager(recipe: Recipe, device: torch.device, groups: bool) -> Callable[[int], None]:
    """What a person writes: the model, AdamW as torch sets it up, data on the device, nothing waited for.

    groups: with μP's parameter groups, which the trials have; or all parameters in one group, which is cheaper.
    """
    family = recipe.family()
    model = family.init(recipe.width).to(device)
    hyper = {"lr": 0.01, "weight_decay": 1e-4}
    adamw = torch.optim.AdamW
    optimizer = family.optimizer(model, adamw, **hyper) if groups else adamw(model.parameters(), **hyper)
    data = CoverTypeSample().to(device)
    position = 0

    def steps(count: int) -> None:
        nonlocal position
        for _ in range(count):
            x, y = data.batch(0, position, recipe.batch)
            position += recipe.batch
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
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

    return 2 * size**3 / taking_turns([products], device, 0.5)[0]


def compare(width: int, batch: int, precision: str, compiled: bool, streams: int, device: torch.device) -> str:
    """One line of the table."""
    trials = LRS * SEEDS
    with matmul_precision(precision):
        best = peak(device, precision)
        asked = recipes(width, batch, precision, compiled, streams)
        began = time.perf_counter()
        stack = RunStack(asked, device)
        stack.advance(3)
        wait(device)
        ready = time.perf_counter() - began
        alone = [eager(asked[0], device, groups) for groups in (True, False)]
        together, same, plain = taking_turns([stack.advance, *alone], device, 1.5 if device.type == "cuda" else 8.0)
    flops = mlp_flops(54, width, 7) * batch * trials
    return (
        f"width {width:>4}  batch {batch:>4}  {precision}{' compiled' if compiled else '         '}  "
        f"{streams} stream{'s' if streams > 1 else ' '}  engine {1e3 * together:7.2f} ms for {trials} steps  "
        f"eager {1e3 * same:5.2f} ms a step: {trials * same / together:5.1f}×  "
        f"(one group: {1e3 * plain:5.2f} ms, {trials * plain / together:5.1f}×)  "
        f"{flops / together / 1e12:6.2f} TFLOP/s, {flops / together / best:5.1%} of a large product  "
        f"(ready in {ready:.0f} s)"
    )


def compare_language_models(runs: int, width: int, device: torch.device) -> str:
    """A line: small GPTs by the engine, compiled and not, and stacked by hand; bf16, 32 × 256 bytes a step."""
    sizes = Sizes(runs, width)
    recipe = Recipe(
        model=Spec(
            "mupscale.models.GPT2",
            {"vocab": sizes.vocab, "context": sizes.context, "layers": sizes.layers, "head_dim": sizes.head_dim},
        ),
        data=Spec("mupscale.data.Shakespeare", {"context": sizes.context}),
        optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}),
        width=width,
        base=64,
        init_at=768,
        steps=1_000_000,
        batch=sizes.batch,
        precision="bf16",
    )
    seeds = [Seeds(init=number, data=number) for number in range(runs)]
    ready, steps = [], []
    with matmul_precision("bf16"):
        for compiled in (True, "never"):
            began = time.perf_counter()
            stack = RunStack([replace(recipe, compile=compiled, seeds=one) for one in seeds], device)  # type: ignore[arg-type]
            stack.advance(3)
            wait(device)
            ready.append(time.perf_counter() - began)
            steps.append(stack.advance)
        kept = stack.vmapped.bytes_for_backward(*stack.replicas.row(0), *stack.streams.first_row(0))
        ours, plain, by_hand = taking_turns([*steps, stacked_by_hand(sizes, device)], device, 6.0)
    return (
        f"{runs:>2} GPTs of width {width}  by hand {1e3 * by_hand:6.2f} ms a step of all  engine compiled "
        f"{1e3 * ours:6.2f} ms: {ours / by_hand:.2f}×  (ready in {ready[0]:.0f} s)  not compiled "
        f"{1e3 * plain:6.2f} ms: {plain / by_hand:.2f}×  (ready in {ready[1]:.0f} s)  "
        f"{len(stack.replicas.layout.names)} parameters, "
        f"{kept / 1e6:.0f} MB kept for the backward pass of each: {1e12 * plain / kept / runs:.1f} ps a byte"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-only", action="store_true", help="leave the GPU out even if there is one")
    parser.add_argument("--gpu-only", action="store_true", help="leave out the CPU and the pruned search")
    parser.add_argument("--language-models", action="store_true", help="on the GPU the GPTs alone")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes its time")
    parser.add_argument("--no-search", action="store_true", help="leave out the pruned search")
    parser.add_argument("--seeds", type=int, default=1, help="with how many seeds to repeat the pruned search")
    options = parser.parse_args()
    if torch.cuda.is_available() and not options.cpu_only:
        device = torch.device("cuda", 0)
        print(f"On {torch.cuda.get_device_name(device)}, torch {torch.__version__}:")
        for width in () if options.language_models else (100, 400):
            for precision in ("tf32", "bf16"):
                for compiled in (False,) if options.no_compile else (False, True):
                    print(compare(width, 2000, precision, compiled, 1, device), flush=True)
            print(compare(width, 2000, "bf16", not options.no_compile, SEEDS, device), flush=True)
        for runs, width in ((20, 128), (8, 256)) if not options.no_compile else ():
            print(compare_language_models(runs, width, device), flush=True)
    if options.gpu_only:
        return
    print(f"On the CPU, {torch.get_num_threads()} threads:")
    print(compare(100, 256, "fp32", False, 1, torch.device("cpu")), flush=True)
    if not options.no_search:
        print("Pruned search against the grid, Sweep 2 of an MLP from width 64 to 128:")
        for seed in range(options.seeds):
            pruned_search(seed=seed)


if __name__ == "__main__":
    main()
