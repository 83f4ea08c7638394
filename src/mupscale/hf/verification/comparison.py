"""What was compared of two models, and the verdict, as a table and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mupscale.planning import Difference
from mupscale.system import html_table, text_table, wrap_text

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""How far outputs may differ, by the dtype that they are computed in."""


@dataclass(frozen=True)
class ComparisonRow:
    """One thing that was compared; difference: relative, the largest."""

    what: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance; what is not finite never is."""
        return math.isfinite(self.difference) and self.difference <= self.tolerance

    def cells(self) -> tuple[str, str, str, str]:
        """As text."""
        allowed = f"{self.tolerance:.0e}" if self.tolerance else "no bit"
        if math.isinf(self.tolerance):
            allowed = "as it comes"
        what = self.what.removeprefix("outputs over ")  # so that a row fits 80 columns
        return what, f"{self.difference:.1e}", allowed, (self.note or "same") if self.ok else "DIFFERENT"


RANDOM = "random inputs"


@dataclass(frozen=True)
class Comparison:
    """What was compared, the loss of both models, and the first difference if there is one.

    as_recorded: what to say, where all is well, of a model that is not meant to compute what the small one does.
    inputs: what the losses are of. The losses of random inputs say nothing of the models, and are not shown.
    """

    rows: tuple[ComparisonRow, ...]
    losses: tuple[float, float]
    first: Difference | None = None
    noisy: bool = False
    notes: tuple[str, ...] = ()
    as_recorded: str = ""
    inputs: str = RANDOM

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is as it should be."""
        return all(row.ok for row in self.rows) and self.first is None

    @property
    def verdict(self) -> str:
        """In words."""
        worst = max(self.rows, key=lambda row: row.difference if row.difference == row.difference else math.inf)
        losses = f"on {self.inputs}"
        if self.inputs != RANDOM:
            losses = f"loss of {self.inputs}: {self.losses[0]:.4g} and {self.losses[1]:.4g}"
        if not self.ok:
            lines = [f"NOT equivalent: {next((r.what for r in self.rows if not r.ok), worst.what)} differ ({losses})"]
            lines += [str(self.first)] if self.first is not None else []
        elif self.as_recorded:
            lines = [f"as recorded: {self.as_recorded} ({losses})"]
        elif self.noisy:
            moved = next(row for row in self.rows if row.note)
            lines = [f"as recorded: the noise moves {moved.what} by {moved.difference:.1%} ({losses})"]
        else:
            lines = [f"equivalent: largest relative difference {worst.difference:.1e} ({losses})"]
        return "\n".join([*lines, *self.notes])

    def table(self) -> str:
        """What was compared, as text."""
        return text_table(_HEADER, [row.cells() for row in self.rows], left=4)

    def __str__(self) -> str:
        return f"{self.table()}\n{wrap_text(self.verdict)}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        return html_table(_HEADER, [row.cells() for row in self.rows], self.verdict)


_HEADER = ("compared", "difference", "allowed", "")
