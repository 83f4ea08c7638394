"""The language on both backends: matrices of every class, what they do in the limit, and random programs at large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mupscale.system.errors import MupscaleError
from mupscale.theory import Diverged, Estimate, FewSamples, Finite, Limit, Program, finite, limit

BACKENDS = [
    lambda n, k, seed=0: Finite(n, k, seed, device="cpu"),
    lambda n, k, seed=0: Finite(n, k, seed, device="cpu", dense=False),
    lambda n, k, seed=0: Limit(n, k, seed, device="cpu"),
]
Backend = Callable[..., Program]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=["dense", "revealed", "limit"])


def close(a: Tensor, b: Tensor | float, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand(a.shape), rtol=0, atol=tolerance)


# ------------------------------------------------------------------------ the operations


@each_backend
def test_a_program_is_ordinary_python(backend: Backend) -> None:
    p = backend(200, 2)
    w, x = p.matrix(copies=2), p.vector()
    c = p.avg(torch.tanh(w @ x) ** 2)
    y = w.T @ (c * torch.relu(w @ x))
    assert y.shape == x.shape == (200, 2)
    assert w.T.T is w
    close(p.inner(x, y), (x * y).mean())
    batch = torch.stack([x, y, x + y])
    for one, many in zip(batch, w @ batch, strict=True):
        close(w @ one, many, 1e-10)
    assert p.avg(batch).shape == (3,)
    assert p.inner(batch, batch[:2]).shape == (3, 2)
    close(p.kernel(batch)[1], y.T @ y / 200)
    close(p.kernel(x, y).diagonal().mean(), p.inner(x, y))


@each_backend
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_matrix_is_linear_and_the_adjoint_of_its_transpose(backend: Backend, copies: int) -> None:
    p = backend(300, 4)
    w, x, y = p.matrix(copies), p.vector(2), torch.tanh(p.vector())
    wx, wy = w @ x, w @ y
    close(w @ (2 * x - y), 2 * wx - wy, 1e-10)
    z = w.T @ torch.tanh(wx + wy)
    exact = not isinstance(p, Limit)
    close(p.inner(z, x), p.inner(torch.tanh(wx + wy), wx), 1e-10 if exact else 0.2)
    close(w @ x, wx, 1e-10)
    for copy in range(0, 4, copies):
        close(wx[:, copy : copy + copies], wx[:, copy : copy + 1], 1e-12)


@each_backend
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_an_initial_vector_has_its_class(backend: Backend, copies: int) -> None:
    p = backend(4000, 4)
    x = p.vector(copies)
    blocks = torch.block_diag(*[torch.ones(copies, copies, dtype=torch.float64)] * (4 // copies))
    close(p.kernel(x), blocks, 1e-12 if isinstance(p, Limit) else 0.1)
    assert p.vector(copies, 3).shape == (3, 4000, 4)


def test_backends_and_widths_draw_independent_numbers() -> None:
    """Equal seeds do not make their errors equal; k does, so that a run before its upscaling is the same at every k."""
    size = 500
    drawn = [
        Finite(size, 1, 3, device="cpu").vector(),
        Finite(size, 1, 4, device="cpu").vector(),
        Finite(size + 1, 1, 3, device="cpu").vector()[:-1],
        Limit(size, 1, 3, device="cpu").vector(),
        Limit(size + 1, 1, 3, device="cpu").vector()[:-1],
    ]
    correlations = torch.corrcoef(torch.cat(drawn, 1).T)
    assert float((correlations - torch.eye(len(drawn), dtype=torch.float64)).abs().max()) < 5 / size**0.5
    close(Finite(size, 3, 3, device="cpu").vector(3), drawn[0])
    close(Limit(size, 3, 3, device="cpu").vector(3), drawn[3])


@pytest.mark.parametrize("r", [0, 1, 2])
@each_backend
def test_outer_nonlin_is_its_definition(backend: Backend, r: int) -> None:
    p = backend(6, 2)
    x, y, c = p.vector(), p.vector(2), 0.7

    def psi(*args: list[Tensor]) -> Tensor:
        *rows, (scale,) = args
        total = scale * rows[0][0] + rows[0][1]
        for i, (a, b) in enumerate(rows[1:]):
            total = torch.sin(total + (i + 2) * a * b)
        return total

    found = p.outer_nonlin(psi, [x, y], r, [c]).reshape(-1)
    flat = [(float(a), float(b)) for a, b in zip(x.reshape(-1), y.reshape(-1), strict=True)]

    def mean(total: float, depth: int) -> float:
        if depth == r:
            return total
        here = [torch.sin(torch.tensor(total + (depth + 2) * a * b, dtype=torch.float64)) for a, b in flat]
        return sum(mean(float(value), depth + 1) for value in here) / len(flat)

    for (a, b), value in zip(flat, found, strict=True):
        assert float(value) == pytest.approx(mean(c * a + b, 0), abs=1e-12)


def test_outer_nonlin_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Finite(30, 2, device="cpu")
    x, y = p.vector(), p.vector()

    def value() -> Tensor:
        return p.outer_nonlin(lambda a, b: torch.tanh(a[0] * b[1]) * b[0], [x, y], r=1)

    whole = value()
    monkeypatch.setattr("mupscale.theory.program._AT_A_TIME", 7 * 60)
    close(value(), whole, 1e-15)
    close(p.outer_nonlin(lambda a, b: b[0] * b[0], [x], r=1), (x * x).mean())


# ------------------------------------------------------------------------ Definition 'Ket Construction'


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_hat_kets_have_the_papers_covariance(copies: int) -> None:
    """Equation 'hatket': Tr⟨x|y⟩ I for W₁, (1ᵀ⟨x|y⟩1) 1 1ᵀ for W₂; between them, blocks of equal copies."""
    p = Limit(3000, 4, device="cpu")
    w, u, x, y = p.matrix(copies), p.matrix(copies), torch.tanh(p.vector()), p.vector(2) + p.vector(4)
    y = y + 0.5 * x
    sums = [v.unflatten(-1, (-1, copies)).sum(-1) for v in (x, y)]
    blocks = torch.block_diag(*[torch.ones(copies, copies, dtype=torch.float64)] * (4 // copies))
    close(p.kernel(w @ x, w @ y), (sums[0] * sums[1]).sum(1).mean() * blocks, 1e-10)
    close(p.kernel(w @ x, u @ y), 0.0, 1e-10)
    close(p.kernel(w @ x, w.T @ x), 0.0, 1e-3)  # the transpose has a dot-ket, of no more than sampling noise here


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_dot_kets_are_the_papers(copies: int) -> None:
    """Equation 'dotket' with |x⟩ = tanh|Wᵀy⟩ + |other⟩: k·E[tanh′] |y⟩, summed over equal copies.

    For W₂ the derivative is the total one, with respect to the one shared scalar.
    """
    found = {}
    for dots in (True, False):
        p = Limit(20_000, 4, device="cpu", dots=dots)
        w, y, other = p.matrix(copies), torch.relu(p.vector()), p.vector()
        g = w.T @ y
        found[dots] = w @ (torch.tanh(g * 0.3) + other)
    size = y.unflatten(-1, (-1, copies)).sum(-1)
    slope = 4 * (0.3 * (1 - torch.tanh(g * 0.3) ** 2)).mean()  # distinct · copies: every equal copy adds its own
    wanted = slope * size.repeat_interleave(copies, -1)
    close(found[True] - found[False], wanted, 0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("seed", range(3))
def test_linear_programs_are_exact_with_few_samples(seed: int) -> None:
    """Moment matching: ⟨W Wᵀ W x, W Wᵀ W x⟩ at any number of samples is what the moments of W say."""
    p = Limit(40, 1, seed, device="cpu")
    w, x = p.matrix(), p.vector()
    y = w @ (w.T @ (w @ x))
    close(p.inner(x, x), 1.0)
    close(p.inner(w @ x, w @ x), 1.0)
    close(p.inner(y, y), 5.0, 1e-12)  # the third Catalan number: E of the Marchenko-Pastur law's third moment
    close(p.inner(w @ x, y), 2.0, 1e-12)


def test_fresh_normals_favour_no_sign() -> None:
    """Orthonormal normals are as often positive as negative in each sample, the first one included."""
    first = torch.stack([Limit(50, seed=seed, device="cpu").vector(count=4)[:, 0, 0] for seed in range(400)])
    assert float(first.mean(0).abs().max()) < 0.2
    assert float(first.std()) == pytest.approx(1, abs=0.06)


def test_what_is_nearly_known_is_not_met_again() -> None:
    p = Limit(500, device="cpu")
    w, x, y = p.matrix(), p.vector(), p.vector()
    w @ torch.stack([x, y])
    known = p.latents
    w @ torch.stack([x + 1e-9 * torch.tanh(y), 3 * x - y, 1e9 * x, torch.zeros_like(x)])
    assert p.latents == known
    w @ (x + 1e-5 * torch.tanh(y))
    assert p.latents == known + 1
    basis = w.sides[0].directions.rows  # type: ignore[attr-defined]
    close(basis @ basis.T, torch.eye(3, dtype=torch.float64), 1e-12)


@pytest.mark.quick("2")
@pytest.mark.parametrize("copies", [1, 2])
def test_revealed_matrices_have_the_distribution_of_real_ones(copies: int) -> None:
    """At small width, where O(1/n) terms are large: means and spreads of fourth moments agree."""

    def program(p: Program) -> Tensor:
        w, x = p.matrix(copies), p.vector()
        a = torch.relu(w @ x)
        b = torch.tanh(w.T @ a)
        c = w @ b
        return torch.stack([p.avg(a * c), p.avg(b * x), p.avg(c * c), p.inner(w @ x, c), p.avg((w.T @ c) * b)])

    real, revealed = (finite(program, 6, k=2, seeds=120, dense=dense, dtype=torch.float64) for dense in (True, False))
    _agree(real, revealed, 4)
    squares = [Estimate(found.values**2) for found in (real, revealed)]
    _agree(*squares, 4)
    limiting = limit(program, k=2, samples=2000, seeds=4)
    assert float(((real.mean - limiting.mean).abs() / real.standard_error).max()) > 2  # width 6 is not the limit


def _agree(a: Estimate, b: Estimate, errors: float, beside: float = 1e-9) -> None:
    allowed = errors * (a.standard_error**2 + b.standard_error**2).sqrt() + beside
    assert ((a.mean - b.mean).abs() <= allowed).all(), f"{a.mean} and {b.mean} differ by more than {allowed}"


# ------------------------------------------------------------------------ the Master theorem at large

MATRICES, K = 3, 2
ops = st.one_of(
    st.tuples(st.just("matmul"), st.integers(0, MATRICES - 1), st.booleans(), st.integers(0, 9)),
    st.tuples(st.just("nonlin"), st.sampled_from(["tanh", "relu", "sin"]), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("scale"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("outer"), st.integers(0, 9), st.integers(0, 9)),
)
FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu, "sin": torch.sin}


def interpret(script: list[tuple[object, ...]], p: Program) -> Tensor:
    """Run a random program; its numbers are averages of its vectors and of their products."""
    w = [p.matrix(1), p.matrix(K), p.matrix(K)]
    xs = [p.vector(), p.vector(K)]

    def x(i: object) -> Tensor:
        return xs[-1 - int(i) % len(xs)]  # type: ignore[call-overload, no-any-return]

    for op in script:
        if op[0] == "matmul":
            matrix = w[op[1]]  # type: ignore[index]
            y = (matrix.T if op[2] else matrix) @ (x(op[3]) / K)
        elif op[0] == "nonlin":
            y = FUNCTIONS[op[1]](x(op[2]) + 0.5 * x(op[3]))  # type: ignore[index]
        elif op[0] == "scale":
            y = torch.tanh(p.inner(x(op[1]), x(op[2]))) * x(op[1]) + torch.tanh(p.avg(x(op[2]).square()))
        else:
            y = p.outer_nonlin(lambda a, b: torch.tanh(a[0] + b[1]) * b[0], [x(op[1]), x(op[2])], r=1)
        xs.append(y)
    return torch.stack([*(p.avg(torch.tanh(v)) for v in xs), *(p.avg(torch.tanh(u * v)) for u in xs for v in xs)])


@settings(max_examples=5, phases=[Phase.generate])
@given(st.lists(ops, min_size=2, max_size=6))
def test_master_theorem_for_random_programs(script: list[tuple[object, ...]]) -> None:
    """Finite programs of width n·k agree with the limit within both errors and a bias of O(1/n)."""
    # Products of both classes on the way, and something that Stein's lemma is needed for.
    script = [
        ("matmul", 0, False, 1),
        ("nonlin", "relu", 0, 2),
        ("matmul", 0, True, 0),
        *script,
        ("matmul", 1, True, 2),
    ]
    found = finite(lambda p: interpret(script, p), 100, k=K, seeds=12, dtype=torch.float64)
    _agree(found, limit(lambda p: interpret(script, p), k=K, samples=400, seeds=4), 5, beside=0.02)


# ------------------------------------------------------------------------ estimates, and bad input


def test_estimates_have_error_bars_and_a_note_when_latents_are_many() -> None:
    def program(p: Program) -> Tensor:
        w, x = p.matrix(), torch.relu(p.vector())
        for _ in range(6):
            x = torch.relu(w @ x)
        return p.avg(x)

    with pytest.warns(FewSamples, match="7 latents are many for 100 samples"):
        found = limit(program, samples=100, seeds=5)
    assert found.values.shape == (5,)
    torch.testing.assert_close(found.standard_error, found.values.std() / 5**0.5)
    assert "7 latents are many for 100 samples: take at least 140" in found.note
    fine = limit(program, samples=4000, seeds=5)
    assert fine.note == ""
    assert fine.standard_error < found.standard_error
    assert abs(fine.mean - found.mean) < 4 * found.standard_error


def _outer(p: Program, r: int, value: Callable[..., Tensor] = lambda *rows: sum(row[0] for row in rows)) -> Tensor:
    return p.outer_nonlin(value, [p.vector()], r)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Finite(0), "at least one unit"),
        (lambda: Limit(10, 0), "at least one unit and one copy of it, not 10 and 0"),
        (lambda: Finite(10, 4).matrix(copies=3), "copies=3 is no class.*divisor of 4"),
        (lambda: Limit(10, 4).vector(copies=8), "copies=8 is no class.*divisor of 4"),
        (lambda: Finite(10, 2).matrix() @ torch.ones(10, 1, dtype=torch.float64), r"\(…, 10, 2\).*not \(10, 1\)"),
        (lambda: Limit(10, 2).avg(torch.ones(20, dtype=torch.float64)), r"avg takes.*not \(20,\)"),
        (lambda: Finite(10, 2, device="cpu").avg(torch.ones(10, 2)), "torch.float64 on cpu.*not of torch.float32"),
        (lambda: Finite(10, 2).kernel(Finite(10, 1).vector()), r"kernel takes.*not \(10, 1\)"),
        (lambda: _outer(Finite(10, 2), 1, lambda a, b: a[0].squeeze()), r"returned shape \(20,\).*entry by entry"),
        (lambda: _outer(Finite(10, 2), 0, lambda a: a[0][:7]), r"returned shape \(7,\).*entry by entry"),
        (lambda: _outer(Finite(10, 2), 0, lambda a: 1.0), r"returned shape \(\).*entry by entry"),  # type: ignore
        (lambda: _outer(Finite(10, 2), -1), "0 or more, not -1"),
        (lambda: _outer(Limit(20_000, 2), 2), "order 2 over 40000 entries needs 1.6e\\+09"),
        (lambda: Finite(10, 2).outer_nonlin(torch.tanh, [Finite(10, 2).vector(1, 3)]), "single vectors, not a batch"),
        (lambda: Limit(9).matrix() @ Limit(9).matrix(), r"this is a ImplicitMatrix; .*A @ \(B @ x\)"),  # type: ignore
        (lambda: Limit(5).vector(count=9), "9 independent normals and more, and 5 samples cannot hold.*take 200"),
        (lambda: Finite(10).grow(1.26), "10 units cannot become 1.26 times as many"),
        (lambda: Limit(10).grow(1), "more than once as wide"),
        (lambda: Finite(5, dtype=torch.float16), r"torch\.float32 or torch\.float64, not in torch\.float16"),
        (lambda: limit(lambda p: p.avg(p.vector()), seeds=1), "at least two seeds, not 1"),
        (lambda: finite(lambda p: p.avg(p.vector()), 5, seeds=0), "at least two seeds, not 0"),
    ],
)
def test_bad_input_gets_one_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MupscaleError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_divergence_is_said() -> None:
    def program(p: Program) -> Tensor:
        w, x = p.matrix(), p.vector()
        for _ in range(9):
            x = w @ x.exp()
        return p.avg(x)

    for estimate in (lambda: limit(program, samples=500), lambda: finite(program, 50)):
        with pytest.raises(Diverged, match="has diverged"):
            estimate()
