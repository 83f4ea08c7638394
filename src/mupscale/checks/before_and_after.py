"""A model before and after it grew, side by side: size, memory, loss, speed and learning rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import naming
from mupscale.system import checks_arguments, html_table, name_of_group, pattern_of_name, text_table

HEADER = ("", "before", "after", "")
_TIMED = 3  # passes, of which the median counts, after one that warms up


@dataclass(frozen=True)
class GrowthTable:
    """What `growth_table` gave; printed, it is a table.

    >>> print(GrowthTable([("parameters", "8", "32", "× 4")]))
                before  after
    parameters       8     32  × 4
    """

    rows: list[tuple[str, str, str, str]]

    def __str__(self) -> str:
        return text_table(HEADER, self.rows)

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows)


@checks_arguments
def growth_table(
    before: nn.Module,
    after: nn.Module,
    optimizers: tuple[Optimizer, Optimizer] | None = None,
    loss: Callable[[nn.Module], Any] | None = None,
) -> GrowthTable:
    """What a growth has changed: parameters, memory, loss on a batch, passes per second, and learning rates.

    optimizers: of the two, for their state and rates. loss: of a model, on a batch of yours; it is also run backward,
    to be timed, unless it has no gradient. Gradients, buffers, modes and random numbers stay as they were.

    >>> import mupscale as mu
    >>> from mupscale.models import MLP
    >>> x = torch.randn(4, 3)
    >>> narrow = MLP(3, 8, 2)
    >>> optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
    >>> wide, grown = mu.upscale(narrow, MLP(3, 16, 2), None, optimizer, inputs=x, fresh=MLP(3, 8, 2), noise=1.0)
    >>> print(mu.growth_table(narrow, wide, (optimizer, grown)))
                                                before     after
    parameters                                     194       642  × 3.31
    weights, gradients, optimizer state (MiB)  0.00148  0.004898  × 3.31
    lr of layers.0.weight, layers.0–3.bias        0.01      0.01
    lr of layers.1–3.weight                       0.01     0.005   × 0.5
    """
    models = (before, after)
    counts = [sum(p.numel() for p in naming.parameters(model).values()) for model in models]
    rows = [_row("parameters", counts[0], counts[1], ",.0f")]
    held = [None, None] if optimizers is None else list(optimizers)
    sizes = []  # of parameters and their gradients, buffers, and the optimizer's state: what there is, or will be
    for model, optimizer in zip(models, held, strict=True):
        state = () if optimizer is None else (v for values in optimizer.state.values() for v in values.values())
        tensors = [*(p for p in model.parameters() for _ in range(2)), *model.buffers(), *state]
        sizes.append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)) / 2**20)
    rows.append(_row("weights, gradients, optimizer state (MiB)", sizes[0], sizes[1], ",.4g"))
    if loss is not None:
        measured = [_measure(model, loss) for model in models]
        rows.append(_row("loss on the batch", measured[0][0], measured[1][0], ".4f", difference=True))
        passes = "forward and backward" if all(backward for *_, backward in measured) else "forward"
        rows.append(_row(f"{passes} passes per second", measured[0][1], measured[1][1], ",.3g"))
    if optimizers is not None:
        rows += _rates(models, optimizers)
    return GrowthTable(rows)


def _row(what: str, a: float, b: float, form: str, *, difference: bool = False) -> tuple[str, str, str, str]:
    change = f"{b - a:+.4f}" if difference else "" if a == b else f"× {b / a:.3g}" if a else ""
    return what, format(a, form), format(b, form), change


def _measure(model: nn.Module, loss: Callable[[nn.Module], Any]) -> tuple[float, float, bool]:
    """The loss in eval mode, passes per second as it trains, and whether they go backward: not under no_grad."""
    gradients, training = {p: p.grad for p in model.parameters()}, [(m, m.training) for m in model.modules()]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]  # passes in training move running statistics
    seconds = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            with torch.no_grad():
                value = float(loss(model.eval()))
            for module, mode in training:
                module.training = mode
            for _ in range(1 + _TIMED):
                began = time.perf_counter()
                got = loss(model)
                if backward := isinstance(got, Tensor) and got.requires_grad:
                    got.backward()
                if torch.accelerator.is_available():
                    torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - began)
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
    return value, 1 / median(seconds[1:]), backward


def _rates(
    models: tuple[nn.Module, nn.Module], optimizers: tuple[Optimizer, Optimizer]
) -> list[tuple[str, str, str, str]]:
    """A row for parameters whose learning rate changes alike."""
    found = []
    for model, optimizer in zip(models, optimizers, strict=True):
        names = {p: name for name, p in naming.parameters(model).items()}
        found.append({names[p]: float(g["lr"]) for g in optimizer.param_groups for p in g["params"] if p in names})
    alike: dict[tuple[float | None, float], dict[str, list[str]]] = {}
    for name, rate in found[1].items():
        alike.setdefault((found[0].get(name), rate), {}).setdefault(pattern_of_name(name), []).append(name)
    rows = []
    for (a, b), patterns in alike.items():
        shown = [name_of_group(names) for names in patterns.values()]
        label = f"lr of {', '.join(shown[:2])}{f' and {len(shown) - 2} more' if len(shown) > 2 else ''}"
        rows.append((label, "" if a is None else f"{a:.4g}", f"{b:.4g}", "" if a in (None, b) else f"× {b / a:.3g}"))
    return rows
