"""A model and what it grew into, side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.models import MLP

Grown = tuple[nn.Module, nn.Module, tuple[torch.optim.Optimizer, torch.optim.Optimizer]]


@pytest.fixture(scope="module")
def grown() -> Grown:
    x = torch.randn(4, 3)
    family = mu.Family(lambda width: MLP(3, width, 2), base=8, inputs=x)
    model = family.init(8)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=0.01)
    model(x).sum().backward()
    optimizer.step()
    wide, wide_optimizer = family.upscale(model, optimizer, width=16, grow=mu.Fresh())
    assert wide_optimizer is not None
    return model, wide, (optimizer, wide_optimizer)


def test_what_a_growth_changes_is_in_the_table(grown: Grown) -> None:
    before, after, optimizers = grown
    x, gradients = torch.randn(5, 3), [p.grad for p in before.parameters()]

    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    table = mu.growth_table(before, after.eval(), optimizers, loss)
    rows = {what: rest for what, *rest in table.rows}
    counts = [sum(p.numel() for p in model.parameters()) for model in (before, after)]
    assert rows["parameters"][:2] == [f"{count:,}" for count in counts]
    held = float(rows["weights, gradients, optimizer state (MiB)"][0])
    assert held == pytest.approx((16 * counts[0] + 4 * len(gradients)) / 2**20, rel=1e-3)  # and a count of steps each
    assert rows["loss on the batch"][:2] == [f"{loss(model).item():.4f}" for model in (before, after)]
    assert float(rows["forward and backward passes per second"][0].replace(",", "")) > 0
    assert ["0.01", "0.005", "× 0.5"] in rows.values()
    assert ["0.01", "0.01", ""] in rows.values()
    assert "lr of layers.1–3.weight" in str(table)
    assert "<table" in table._repr_html_()
    assert all(p.grad is gradient for p, gradient in zip(before.parameters(), gradients, strict=True))
    assert before.training
    assert not after.training


def test_without_optimizers_and_a_loss_there_are_sizes(grown: Grown) -> None:
    told = [row[0] for row in mu.growth_table(*grown[:2]).rows]
    assert told == ["parameters", "weights, gradients, optimizer state (MiB)"]


def test_a_loss_without_a_gradient_is_timed_forward(grown: Grown) -> None:
    x = torch.randn(5, 3)

    @torch.no_grad()
    def loss(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    assert mu.growth_table(*grown[:2], loss=loss).rows[-1][0] == "forward passes per second"
    assert mu.growth_table(*grown[:2], loss=lambda model: loss(model).item()).rows[-1][0] == "forward passes per second"
    with torch.no_grad():  # of the caller: it is not the loss's own
        table = mu.growth_table(*grown[:2], loss=lambda model: model(x).sum())
    assert table.rows[-1][0] == "forward and backward passes per second"


def test_both_models_are_left_as_they_were() -> None:
    """Passes in training, which are timed, would move running statistics."""
    models = [nn.Sequential(nn.Linear(5, w), nn.BatchNorm1d(w), nn.Dropout(), nn.Linear(w, 3)) for w in (8, 16)]
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    batch, drawn = torch.randn(6, 5), torch.get_rng_state()
    mu.growth_table(*models, loss=lambda model: model(batch).square().mean())
    assert torch.equal(torch.get_rng_state(), drawn)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
