"""Growing right after an evaluation: the narrow model is in eval mode, and the new one in train mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, width), nn.BatchNorm1d(width)
        self.blocks, self.last = nn.ModuleList(Block(width) for _ in range(depth)), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def evaluated(x: Tensor) -> Net:
    torch.manual_seed(0)
    model = Net(8)
    model(x)
    return model.eval()


def modes(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


@pytest.mark.parametrize(("width", "grow"), [(16, mu.Copies()), (16, mu.Fresh()), (12, mu.Fresh())])
def test_both_models_are_run_in_the_mode_of_the_narrow_one(
    width: int, grow: mu.Operator, evaluated: Net, x: Tensor
) -> None:
    wide, _ = mu.upscale(evaluated, Net(width), inputs=x, fresh=lambda: Net(8), grow=grow, exact=grow == mu.Copies())
    assert (modes(evaluated), modes(wide)) == ({False}, {True})


def test_the_other_way_round(evaluated: Net, x: Tensor) -> None:
    wide, _ = mu.upscale(evaluated.train(), Net(16).eval(), inputs=x, exact=True)
    assert (modes(evaluated), modes(wide)) == ({True}, {False})


def test_a_deeper_model_and_the_check_over_steps(evaluated: Net, x: Tensor) -> None:
    deep = mu.upscale(evaluated, Net(8, 4), inputs=x)[0]
    assert (modes(evaluated), modes(deep)) == ({False}, {True})
    assert torch.allclose(deep.eval()(x), evaluated(x), atol=1e-6)
    plan = mu.plan(evaluated, Net(16), inputs=x)
    wide = mu.widen(evaluated, Net(16), plan)
    report = mu.verify(evaluated, wide, plan, [x], lambda model, batch: model(batch).square().mean(), steps=2)
    assert report.ok
    assert (modes(evaluated), modes(wide)) == ({False}, {True})
