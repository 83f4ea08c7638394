"""What our training loop costs: python bench/train.py [--device cuda]

Every figure is a ratio within this one run: our loop (data, schedule, metrics, everything) and a bare one (model, torch
optimizer, nothing else) take turns in one process.

- the MLP on data that lies on the device (the bare loop gathers its batches from there, too), and GPT-2: steps a second
  of our loop over those of the bare loop; and over those of a bare loop whose optimizer has our parameter groups, which
  μP needs and of which each takes launches of its own
- the token reader's part of a GPT-2 step
- peak memory of a growth event over what the narrow and the wide model with their optimizer states take
- on CUDA: model-FLOPs utilisation of GPT-2 124M, bf16, compiled, sequences of 1024; of a bare compiled loop, too
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from _measuring import forget_peak, resident, seconds
from mupscale.data import Split, Table
from mupscale.data.packing import pack
from mupscale.train import Checkpoints, Evaluation, Growth, Recipe, Spec, TrainingRun
from mupscale.train.processes import Processes

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # dense bf16, as the makers state them
QUIET = {"checkpoints": Checkpoints(every=0), "evaluation": Evaluation(every=0), "steps": 10**9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder))
        mlp = mlp_recipe(Path(folder))
        gpt = gpt_recipe(Path(folder), tokens, large=device.type == "cuda")
        cases = [("MLP", mlp, 50), ("GPT-2", gpt, 5)]
        if device.type == "cuda":
            cases.insert(
                1, ("MLP as CUDA graphs", replace(mlp, compile="reduce-overhead", out=mlp.out + "-graphs"), 50)
            )
        for name, recipe, block in cases:
            ours = quiet_run(recipe, device)
            ours.begin(resume=False)
            ratio, seconds = compare(ours.advance, bare_loop(ours), block, device)
            shown = f"target ≥ 0.97; {seconds * 1e3:.2f} ms a step"
            print(f"{name}: our loop / bare loop, in steps a second: {ratio:.3f}  ({shown})")
            ratio, _ = compare(ours.advance, bare_loop(ours, grouped=True), block, device)
            print(f"{name}: our loop / bare loop with our parameter groups: {ratio:.3f}  (target ≥ 0.97)")
            if ours.data.unit == "tokens":
                reading = time_reader(ours)
                shown = f"target ≤ 0.02; {reading * 1e6:.0f} µs"
                print(f"{name}: reading tokens / a step: {reading / seconds:.4f}  ({shown})")
            ours.close()
        growth_memory(gpt, device)
        if device.type == "cuda":
            utilisation(Path(folder), tokens, device)


def quiet_run(recipe: Recipe, device: torch.device) -> TrainingRun:
    return TrainingRun(recipe, Processes(device), listeners=[])


def write_tokens(folder: Path) -> Path:
    """Two million bytes of text-like noise, packed as any corpus is."""
    letters = np.random.default_rng(0).integers(97, 123, (200, 10_000), dtype=np.uint8)
    (folder / "documents").mkdir()
    for number, row in enumerate(letters):
        (folder / "documents" / f"{number:03d}.txt").write_bytes(row.tobytes())
    return pack(str(folder / "documents"), str(folder / "tokens"), "bytes", validation=0.05)


class Rows(Table):
    """As many rows as Forest CoverType has for training, of noise."""

    def __init__(self) -> None:
        x, y = torch.randn(465_000, 54), torch.randint(7, (465_000,))
        super().__init__(Split(x, y, x[:2000], y[:2000]), classes=7)


def mlp_recipe(folder: Path) -> Recipe:
    return Recipe(
        model=Spec("mupscale.models.MLP", {"d_in": 54, "d_out": 7}),
        data=Spec("__main__.Rows"),
        optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3, "weight_decay": 1e-4}),
        width=500,
        base=100,
        batch=2000,
        log_every=50,
        out=str(folder / "mlp"),
        **QUIET,
    )


def gpt_recipe(folder: Path, tokens: Path, *, large: bool) -> Recipe:
    context = 1024 if large else 128
    return Recipe(
        model=Spec(
            "mupscale.models.GPT2",
            {"vocab": 50304 if large else 257, "context": context, "layers": 12 if large else 4, "head_dim": 64},
        ),
        data=Spec("mupscale.data.Text", {"tokens": str(tokens), "context": context}),
        optimizer=Spec("torch.optim.AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
        width=768 if large else 128,
        base=128,
        batch=8,
        precision="bf16" if large else "fp32",
        log_every=10,
        out=str(folder / "gpt"),
        **QUIET,
    )


def bare_loop(run: TrainingRun, *, grouped: bool = False, compiled: bool = False) -> Callable[[], None]:
    """The same model and loss with torch's own optimizer on one batch, and nothing else."""
    recipe, device = run.recipe, run.processes.device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing here depends on initial values
        model = run.family.init(recipe.width).to(device)
    fused = {"fused": True} if device.type == "cuda" else {}
    groups = [{"params": list(model.parameters())}]
    if grouped:
        place = {id(p): number for number, p in enumerate(run.model.parameters())}
        ours, settings = list(model.parameters()), ("lr", "weight_decay", "eps")
        groups = [
            {"params": [ours[place[id(p)]] for p in group["params"]], **{name: group[name] for name in settings}}
            for group in run.optimizer.param_groups
        ]
    optimizer = torch.optim.AdamW(groups, **recipe.optimizer.init_args, **fused)
    x, y = run.data.batch(0, 0, recipe.batch)
    loss = recipe.loss_function()
    resident, rows = isinstance(run.data, Table), torch.randperm(recipe.batch, device=device)

    def objective(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16"):
            return loss(model(x), y)

    if compiled:
        objective = torch.compile(objective)

    def step() -> None:
        nonlocal x, y
        if resident:
            x, y = run.data.examples(rows)
        objective(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds a step, over so many of them."""

    def steps() -> None:
        for _ in range(count):
            step()

    return seconds(steps, device) / count


def compare(
    ours: Callable[[], object], bare: Callable[[], object], block: int, device: torch.device, rounds: int = 15
) -> tuple[float, float]:
    """Median over turns of bare time / our time, and our median time a step."""
    timed(ours, block, device), timed(bare, block, device)
    pairs = []
    for number in range(rounds):  # who goes first alternates, too
        if number % 2:
            mine, theirs = timed(ours, block, device), timed(bare, block, device)
        else:
            theirs, mine = timed(bare, block, device), timed(ours, block, device)
        pairs.append((theirs, mine))
    return statistics.median(t / m for t, m in pairs), statistics.median(m for _, m in pairs)


def time_reader(run: TrainingRun) -> float:
    recipe, device = run.recipe, run.processes.device
    position = iter(range(10**9))
    return timed(lambda: run.data.batch(1, next(position) * recipe.batch, recipe.batch), 100, device)


def growth_memory(recipe: Recipe, device: torch.device) -> None:
    """The largest memory in use during a growth, over narrow and wide with optimizer states."""
    large = replace(
        recipe,
        width=512,
        batch=2,
        out=None,
        grow=[Growth(at=2, width=1024, noise=0.5)],
        model=replace(recipe.model, init_args={**recipe.model.init_args, "layers": 12, "vocab": 50304}),
    )
    run = quiet_run(large, device)
    before = in_use(device)
    run.begin(resume=False)
    run.advance()
    run.advance()
    gc.collect()
    narrow = state_bytes(run)
    growth = large.grow[0]
    reset_peak(device)
    run._grow(growth)
    peak = peak_use(device) - before
    wide = state_bytes(run)
    print(
        f"Growth 512 → 1024: peak memory / (narrow + wide with states): {peak / (narrow + wide):.3f}  (target ≤ 1.05; "
        f"{peak / 2**30:.2f} GiB against {narrow / 2**30:.2f} + {wide / 2**30:.2f})"
    )
    run.close()


def state_bytes(run: TrainingRun) -> int:
    states = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in [*run.model.parameters(), *run.model.buffers(), *states])


def reset_peak(device: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats(device) if device.type == "cuda" else forget_peak()


def peak_use(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident()


def utilisation(folder: Path, tokens: Path, device: torch.device) -> None:
    recipe = gpt_recipe(folder, tokens, large=True)
    for batch in (32, 64):
        run = quiet_run(replace(recipe, compile=True, batch=batch, out=None), device)
        run.begin(resume=False)
        for _ in range(5):
            run.advance()
        ratio, seconds = compare(run.advance, bare_loop(run, compiled=True), 10, device, rounds=5)
        flops = (run.flops_per_example or 0.0) * batch / seconds
        name = torch.cuda.get_device_name(device)
        peak = next((p for key, p in PEAK_TFLOPS.items() if key in name), None)
        shown = f"{flops / peak / 1e12:.1%} of {peak:g} TFLOP/s" if peak else "peak not known"
        speed = batch * 1024 / seconds
        print(
            f"GPT-2 124M, bf16, compiled, {batch} × 1024 tokens: {speed:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s, "
            f"{shown}, {ratio:.3f} of a bare compiled loop ({name})"
        )
        run.close()
        del run
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
