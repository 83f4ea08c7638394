"""Tensor programs with upscaling, at finite width and at infinity (Definition 'modified Ne⊗or⊤ program').

A vector of n·k entries is an array (…, units, k): the k copies of a unit side by side, and batches in front. `Finite`
has n units; `Limit` has samples of the units' joint distribution instead. A program is ordinary Python on either:

    def program(p: Program) -> Tensor:
        W, x = p.matrix(copies=p.k), p.vector()
        return p.avg((W.T @ torch.tanh(W @ x)) ** 2)

Functions of entries such as torch.tanh are OuterNonlin with r = 0, and numbers are scalars of the program.

`grow` puts units of another population beside those that there are (growth by fresh units, beyond the paper): arrays
are longer from then on, old units first. Averages are mixtures: every unit counts by its share of the width, which is
1/n at finite width, and in the limit a population's fraction divided by its samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import Diverged, MupscaleError, derive, warn

Psi = Callable[..., Tensor]
_AT_A_TIME = 1 << 24  # entries of an outer product that are in memory at once
_NEW = {torch.float64: 1e-7, torch.float32: 1e-4}  # what part of a vector, beyond the basis, counts as a new direction
_SAMPLES_PER_LATENT = 20  # samples for each latent below which orthonormal normals are no longer nearly independent


class Matrix(ABC):
    """A random nk × nk matrix with entries N(0, 1/n), drawn for blocks of `copies` × `copies` equal entries.

    copies = 1 is the class W₁ of the paper (the noise of an upscaling), copies = k its class W₂ (duplicated weights);
    in between is the noise of an upscaling that another one follows. out, in_: the units that it leads to and from,
    where it is a block of the whole (everything else is zero); n is the width at which it was drawn, in any case.
    """

    def __init__(self, program: Program, copies: int, out: range, in_: range) -> None:
        self.program, self.copies, self.distinct = program, copies, program.distinct(copies)
        self.out, self.in_ = out, in_

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.times(x, transposed=False)

    @property
    def T(self) -> Transpose:
        """Wᵀ: `W.T @ x` is MatMul with it."""
        return Transpose(self)

    def times(self, x: Tensor, *, transposed: bool) -> Tensor:
        """(W ⊗ 1 1ᵀ) x: W acts on the sums over equal copies, and its result is repeated."""
        self.program.check(x, "a matrix")
        source, target = (self.out, self.in_) if transposed else (self.in_, self.out)
        x = x[..., source.start : source.stop, :]
        sums = x.unflatten(-1, (-1, self.copies)).sum(-1) if self.copies > 1 else x
        batch = sums.reshape(-1, *sums.shape[-2:])
        y = self._times(batch, transposed).reshape(*sums.shape[:-2], len(target), self.distinct)
        y = y.repeat_interleave(self.copies, -1) if self.copies > 1 else y
        around = target.start, self.program.units - target.stop
        return pad(y, (0, 0, *around)) if any(around) else y

    @abstractmethod
    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        """The iid matrix, or its transpose, times a batch of vectors (batch, units that it leads from, distinct)."""


class Transpose:
    """A matrix seen from the other side."""

    def __init__(self, matrix: Matrix) -> None:
        self.T = matrix

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.T.times(x, transposed=True)


class Program(ABC):
    """The operations of the language; `units` are a backend's n or its samples, k the copies of each."""

    def __init__(self, units: int, k: int, seed: int, device: str | torch.device | None, dtype: torch.dtype) -> None:
        if units < 1 or k < 1:
            raise MupscaleError(f"a program needs at least one unit and one copy of it, not {units} and {k}")
        if dtype not in (torch.float32, torch.float64):
            raise MupscaleError(f"a program computes in torch.float32 or torch.float64, not in {dtype}")
        self.units, self.k, self.dtype = units, k, dtype
        self.populations = [range(units)]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Backends and widths are independent of each other: the class's name and its units are part of the seed. k is
        # not, so that a run before its upscaling is the same at every k.
        self.generator = torch.Generator(self.device).manual_seed(derive(seed, type(self).__name__, units))
        self.shares = torch.full((units, 1), 1 / units, device=self.device, dtype=dtype)  # of the width, unit by unit

    def grow(self, times: float) -> range:
        """Make the width `times` as large with units of a new population behind all others; the new units.

        Vectors from before are shorter than those from now on: what becomes of them is the program's business.
        """
        if not 1 < times < math.inf:
            raise MupscaleError(f"fresh units make a network more than once as wide, and not infinitely, not {times:g}")
        count = self._count_new(times)
        new = self.shares.new_full((count, 1), (1 - 1 / times) / count)
        self.shares = torch.cat([self.shares / times, new])
        self.populations.append(range(self.units, self.units + count))
        self.units += count
        return self.populations[-1]

    @abstractmethod
    def _count_new(self, times: float) -> int: ...

    def vector(self, copies: int = 1, count: int | None = None, *, of: range | None = None) -> Tensor:
        """An initial vector with entries N(0, 1): iid (copies = 1) or duplicated (copies = k); or `count` of them.

        of: one population, and a vector of its length.
        """
        distinct, of = self.distinct(copies), of or range(self.units)
        drawn = self._normals((1 if count is None else count) * distinct, of)
        vectors = drawn.reshape(-1, distinct, len(of)).transpose(1, 2).contiguous()
        vectors = vectors.repeat_interleave(copies, -1) if copies > 1 else vectors
        return vectors if count is not None else vectors[0]

    def matrix(self, copies: int = 1, out: range | None = None, in_: range | None = None) -> Matrix:
        """An initial matrix: iid (copies = 1) or duplicated (copies = k); or a block of one, as in `Matrix`."""
        return self._matrix(copies, out or range(self.units), in_ or range(self.units))

    @abstractmethod
    def _matrix(self, copies: int, out: range, in_: range) -> Matrix: ...

    @abstractmethod
    def _normals(self, count: int, of: range) -> Tensor:
        """(count, units) fresh standard normals for these units, which are whole populations."""

    def distinct(self, copies: int) -> int:
        """How many different copies of a unit there are where `copies` of them are equal."""
        if copies < 1 or self.k % copies:
            raise MupscaleError(
                f"copies={copies} is no class of this program: its {self.k} copies of a unit do not divide into groups "
                f"of {copies}; take a divisor of {self.k}"
            )
        return self.k // copies

    def avg(self, x: Tensor) -> Tensor:
        """Avg: the mean over all nk entries, for each vector of a batch."""
        self.check(x, "avg")
        return self.weigh(x).sum((-2, -1))

    def weigh(self, x: Tensor) -> Tensor:
        """Every entry times its share of all nk, so that sums are averages."""
        return x * (self.shares / self.k)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """Avg of x y, for batches (a, units, k) and (b, units, k) an a × b matrix; Tr⟨x|y⟩ / k."""
        self.check(x, "inner")
        self.check(y, "inner")
        size = self.units * self.k
        products = x.reshape(-1, size) @ self.weigh(y).reshape(-1, size).T
        return products.reshape((*x.shape[:-2], *y.shape[:-2]))

    def kernel(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """⟨x|y⟩, the k × k matrix of second moments between copies, for each pair of a batch."""
        y = x if y is None else y
        self.check(x, "kernel")
        self.check(y, "kernel")
        return x.mT @ (y * self.shares)

    def outer_nonlin(
        self, psi: Psi, xs: Sequence[Tensor], r: int = 0, scalars: Sequence[float | Tensor] = ()
    ) -> Tensor:
        """OuterNonlin: y_α = ⟨ψ(x_α; x_β₁; …; x_βᵣ; c)⟩ over β₁ … βᵣ; ψ gets r + 1 lists of tensors, and c if any.

        The tensors broadcast: those of β₁ have an axis of their own behind that of α, and so on.
        """
        for x in xs:
            self.check(x, "outer_nonlin")
            if x.dim() != 2:
                raise MupscaleError(f"outer_nonlin takes single vectors, not a batch of shape {tuple(x.shape)}")
        size = self.units * self.k
        if r < 0:
            raise MupscaleError(f"outer_nonlin's order r is 0 or more, not {r}")
        if size**r > _AT_A_TIME:
            raise MupscaleError(
                f"outer_nonlin of order {r} over {size} entries needs {float(size) ** r:.1e} numbers in memory for "
                f"every entry, and {_AT_A_TIME:.1e} is the most; take fewer units or samples, or a lower order"
            )
        flat = [x.reshape(-1) for x in xs]
        betas = [[v.reshape(*(1,) * (i + 1), -1, *(1,) * (r - 1 - i)) for v in flat] for i in range(r)]
        step = max(1, _AT_A_TIME // size**r)
        shares = (self.shares / self.k).expand(-1, self.k).reshape(-1)
        parts = []
        for start in range(0, size, step):
            alpha = [v[start : start + step].reshape(-1, *(1,) * r) for v in flat]
            value = torch.as_tensor(psi(alpha, *betas, *([scalars] if len(scalars) else [])))
            expected = (min(step, size - start), *(size,) * r)
            if value.dim() != r + 1 or any(
                has not in (1, wants) for has, wants in zip(value.shape, expected, strict=True)
            ):
                raise MupscaleError(
                    f"the nonlinearity returned shape {tuple(value.shape)} where one number for each of {expected} was "
                    f"expected; it must act entry by entry"
                )
            value = value.expand(expected)
            for _ in range(r):
                value = value @ shares
            parts.append(value)
        return torch.cat(parts).reshape(self.units, self.k)

    def check(self, x: Tensor, what: str) -> None:
        if not isinstance(x, Tensor):
            raise MupscaleError(
                f"{what} takes vectors, and this is a {type(x).__name__}; multiply from the right, one matrix after "
                f"the other: A @ (B @ x)"
            )
        if x.dim() < 2 or tuple(x.shape[-2:]) != (self.units, self.k):
            raise MupscaleError(
                f"{what} takes vectors of shape (…, {self.units}, {self.k}), units × copies, not {tuple(x.shape)}"
            )
        if x.dtype != self.dtype or x.device.type != self.device.type:
            raise MupscaleError(
                f"{what} takes vectors of {self.dtype} on {self.device.type}, as this program's are, not of {x.dtype} "
                f"on {x.device.type}"
            )


# ---------------------------------------------------------------------------------------- where programs run


class Rows:
    """Rows of one length, kept in one piece of memory that grows by half when it is full."""

    def __init__(self, length: int, like: Program) -> None:
        self._memory = torch.empty(4, length, device=like.device, dtype=like.dtype)
        self.count = 0

    @property
    def rows(self) -> Tensor:
        return self._memory[: self.count]

    def add(self, rows: Tensor) -> None:
        needed = self.count + len(rows)
        if needed > len(self._memory):
            grown = self._memory.new_empty(max(needed, len(self._memory) * 3 // 2), self._memory.shape[1])
            grown[: self.count] = self.rows
            self._memory = grown
        self._memory[self.count : needed] = rows
        self.count = needed

    def lengthen(self, length: int, factor: float = 1.0) -> None:
        """Give rows this length: what they have times a factor, and zeros."""
        self._memory = pad(factor * self._memory, (0, length - self._memory.shape[1]))


class KnownProducts:
    """Directions, orthonormal, that a matrix or its transpose was multiplied with, and the product for each."""

    def __init__(self, source: int, target: int, like: Program) -> None:
        self.directions, self.products = Rows(source, like), Rows(target, like)


class ImplicitMatrix(Matrix):
    """A matrix of which only products are known.

    projected: include the middle term, as at finite width. dots: include the last one, the dot-kets.
    """

    def __init__(
        self, program: Program, copies: int, out: range, in_: range, *, projected: bool, dots: bool = True
    ) -> None:
        super().__init__(program, copies, out, in_)
        self.projected, self.dots = projected, dots
        source, target = (len(units) * self.distinct for units in (in_, out))
        self.sides = KnownProducts(source, target, program), KnownProducts(target, source, program)
        self._roots = [program.shares[units.start : units.stop].sqrt() for units in (in_, out)]

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        side, other = self.sides[transposed], self.sides[not transposed]
        flat = (x * self._roots[transposed]).reshape(len(x), -1)
        directions = side.directions.rows
        parts = flat @ directions.T
        y = parts @ side.products.rows
        lengths = torch.linalg.vector_norm(flat, dim=1)
        if not lengths.isfinite().all():
            raise Diverged("the program has diverged: a vector is not finite; take a smaller learning rate")
        new = _orthonormal(flat - parts @ directions, _NEW[self.program.dtype] * lengths)  # block Gram-Schmidt, twice
        if len(new):
            new = _orthonormal(new - (new @ directions.T) @ directions, 0 * lengths[: len(new)])
            p, count, target = other.directions.rows, len(new), self.in_ if transposed else self.out
            drawn = self.program._normals(count * self.distinct, target)
            fresh = drawn.reshape(count, self.distinct, len(target)).transpose(1, 2) * self._roots[not transposed]
            products = fresh.reshape(count, -1)  # W q for each new q
            if self.projected:
                products = products - (products @ p.T) @ p
            if self.dots:
                products = products + (new @ other.products.rows.T) @ p
            y += (flat @ new.T) @ products
            side.directions.add(new)
            side.products.add(products)
        return y.reshape(len(x), -1, self.distinct) / self._roots[not transposed]


def _orthonormal(vectors: Tensor, shortest: Tensor) -> Tensor:
    """Gram-Schmidt once; a vector of which no more than `shortest` is left is left out."""
    basis = vectors[:0]
    if not (torch.linalg.vector_norm(vectors, dim=1) > shortest).any():
        return basis
    if len(vectors) <= vectors.shape[1]:
        factors: tuple[Tensor, Tensor] = torch.linalg.qr(vectors.T)
        q, sizes = factors[0], factors[1].diagonal()
        if (sizes.abs() > shortest).all():  # mostly: nothing is left out
            return (q * sizes.sign()).T.contiguous()
    for vector, least in zip(vectors, shortest.tolist(), strict=True):
        left = vector - (basis @ vector) @ basis
        length = float(left.norm())
        if length > least:
            basis = torch.cat([basis, (left / length)[None]])
    return basis


class Finite(Program):
    """A program at width n·k. dense=False never forms a matrix: the same distribution at a cost linear in n."""

    def __init__(
        self,
        n: int,
        k: int = 1,
        seed: int = 0,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float64,
        dense: bool = True,
    ) -> None:
        super().__init__(n, k, seed, device, dtype)
        self.dense = dense

    def _matrix(self, copies: int, out: range, in_: range) -> Matrix:
        if self.dense:
            return DenseMatrix(self, copies, out, in_)
        return ImplicitMatrix(self, copies, out, in_, projected=True)

    def _count_new(self, times: float) -> int:
        wide = round(times * self.units)
        if abs(wide - times * self.units) > 1e-6 * wide or wide == self.units:
            raise MupscaleError(
                f"{self.units} units cannot become {times:g} times as many: take a whole number of new ones"
            )
        return wide - self.units

    def _normals(self, count: int, of: range) -> Tensor:
        return torch.randn(count, len(of), generator=self.generator, device=self.device, dtype=self.dtype)


class DenseMatrix(Matrix):
    """All n·distinct × n·distinct different entries."""

    def __init__(self, program: Finite, copies: int, out: range, in_: range) -> None:
        super().__init__(program, copies, out, in_)
        size = len(out) * self.distinct, len(in_) * self.distinct
        drawn = torch.randn(size, generator=program.generator, device=program.device, dtype=program.dtype)
        self.weight = drawn / math.sqrt(program.units)

    def _times(self, x: Tensor, transposed: bool) -> Tensor:
        return x.reshape(len(x), -1) @ (self.weight if transposed else self.weight.T)


class Limit(Program):
    """A program at infinite width, by Monte Carlo over `samples` of its kets.

    All fresh normals of a population are made orthonormal in sample space, with mean zero (moment matching): linear
    programs are then exact, and others much less noisy. Every population has as many samples. dots=False leaves the
    dot-kets out, to show what they are for.
    """

    def __init__(
        self,
        samples: int,
        k: int = 1,
        seed: int = 0,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float64,
        dots: bool = True,
    ) -> None:
        super().__init__(samples, k, seed, device, dtype)
        self.samples, self.dots = samples, dots
        self._fresh: dict[range, Rows] = {}

    @property
    def latents(self) -> int:
        """Independent normals drawn so far, for one population; they must stay far fewer than the samples."""
        return max((fresh.count - 1 for fresh in self._fresh.values()), default=0)

    def _matrix(self, copies: int, out: range, in_: range) -> Matrix:
        return ImplicitMatrix(self, copies, out, in_, projected=False, dots=self.dots)

    def _count_new(self, times: float) -> int:
        return self.samples  # whatever a population's fraction: its share is divided by them

    def _normals(self, count: int, of: range) -> Tensor:
        inside = [units for units in self.populations if units.start >= of.start and units.stop <= of.stop]
        return torch.cat([self._normals_of(units, count) for units in inside], 1)

    def _normals_of(self, units: range, count: int) -> Tensor:
        """Fresh normals for one population, orthonormal in its own samples."""
        if units not in self._fresh:
            self._fresh[units] = Rows(len(units), self)
            self._fresh[units].add(torch.ones(1, len(units), device=self.device, dtype=self.dtype))  # for mean zero
        fresh, samples = self._fresh[units], len(units)
        needed = fresh.count + count
        if needed > samples:
            raise MupscaleError(
                f"the program needs {needed - 1} independent normals and more, and {samples} samples cannot hold "
                f"them; take {20 * needed} samples or more"
            )
        drawn = torch.randn(count, samples, generator=self.generator, device=self.device, dtype=self.dtype)
        earlier = fresh.rows
        for _ in range(2):
            drawn = drawn - (drawn @ earlier.T / samples) @ earlier
            drawn = torch.linalg.solve_triangular(torch.linalg.cholesky(drawn @ drawn.T / samples), drawn, upper=False)
        fresh.add(drawn)
        return drawn


# ---------------------------------------------------------------------------------------- numbers with error bars


class FewSamples(UserWarning):
    """The limit was computed with few samples for its latents, and may be biased."""


def warn_of_few_samples(note: str) -> None:
    if note:
        warn(note, FewSamples)


@dataclass(frozen=True)
class Estimate:
    """Mean and standard error over seeds, entry by entry.

    values: the program's numbers for each seed. note: a warning, or an empty text.

    >>> estimate = Estimate(torch.tensor([1.0, 3.0]))
    >>> float(estimate.mean), float(estimate.standard_error)
    (2.0, 1.0)
    """

    values: Tensor
    note: str = ""

    @property
    def mean(self) -> Tensor:
        """Over seeds."""
        return self.values.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean."""
        return self.spread / math.sqrt(len(self.values))

    @property
    def spread(self) -> Tensor:
        """Standard deviation of one seed."""
        return self.values.std(0)


def limit(
    program: Callable[[Program], Tensor],
    *,
    k: int = 1,
    samples: int = 20_000,
    seeds: int = 4,
    device: str | torch.device | None = None,
    dots: bool = True,
    quiet: bool = False,
) -> Estimate:
    """What a program's numbers tend to as the width grows (Master theorem), with a standard error over seeds.

    Where there are too many latents for the samples the estimate's `note` says so, and it warns (`FewSamples`), unless
    it is quiet.

    Two products with iid matrices of variance 1/n keep a vector's mean square:

    >>> estimate = limit(lambda p: p.avg((p.matrix() @ (p.matrix() @ p.vector())) ** 2), samples=1000, seeds=2)
    >>> float(estimate.mean.round(decimals=6)), bool(estimate.standard_error < 1e-6)
    (1.0, True)
    """
    latents = 0

    def one(seed: int) -> Tensor:
        nonlocal latents
        backend = Limit(samples, k, seed, device=device, dots=dots)
        numbers = program(backend)
        latents = max(latents, backend.latents)
        return numbers

    values, note = _run_seeds(one, seeds), ""
    if samples < _SAMPLES_PER_LATENT * latents:
        note = (
            f"{latents} latents are many for {samples} samples: take at least {_SAMPLES_PER_LATENT * latents}, or the "
            f"limit may be biased by more than its error bar says"
        )
    warn_of_few_samples("" if quiet else note)
    return Estimate(values, note)


def finite(
    program: Callable[[Program], Tensor],
    n: int,
    *,
    k: int = 1,
    seeds: int = 8,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    dense: bool = True,
) -> Estimate:
    """The same numbers of real networks of width n·k, over several draws; dense=False as in `Finite`.

    >>> estimate = finite(lambda p: p.avg((p.matrix() @ p.vector()) ** 2), n=100, seeds=4)
    >>> estimate.values.shape, bool(abs(estimate.mean - 1) < 0.5)
    (torch.Size([4]), True)
    """
    how: dict[str, Any] = {"device": device, "dtype": dtype, "dense": dense}
    return Estimate(_run_seeds(lambda seed: program(Finite(n, k, seed, **how)), seeds))


def _run_seeds(one: Callable[[int], Tensor], seeds: int) -> Tensor:
    if seeds < 2:
        raise MupscaleError(f"a standard error needs at least two seeds, not {seeds}")
    values = []
    for seed in range(seeds):
        values.append(torch.as_tensor(one(seed)).detach().cpu().double())
        if not values[-1].isfinite().all():
            raise Diverged(f"the program has diverged: its numbers are not finite for seed {seed}")
    return torch.stack(values)
