"""A trained hidden matrix of a program: σ̄·W, the noise of upscalings, and its updates as what they are made of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import MupscaleError
from mupscale.theory.finite_backend import DenseMatrix
from mupscale.theory.implicit_matrices import Rows
from mupscale.theory.optimizers import Entrywise, State
from mupscale.theory.program import Matrix, Program

_ENTRIES = 1 << 28  # of a matrix of all pairs of entries, at most


class Updates(ABC):
    """The sum of a matrix's updates, in units of 1/(nk)."""

    @abstractmethod
    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """It, or its transpose, times a batch."""

    @abstractmethod
    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """One update; nk times the gradient is the sum of leftᵢ rightᵢᵀ over the batch."""

    @abstractmethod
    def grow(self, times: float) -> None:
        """Follow a program that has grown: old entries stay, so they are `times` as many units of 1/(nk); new are 0."""

    @abstractmethod
    def full(self) -> Tensor:
        """All nk × nk entries."""


class OuterProductUpdates(Updates):
    """Under SGD with momentum: Σ cₛ leftₛ rightₛᵀ, memory for two vectors a step and input.

    The velocity is made of the same vectors, with coefficients of its own.
    """

    def __init__(self, program: Program, momentum: float) -> None:
        self.program, self.momentum = program, momentum
        size = program.units * program.k
        self.left, self.right = Rows(size, program), Rows(size, program)
        self.weight = self.velocity = torch.zeros(0, device=program.device, dtype=program.dtype)

    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """Avg and OuterNonlin with r = 0: rank by rank."""
        left, right = (self.right.rows, self.left.rows) if transposed else (self.left.rows, self.right.rows)
        met = self.program.weigh(x).reshape(len(x), -1) @ right.T
        return (met * self.weight @ left).reshape(x.shape)

    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """Coefficients change; what is new is kept."""
        new = self.weight.new_ones(len(left))
        self.velocity = torch.cat([self.momentum * self.velocity, new])
        self.weight = torch.cat([self.weight, 0 * new]) - lr * self.velocity
        self.left.add(left.reshape(len(left), -1))
        self.right.add(right.reshape(len(right), -1))

    def grow(self, times: float) -> None:
        """Vectors of the past have no new units; those of the left side, which are gradients, are in units of 1/n."""
        size = self.program.units * self.program.k
        self.left.lengthen(size, times)
        self.right.lengthen(size)

    def full(self) -> Tensor:
        """The sum of the outer products."""
        return self.left.rows.T * self.weight @ self.right.rows / self.left.rows.shape[1]


class EntrywiseUpdates(Updates):
    """Under any entrywise optimizer: OuterNonlin with r = 1 of all vectors of the past, ψ kept for every pair (α, β).

    Time and memory are of order (samples·k)², for each step and not for each product.
    """

    def __init__(self, program: Program, optimizer: Entrywise) -> None:
        size = _affordable_size(program)
        self.program, self.optimizer, self.state, self.count = program, optimizer, State(), 0
        self.entries = torch.zeros(size, size, device=program.device, dtype=program.dtype)

    def times(self, x: Tensor, transposed: bool) -> Tensor:
        """⟨ψ_αβ x_β⟩ over β."""
        flat = self.program.weigh(x).reshape(len(x), -1)
        return (flat @ (self.entries if transposed else self.entries.T)).reshape(x.shape)

    def step(self, left: Tensor, right: Tensor, lr: float) -> None:
        """The optimizer sees every pair's gradient."""
        self.count += 1
        gradient = left.reshape(len(left), -1).T @ right.reshape(len(right), -1)
        self.entries.sub_(self.optimizer(gradient, self.state, self.count), alpha=lr)

    def grow(self, times: float) -> None:
        """Old pairs keep what they have; pairs with a new unit start at zero, and so does their optimizer state."""
        new = _affordable_size(self.program) - len(self.entries)
        self.entries = pad(times * self.entries, (0, new, 0, new))
        self.state = self.optimizer.grow(self.state, times, (0, new, 0, new))

    def full(self) -> Tensor:
        """As a matrix of the network."""
        return self.entries / len(self.entries)


def _affordable_size(program: Program) -> int:
    """The entries of a vector, if a matrix of all their pairs can be kept."""
    size = program.units * program.k
    if size**2 > _ENTRIES:
        raise MupscaleError(
            f"an entrywise optimizer keeps a number for every pair of {size} entries (units or samples × copies), "
            f"and {math.isqrt(_ENTRIES)} entries are the most; take fewer of them, and more seeds"
        )
    return size


class HiddenWeight:
    """A hidden matrix."""

    def __init__(self, program: Program, sigma: float, updates: Updates | None) -> None:
        self.program, self.updates = program, updates
        self.parts: list[tuple[float, Matrix]] = []
        self.perturb(sigma, program.k)

    def perturb(self, std: float, copies: int, out: range | None = None, in_: range | None = None) -> None:
        """Entries N(0, std²/N) more, N the width so far, duplicated for upscalings to come: the start, and noise."""
        if std:
            scale = std / (copies * math.sqrt(self.program.distinct(copies)))
            self.parts.append((scale, self.program.matrix(copies, out, in_)))

    def grow(self, times: float, std: float, copies: int, new: range, outgoing: float) -> None:
        """Draw three of the four blocks at the wide width; from old to old units nothing changes."""
        if self.updates is not None:
            self.updates.grow(times)
        self.perturb(std, copies, out=new)
        self.perturb(outgoing * std, copies, out=range(new.start), in_=new)

    def times(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """It, or its transpose, times a batch."""
        total = torch.zeros_like(x) if self.updates is None else self.updates.times(x, transposed)
        for scale, matrix in self.parts:
            total = total + scale * matrix.times(x, transposed=transposed)
        return total

    def full(self) -> Tensor:
        """All entries, where its matrices have them."""
        size = self.program.units * self.program.k
        total = torch.zeros(size, size, device=self.program.device, dtype=self.program.dtype)
        for scale, matrix in self.parts:
            if not isinstance(matrix, DenseMatrix):
                raise MupscaleError("only networks with real matrices have weights to show: take Finite(n, k) as it is")
            total += scale * matrix.full()
        return total if self.updates is None else total + self.updates.full()
