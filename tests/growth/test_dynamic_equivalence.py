"""Theorem 'Dynamic equivalence': architectures × optimizers over training steps; MLPs and hyperparameters at random."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import MLP
from mupscale.optim import traits_of
from toys import Toy
from weights import take_step
from zoo import ARCHITECTURES, TRAININGS, VOCAB, Architecture, Training, train_pair

pytestmark = pytest.mark.usefixtures("float64")


def _cosine(t: int) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * t / 20)


def _matrix(architectures: tuple[str, ...], trainings: tuple[str, ...]) -> list[Any]:
    """Every cell; those outside these rows and columns, which meet every architecture and every optimizer, are slow."""
    cells = []
    for a, t in product(ARCHITECTURES, TRAININGS):
        crossed = a in architectures or t in trainings
        cells.append(pytest.param(a, t, marks=() if crossed else (pytest.mark.slow,)))
    return cells


# Every optimizer on a convolutional model, and below on the cheapest; every architecture with AdamW, below with SGD.
PLAIN = _matrix(("conv-flatten",), ("AdamW",))
CLIPPED = _matrix(("mlp",), ("SGD-momentum",))


@pytest.mark.parametrize(("architecture", "training"), PLAIN)
def test_dynamic_equivalence(architecture: str, training: str) -> None:
    outcome = train_pair(ARCHITECTURES[architecture], TRAININGS[training])
    assert outcome.difference <= 1e-10
    assert outcome.losses[-1] < 0.9 * outcome.losses[0], "the model must visibly learn"


@pytest.mark.parametrize(("architecture", "training"), CLIPPED)
def test_with_clipping_and_a_schedule(architecture: str, training: str) -> None:
    """Every architecture, whose norms are clipped, and every optimizer, whose rates follow the schedule."""
    outcome = train_pair(
        ARCHITECTURES[architecture], TRAININGS[training], before=5, after=10, clip=0.2, schedule=_cosine
    )
    assert outcome.clipped
    assert outcome.difference <= 1e-10


@pytest.mark.parametrize("matrix", [PLAIN, CLIPPED], ids=["plain", "clipped"])
def test_every_architecture_and_every_optimizer_is_tried_for_every_change(matrix: list[Any]) -> None:
    cells = [cell.values for cell in matrix if not cell.marks]
    assert {architecture for architecture, _ in cells} == set(ARCHITECTURES)
    assert {training for _, training in cells} == set(TRAININGS)
    assert len(matrix) == len(ARCHITECTURES) * len(TRAININGS)


def _hyperparameters() -> list[tuple[str, str]]:
    """Every scaled hyperparameter that a training sets."""
    constant = [
        ("Adafactor", "lr"),
        ("Adafactor", "weight_decay"),
        ("Rprop", "lr"),
    ]  # Rprop reads it at the start alone
    cases = []
    for name, training in TRAININGS.items():
        scaled = traits_of(training.optimizer).hyper
        cases += [(name, key) for key in scaled if key in training.hyper and training.matrices is None]
    return [*(c for c in cases if c not in constant), *(("Muon", key) for key in ("lr", "weight_decay", "eps"))]


@pytest.mark.quick("SGD-momentum-*", "AdamW-*", "Muon-*", "Adafactor-*", "RMSprop-eps")
@pytest.mark.parametrize(("training", "key"), _hyperparameters())
def test_every_scaled_hyperparameter_matters(training: str, key: str) -> None:
    """Left at its narrow value, the wide model goes elsewhere: decay and eps are large enough to matter."""
    config = TRAININGS[training]
    hyper = config.hyper if config.matrices is None else config.matrices[1]

    def keep_narrow(group: dict[str, Any]) -> None:
        if config.matrices is None or all(p.dim() == 2 for _, p in group["params"]):
            group[key] = hyper[key]

    assert any(
        train_pair(ARCHITECTURES[a], config, tamper=keep_narrow).difference > 1e-7
        for a in ("mlp", "conv-flatten", "lstm")
    )


def test_adafactors_first_floor_matters() -> None:
    """eps1, left at its narrow value: the floor under the mean of the rows' second moments binds."""

    def keep_narrow(group: dict[str, Any]) -> None:
        group["eps"] = (TRAININGS["Adafactor"].hyper["eps"][0], group["eps"][1])

    outcome = train_pair(ARCHITECTURES["grouped-queries"], TRAININGS["Adafactor"], tamper=keep_narrow)
    assert outcome.difference > 1e-7


def test_sparse_adam() -> None:
    """SparseAdam trains embeddings with sparse gradients; the rest has another optimizer."""

    def bag(width: int) -> nn.Module:
        embed, head = nn.Embedding(VOCAB, width, sparse=True), nn.Linear(width, VOCAB)
        return Toy(lambda m, tokens: m.head(torch.tanh(m.embed(tokens))), embed=embed, head=head)

    tokens = Architecture(lambda: bag(4), lambda: bag(12), lambda: torch.randint(0, VOCAB - 3, (4, 8)))
    sparse = (torch.optim.SparseAdam, {"lr": 3e-2, "eps": 1e-2})

    class Split(Training):
        def split(self, model: nn.Module, lr: float = 1.0) -> list[Any]:
            return [(*sparse, ["embed.weight"]), (self.optimizer, self.hyper, ["head.weight", "head.bias"])]

    outcome = train_pair(tokens, Split(torch.optim.AdamW, {"lr": 3e-2, "eps": 1e-2}))
    assert outcome.difference <= 1e-10
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]


# ---------------------------------------------------------------------------------------------- at random

quick = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])

widths = st.integers(1, 5)
multipliers = st.integers(1, 4)
rates = st.floats(1e-3, 0.3)
decays = st.floats(0, 1)
epsilons = st.floats(1e-8, 1)


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """An optimizer and hyperparameters from their whole range."""
    lr, decay, eps = draw(rates), draw(decays), draw(epsilons)
    return draw(
        st.sampled_from(
            [
                (torch.optim.SGD, {"lr": lr, "weight_decay": decay, "momentum": 0.9, "dampening": draw(decays)}),
                (torch.optim.Adam, {"lr": lr, "weight_decay": decay, "eps": eps, "amsgrad": draw(st.booleans())}),
                (torch.optim.AdamW, {"lr": lr, "weight_decay": decay, "eps": eps}),
                (torch.optim.RMSprop, {"lr": lr, "weight_decay": decay, "eps": eps, "momentum": draw(decays)}),
                (torch.optim.Adagrad, {"lr": lr, "weight_decay": decay, "eps": eps}),
                (torch.optim.Adamax, {"lr": lr, "weight_decay": decay, "eps": eps}),
            ]
        )
    )


@quick
@given(
    layers=st.lists(st.tuples(widths, multipliers), min_size=1, max_size=4),
    optimizer=optimizers(),
    bias=st.booleans(),
    clip=st.one_of(st.none(), st.floats(0.01, 10)),
    seed=st.integers(0, 1000),
)
def test_proposition_dynamic_equivalence_of_mlps(
    layers: list[tuple[int, int]],
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    bias: bool,
    clip: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    narrow = MLP(3, [n for n, _ in layers], 2, bias=bias, activation="tanh")
    wide = MLP(3, [n * k for n, k in layers], 2, bias=bias, activation="tanh")
    batch = (torch.randn(6, 3), torch.randn(6, 2))
    plan, (cls, hyper) = mu.plan(narrow, wide), optimizer
    opt = cls(narrow.parameters(), **hyper)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    for _ in range(3):
        take_step(opt, loss(narrow, batch))
    mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [batch], loss, optimizer=opt, steps=5, clip=clip, tolerance=1e-8)
    assert report.ok, str(report)
