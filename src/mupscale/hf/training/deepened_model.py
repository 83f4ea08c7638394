"""A model of transformers with more layers, in memory, as its checkpoint would become: weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.core import naming
from mupscale.growth import NewTensor, deepen, deepen_optimizer, plan_depth
from mupscale.hf.describe import Config, Times, depth_operator, plan_layers, writers_of
from mupscale.hf.files import GrowthStep
from mupscale.hf.training.model_parameters import shapes_of


def model_like(model: Any, config: Mapping[str, Any]) -> nn.Module:
    """A model of the same class with this config, on the same device, in the same dtype and mode."""
    made, first = type(model.config).from_dict(dict(config)), next(model.parameters())
    made._attn_implementation = model.config._attn_implementation
    built: nn.Module = type(model)(made).to(device=first.device, dtype=first.dtype).train(model.training)
    return built


@torch.no_grad()
def deepen_in_memory(
    model: Any, optimizer: Optimizer, step: GrowthStep, first: Config, times: Times, lr: float | None = None
) -> tuple[nn.Module, Optimizer]:
    """The model with more layers, whose new weights are those that `deepen_checkpoint` would write, and its optimizer.

    first, times: the config of the first small model, and by how much this one is wider. lr: as in `upscale`.
    """
    assert step.layers is not None
    config = model.config.to_dict()
    deep, operator = model_like(model, step.config_after(config)), depth_operator(step.deepen)
    made = plan_layers(shapes_of(model), step.deepen, step.layers, first, times)
    for name, p in naming.parameters(deep).items():
        if (new := NewTensor.of(name, made, step.seed, step.draws)) is not None:
            p.copy_(new.whole(tuple(p.shape), p.dtype))
    writers = None if operator.copies else writers_of(config, shapes_of(model))
    plan = plan_depth(model, deep, grow=operator, writers=writers)
    deepen(model, deep, plan)
    return deep, deepen_optimizer(optimizer, model, deep, plan, lr=lr)
