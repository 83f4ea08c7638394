"""Dynamic equivalence for random depths, widths, multipliers, blocks and hyperparameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import MLP

pytestmark = pytest.mark.usefixtures("float64")
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
        opt.zero_grad()
        loss(narrow, batch).backward()
        opt.step()
    mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [batch], loss, optimizer=opt, steps=5, clip=clip, tolerance=1e-8)
    assert report.ok, str(report)
