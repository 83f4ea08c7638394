"""ALiBi: fresh heads between the old ones, from files to training, and the slopes that each head has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import hf_models as models
from mupscale import Axis, Fresh, MupscaleError
from mupscale.core import places
from mupscale.hf import param_groups, upscale, verify
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.multipliers import Times
from mupscale.hf.record import Record
from mupscale.hf.source import open_source


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_fresh_heads_of_alibi_from_files_to_training(name: str, tmp_path: Path) -> None:
    """Planned, written, verified, trained; and the old heads have their own slopes where they lie among the new."""
    small, wide = tmp_path / "small", tmp_path / "wide"
    config = models.tiny(name)[0]
    models.randomised(models.build(config)).save_pretrained(small, max_shard_size="20KB")
    made = upscale(small, wide, times=2, grow=Fresh(), shard_size="40KB", progress=False)
    assert made.files > 1
    assert verify(small, wide, dtype="float64").ok
    heads = getattr(config, "n_head", None) or config.n_heads
    axis = axis_of_heads(wide, small)
    old = places(axis, heads * axis.block)[:: axis.block] // axis.block
    assert torch.equal(slopes(name, 2 * heads)[old], slopes(name, heads))
    model = models.build(json.loads((wide / "config.json").read_text())).from_pretrained(wide).double()
    optimizer = torch.optim.AdamW(param_groups(wide, model, torch.optim.AdamW, lr=1e-2))
    tokens = torch.randint(0, config.vocab_size, (4, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_slopes_that_are_not_among_those_of_more_heads_are_refused() -> None:
    """As many heads as a power of two have their slopes among those of twice as many, not of three times."""
    config = models.tiny("bloom", num_hidden_layers=1)[0].to_dict()
    with pytest.raises(MupscaleError, match="ALiBi's slopes, and 3 times as many units would change"):
        ConfigFamily(config).plan(Times(3, 3, 3, 3, fresh=True), initial=False)


def axis_of_heads(wide: Path, small: Path) -> Axis:
    """How the heads grew that lead into the first attention's output."""
    record, shapes = Record.load(wide), open_source(small).shapes
    plan = ConfigFamily(record.config).plan_files(record.times, shapes)
    outputs = ("self_attention.dense.weight", "attn.out_proj.weight")
    return next(entry.axes[1] for name, entry in plan.parameters.items() if name.endswith(outputs))


def slopes(name: str, heads: int) -> Tensor:
    """What transformers adds to the scores of each head for the next token."""
    if name == "mpt":
        return transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 4)[:, 0, 1]
    mask = torch.ones(1, 4, dtype=torch.long)
    return transformers.models.bloom.modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
