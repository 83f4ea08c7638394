"""Architectures of which no line of ours tells: exact from folder to folder, or refused with the reason."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_models as models
from hf_models import GPT, GROUPED, SIZES, TEXT, Named, randomised
from mupscale import Copies, Fresh, MupscaleError, Role, hf
from mupscale.cli import main
from mupscale.hf import config_family, inspect, upscale, verify
from mupscale.hf.building import quiet_transformers
from mupscale.hf.config_family import GIVEN, ConfigFamily, InModel, plan_for_files
from mupscale.hf.config_fields import Times
from mupscale.hf.record import Record
from mupscale.hf.source import open_source
from mupscale.hf.verifying import Comparison, load_pretrained
from refusals import refuses
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
    "longt5": (  # it divides by √d_model before its readout, which is the embedding
        "LongT5",
        "ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 4, "vocab_size": 29},
    ),
    "siglip_vision_model": ("SiglipVision", "SiglipVisionModel", {**SIZES, "image_size": 8, "patch_size": 4}),
}
"""Also those whose outputs are hidden states, and one that writes a state in place."""

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


def saved(folder: Path, prefix: str, head: str, fields: dict[str, Any], size: float = 0.3) -> Path:
    config = config_of(prefix, head, fields)
    with quiet_transformers():
        randomised(getattr(transformers, config.architectures[0])(config), size=size).save_pretrained(folder)
    return folder


def compared(small: Path, folder: Path, times: Any = 2) -> Comparison:
    """Grown by copies, and compared in training."""
    upscale(small, folder / "wide", times=times, progress=False, exact=True, verify=False)
    found = verify(small, folder / "wide", dtype="float64", train=2)
    assert found.ok, found
    return found


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
    said = (
        "new units switched off: the norm 'model.layers.0.input_layernorm' has no gain that could be rescaled (layer)"
    )
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize("name", with_slow(REFUSED, list(REFUSED)[:2]))
def test_what_the_modules_do_not_explain_is_refused(name: str, tmp_path: Path) -> None:
    prefix, head, fields, says = REFUSED[name]
    small = saved(tmp_path / "small", prefix, head, fields)
    error = refuses(says, upscale, small, tmp_path / "wide", times=2, progress=False, exact=True)
    assert "roles=" not in error  # which is none of upscale's arguments, and no option
    assert "inputs=" not in error
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
        MupscaleError, match=r"'probe.weight' of shape \(3, 16\) is not a parameter .*mupscale.hf.register"
    ):
        upscale(small, tmp_path / "wide", exact=True, progress=False)
    monkeypatch.setitem(GIVEN, "arcee", {})
    hf.register("arcee", {"probe.*": Role(in_=1)})
    upscale(small, tmp_path / "wide", exact=True, verify=False, progress=False)
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["probe.weight"], torch.full((3, 32), 0.5))
    hf.register("arcee", {"probe.*": Role(in_=0)})
    with pytest.raises(MupscaleError, match="3 is not a size of the model that grows"):
        upscale(small, tmp_path / "other", exact=True, verify=False, progress=False)


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
    config = config_of(*EXACT["apertus"]).to_dict()  # to which transformers gives a head_dim of its own
    assert ConfigFamily(config).wide_config(Times.of("hidden=2"))["head_dim"] == 4


def test_a_config_without_any_known_size() -> None:
    refuses("has no field for the hidden size", ConfigFamily({"breadth": 3}).wide_config, Times.of(2))


# --- Checkpoints of which nothing would grow, or a part, or that cannot be compared: refused in a sentence.
SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
REGNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "groups_width": 4}
SERIES = {"prediction_length": 2, "context_length": 8, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.slow
def test_sizes_of_stages_with_heads_in_a_list(tmp_path: Path) -> None:
    """Every size of Swin follows from embed_dim, and its biases by distance are copied with their heads."""
    transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)).save_pretrained(tmp_path / "small")
    made = hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, exact=True)
    assert made.comparison.ok
    assert made.numbers[1] > 3 * made.numbers[0]


STAGES = "a list here, .* all stages grow by one whole number, as in times=2"


def test_sizes_of_stages_in_a_list(tmp_path: Path) -> None:
    """They are told in the result and on the card, and what else is asked for gets advice that works."""
    config = transformers.ConvNextConfig(
        image_size=16, patch_size=2, depths=[1, 1], hidden_sizes=[8, 12], num_stages=2, num_labels=3
    )
    small, wide = tmp_path / "small", tmp_path / "wide"
    transformers.ConvNextForImageClassification(config).save_pretrained(small)
    told = str(hf.upscale(small, wide, times=2, progress=False, exact=True))
    assert "with copies (hidden [8, 12] → [16, 24])" in told
    assert "hidden size [8, 12] → [16, 24]" in (wide / "README.md").read_text(encoding="utf-8")
    asked: list[tuple[dict[str, Any], str]] = [
        ({"hidden": 40}, f"hidden=: the hidden size is {STAGES}"),
        ({"layers": 8}, "layers in 2 stages or parts, .* which cannot be deepened"),
        ({"times": 1}, "times=1 changes nothing"),
    ]
    for ask, message in asked:
        refuses(message, hf.upscale, small, tmp_path / "other", progress=False, **ask)


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"hidden": 24}, "it must stay: all stages grow by .* times=2"), ({"hidden": 24, "heads": 3}, STAGES)],
)
def test_heads_of_stages_in_a_list(asked: dict[str, int], message: str, tmp_path: Path) -> None:
    transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)).save_pretrained(tmp_path / "small")
    refuses(message, hf.upscale, tmp_path / "small", tmp_path / "wide", progress=False, **asked)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        pytest.param("RegNet", REGNET, "the wide units are not copies of the narrow ones", marks=pytest.mark.slow),
        ("TimeSeriesTransformer", SERIES, "reads 'past_values', but its config does not give the sizes"),
    ],
)
def test_refused_in_a_sentence(name: str, sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / "small")
    refuses(message, hf.upscale, tmp_path / "small", tmp_path / "wide", times=2, progress=False, exact=True)
    assert not (tmp_path / "wide").exists()


# --- Models of several parts, configs with lists, and inputs that are no text: planned by running, and exact.
PART_SIZES: dict[str, Any] = {**models.SIZES, "num_hidden_layers": 1}
ONE_LAYER = {**models.TEXT, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
KEYED = {**ONE_LAYER, "num_key_value_heads": 2}
VISION = {**PART_SIZES, "image_size": 8, "patch_size": 4}
FILMS = {**VISION, "num_frames": 2, "num_labels": 3}
PART_STAGES: dict[str, Any] = {"depths": [1, 1], "num_labels": 3, "image_size": 32, "hidden_sizes": [8, 12]}
BLOCKS = {**PART_STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "decoder_hidden_size": 10}
BLOCKS |= {"strides": [4, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "mlp_ratios": [2, 2]}
LLAVA: dict[str, Any] = {"text_config": {**KEYED, "model_type": "llama"}, "image_token_id": 28}
LLAVA |= {"vision_config": {**VISION, "model_type": "clip_vision_model"}, "vision_feature_layer": -1}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
SEEN = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 2}
TOKENS = {"image_token_id": 28, "video_token_id": 27, "vision_start_token_id": 26, "vision_end_token_id": 25}
GROUPED_REGNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "num_labels": 3}
PATCHES = {"d_model": 16, "ffn_dim": 20, "num_attention_heads": 4, "num_hidden_layers": 1, "context_length": 16}
PATCHES |= {
    "patch_length": 4,
    "patch_stride": 4,
    "num_input_channels": 2,
    "prediction_length": 3,
    "do_mask_input": False,
}
SOUND = {**PART_SIZES, "max_length": 12, "num_mel_bins": 8, "patch_size": 4, "time_stride": 4, "frequency_stride": 4}

MODELS: dict[str, models.Named] = {
    "clip": ("CLIP", "Model", {"text_config": ONE_LAYER, "vision_config": VISION, "projection_dim": 12}),
    "siglip": ("Siglip", "Model", {"text_config": {**ONE_LAYER, "projection_size": 16}, "vision_config": VISION}),
    "llava": ("Llava", "ForConditionalGeneration", LLAVA),
    "qwen2_vl": (
        "Qwen2VL",
        "ForConditionalGeneration",
        {"text_config": {**KEYED, "rope_parameters": ROPE}, "vision_config": SEEN, **TOKENS},
    ),
    "convnext": ("ConvNext", "ForImageClassification", {**PART_STAGES, "num_stages": 2}),
    "segformer": ("Segformer", "ForSemanticSegmentation", BLOCKS),
    "vivit": ("Vivit", "ForVideoClassification", {**FILMS, "tubelet_size": [2, 4, 4]}),
    "timesformer": ("Timesformer", "ForVideoClassification", FILMS),
    "videomae": ("VideoMAE", "ForVideoClassification", {**FILMS, "tubelet_size": 2}),
    "regnet": ("RegNet", "ForImageClassification", GROUPED_REGNET),
    "patchtst": ("PatchTST", "ForPrediction", PATCHES),
    "audio-spectrogram-transformer": ("AST", "ForAudioClassification", SOUND),
}
TELLING = ("gptj", "convnext", "jina_embeddings_v3")
TIMES = {"videomae": "ffn=2"}  # whose table of sinusoids is another at another hidden size


def saved_part(folder: Path, name: str) -> Path:
    return saved(folder, *MODELS[name], size=0.2)


@pytest.mark.parametrize("name", with_slow([*EXACT, *MORE_EXACT, *JOINED, *MODELS], TELLING))
def test_exact_in_outputs_and_training(name: str, tmp_path: Path) -> None:
    """Files of the joined ones were "the files and config.json do not belong together", just after they were saved."""
    prefix, head, fields = {**EXACT, **MORE_EXACT, **JOINED, **MODELS}[name]
    if not hasattr(transformers, f"{prefix}Config"):
        pytest.skip("another version of transformers")
    small = saved(tmp_path / "small", prefix, head, fields, size=0.2 if name in MODELS else 0.3)
    found = compared(small, tmp_path, TIMES.get(name, 2))
    assert found.rows[0].what == "tensors in the files"
    assert found.rows[0].difference < 1e-10
    assert len(found.rows) > 2
    assert found.rows[-1].what.startswith("outputs over 2 steps of AdamW")
    exact = [row for row in found.rows if "before rounding" in row.what or name not in MORE_EXACT]
    assert all(row.difference < (1e-12 if name in {**EXACT, **JOINED} else 1e-10) for row in exact)
    Record.load(tmp_path / "wide").plan.check(load_pretrained(open_source(tmp_path / "wide"), torch.float32)[0])


@pytest.mark.slow
def test_a_table_that_a_model_computes_for_its_width_is_refused(tmp_path: Path) -> None:
    small = saved_part(tmp_path / "small", "videomae")
    with pytest.raises(
        MupscaleError, match=r"'videomae\.embeddings' .* uses numbers that the model computes from its width"
    ):
        upscale(small, tmp_path / "wide", times=2, progress=False, exact=True)
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("name", "times", "text", "vision"),
    [
        pytest.param("clip", "text=2", 32, 16, marks=pytest.mark.slow),
        ("clip", "vision.hidden=3,vision.heads=3", 16, 48),
        pytest.param("llava", "text=2,vision=3", 32, 48, marks=pytest.mark.slow),
    ],
)
def test_parts_by_name(name: str, times: str, text: int, vision: int, tmp_path: Path) -> None:
    small = saved_part(tmp_path / "small", name)
    made = upscale(small, tmp_path / "wide", times=times, progress=False, exact=True)
    assert made.comparison.ok
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert [config[f"{part}_config"]["hidden_size"] for part in ("text", "vision")] == [text, vision]
    assert all(f"{a} → {b}" in str(made) for a, b in ((16, text), (16, vision)) if a != b)


@pytest.mark.slow
def test_sizes_of_parts_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    small = saved_part(tmp_path / "small", "clip")
    command = ["upscale", str(small), str(tmp_path / "wide"), "--hidden", "text=32", "--heads", "text=8", "--no-verify"]
    assert main(command) == 0
    upscale(small, tmp_path / "same", hidden={"text": 32}, heads={"text": 8}, progress=False, verify=False, exact=True)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("wide", "same")]
    assert configs[0] == configs[1]
    assert configs[0]["text_config"]["hidden_size"] == 32
    sizes = inspect(small, times="text=2").sizes
    assert sizes["text.hidden_size"] == (16, 32)
    assert not any(name.startswith("vision") for name in sizes)


@pytest.mark.quick("True-clip-*")
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("clip", {"ffn": {"vision": 30}}),
        pytest.param("clip", {"times": "text=2"}, marks=pytest.mark.slow),
        pytest.param("siglip", {"times": "text.ffn=2"}, marks=pytest.mark.slow),
        pytest.param("llava", {"hidden": "text=24", "heads": "text=6"}, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", {"hidden": "text=24", "heads": "text=6"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lossless", [False, True])
def test_fresh_units_of_parts_by_name(name: str, asked: dict[str, Any], lossless: bool, tmp_path: Path) -> None:
    small, wide = saved_part(tmp_path / "small", name), tmp_path / "wide"
    made = upscale(small, wide, grow=Fresh(lossless=lossless), progress=False, **asked)
    assert made.comparison.ok
    assert verify(small, wide).ok
    growth = Record.load(wide).growths[0]
    assert growth.fresh == Fresh(lossless=lossless)
    assert growth.times.fresh
    stayed = "vision" if "text" in str(growth.times) else "text"
    configs = [json.loads((folder / "config.json").read_text())[f"{stayed}_config"] for folder in (small, wide)]
    kept = {"hidden_size", "intermediate_size", "num_attention_heads"} - ({"hidden_size"} if "qwen" in name else set())
    assert all(configs[0].get(field) == configs[1].get(field) for field in kept)


@pytest.mark.slow
def test_two_growths_of_one_part_after_the_other(tmp_path: Path) -> None:
    small = saved_part(tmp_path / "small", "clip")
    upscale(small, tmp_path / "middle", times="text=2", progress=False, exact=True)
    upscale(tmp_path / "middle", tmp_path / "last", times="vision=2", progress=False, exact=True)
    assert verify(small, tmp_path / "last", dtype="float64", train=3).ok


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    small, wide = saved_part(tmp_path / "small", "clip"), tmp_path / "wide"
    asked: list[tuple[dict[str, Any], str]] = [
        (
            {"times": "audio=2", "exact": True},
            "'audio' is not a part of this model that grows: its parts are text, vision",
        ),
        ({"hidden": 32, "exact": True}, r"hidden=32: config.json has the sizes text.hidden 16"),
        ({"hidden": "text=wide", "exact": True}, r"hidden=\"text=wide\": give a whole number"),
        ({"hidden": "audio=24", "grow": Fresh()}, r"hidden=\"audio=24\": config.json has the sizes"),
        ({"times": "txt=2"}, r"names 'txt', which does not grow: text and vision \(text=2\)"),
    ]
    for ask, message in asked:
        refuses(message, upscale, small, wide, progress=False, **ask)
    assert not wide.exists()


def test_new_channels_of_batch_norm_start_with_the_variance_of_a_fresh_one(tmp_path: Path) -> None:
    """A running variance of 0 divided outputs by the root of eps, in each layer once more."""
    config = transformers.RegNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], groups_width=1, num_labels=3, layer_type="x"
    )
    model = transformers.RegNetForImageClassification(config)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    model.save_pretrained(tmp_path / "small")
    wide = upscale(tmp_path / "small", tmp_path / "wide", times=2, grow=Fresh(), progress=False)
    grown = transformers.RegNetForImageClassification.from_pretrained(tmp_path / "wide").state_dict()
    variances = [tensor for name, tensor in grown.items() if name.endswith("running_var")]
    assert variances
    assert all(bool((tensor >= 0.5).all()) for tensor in variances)
    assert "New channels of BatchNorm" in wide.comparison.verdict
