"""Words that the presets and the page share: widths and costs as people read them, and the table of contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mupscale.core import Width
from mupscale.plots import words
from mupscale.study.results import ContenderRuns, Curve, PageTable, SystemRuns
from mupscale.system import MupscaleError


def format_width(width: Any) -> str:
    """A width as a summary holds it; what is none, in a damaged one, is shown as it is.

    >>> format_width(4096), format_width({"head_dim": 32, "heads": 4})
    ('4,096', 'head_dim 32, heads 4')
    """
    try:
        return Width.of(width).shown(words.format_count)
    except MupscaleError:
        return words.format_count(width)


def format_widths(runs: SystemRuns) -> str:
    """Both widths of a system.

    >>> format_widths(SystemRuns(32, 64, None, "FLOPs", []))
    '32 → 64'
    """
    return f"{format_width(runs.narrow)} → {format_width(runs.wide)}"


def find_cost_unit(runs: SystemRuns) -> tuple[float, str]:
    """The unit for all costs of a system, and its size: the largest of which its lowest cost is one or more.

    >>> from mupscale.study import BudgetPoint
    >>> one = ContenderRuns("fresh", 64, 0.1, 0.0, [BudgetPoint(1.0, 10, 2e9, [0.5])])
    >>> find_cost_unit(SystemRuns(32, 64, 1e9, "FLOPs", [one]))
    (1000000000.0, 'GFLOPs')
    """
    if runs.unit != "FLOPs":
        return 1.0, runs.unit
    lowest = min(runs.charge(one) + point.cost for one in runs.contenders for point in one.points)
    return words.choose_flops_unit(lowest / 10)


def format_cost(runs: SystemRuns, cost: float) -> str:
    """A cost in the system's unit.

    >>> from mupscale.study import BudgetPoint
    >>> one = ContenderRuns("fresh", 64, 0.1, 0.0, [BudgetPoint(1.0, 10, 2e9, [0.5])])
    >>> format_cost(SystemRuns(32, 64, 1e9, "FLOPs", [one]), 5e10)
    '50 GFLOPs'
    """
    size, name = find_cost_unit(runs)
    return f"{words.format_setting(cost / size)} {name}"


def list_contenders(title: str, runs: SystemRuns, measure: str) -> PageTable:
    """A row per contender at the full budget, lowest loss first, those that diverged last."""
    ranked = sorted(runs.contenders, key=lambda one: float("inf") if one.final is None else one.final)
    head = ["contender", "width", "learning rate", "noise", "steps", "cost", f"final {measure}"]
    rows = [
        [
            one.shown,
            format_width(one.width),
            _rate(one),
            "per parameter"
            if isinstance(one.noise, dict)
            else words.format_setting(one.noise)
            if one.noise
            else "none",
            words.format_count(one.steps),
            format_cost(runs, runs.charge(one) + one.points[-1].cost),
            _final(one),
        ]
        for one in ranked
    ]
    for name, column in _scores(ranked, measure):
        head.append(name)
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    over = "the mean over the seeds and their range"
    note = f"Costs include the base model's where a contender starts from it. Losses are {over}."
    return PageTable(title, head, rows, note=note)


def _rate(one: ContenderRuns) -> str:
    start = words.format_setting(one.lr)
    return start if one.change is None else f"{start} → {words.format_setting(one.change[1])}"


def _final(one: ContenderRuns) -> str:
    count, lost = len(one.points[-1].losses), len(one.points[-1].losses) - len(one.finals)
    if lost == count:
        return "diverged"
    return _in_two_lines(one.finals) + (f"\n{lost} of {count} seeds diverged" if lost else "")


def _scores(contenders: Sequence[ContenderRuns], measure: str) -> Iterator[tuple[str, list[str]]]:
    """What else was measured at the end, by those of whom curves are kept."""
    last: dict[str, Callable[[Curve], list[float]]] = {
        "held-out loss": lambda curve: curve.held_out_losses[-1:],
        "accuracy": lambda curve: curve.accuracy[-1:],
    }
    for name, read in last.items():
        found = [[v for c in one.curves if c.status != "diverged" for v in read(c)] for one in contenders]
        if any(found) and name != measure:
            yield name, [_in_two_lines(values) for values in found]


def _in_two_lines(values: Sequence[float]) -> str:
    return words.format_spread(values).replace(" (", "\n(")
