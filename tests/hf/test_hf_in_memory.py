"""Models of transformers as a user builds them, grown in memory: nothing is set that makes them easy to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_models as models
import mupscale as mu
from mupscale.hf.config_family import ConfigFamily
from slow_cases import with_slow

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2", "deepseek_v3"]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A narrow and a wide mixture in float32, with the kernels that a user gets."""
    config, cls = models.tiny(name)
    family = ConfigFamily(config.to_dict())
    wide_config = family.wide_config(models.usual_times(name))
    attention = "eager" if name == "gpt_oss" else "sdpa"  # it has attention sinks, which sdpa has not
    made = []
    for given in (config.to_dict(), wide_config):
        kernels = {"experts_implementation": "grouped_mm", "attn_implementation": attention}  # what users get
        made.append(cls(type(config)(**{**given, **kernels})).eval())
    narrow, wide = made
    return models.randomised(narrow), wide


@pytest.mark.parametrize("name", with_slow(MIXTURES, ("mixtral", "qwen3_moe")))
def test_a_mixture_is_planned_with_the_kernels_that_it_was_built_with(name: str) -> None:
    """Its product of all experts at once (grouped_mm) does not exist in float64, in which plans are tried."""
    narrow, wide = pair(name)
    tokens = torch.randint(0, models.VOCAB, (2, 7))
    plan = mu.plan(narrow, wide, inputs={"input_ids": tokens}, grow=mu.Copies())
    assert {model.config._experts_implementation for model in (narrow, wide)} == {"grouped_mm"}

    mu.widen(narrow, wide, plan)
    assert mu.verify(narrow, wide, plan, [tokens], loss_of_logits, optimizer=torch.optim.AdamW, steps=3, lr=1e-2).ok
    assert {model.config._experts_implementation for model in (narrow, wide)} == {"grouped_mm"}


def test_a_mixture_grows_by_fresh_units() -> None:
    narrow, wide = pair("mixtral")
    tokens = torch.randint(0, models.VOCAB, (2, 7))
    grown, _ = mu.upscale(narrow, wide, inputs={"input_ids": tokens})
    old_experts = narrow.get_parameter("model.layers.0.mlp.experts.down_proj")
    new_experts = grown.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert new_experts.shape > old_experts.shape
    assert grown.config._experts_implementation == "grouped_mm"


def loss_of_logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return logits.square().mean()
