"""A plan as a table: parameters that differ in their layer alone in one row, with what their three numbers imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mupscale.core.rules import Number, Rule
from mupscale.system import name_of_group, pattern_of_name

HEADER = ("parameter", "shape", "out", "in", "fold", "weight ×", "lr × (Adam)", "lr × (SGD)")


class PlannedShape(NamedTuple):
    """What of a parameter's entry a table shows."""

    narrow: tuple[int, ...]
    wide: tuple[int, ...]
    rule: Rule


def plan_rows(shapes: Mapping[str, PlannedShape]) -> list[tuple[str, ...]]:
    """One row for each group of alike parameters, under HEADER.

    >>> matrix = PlannedShape((8, 8), (16, 16), Rule(out=2, in_=2))
    >>> plan_rows({f"layers.{i}.weight": matrix for i in range(3)})
    [('layers.0–2.weight', '8×8 → 16×16', '2', '2', '1', '0.5', '0.5', '1')]
    """
    groups: dict[tuple[str, PlannedShape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((pattern_of_name(name), shape), []).append(name)
    return [
        (name_of_group(names), shapes_in_words(*shape[:2]), *_numbers(shape.rule))
        for (_, shape), names in groups.items()
    ]


def shapes_in_words(narrow: tuple[int, ...], wide: tuple[int, ...]) -> str:
    """A shape before and after, or once where it stays.

    >>> shapes_in_words((8, 3), (16, 3)), shapes_in_words((), ())
    ('8×3 → 16×3', '1')
    """
    before, after = ("×".join(map(str, shape)) or "1" for shape in (narrow, wide))
    return before if before == after else f"{before} → {after}"


def tried_in_words(checked: bool) -> str:
    """Whether models were run to see that copies by a plan are exact.

    >>> tried_in_words(True)
    'copies tried: exact'
    """
    return "copies tried: exact" if checked else "not tried yet: mu.verify, or a batch (inputs=), would"


def _numbers(rule: Rule) -> tuple[str, ...]:
    return tuple(map(_short, (rule.out, rule.in_, rule.fold, rule.weight, rule.lr(m=0), rule.lr(m=1))))


def _short(number: Number) -> str:
    return f"{float(number):.4g}"
