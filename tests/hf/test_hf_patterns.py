"""New units of what starts as a pattern, in files: they have the values that transformers builds a model with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hf_models as models
from hf_files import read_checkpoint
from mupscale import hf
from mupscale.core import index_of_old, naming
from mupscale.growth import Fresh
from mupscale.hf.building import build_model
from mupscale.hf.built_values import build_tensors
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.config_fields import Times
from mupscale.hf.record import GrowthStep, plan_growths
from refusals import refuses

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29}
STATES: dict[str, Any] = {**SMALL, "state_size": 3, "intermediate_size": 32}
ROUTED: dict[str, Any] = {**SMALL, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
JAMBA = {"mamba_d_state": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
JAMBA |= {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_offset": 1}
MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}
MINIMAX |= {"layer_types": ["linear_attention", "full_attention"]}
SERIES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16}
SERIES |= {"ffn_dim": 20, "num_attention_heads": 4, "num_hidden_layers": 2, "prediction_length": 4}

CONFIGS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "mamba": ("MambaForCausalLM", STATES, "hidden=2,ffn=2", ("A_log",)),
    "falcon_mamba": ("FalconMambaForCausalLM", STATES, "hidden=2,ffn=2", ("A_log",)),
    "jamba": ("JambaForCausalLM", {**ROUTED, **JAMBA}, "hidden=2,ffn=2,heads=2", ("A_log",)),
    "rwkv": ("RwkvForCausalLM", SMALL, "2", ("time_decay", "time_mix_key", "time_mix_value", "time_mix_receptance")),
    "patchtst": ("PatchTSTForPrediction", SERIES, "2", ("position_enc",)),
    "minimax": (
        "MiniMaxForCausalLM",
        {**ROUTED, **MINIMAX},
        "2",
        ("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    ),
}
"""By model_type: the class, the config, how it grows, and the tensors that start as patterns by the ends of names."""

FAST = ("rwkv", "patchtst")


def config_of(name: str) -> dict[str, Any]:
    architecture, sizes, _, _ = CONFIGS[name]
    return {"model_type": name, "architectures": [architecture], **sizes}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    model = build_model(config)
    return {**naming.buffers(model), **naming.parameters(model)}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_new_units_of_a_pattern_are_those_of_the_wide_model(tmp_path: Path, name: str) -> None:
    """They were zeros, and verified: A_log = 0 for every new channel is a decay that no Mamba starts with."""
    _, _, times, endings = CONFIGS[name]
    small = build_model(config_of(name))
    small.save_pretrained(tmp_path / "small")  # type: ignore[operator]
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=times, progress=False, verify=False)

    files = read_checkpoint(tmp_path / "wide")
    wide = tensors_of(json.loads((tmp_path / "wide" / "config.json").read_text()))
    narrow = {**naming.buffers(small), **naming.parameters(small)}
    family = ConfigFamily(json.loads((tmp_path / "small" / "config.json").read_text()))
    plan = family.plan(Times.of(times).for_units(fresh=True))
    entries = {**plan.buffers, **plan.parameters}
    patterned = [n for n in files if n.endswith(endings)]
    assert patterned
    for tensor in patterned:
        entry = entries[tensor]
        old = index_of_old(entry.narrow, entry.axes)
        expected = wide[tensor].detach().clone()
        expected[old] = narrow[tensor].detach()
        assert torch.equal(files[tensor], expected), tensor
        is_new = torch.ones(entry.wide, dtype=torch.bool)
        is_new[old] = False
        assert bool(is_new.any()) == (entry.narrow != entry.wide), tensor


def test_the_sinusoids_of_an_encoder_are_a_pattern(tmp_path: Path) -> None:
    """Whisper's; the table of its decoder is drawn."""
    models.save(tmp_path / "small", "whisper")
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, verify=False)
    name = "model.encoder.embed_positions.weight"
    table = read_checkpoint(tmp_path / "wide")[name]
    wide = tensors_of(json.loads((tmp_path / "wide" / "config.json").read_text()))[name]
    is_as_built = (table == wide).all(dim=0)
    assert int(is_as_built.sum()) >= table.shape[1] // 2


def test_verification_sees_new_units_that_do_not_start_as_the_pattern(tmp_path: Path) -> None:
    """Zeros in their place, as an earlier version wrote them."""
    build_model(config_of("rwkv")).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, verify=False)
    assert hf.verify(tmp_path / "small", tmp_path / "wide").ok
    files = read_checkpoint(tmp_path / "wide")
    name = next(n for n in files if n.endswith("0.attention.time_decay"))
    files[name][16:] = 0.0
    save_file(files, tmp_path / "wide" / "model.safetensors", {"format": "pt"})
    found = hf.verify(tmp_path / "small", tmp_path / "wide")
    assert not found.ok
    assert found.first is not None
    assert found.first.name == name


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_are_built_alone_as_in_the_whole_model(name: str) -> None:
    config, endings = config_of(name), CONFIGS[name][3]
    whole = tensors_of(config)
    wanted = {n: n for n in whole if n.endswith(endings)}
    alone = build_tensors(config, wanted)
    assert all(torch.equal(alone[n], whole[n]) for n in wanted)


def test_a_tensor_that_transformers_does_not_initialise_is_refused() -> None:
    refuses("'lost' starts as a pattern", build_tensors, config_of("rwkv"), {"lost": "rwkv.lost"})


def test_values_are_made_once_for_a_growth_by_fresh_units() -> None:
    config = config_of("rwkv")
    shapes = {n: tuple(t.shape) for n, t in build_model(config).state_dict().items()}
    (step,) = plan_growths([GrowthStep(Times.of(2).for_units(fresh=True), Fresh())], config, shapes)
    assert step.built.keys() == {*step.plan.patterned}
    assert len(step.built) >= 2 * 4
