"""A plan as a table: parameters that differ in their layer alone in one row, with what their three numbers imply.

Of a plan that adds blocks, a table of the blocks: what each of them comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from mupscale.core.entries import TensorSource
from mupscale.core.rules import Number, Rule
from mupscale.system import name_of_group, pattern_of_name, terminal_width, text_table, wrap_text

HEADER = ("parameter", "shape", "out", "in", "fold", "weight ×", "lr × (Adam)", "lr × (SGD)")
BLOCK_HEADER = ("block", "comes from", "starts")
TriedBy = Literal["copies", "silent units", "small members"]
"""What was run to see that a plan is right."""

_SHAPES = 5  # columns of the first part, where the table is cut in two
_WIDTH, _UNLIMITED = 80, 1 << 20


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


def plan_as_text(rows: Sequence[tuple[str, ...]], tried: str) -> str:
    """The table within the terminal's width, 80 where there is none: in two parts where one would not fit.

    >>> print(plan_as_text([("weight", "8 → 16", "2", "1", "1", "1", "1", "2")], "copies tried: exact"))
    parameter  shape   out  in  fold  weight ×  lr × (Adam)  lr × (SGD)
    weight     8 → 16    2   1     1         1            1           2
    copies tried: exact
    """
    width = terminal_width() or _WIDTH
    whole = text_table(HEADER, rows, left=2, width=_UNLIMITED)
    if max(map(len, whole.splitlines())) > width:
        shapes = text_table(HEADER[:_SHAPES], [row[:_SHAPES] for row in rows], left=2, width=width)
        factors = [(row[0], *row[_SHAPES:]) for row in rows]
        whole = f"{shapes}\n\n{text_table((HEADER[0], *HEADER[_SHAPES:]), factors, width=width)}\n"
    return f"{whole}\n{wrap_text(tried, width)}"


def tried_in_words(by: TriedBy | None, *, copies: bool = True) -> str:
    """What models were run to see of a plan; by: None if none was. copies: whether that is what it is for.

    >>> tried_in_words("copies")
    'copies tried: exact'
    >>> tried_in_words("silent units", copies=False)
    'tried with the new units switched off: the outputs stay the same'
    >>> tried_in_words("small members")
    'copies tried on small members of the family: exact'
    """
    if by is None:
        return "not tried yet: call mu.verify, or pass a batch (inputs=)"
    if by == "silent units":
        return "tried with the new units switched off: the outputs stay the same"
    if by == "small members":
        return "copies tried on small members of the family: exact"
    return "copies tried: exact" if copies else "axes tried with copies, at a whole multiple: exact"


def moved_parts(sources: Mapping[str, TensorSource]) -> dict[str, str]:
    """From the path of a part of the larger model to that of the part that it comes from, where the two differ.

    >>> moved_parts({"h.0.up": TensorSource("h.0.up"), "h.1.up": TensorSource("h.0.up", "copy")})
    {'h.1': 'h.0'}
    """
    moved = {}
    for name, source in sources.items():
        ours, theirs = name.split("."), source.name.split(".")
        while ours and theirs and ours[-1] == theirs[-1]:
            del ours[-1], theirs[-1]
        if ours:
            moved[".".join(ours)] = ".".join(theirs)
    return moved


def block_rows(sources: Mapping[str, TensorSource]) -> list[tuple[str, ...]]:
    """One row for each block of the larger model, under BLOCK_HEADER."""
    patterns = {pattern_of_name(path): path.count(".") + 1 for path in moved_parts(sources)}
    rows: dict[str, tuple[str, str]] = {}
    kinds: dict[str, set[str]] = {}
    for name, source in sources.items():
        for pattern, length in patterns.items():
            path = ".".join(name.split(".")[:length])
            if pattern_of_name(path) == pattern:
                rows.setdefault(path, (path, source.name.removesuffix(name.removeprefix(path))))
                kinds.setdefault(path, set()).add(source.kind)
    starts = {"old": "as it was", "copy": "a copy", "expert": "a copy", "drawn": "drawn"}
    starts["silent"] = "new, and writes nothing yet"
    return [(*row, starts[max(kinds[path], key=list(starts).index)]) for path, row in rows.items()]


def blocks_in_words(sources: Mapping[str, TensorSource], rules: Mapping[str, Rule]) -> str:
    """What there is to know of the blocks besides."""
    if drawn := [source.value for source in sources.values() if source.kind == "expert"]:
        shared, share = max(rule.depth * rule.out for rule in rules.values()), max(drawn)
        changes = (
            f"the function changes, since {share:.0%} of their entries are drawn" if share else "the function stays"
        )
        return f"experts are copies, among which a gradient is shared ({_short(shared)}): {changes}"
    silent = sorted({pattern_of_name(name) for name, source in sources.items() if source.kind == "silent"})
    said = ["new blocks write nothing yet: the function stays" if silent else "blocks are copied: the function changes"]
    said += [f"what writes into the stream: {', '.join(silent)}"] if silent else []
    return "; ".join(said + ["learning rates follow the depth"] * any(rule.depth != 1 for rule in rules.values()))


def _numbers(rule: Rule) -> tuple[str, ...]:
    return tuple(map(_short, (rule.out, rule.in_, rule.fold, rule.weight, rule.lr(m=0), rule.lr(m=1))))


def _short(number: Number) -> str:
    return f"{float(number):.4g}"
