"""New units of what starts as a pattern, in files: they have the values that transformers builds a model with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import hf_models as models
from hf_files import read_checkpoint
from mupscale import hf
from mupscale.core import Entry, index_of_old, naming, part_of_units
from mupscale.growth import Fresh
from mupscale.hf import miniatures
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


def new_entries(entry: Entry) -> Tensor:
    """Which entries of the wide tensor belong to a new unit."""
    is_new = torch.ones(entry.wide, dtype=torch.bool)
    is_new[index_of_old(entry.narrow, entry.axes)] = False
    return is_new


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
        assert bool(new_entries(entry).any()) == (entry.narrow != entry.wide), tensor


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


# Parts of one tensor that start differently, in a checkpoint's class.

PARTS: dict[str, Any] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4}
PARTS |= {"n_layer": 1, "n_positions": 16, "vocab_size": 29, "initializer_range": 0.02}
ATTENTION = "transformer.h.0.attn"
BY_PART = {
    f"{ATTENTION}.c_attn.weight": ((0.0, 0.0, 0.0), (0.1, 0.02, 0.02)),
    f"{ATTENTION}.c_attn.bias": ((0.0, 1.0, 0.0), (0.1, 0.0, 0.1)),
}
"""Of queries, keys and values: means and standard deviations at the small width."""


@pytest.fixture
def parts_that_start_differently(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPT-2 whose queries are drawn wider, whose keys have biases of 1, and whose projection is about the identity."""
    usual = transformers.GPT2PreTrainedModel._init_weights

    @torch.no_grad()
    def initialise(model: Any, module: nn.Module) -> None:
        usual(model, module)
        if type(module).__name__ != "GPT2Attention":
            return
        n = module.c_proj.weight.shape[0]
        module.c_attn.weight[:, :n].mul_(5)
        module.c_attn.bias.normal_(std=0.1)
        module.c_attn.bias[n : 2 * n].fill_(1.0)
        module.c_proj.weight.diagonal().add_(1.0)

    miniatures._start.cache_clear()
    monkeypatch.setattr(transformers.GPT2PreTrainedModel, "_init_weights", initialise)
    yield
    miniatures._start.cache_clear()


@pytest.mark.usefixtures("parts_that_start_differently")
def test_parts_of_a_tensor_have_a_law_each() -> None:
    """They had one spread between theirs, and one mean: keys' biases were drawn about 0.33."""
    laws = miniatures.initial_laws(PARTS)
    for name, (means, stds) in BY_PART.items():
        assert laws[name].means == pytest.approx(means, rel=1e-10), name
        assert laws[name].stds == pytest.approx(stds, rel=1e-10), name
    assert laws[f"{ATTENTION}.c_proj.weight"].means == ()


@pytest.mark.usefixtures("parts_that_start_differently")
def test_new_units_of_files_start_as_their_part_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    build_model(PARTS).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, verify=False)
    files = read_checkpoint(tmp_path / "wide")
    family = ConfigFamily(json.loads((tmp_path / "small" / "config.json").read_text()))
    plan = family.plan(Times.of(2).for_units(fresh=True))
    for name, (means, stds) in BY_PART.items():
        entry, values = plan[name], files[name]
        is_new = new_entries(entry)
        part = part_of_units(entry.wide[-1], 3).expand(entry.wide)
        for number, (mean, std) in enumerate(zip(means, stds, strict=True)):
            new = values[is_new & (part == number)]
            expected = std * entry.init
            assert abs(float(new.mean()) - mean) <= 6 * expected / len(new) ** 0.5, (name, number)
            assert float(new.std()) == pytest.approx(expected, rel=6 / (2 * len(new)) ** 0.5), (name, number)
    projection = f"{ATTENTION}.c_proj.weight"
    is_new = new_entries(plan[projection])
    built = build_tensors(json.loads((tmp_path / "wide" / "config.json").read_text()), {projection: projection})
    assert float(built[projection].diagonal().mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(files[projection][is_new], built[projection][is_new])
    assert hf.verify(tmp_path / "small", tmp_path / "wide").ok


def test_what_is_a_logarithm_of_random_numbers_is_taken_as_built() -> None:
    """Gated DeltaNet's A_log was drawn normal, from moments that a few even numbers gave."""
    laws = miniatures.initial_laws(models.tiny("qwen3_next")[0].to_dict())
    decays = [law for name, law in laws.items() if name.endswith("A_log")]
    assert decays
    assert all(law.means == () for law in decays)
