"""The table: how every quantity of a parameter scales with width (the paper's Tables 1 and 2 in one).

A parameter has three numbers: `out`, by how much its output width axis grows; `in_`, by how much its input
width axis grows; `fold`, a constant folded into the stored weight. Everything else follows, for an entrywise
optimizer whose update is homogeneous of degree `m` in the gradient (SGD 1, Adam 0).
Integer multipliers give widening (Theorem 'Dynamic equivalence'), real ones give μP: it is the same table.

Depth adds nothing but a fourth number, `depth`: by how much there are more blocks. Under the rule 'complete' (residual
multiplier 1/L) r blocks share what one did. A block is then to the sum over blocks what a copy of a unit is to the sum
over units: `depth` stands beside `out` wherever that does, and the projections into the residual stream, which are
what is summed, have fold 1/depth. docs/depth.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = int | float | Fraction


def tidy(number: Number) -> Number:
    """The number as an int where it is whole."""
    return int(number) if number == int(number) else number


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """Three numbers per parameter, and the factors they imply for the wide model relative to the narrow one.

    depth: of the parameters of residual blocks, where rates follow the depth; 1 otherwise.

    >>> import mupscale as mu
    >>> hidden = mu.Rule(out=4, in_=4)
    >>> hidden.weight, hidden.lr(m=0), hidden.lr(m=1)  # copies are divided by 4; Adam's rate by 4; SGD's stays
    (0.25, 0.25, 1.0)
    """

    out: Number = 1
    in_: Number = 1
    fold: Number = 1
    depth: Number = 1

    def __repr__(self) -> str:
        depth = "" if self.depth == 1 else f", depth={self.depth!r}"
        return f"Rule(out={self.out!r}, in_={self.in_!r}, fold={self.fold!r}{depth})"

    @property
    def _copies(self) -> Number:
        """Among how many a gradient is shared: copies of a unit, or of a block, that together do what one did."""
        return self.out * self.depth

    @property
    def weight(self) -> float:
        """Proposition 'Static equivalence of MLPs': copies are summed over the input axis, so each is 1/in_."""
        return float(self.fold / self.in_)

    def gradient(self, degree: int = 1) -> float:
        """Optimizer state of this degree in the gradient: 1 for momentum, 2 for second moments, 0 for updates."""
        return float(1 / (self.fold * self._copies)) ** degree

    def lr(self, m: int) -> float:
        """Learning rate under an update of degree m (Proposition 'Dynamic equivalence … general optimizers')."""
        return float(self.fold ** (1 + m) * self._copies**m / self.in_)

    @property
    def spectral_lr(self) -> float:
        """Learning rate of an orthogonalised update (Muon): copying multiplies singular values by √(out·in_)."""
        return float(self.fold) * math.sqrt(self.out / self.in_)

    @property
    def eps(self) -> float:
        """A constant that is added to a quantity of degree 1 in the gradient."""
        return float(1 / (self.fold * self._copies))

    @property
    def coupled_decay(self) -> float:
        """Weight decay that is added to the gradient (λ in the paper's 'vanilla' column)."""
        return float(self.in_ / (self.fold**2 * self._copies))

    def decoupled_decay(self, m: int) -> float:
        """Weight decay that shrinks the weight by lr·λ (AdamW): lr·λ must stay what it was."""
        return float(self.in_ / (self.fold ** (1 + m) * self._copies**m))

    def norm(self, p: float = 2.0) -> float:
        """Weight of Σ|grad|^p in a width-invariant global p-norm; for p = ∞ the weight of max|grad|."""
        if math.isinf(p):
            return float(self.fold * self._copies)
        return float(float(self.fold * self._copies) ** p / float(self._copies * self.in_))

    def init(self, *, out_is_width: bool, in_is_width: bool) -> float:
        """Standard deviation of a random initial value under μP (Table 'μP width scalings', readout folded in)."""
        if not in_is_width:
            return float(self.fold)
        return float(self.fold * float(self.in_) ** (-0.5 if out_is_width else -1.0))

    def __mul__(self, other: Rule) -> Rule:
        """First this, then the other: multipliers multiply, so μP at n followed by widening is μP at k·n."""
        depth = self.depth * other.depth
        return Rule(self.out * other.out, self.in_ * other.in_, self.fold * other.fold, depth)
