"""Architectures of which no line of ours tells: exact from folder to folder, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_models import GPT, GROUPED, SIZES, TEXT, Named, randomised
from mupscale import Copies, Fresh, MupscaleError, Role, hf
from mupscale.hf import config_family
from mupscale.hf.building import quiet_transformers
from mupscale.hf.config_family import GIVEN, ConfigFamily, InModel, plan_for_files
from mupscale.hf.inspection import inspect
from mupscale.hf.multipliers import Times
from mupscale.hf.record import Record
from mupscale.hf.source import open_source
from mupscale.hf.upscaling import upscale
from mupscale.hf.verifying import Comparison, load_pretrained, verify
from slow_cases import with_slow

DEBERTA_V3 = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
DEBERTA_V3 |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}

EXACT: dict[str, Named] = {
    "gptj": ("GPTJ", "ForCausalLM", {**GPT, "rotary_dim": 2, "n_inner": 20}),
    "codegen": ("CodeGen", "ForCausalLM", {**GPT, "rotary_dim": 2}),
    "arcee": ("Arcee", "ForCausalLM", GROUPED),
    "apertus": ("Apertus", "ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "exaone4": ("Exaone4", "ForCausalLM", GROUPED),
    "nemotron": ("Nemotron", "ForCausalLM", GROUPED),
    "data2vec-text": ("Data2VecText", "ForMaskedLM", TEXT),
    "deit": ("DeiT", "ForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4}),
    "flex_olmo": ("FlexOlmo", "ForCausalLM", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "mamba": ("Mamba", "ForCausalLM", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 29, "state_size": 3}),
}
MORE_EXACT: dict[str, Named] = {
    "deberta-v2": ("DebertaV2", "ForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v3": ("DebertaV2", "ForSequenceClassification", DEBERTA_V3),
    "dinov2": ("Dinov2", "ForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4}),
    "vaultgemma": ("VaultGemma", "ForCausalLM", {**GROUPED, "head_dim": 4}),
    "rwkv": ("Rwkv", "ForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29}),
    "clip_text_model": ("CLIPText", "CLIPTextModel", TEXT),
    "siglip_vision_model": ("SiglipVision", "SiglipVisionModel", {**SIZES, "image_size": 8, "patch_size": 4}),
}
"""With make test-slow; also those whose outputs are hidden states, and one that writes a state in place."""

JOINED: dict[str, Named] = {
    "jina_embeddings_v3": ("JinaEmbeddingsV3", "JinaEmbeddingsV3Model", {**TEXT, "num_hidden_layers": 1}),
    "gte": ("Gte", "GteModel", {**TEXT, "num_hidden_layers": 1}),
    "hrm_text": ("HrmText", "ForCausalLM", {**TEXT, "num_hidden_layers": 1, "head_dim": 4}),
}
"""transformers' files of them hold several parameters in one tensor: q, k and v, or gate and up."""

MARIAN = {
    "d_model": 16,
    "vocab_size": 29,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
MARIAN |= {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
MARIAN |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "multi-query": (
        "GPTBigCode",
        "ForCausalLM",
        {**GPT, "multi_query": True},
        "joins a width with a part that does not grow",
    ),
    "sinusoids": (
        "XGLM",
        "ForCausalLM",
        {"d_model": 16, "ffn_dim": 20, "num_layers": 1, "attention_heads": 4, "vocab_size": 29},
        "does not run on the batch in float64",
    ),
    "sinusoids that are never saved": ("Marian", "MTModel", MARIAN, "numbers that the model computes from its width"),
}


def config_of(prefix: str, head: str, fields: dict[str, Any]) -> Any:
    name = head if hasattr(transformers, head) else prefix + head
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, f"{prefix}Config")(**ids, **fields, architectures=[name])


def saved(folder: Path, prefix: str, head: str, fields: dict[str, Any]) -> Path:
    config = config_of(prefix, head, fields)
    with quiet_transformers():
        randomised(getattr(transformers, config.architectures[0])(config)).save_pretrained(folder)
    return folder


def compared(name: str, models: Mapping[str, Any], folder: Path) -> Comparison:
    """Grown by copies, and compared in training."""
    small = saved(folder / "small", *models[name])
    upscale(small, folder / "wide", times=2, progress=False, exact=True, verify=False)
    found = verify(small, folder / "wide", dtype="float64", train=2)
    assert found.ok, found
    return found


@pytest.mark.quick("gptj")
@pytest.mark.parametrize("name", with_slow(EXACT, list(EXACT)[::2]))
def test_exact_in_outputs_and_training(name: str, tmp_path: Path) -> None:
    found = compared(name, EXACT, tmp_path)
    assert [row.what for row in found.rows] == ["tensors in the files", "logits", "outputs over 2 steps of AdamW"]
    assert found.rows[0].difference == 0
    assert all(row.difference < 1e-12 for row in found.rows)
    plan = Record.load(tmp_path / "wide").plan
    assert plan is not None
    plan.check(load_pretrained(open_source(tmp_path / "wide"), torch.float32)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_EXACT)
def test_more_that_is_exact(name: str, tmp_path: Path) -> None:
    found = compared(name, MORE_EXACT, tmp_path)
    assert found.rows[-1].what.startswith("outputs over 2 steps of AdamW")
    assert all(row.difference < 1e-10 for row in found.rows if "before rounding" in row.what or row is found.rows[0])


@pytest.mark.parametrize("name", with_slow(JOINED, ["jina_embeddings_v3"]))
def test_tensors_that_hold_several_parameters(name: str, tmp_path: Path) -> None:
    """They were "the files and config.json do not belong together", of a folder that transformers had just saved."""
    if not hasattr(transformers, f"{JOINED[name][0]}Config"):
        pytest.skip("another version of transformers")
    found = compared(name, JOINED, tmp_path)
    assert found.rows[-1].what.startswith("outputs over 2 steps of AdamW")
    assert all(row.difference < 1e-12 for row in found.rows)


def test_what_cannot_grow_in_one_tensor_is_told_how_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*EXACT["arcee"]).to_dict()
    plan = ConfigFamily(config).plan(Times.of(2), initial=False)
    q, o = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "qo")
    for held in (InModel((q, o), in_a_row=False), InModel((q, q, o)), InModel((q, "lm_head.weight"))):
        monkeypatch.setattr(config_family, "names_in_model", lambda model, names, held=held: {"joined": held})
        with pytest.raises(MupscaleError, match=r"'joined' .* holds \d parameters .*save_original_format=False"):
            plan_for_files(config, plan, {"joined": (32, 16)})


def test_norms_without_gains_are_the_reason_of_fresh_units_that_are_not_compared(tmp_path: Path) -> None:
    """OLMo's are before the branches; that they come after the sum was said of them, and it was refused."""
    small = saved(tmp_path / "small", "Olmo", "ForCausalLM", {**GROUPED, "num_hidden_layers": 1, "pad_token_id": 0})
    found = upscale(small, tmp_path / "wide", times=2, grow=Fresh(), progress=False).comparison
    assert found is not None
    said = (
        "new units switched off: the norm 'model.layers.0.input_layernorm' has no gain that could be rescaled (layer)"
    )
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize("name", with_slow(REFUSED, list(REFUSED)[:2]))
def test_what_the_modules_do_not_explain_is_refused(name: str, tmp_path: Path) -> None:
    prefix, head, fields, says = REFUSED[name]
    small = saved(tmp_path / "small", prefix, head, fields)
    with pytest.raises(MupscaleError, match=says) as error:
        upscale(small, tmp_path / "wide", times=2, progress=False, exact=True)
    assert "roles=" not in str(error.value)  # which is none of upscale's arguments, and no option
    assert "inputs=" not in str(error.value)
    assert not (tmp_path / "wide").exists()


@pytest.mark.slow
def test_a_feed_forward_size_that_follows_from_the_hidden_size(tmp_path: Path) -> None:
    """Mamba's: what is asked of hidden alone is told what goes with it; and how it would be planned."""
    small = saved(tmp_path / "small", *EXACT["mamba"])
    for asked, times in (({"hidden": 24, "grow": Fresh(lossless=True)}, "3/2"), ({"times": "hidden=2"}, "2")):
        told = rf"only \d+ of \d+ tensors of 'mamba' would grow, .* let ffn grow as hidden does, {times} times"
        for call in (partial(upscale, out=tmp_path / "wide"), inspect):
            with pytest.raises(MupscaleError, match=told):
                call(small, **asked)  # type: ignore[operator]
    assert not (tmp_path / "wide").exists()
    assert "(planned by running miniatures of it)" in str(inspect(small, grow=Copies()))


def test_a_model_without_a_miniature_is_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is refused, where memory is too small for that, or nobody knows what it is to be run on."""
    small = saved(tmp_path / "small", *EXACT["arcee"])
    monkeypatch.setattr("mupscale.hf.miniatures._FEW", 10)
    assert "(planned by running miniatures of it)" in str(inspect(small, grow=Copies()))
    assert upscale(small, tmp_path / "wide", progress=False, exact=True).comparison is not None
    monkeypatch.setattr("mupscale.system.available_memory", lambda: 600_000_000 - 100_000_000)
    with pytest.raises(MupscaleError, match=r"no smaller model with the parts of 'arcee' .* memory is too small"):
        inspect(small, times=3, grow=Copies())


def test_tensors_beside_the_model_are_what_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one's own, which no class of transformers has."""
    small = saved(tmp_path / "small", *EXACT["arcee"])
    file = small / "model.safetensors"
    save_file({**load_file(file), "probe.weight": torch.ones(3, 16)}, file, {"format": "pt"})
    with pytest.raises(
        MupscaleError, match=r"'probe.weight' of shape \(3, 16\) is no parameter .*mupscale.hf.register"
    ):
        upscale(small, tmp_path / "wide", exact=True, progress=False)
    monkeypatch.setitem(GIVEN, "arcee", {})
    hf.register("arcee", {"probe.*": Role(in_=1)})
    upscale(small, tmp_path / "wide", exact=True, verify=False, progress=False)
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["probe.weight"], torch.full((3, 32), 0.5))
    hf.register("arcee", {"probe.*": Role(in_=0)})
    with pytest.raises(MupscaleError, match="3 is no size of the model that grows"):
        upscale(small, tmp_path / "other", exact=True, verify=False, progress=False)


@pytest.mark.slow
def test_a_constant_that_only_a_run_shows(tmp_path: Path) -> None:
    """LongT5 divides by √d_model before its readout, which is the embedding."""
    fields = {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 4, "vocab_size": 29}
    small = saved(tmp_path / "small", "LongT5", "ForConditionalGeneration", fields)
    upscale(small, tmp_path / "wide", times=2, progress=False, exact=True)
    found = verify(small, tmp_path / "wide", dtype="float64", train=2)
    assert found.ok
    assert found.rows[-1].what.startswith("outputs over 2 steps of AdamW")
    assert found.rows[-1].difference < 1e-12


def test_multipliers_of_their_own(tmp_path: Path) -> None:
    prefix, head, fields = EXACT["arcee"]
    small = saved(tmp_path / "small", prefix, head, fields)
    made = upscale(small, tmp_path / "wide", times="hidden=2,ffn=3,heads=2", progress=False, exact=True)
    assert made.comparison is not None
    assert made.comparison.ok
    wide = json.loads((tmp_path / "wide" / "config.json").read_text())
    grown = [wide[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")]
    assert grown == [32, 60, 8, 4]


@pytest.mark.slow
def test_two_growths_and_noise(tmp_path: Path) -> None:
    """Stacked experts, which lie apart in the files: noise in the second growth, verified against either model."""
    small = saved(tmp_path / "small", *EXACT["flex_olmo"])
    upscale(small, tmp_path / "middle", times=2, progress=False, exact=True)
    upscale(tmp_path / "middle", tmp_path / "last", times="ffn=2", noise=0.5, progress=False)
    for first in (small, tmp_path / "middle"):
        found = verify(first, tmp_path / "last")
        assert found.ok, found
        assert found.as_recorded
        assert found.rows[0].difference < 1e-6
        assert 1e-4 < found.rows[1].difference < 1


def test_a_feed_forward_size_that_is_null_is_the_usual_one() -> None:
    config = config_of(*EXACT["codegen"]).to_dict()
    assert config["n_inner"] is None
    wide = ConfigFamily(config).wide_config(Times.of(2))
    plan = ConfigFamily(config).plan(Times.of(2), initial=False)
    assert wide["n_inner"] == 2 * 64
    assert plan["transformer.h.0.mlp.fc_in.weight"].wide == (128, 32)
    assert ConfigFamily(config).wide_config(Times.of("hidden=2,heads=2,ffn=3"))["n_inner"] == 3 * 64
    bloom = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 11}
    with pytest.raises(MupscaleError, match=r"no separate size .* let ffn grow as hidden does, 2 times"):
        ConfigFamily(bloom).wide_config(Times.of("hidden=2,heads=2,ffn=3"))


def test_a_head_dim_that_would_change() -> None:
    config = config_of(*EXACT["codegen"]).to_dict()
    with pytest.raises(MupscaleError, match="head_dim is n_embd / n_head here, and it must stay"):
        ConfigFamily(config).plan(Times.of("hidden=4,heads=2"), initial=False)
    config = config_of(*EXACT["apertus"]).to_dict()  # to which transformers gives a head_dim of its own
    assert ConfigFamily(config).wide_config(Times.of("hidden=2"))["head_dim"] == 4


def test_a_config_without_any_known_size() -> None:
    with pytest.raises(MupscaleError, match="has no field for the hidden size"):
        ConfigFamily({"breadth": 3}).wide_config(Times.of(2))


def test_a_tensor_that_the_model_lacks(tmp_path: Path) -> None:
    config = config_of(*EXACT["arcee"]).to_dict()
    plan = ConfigFamily(config).plan(Times.of(2), initial=False)
    shapes = {name: entry.narrow for name, entry in plan.parameters.items()}
    assert plan_for_files(config, plan, shapes).parameters.keys() == shapes.keys()
    with pytest.raises(MupscaleError, match=r"'reward.weight' of shape \(1, 16\) is no parameter of the model"):
        plan_for_files(config, plan, {**shapes, "reward.weight": (1, 16)})
