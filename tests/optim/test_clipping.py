"""Clipping by what the optimizer knows of the growths, and torch's own clipping noticed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu

Clip = Callable[[nn.Module, Optimizer], Any]


def net(width: int) -> nn.Module:
    hidden = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(width, 2)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3).double(), 30 * torch.randn(16, 2).double()


def step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor], clip: Clip) -> float:
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    clip(model, optimizer)
    optimizer.step()
    return loss.item()


def plainly(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def by_optimizer(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return mu.clip_grad_norm_(model, 1.0, optimizer)


@pytest.mark.parametrize(
    ("cls", "hyper"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01, "eps": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.01}),
    ],
)
def test_it_clips_as_the_narrow_model_was_after_two_growths_and_a_save(
    cls: type[Optimizer], hyper: dict[str, float], batch: tuple[Tensor, Tensor]
) -> None:
    narrow = net(8)
    optimizer: Optimizer = cls(narrow.parameters(), **hyper)
    step(narrow, optimizer, batch, by_optimizer)  # before any growth it is torch's
    wide, first = mu.upscale(narrow, net(16), optimizer=optimizer, inputs=batch[0], exact=True)
    wider, second = mu.upscale(wide, net(48), optimizer=first, inputs=batch[0], exact=True)
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    again = cls(second.param_groups)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        plain = step(narrow, optimizer, batch, plainly)
        assert step(wider, again, batch, by_optimizer) == pytest.approx(plain, rel=1e-10)


def test_a_plan_and_the_optimizer_agree_under_a_family(batch: tuple[Tensor, Tensor]) -> None:
    family = mu.Family(net, base=4, inputs=batch[0])
    model = family.init(12)
    optimizer = family.optimizer(model, torch.optim.AdamW, lr=0.1)
    norms = []
    for given in (family.plan(model), optimizer):
        model.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        norms.append(mu.clip_grad_norm_(model, 1.0, given).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


def test_what_an_optimizer_cannot_tell_is_refused() -> None:
    model, other = net(4), net(4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(mu.MupscaleError, match=r"'0\.weight' has a gradient, but this optimizer does not hold it"):
        mu.clip_grad_norm_(model, 1.0, optimizer)
    with pytest.raises(mu.MupscaleError, match=r"norm_type= is 1\.0\. Pass a plan"):
        mu.clip_grad_norm_(model, 1.0, optimizer, norm_type=1.0)
    optimizer.param_groups[0]["lr_factor"] = 0.5  # made by hand
    with pytest.raises(mu.MupscaleError, match="do not say how their gradients enter a norm"):
        mu.clip_grad_norm_(model, 1.0, optimizer)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_torchs_clipping_of_a_grown_model_is_noticed_once(
    batch: tuple[Tensor, Tensor], is_loaded: bool, tmp_path: Path
) -> None:
    narrow = net(8)
    optimizer: Optimizer | None = torch.optim.SGD(narrow.parameters(), lr=0.01)
    wide, optimizer = mu.upscale(narrow, net(16), optimizer=optimizer, inputs=batch[0])
    if is_loaded:  # as in another process
        path = mu.save(tmp_path / "wide.safetensors", wide, optimizer, mu.plan(narrow, wide, inputs=batch[0]))
        optimizer = torch.optim.SGD(mu.param_groups(wide, mu.load(path).plan, torch.optim.SGD, lr=0.01))
        mu.load(path, wide, optimizer)
    for clip in (by_optimizer, lambda model, optimizer: None):
        for _ in range(4):
            step(wide, optimizer, batch, clip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            step(wide, optimizer, batch, plainly)
    (said,) = [str(one.message) for one in caught]
    assert "mupscale.clip_grad_norm_(model, 1, optimizer)" in said


def test_one_rate_set_by_hand_for_all_groups_of_a_grown_model_is_noticed_once(batch: tuple[Tensor, Tensor]) -> None:
    narrow = net(8)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 2))
    wide, optimizer, scheduler = mu.upscale(
        narrow, net(16), optimizer=optimizer, scheduler=scheduler, inputs=batch[0], exact=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):  # the first at a rate of 0
            step(wide, optimizer, batch, by_optimizer)
            scheduler.step()
        for rates_of in (lambda group: 0.01 * group["lr_factor"], lambda group: 0.01):
            assert not caught
            for group in optimizer.param_groups:
                group["lr"] = rates_of(group)
            for _ in range(3):
                step(wide, optimizer, batch, by_optimizer)
    (said,) = [str(one.message) for one in caught]
    assert 'write group["lr"] = lr * group.get("lr_factor", 1.0)' in said
