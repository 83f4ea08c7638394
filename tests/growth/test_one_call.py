"""`upscale` in one call: model, optimizer and scheduler in, all three out, checked on a batch first."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import mupscale as mu
from mupscale.models import MLP


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, x: Tensor, y: Tensor) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def _half_way() -> tuple[nn.Module, AdamW, CosineAnnealingLR, Tensor, Tensor]:
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(0, 2, (16,))
    model = MLP(3, 8, 2).double()
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=12, eta_min=1e-3)
    _train(model, optimizer, scheduler, x, y)
    return model, optimizer, scheduler, x, y


@pytest.mark.parametrize("door", ["pair", "family"])
def test_all_three_go_on_as_the_narrow_ones_would(door: str) -> None:
    model, optimizer, scheduler, x, y = _half_way()
    given = {"scheduler": scheduler, "exact": True}
    if door == "pair":
        grown = mu.upscale(model, MLP(3, 32, 2).double(), optimizer=optimizer, inputs=x, **given)
    else:
        family = mu.Family(lambda width: MLP(3, width, 2), 8, inputs=x.float())
        grown = family.upscale(model, optimizer, width=32, **given)
    _train(*grown, x, y)
    _train(model, optimizer, scheduler, x, y)
    assert torch.allclose(grown[0](x), model(x), rtol=1e-10, atol=1e-12)
    assert grown[2].last_epoch == scheduler.last_epoch == 10
    _, fresh_optimizer, again = mu.upscale(
        model, MLP(3, 11, 2).double(), optimizer=optimizer, scheduler=scheduler, inputs=x, fresh=model
    )
    assert again.get_last_lr() == [group["lr"] for group in fresh_optimizer.param_groups]


def test_a_rate_far_above_the_schedules_is_said() -> None:
    """In mid-schedule the peak of it is no rate of today's; half of what the optimizer has now is."""
    x = torch.randn(4, 3)
    family = mu.Family(lambda width: MLP(3, width, 2), 8, inputs=x)
    model = family.init(16)
    optimizer = family.optimizer(model, AdamW, lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=100)
    for _ in range(90):
        optimizer.step()
        scheduler.step()
    with pytest.warns(UserWarning, match=r"^lr is 20\.4 times the .*, 7\.34e-05\. .*give lr=3\.67e-05$") as met:
        family.upscale(model, optimizer, scheduler=scheduler, width=32, grow=mu.Fresh(), lr=1.5e-3)
    assert [warning.filename for warning in met] == [__file__]
    wide = MLP(3, 32, 2)
    with pytest.warns(UserWarning, match="lr is 20.4 times"):
        mu.upscale(model, wide, family.widening(16, 32), optimizer, scheduler=scheduler, lr=1.5e-3, exact=True)
    group = optimizer.param_groups[-1]
    lr = group["lr"] / group["lr_factor"] / 2  # as the page on choosing has it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grown, schedule = family.upscale(model, optimizer, scheduler=scheduler, width=32, grow=mu.Fresh(), lr=lr)
    assert schedule.get_last_lr() == pytest.approx([3.67e-05 * g["lr_factor"] for g in grown.param_groups], rel=1e-3)


def test_what_does_not_go_together_is_refused() -> None:
    model, optimizer, scheduler, x, _ = _half_way()
    wide = MLP(3, 32, 2).double()
    other = AdamW(model.parameters())
    with pytest.raises(mu.MupscaleError, match="Give that one as optimizer="):
        mu.upscale(model, wide, optimizer=other, scheduler=scheduler, inputs=x, exact=True)
    plan = mu.plan(model, wide)
    with pytest.raises(mu.MupscaleError, match="leave the plan out"):
        mu.upscale(model, wide, plan, optimizer, fresh=model, exact=True)
    with pytest.raises(mu.MupscaleError, match=r"nothing would grow.*Build it wider"):
        mu.upscale(model, MLP(3, 8, 2).double(), optimizer=optimizer, inputs=x, exact=True)


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before() -> None:
    """What `fresh` builds is drawn from seeds of its own, too."""
    torch.manual_seed(0)
    narrow, batch = MLP(3, 8, 2), torch.randn(4, 3)
    grown = [
        mu.upscale(narrow, MLP(3, 16, 2), inputs=batch, fresh=lambda: MLP(3, 8, 2), noise=1.0, seed=0)[0]
        for _ in range(2)
    ]
    for a, b in zip(*(model.parameters() for model in grown), strict=True):
        assert torch.equal(a, b)
