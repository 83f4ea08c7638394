"""Which batches a family has been tried on, and what it says where it has been tried on none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mupscale as mu
from deep_models import ResidualTable
from mupscale.models import MLP
from poor_batches import Branch


def test_a_family_checks_every_batch() -> None:
    family = mu.Family(lambda width: Branch(width // 8, "with an argument", "heads"), base=8)
    x = torch.randn(2, 4, 5)
    with pytest.warns(mu.UncheckedPlan, match="right for 'm.weight', 'o.weight'"):
        family.check(x)
    with pytest.raises(mu.MupscaleError, match="the plan is wrong"):
        family.check((x, torch.ones(1)))
    with pytest.raises(mu.MupscaleError, match="the batch is empty"):
        family.check(x[:0])


def test_a_family_without_a_batch_warns_where_its_plan_matters() -> None:
    def build(width: int) -> nn.Module:
        return MLP(3, width, 2)

    family, x = mu.Family(build, base=64), torch.randn(8, 3)
    with pytest.warns(mu.UncheckedPlan, match="this family has not been tried: its initial values follow"):
        model = family.init(128)
    for make in (family.optimizer, family.param_groups):
        with pytest.warns(mu.UncheckedPlan, match="this family has not been tried: its learning rates follow"):
            make(model, torch.optim.AdamW, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.optimizer(family.init(64), torch.optim.AdamW, lr=1e-3)  # nothing is scaled at the base
        tried = mu.Family(build, base=64, inputs=x)
        tried.optimizer(tried.init(128), torch.optim.AdamW, lr=1e-3)
        family.check(x)
        family.optimizer(family.init(128), torch.optim.AdamW, lr=1e-3)


def test_a_family_with_a_depth_says_so_too() -> None:
    base, member = {"width": 64, "depth": 2}, {"width": 128, "depth": 3}
    family = mu.Family(lambda width, depth: ResidualTable(3, 2, width, depth), base=base)
    with pytest.warns(mu.UncheckedPlan, match="this family has not been tried"):
        family.init(member)
    assert not family.has_tried(base, member)
    family.check(torch.randn(8, 3))
    assert family.has_tried(base, member)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.optimizer(family.init(member), torch.optim.AdamW, lr=1e-3)
