"""CREPE `tiny` grown to twice its width and trained on tones, beside `tiny` itself and the published `full`.

`python tests/real/crepe_growth.py` prints the table of docs/real-checkpoints.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy

import mupscale as mu
from published import crepe, near_enough, tones

TIMES, STEPS, BATCH, RATE, NOISE = 2, 80, 32, 3e-4, 0.5
SAME_FLOPS = 4  # steps of tiny that cost about one of the twice as wide network
HELD_OUT = 512


@dataclass(frozen=True)
class Outcome:
    """What a network makes of tones that nothing was trained on.

    loss: above the least that there is, which is not 0, since targets are no certainties.
    """

    name: str
    numbers: int
    steps: int
    loss: float
    right: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.numbers / 1e6:.2f} M | {self.steps} | {1e3 * self.loss:.2f} | {self.right:.1%} |"


@torch.no_grad()
def look_at(name: str, model: nn.Module, steps: int = 0) -> Outcome:
    """Loss and pitches within 50 cents."""
    x, y = tones(HELD_OUT, seed=10**6)
    outputs = torch.cat([model(rows) for rows in x.split(64)])
    numbers = sum(p.numel() for p in model.parameters())
    loss = (binary_cross_entropy(outputs, y) - binary_cross_entropy(y, y)).item()
    return Outcome(name, numbers, steps, loss, near_enough(outputs, y))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> nn.Module:
    """On new tones at every step, with a rate that falls to zero; the statistics of the norms stay."""
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        x, y = tones(BATCH, seed=step)
        optimizer.zero_grad()
        binary_cross_entropy(model(x), y).backward()
        optimizer.step()
        decay.step()
    return model


def grown(operator: mu.Operator) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`tiny` made wider, and its optimizer."""
    narrow, wide = crepe("tiny"), crepe("tiny", TIMES)
    x, _ = tones(8, seed=1)
    plan = mu.plan(narrow, wide, inputs=x, fresh=lambda: crepe("tiny", trained=False), grow=operator)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=RATE)
    wide, wide_optimizer = mu.upscale(narrow, wide, plan, optimizer, grow=operator, seed=0)
    mu.measure_statistics(wide, [tones(64, seed=seed)[0] for seed in (2, 3)], plan)
    return wide, wide_optimizer


def compare(steps: int = STEPS, *, same_flops: bool = True) -> dict[str, Outcome]:
    """By name: the published ones, `tiny` trained on, and what it was grown into; with the defaults a quarter hour."""
    torch.manual_seed(0)
    found = [look_at("tiny, as published", crepe("tiny")), look_at("full, as published", crepe("full"))]
    counts = {"tiny, trained on": steps}
    counts |= {"tiny, trained on for the same FLOPs": SAME_FLOPS * steps} if same_flops else {}
    for name, count in counts.items():
        tiny = crepe("tiny")
        found.append(look_at(name, train(tiny, torch.optim.AdamW(tiny.parameters(), lr=RATE), count), count))
    for name, operator in (("by copies", mu.Copies(NOISE)), ("by fresh units", mu.Fresh())):
        wide, optimizer = grown(operator)
        found.append(look_at(f"twice as wide {name}, untrained", wide))
        found.append(look_at(f"twice as wide {name}, trained on", train(wide, optimizer, steps), steps))
    return {outcome.name: outcome for outcome in found}


if __name__ == "__main__":
    print(
        "| network | parameters | steps | 1000 × loss above the least | within 50 cents |",
        "| --- | --- | --- | --- | --- |",
        sep="\n",
    )
    print(*compare().values(), sep="\n")
