"""Summaries of runs that never were, for the report's tests: plausible, and always the same."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mupscale.checks.coordinate_verdicts import Measurement
from mupscale.method.summary import Choice, Curve, Runs, StageCost, Summary
from mupscale.sweep.space import Space, Status, Sweep, Trial

LRS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
NOISES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
STEPS = 2000
DROPPED = "(b) from scratch, with the same drop of the learning rate"


def example(**changes: Any) -> Summary:
    """An MLP from width 128 to 256, three seeds, tuned at 64 on a grid of 6 × 6, some of whose cells diverged."""
    summary = Summary(
        name="mlp-covtype",
        command="mupscale run recipes/mlp-covtype-tiny.yaml --seeds.init 0",
        recipe={
            "model": {"class_path": "mupscale.models.MLP", "init_args": {"d_in": 54, "d_out": 7}},
            "data": {"class_path": "mupscale.data.CoverTypeSample", "init_args": {}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.016, "weight_decay": 0.01}},
            "width": 128,
            "base": 32,
            "steps": 2 * STEPS,
            "batch": 200,
            "grow": [{"at": STEPS, "width": 256}],
        },
        method={"widths": [64], "lrs": list(LRS), "upscaled_lrs": list(LRS), "noises": list(NOISES), "seeds": 3},
        sweeps=[sweep_1(), sweep_2()],
        choice=Choice(base_lr=0.016, lr=0.004, noise=1.0, unit="init"),
        runs=[
            runs("base", "base model, width 128", 128, 0.016, 1.05, 0.46, seeds=3),
            runs("scratch", "(a) from scratch, width 256", 256, 0.016, 1.0, 0.412, seeds=3, more=1.28),
            runs("scratch-drop", DROPPED, 256, 0.016, 1.0, 0.386, drop=1280, more=1.28),
            runs("continued", "(c) base model continued, width 128", 128, 0.004, 0.46, 0.417, after=True, more=3.5),
            runs("exact", "(d) upscaled without noise, width 256", 256, 0.004, 0.46, 0.421, after=True),
            runs("upscaled", "(e) upscaled with noise, width 256", 256, 0.004, 0.62, 0.351, after=True, noise=1.0),
        ],
        stages=[
            StageCost("small base model, width 64", 1.2e11, 4.2),
            StageCost("sweep 1 at width 64", 7.5e11, 21.4),
            StageCost("sweep 2 at width 64 → 128", 9.6e12, 63.0),
            StageCost("base model, width 128", 2.4e12, 31.2),
            StageCost("from scratch, width 256", 1.6e13, 123.0),
            StageCost("upscaled, width 256", 8.2e12, 61.7),
        ],
        costs={
            "tuning": 1.05e13,
            "base": 8.0e11,
            "scratch_total": 2.73e12,
            "scratch_min_loss": 0.412,
            "upscaled_to_scratch_loss": 8.3e11,
            "speedup_sunk": 2.73 / 0.83,
            "speedup_base_charged": 2.73 / 1.63,
            "speedup_all_charged": 2.73 / 12.1,
            "tuning_speedup": 3.4,
        },
        gain={
            "scratch": 0.412,
            "scratch_drop": 0.386,
            "continued": 0.417,
            "exact": 0.421,
            "upscaled": 0.351,
            "learning_rate": 0.026,
            "head_start": -0.035,
            "noise": 0.070,
        },
        verdict=[
            "Growing pays here: it reaches the from-scratch model's lowest loss 3.3× cheaper, and ends at 0.351 "
            "rather than 0.386.",
            "Compared with the best baseline, from scratch with the same drop of the learning rate, the final loss is "
            "9 % lower, more than the spread between seeds (0.006).",
            "Of the gain over the from-scratch model, 43 % is the learning rate, −57 % the head start and 115 % the "
            "noise.",
        ],
        warnings=["The best noise, 1, was chosen with one seed a trial: the spread between seeds is not known."],
        coords={"title": "μP, AdamW", "rows": [asdict(row) for row in coordinates()]},
    )
    return replace(summary, **changes)


def runs(
    name: str,
    label: str,
    width: Any,
    lr: float,
    first: float,
    final: float,
    *,
    seeds: int = 3,
    more: float = 1.0,
    after: bool = False,
    drop: int | None = None,
    noise: float = 0.0,
    flops: float | None = -1.0,
) -> Runs:
    """A model whose loss falls from one value to another, each seed a little differently."""
    steps = round(STEPS * more)
    per_step = {128: 4.0e8, 256: 1.365e9}.get(width, 4e8) if flops == -1.0 else flops
    curves = [curve(name, seed, steps, first, final, drop) for seed in range(seeds)]
    drop_lr = 0.004 if drop else None
    return Runs(name, label, width, lr, steps, per_step, curves, after, noise, drop, drop_lr)


def curve(name: str, seed: int, steps: int, first: float, final: float, drop: int | None) -> Curve:
    """One seed."""
    chance = random.Random(f"{name} {seed}")
    own = final * (1 + 0.006 * chance.uniform(-1, 1))
    at = [round(steps * (i + 1) / 60) for i in range(60)]
    losses = []
    for step in at:
        high = final + 0.03 if drop and step < drop else own
        losses.append(high + (first - high) * (1 + 12 * step / steps) ** -1.6 * (1 + 0.02 * chance.uniform(-1, 1)))
    held = [round(steps * (i + 1) / 10) for i in range(10)]
    held_losses = [losses[6 * i + 5] * 1.06 + 0.004 * chance.uniform(-1, 1) for i in range(10)]
    return Curve(seed, "finished", at, losses, held, held_losses, [1 - 0.45 * value for value in held_losses])


def diverged(runs: Runs) -> Runs:
    """The same, but every seed of it ended early in something that is no number."""
    cut = [replace(c, status="diverged", steps=c.steps[:7], losses=[*c.losses[:5], 9.0, math.inf]) for c in runs.curves]
    return replace(runs, curves=[replace(c, held_out_steps=[], held_out_losses=[], accuracy=[]) for c in cut])


def sweep_1(status: Status | None = None) -> Sweep:
    """Learning rates at n₀, the largest of which diverged."""
    trials = []
    for lr in LRS:
        loss = 0.52 + 0.03 * math.log2(lr / 0.016) ** 2 / 4
        lost = status or ("diverged" if lr > 0.03 else "finished")
        by_seed = [loss - 0.005, loss + 0.006] if lost == "finished" else []
        trials.append(Trial(lr, 0.0, lost, loss if lost == "finished" else None, by_seed, steps=1000, flops=1.2e11))
    return Sweep("sweep-1-width-64", 64, None, Space(LRS), trials, seeds=2, seconds=21.4)


def sweep_2(sampler: str = "grid", status: Status | None = None, name: str = "sweep-2-width-64") -> Sweep:
    """Learning rates × noise: a valley, with what is both fast and noisy diverged and one corner pruned."""
    trials, chance = [], random.Random(7)
    for number, cell in enumerate(Space(LRS, NOISES).cells):
        lr, noise = cell
        if sampler != "grid":
            lr = math.exp(chance.uniform(math.log(LRS[0]), math.log(LRS[-1])))
            noise = 0.0 if number < 2 else math.exp(chance.uniform(math.log(0.1), math.log(10)))
        level = 0.0 if noise == 0 else 0.06 * math.exp(-(math.log10(noise) ** 2) / 0.4)
        far = 0.015 * math.log2(lr / 0.004) ** 2 + (0.1 * math.log10(noise / 3) ** 2 if noise > 3 else 0)
        loss = 0.46 - level + far
        lost: Status = (
            "diverged" if lr * max(noise, 0.3) > 0.15 else "pruned" if lr < 0.0015 and noise > 2 else "finished"
        )
        lost = status or lost
        steps = [50 * (i + 1) for i in range(20)]
        curve = [(s, loss + (0.1 + 0.12 * noise**0.5) * math.exp(-s / 150) + 0.05 * (1 - s / 1000)) for s in steps]
        if lost != "finished":
            curve = curve[:6]
        shown = loss if lost == "finished" else None
        by_seed = [loss] if lost == "finished" else []
        trials.append(Trial(lr, noise, lost, shown, by_seed, curve, curve[-1][0], 2.6e11))
    return Sweep(name, 128, 64, Space(LRS, NOISES), trials, sampler=sampler, seconds=63.0)


def coordinates() -> list[Measurement]:
    """A coordinate check that is flat in all layers but one."""
    powers = {"layers.0": 0.0, "layers.1": 0.02, "layers.2": -0.04, "readout": 0.5}
    return [
        Measurement(width, seed, step, module, 1.0, step * 0.05 * (1 + 0.1 * seed) * (width / 64) ** power * scale)
        for scale, (module, power) in zip((1.0, 1.6, 2.4, 0.6), powers.items(), strict=True)
        for width in (64, 128, 256, 512)
        for seed in (0, 1)
        for step in range(5)
    ]


def transfer_check() -> dict[str, Any]:
    """Four widths whose optimum stays where it is."""
    chance = random.Random(3)

    def line(width: int, xs: list[float], best: float) -> dict[str, Any]:
        points = []
        for x in xs:
            far = abs(math.log2(x / best)) if x > 0 else 4.0
            loss = 0.5 - 0.03 * math.log2(width / 128) + 0.008 * far**2
            losses: list[float | None] = [loss + 0.004 * chance.uniform(-1, 1) for _ in range(3)]
            points.append({"x": x, "losses": losses if far < 3.5 or x == 0 else [None, None, losses[0]]})
        return {"width": width, "from": width // 2, "points": points}

    widths = (128, 256, 512, 1024)
    return {
        "times": 2,
        "steps": 1000,
        "fixed": {"lr": 0.004, "noise": 1.0},
        "unit": "init",
        "lr": [line(width, list(LRS), 0.004) for width in widths],
        "noise": [line(width, list(NOISES), 1.0) for width in widths],
        "verdict": ["The best learning rate does not move over widths 128 … 1024: it transfers."],
    }


def write(folder: Path, summary: Summary | None = None, *, check: bool = False) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True)
    (summary or example()).save(folder)
    if check:
        (folder / "transfer-check.json").write_text(json.dumps(transfer_check()))
    return folder
