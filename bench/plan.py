"""Plans by running: what they cost beside a forward pass, and what comes out for the zoo of awkward models.

python bench/plan.py           # GPT-2 small, 384 → 768, 8 tokens: seconds, and forward passes of the wide model
python bench/plan.py --zoo     # 430 small models: exact, refused or wrong, with a batch and without
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import mupscale as mu
from mupscale.models import GPT2
from mupscale.planning import in_double

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))


def build(width: int) -> nn.Module:
    return GPT2(vocab=50257, context=64, width=width, layers=12, head_dim=64)


def cost() -> None:
    """Seconds of a plan with a batch over those of a forward pass of the wide model, in float64 both."""
    tokens = torch.randint(0, 50257, (1, 8))
    narrow, wide = build(384), build(768)
    forward = seconds_of_forward(tokens)
    print(f"{'forward pass of the wide model, float64':<40} {forward:8.2f} s")
    print(f"{'plan from modules':<40} {seconds_of(lambda: mu.plan(narrow, wide)):8.2f} s")
    seconds = seconds_of(lambda: mu.plan(narrow, wide, inputs=tokens))
    print(f"{'plan with a batch':<40} {seconds:8.2f} s, {seconds / forward:.1f} forward passes")
    family = seconds_of(lambda: mu.Family(build, base=64, inputs=tokens))
    print(f"{'family with a batch (base 64)':<40} {family:8.2f} s, {family / forward:.1f} forward passes")


@torch.no_grad()
def seconds_of_forward(tokens: torch.Tensor) -> float:
    model = build(768).double()
    model(tokens)
    return seconds_of(lambda: model(tokens))


def seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def outcome(narrow: nn.Module, wide: nn.Module, plan: mu.Plan, batch: tuple[torch.Tensor, ...]) -> str:
    """Whether four steps of AdamW agree."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        output = model(*batch)
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    adamw = {"optimizer": torch.optim.AdamW, "lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
    wide = mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [batch], loss, steps=4, tolerance=1e-8, **adamw)
    return "exact" if report.ok else "wrong"


def zoo() -> None:
    """A table: what was expected, and what came out."""
    from patterns import PATTERNS

    table: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for pattern in PATTERNS:
        batch = in_double(pattern.inputs())
        for how, inputs in (("by running", batch), ("from modules", None)):
            torch.manual_seed(0)
            narrow, wide = pattern.build(1).double(), pattern.build(2).double()
            try:
                result = outcome(narrow, wide, mu.plan(narrow, wide, inputs=inputs), batch)
            except mu.MupscaleError:
                result = "refused"
            except Exception:  # a plan by names may give a model that cannot run
                result = "wrong"
            table[how, pattern.expected, result] += 1
    results = ("exact", "refused", "wrong")
    print("| plan | an exact widening | " + " | ".join(results) + " |\n" + "| --- " * 5 + "|")
    words = {"exact": "exists", "refused": "does not exist", "either": "may exist"}
    for how in ("by running", "from modules"):
        for expected, word in words.items():
            print(f"| {how} | {word} | " + " | ".join(str(table[how, expected, r]) for r in results) + " |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true")
    zoo() if parser.parse_args().zoo else cost()
