"""Lossless growth where a norm is not the only one that reads an axis: a run shows who reads what."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import mupscale as mu

LOSSLESS = mu.Fresh(lossless=True)


class Residual(nn.Module):
    """The model of docs/start.md: a norm reads the stream, and so does the head."""

    def __init__(self, width: int, times: int = 2, activation: Callable[[Tensor], Tensor] = gelu) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(20, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)
        self.head = nn.Linear(width, 5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y: Tensor = self.head(x + self.down(self.activation(self.up(self.norm(x)))))
        return y


class RootMeanSquare(Residual):
    """The same with an RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.RMSNorm(width)  # type: ignore[assignment]


class Recurrent(nn.Module):
    """A norm reads units of a GRU, which are sums and products of others and cannot start at their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Linear(20, width), nn.GRU(width, width, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.gru(self.embed(x)[:, None])[0][:, -1]))
        return y


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "start.md": Residual,
    "as wide inside as the stream": lambda width: Residual(width, 1),
    "not 0 at 0": lambda width: Residual(width, 1, torch.sigmoid),
    "rms": RootMeanSquare,
}


def exact(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.eps = 1e-18
    return model.double()


def trained(build: Callable[[int], nn.Module], x: Tensor) -> nn.Module:
    """No gain, bias or weight at its initial value."""
    torch.manual_seed(0)
    model = exact(build(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    before, after = one(x).detach(), other(x).detach()
    return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("name", MODELS)
def test_who_reads_past_a_norm_starts_without_weights(name: str, width: int) -> None:
    """To 1e-10, with the batch given to the plan or to the growth, and every parameter trains on."""
    build, x = MODELS[name], torch.randn(6, 20, dtype=torch.float64)
    narrow = trained(build, x)
    for with_plan in (False, True):
        wide = exact(build(width))
        plan = mu.plan(narrow, wide, fresh=lambda: build(8), grow=LOSSLESS, inputs=x if with_plan else None)
        mu.upscale(narrow, wide, plan, grow=LOSSLESS, inputs=x)
        assert difference(narrow, wide, x) < 1e-10
        assert mu.Plan.from_json(plan.to_json()).past_norms == plan.past_norms
    wide(x).square().mean().backward()
    assert all(bool(p.grad.any()) for p in wide.parameters() if p.grad is not None)
    hidden = wide.get_parameter("up.weight").detach()
    assert len(hidden.unique(dim=0)) == len(hidden) or name == "rms"  # none is another's twin for ever


@pytest.mark.parametrize("name", ["start.md", "as wide inside as the stream", "not 0 at 0"])
def test_shapes_alone_would_change_the_function(name: str) -> None:
    build, x = MODELS[name], torch.randn(6, 20, dtype=torch.float64)
    narrow, wide = trained(build, x), exact(build(12))
    plan = mu.plan(narrow, wide, fresh=lambda: build(8), grow=LOSSLESS, inputs=x)
    with pytest.warns(mu.UncheckedPlan, match="has not been tried: which weights of new units .* Pass inputs="):
        mu.upscale(narrow, wide, replace(plan, past_norms=None), grow=LOSSLESS)
    assert difference(narrow, wide, x) > 1e-3


def test_a_family_tries_it_once_on_small_members() -> None:
    x = torch.randn(6, 20)
    family = mu.Family(Residual, base=32, inputs=x)
    model = family.init(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide, _ = family.upscale(model, width=48, grow=LOSSLESS)
    assert difference(model, wide, x) < 1e-3  # a norm's eps leaves a trace


def test_a_family_says_by_how_much_and_why() -> None:
    family = mu.Family(Recurrent, base=16, inputs=torch.randn(6, 20))
    with pytest.warns(
        UserWarning, match=r"outputs differ by [\d.]+ of their size .*'gru.weight_ih_l0' .* a norm reads"
    ):
        family.upscale(family.init(16), width=24, grow=LOSSLESS)


def test_a_family_in_half_precision_is_measured_as_well() -> None:
    x = torch.randn(6, 20)
    family = mu.Family(Recurrent, base=16, inputs=x)
    with pytest.warns(UserWarning, match="outputs differ by"):
        family.upscale(family.init(16).bfloat16(), width=24, grow=LOSSLESS)


def test_a_batch_on_which_a_model_does_not_run_is_no_end_of_a_growth() -> None:
    narrow, wide = Residual(8), Residual(12)
    plan = mu.plan(narrow, wide, fresh=narrow, grow=LOSSLESS)
    with pytest.warns(mu.UncheckedPlan, match="on the batch: RuntimeError"):
        mu.upscale(narrow, wide, plan, grow=LOSSLESS, inputs=torch.ones(2, 3))
