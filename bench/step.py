"""What our parameter groups cost in an optimizer step, on GPT-2 small's shapes: python bench/step.py

The same torch optimizer with one plain group and with mupscale's groups takes steps alternately in this one process;
the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics

import torch

import mupscale as mu
from _measuring import seconds
from mupscale.models import GPT2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)

    def build(heads: int) -> torch.nn.Module:
        return GPT2(50257, 1024, layers=12, heads=heads, head_dim=64)

    family = mu.Family(build, base=2)
    model = build(12).to(device)
    plan = family.plan(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        hyper = {"lr": 1e-6, "weight_decay": 0.1, **kind}
        plain = torch.optim.AdamW(model.parameters(), **hyper)
        ours = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, **hyper))
        times: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(args.steps):
            times["plain"].append(seconds(plain.step, device))
            times["ours"].append(seconds(ours.step, device))
        best = {name: statistics.median(values[2:]) for name, values in times.items()}
        ratio = statistics.median(o / p for o, p in zip(times["ours"][2:], times["plain"][2:], strict=True))
        print(
            f"AdamW {kind}: step with {len(ours.param_groups)} groups / with 1 group: {ratio:.3f}  (target ≤ 1.05; "
            f"{best['ours'] * 1e3:.1f} ms against {best['plain'] * 1e3:.1f} ms, {device})"
        )


if __name__ == "__main__":
    main()
