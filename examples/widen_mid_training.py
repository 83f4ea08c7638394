"""Train a small MLP, upscale it in mid-training, and see four curves: python examples/widen_mid_training.py

(a) the narrow model going on; (b) the wide model without noise, which lies exactly on (a); (c) the wide model with
noise, which leaves it for something better; (d) the wide model from scratch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

import mupscale as mu
from mupscale.data import Split, covtype_sample
from mupscale.models import MLP

NARROW, WIDE = 32, 128
BEFORE, AFTER = 500, 800
LR, DECAY = 1.6e-2, 1e-2
UPSCALED_LR, NOISE = 8e-3, 3.0  # from a small search by hand; the method is there to find them
BATCH, EVERY = 200, 20


@dataclass
class Curve:
    """Training loss on the whole sample, against steps."""

    label: str
    steps: list[int]
    losses: list[float]


def batches(data: Split, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled epochs, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(data.train_y), generator=generator).split(BATCH):
            yield data.train_x[rows], data.train_y[rows]


def train(
    model: nn.Module, optimizer: Optimizer, plan: mu.Plan, data: Split, label: str, start: int, stop: int
) -> Curve:
    """From one step to another, on batches that depend on the step alone, so that runs can be compared."""
    began = time.perf_counter()
    curve = Curve(label, [], [])
    source = batches(data, seed=0)
    for _ in range(start):
        next(source)
    for step in range(start, stop + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                curve.losses.append(cross_entropy(model(data.train_x), data.train_y).item())
            curve.steps.append(step)
        x, y = next(source)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        mu.clip_grad_norm_(model, 1.0, plan)
        if step < stop:
            optimizer.step()
    seconds = time.perf_counter() - began
    print(
        f"  {label:<34} step {start:>5} → {stop}: training loss {curve.losses[-1]:.4f}  ({seconds:.0f} s)", flush=True
    )
    return curve


def run(out: Path, before: int = BEFORE, after: int = AFTER) -> dict[str, Curve]:
    """The whole of it; writes the picture and returns the curves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small models are faster so
    torch.set_default_dtype(torch.float64)  # so that "exactly" shows
    try:
        data = covtype_sample(torch.float64)
        family = mu.Family(lambda width: MLP(54, width, 7), base=NARROW, inputs=data.train_x[:4])
        end = before + after

        print(f"A family of 4-layer MLPs on {len(data.train_y):,} rows of Forest CoverType, AdamW, float64")
        model = family.init(NARROW, seed=0)
        optimizer = family.optimizer(model, AdamW, lr=LR, weight_decay=DECAY)
        small, large = family.plan(NARROW), family.plan(WIDE)
        first = train(model, optimizer, small, data, f"width {NARROW}", 0, before)

        exact, exact_optimizer = family.upscale(model, optimizer, width=WIDE, exact=True)
        noisy, noisy_optimizer = family.upscale(model, optimizer, width=WIDE, noise=NOISE, lr=UPSCALED_LR, seed=0)
        scratch = family.init(WIDE, seed=0)
        scratch_optimizer = family.optimizer(scratch, AdamW, lr=LR, weight_decay=DECAY)
        assert exact_optimizer is not None
        assert noisy_optimizer is not None
        curves = {
            "before": first,
            "narrow": train(model, optimizer, small, data, f"(a) width {NARROW} goes on", before, end),
            "exact": train(exact, exact_optimizer, large, data, f"(b) width {WIDE}, no noise", before, end),
            "noisy": train(noisy, noisy_optimizer, large, data, f"(c) width {WIDE}, noise {NOISE}", before, end),
            "scratch": train(scratch, scratch_optimizer, large, data, f"(d) width {WIDE} from scratch", 0, end),
        }
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    gap = max(abs(a - b) for a, b in zip(curves["narrow"].losses, curves["exact"].losses, strict=True))
    print(f"Largest difference between the losses of (a) and (b) over {after} steps: {gap:.1e}")
    picture = plot(curves, before, gap, out / "demo.png")
    print(f"Picture: {picture}")
    return curves


def plot(curves: Mapping[str, Curve], upscaled_at: int, gap: float, path: Path) -> Path:
    """The demonstration's curves, the exact wide model dotted on top of the narrow one."""
    matplotlib.use("Agg")  # a file, and no window
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(8, 4.6), layout="constrained", dpi=150)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    before = curves["before"]
    ax.plot(before.steps, before.losses, color="#4c566a", lw=1.6)
    styles: dict[str, dict[str, Any]] = {
        "narrow": {"color": "#4c566a", "lw": 1.6},
        "exact": {"color": "#e0a030", "lw": 3.0, "ls": (0, (0.1, 2.2)), "dash_capstyle": "round", "zorder": 5},
        "noisy": {"color": "#d1495b", "lw": 1.8},
        "scratch": {"color": "#2a7fb8", "lw": 1.6},
    }
    for name, style in styles.items():
        ax.plot(curves[name].steps, curves[name].losses, label=curves[name].label, **style)
    ax.axvline(upscaled_at, color="#9aa5b1", lw=0.8, ls="--", zorder=0)
    ax.annotate(
        "upscaled here",
        (upscaled_at, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#6b7683",
    )
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:.2g}")
    ax.yaxis.set_minor_formatter("{x:.2g}")
    ax.tick_params(which="both", labelsize=8)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss")
    ax.set_title(f"Upscaling in mid-training; (a) and (b) differ by {gap:.0e} at most", loc="left", fontsize=11)
    ax.legend(frameon=False, fontsize=9, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    plt.close(fig)
    return path


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python examples/widen_mid_training.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture (default: demo)")
    run(parser.parse_args().out)


if __name__ == "__main__":
    main()
