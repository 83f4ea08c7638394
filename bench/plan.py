"""Plans by running: what they cost beside a forward pass, and what comes out for the zoo of awkward models.

python bench/plan.py           # GPT-2 small, 384 → 768, 8 tokens: CPU seconds, forward passes of the wide model, memory
python bench/plan.py --widths 1024 2048 --layers 24    # the same for 354M → 1.3B parameters; 9 GB
python bench/plan.py --zoo     # 430 small models: exact, refused or wrong, with a batch and without
python bench/plan.py --zoo --poor-batches    # planned on zeros, one row, one token, … and judged by real data
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
from _measuring import peak_memory
from mupscale.models import GPT2
from mupscale.planning import in_double

Batch = tuple[torch.Tensor, ...]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))


def build(width: int, layers: int = 12) -> nn.Module:
    return GPT2(vocab=50257, context=64, width=width, layers=layers, head_dim=64)


def cost(widths: list[int], layers: int) -> None:
    """CPU seconds of a plan with a batch, over those of a forward pass of the wide model, and its memory."""
    tokens = torch.randint(0, 50257, (1, 8))
    narrow, wide = (build(width, layers) for width in widths)
    size = sum(p.numel() * p.element_size() for model in (narrow, wide) for p in model.parameters())
    with torch.no_grad():
        wide(tokens)
        forward = seconds_of(lambda: wide(tokens))
    print(f"{'forward pass of the wide model, float32':<40} {forward:8.2f} s")
    print(f"{'plan from modules':<40} {seconds_of(lambda: mu.plan(narrow, wide)):8.2f} s")
    with peak_memory() as most:
        seconds = seconds_of(lambda: mu.plan(narrow, wide, inputs=tokens))
    print(f"{'plan with a batch':<40} {seconds:8.2f} s, {seconds / forward:.1f} forward passes", end="")
    print(f", {1 + most[0] / size:.2f} times the memory of both models")
    family = seconds_of(lambda: mu.Family(lambda width: build(width, layers), base=64, inputs=tokens))
    print(f"{'family with a batch (base 64)':<40} {family:8.2f} s, {family / forward:.1f} forward passes")


def seconds_of(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def outcome(narrow: nn.Module, wide: nn.Module, plan: mu.Plan, batch: Batch) -> str:
    """Whether four steps of AdamW agree."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
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


def outcome_of_poor(
    build: Callable[[int], nn.Module], poor: Batch, real: Batch, training: bool = True, judged_in_training: bool = True
) -> str:
    """What a plan that was made on a poor batch does on real data; it is not wrong if something was said by name."""
    torch.manual_seed(0)
    narrow, wide = (build(k).double().train(training) for k in (1, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mu.UncheckedPlan)
        try:
            plan = mu.plan(narrow, wide, inputs=in_double(poor))
        except Exception:  # the plan is refused, or the model does not run on so poor a batch
            return "refused"
    if any(issubclass(warning.category, mu.UncheckedPlan) for warning in caught):
        return "warned by name"
    try:
        result = outcome(*(m.train(judged_in_training) for m in (narrow, wide)), plan, in_double(real))
    except Exception:  # a wrong plan may give a model that cannot run
        result = "wrong"
    return "silently wrong" if result == "wrong" else result


def poor_zoo() -> None:
    """A table: of every poor batch, over the zoo, what came out."""
    from patterns import PATTERNS
    from poor_batches import CASES, POOR, poor_batches

    table: collections.Counter[tuple[str, str]] = collections.Counter()
    for pattern in PATTERNS:
        real = pattern.inputs()
        for name, poor in poor_batches(real).items():
            table[name, result := outcome_of_poor(pattern.build, poor, real)] += 1
            if result == "silently wrong":
                print(f"silently wrong: {pattern.name}, {name}")
    for case in CASES:
        result = outcome_of_poor(case.build, case.poor, case.real, case.training, case.judged_in_training)
        table["own models", result] += 1
        if result != case.expected.replace("warned", "warned by name"):
            print(f"{case.name}: {result}, and not {case.expected}")
    results = ("exact", "refused", "warned by name", "silently wrong")
    print("| batch | " + " | ".join(results) + " |\n" + "| --- " * 5 + "|")
    for name in (*POOR, "own models"):
        print(f"| {name} | " + " | ".join(str(table[name, r]) for r in results) + " |")
    print("| all | " + " | ".join(str(sum(n for (_, r), n in table.items() if r == one)) for one in results) + " |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--poor-batches", action="store_true", help="beside --zoo")
    parser.add_argument("--widths", type=int, nargs=2, default=[384, 768])
    parser.add_argument("--layers", type=int, default=12)
    asked = parser.parse_args()
    if asked.poor_batches and not asked.zoo:
        parser.error("--poor-batches goes with --zoo")
    if asked.zoo:
        (poor_zoo if asked.poor_batches else zoo)()
    else:
        cost(asked.widths, asked.layers)
