"""Models of several parts, configs with lists, and inputs that are no text: planned by running, and exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_models as models
import mupscale as mu
from mupscale import Fresh, MupscaleError
from mupscale.cli import main
from mupscale.hf import inspect, verify
from mupscale.hf.building import make_batches, quiet_transformers
from mupscale.hf.record import Record, settle_growth
from mupscale.hf.source import open_source
from mupscale.hf.upscaling import upscale
from mupscale.hf.verifying import load_pretrained

SIZES: dict[str, Any] = {**models.SIZES, "num_hidden_layers": 1}
TEXT = {**models.TEXT, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
KEYED = {**TEXT, "num_key_value_heads": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
FILMS = {**VISION, "num_frames": 2, "num_labels": 3}
STAGES: dict[str, Any] = {"depths": [1, 1], "num_labels": 3, "image_size": 32, "hidden_sizes": [8, 12]}
BLOCKS = {**STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "decoder_hidden_size": 10}
BLOCKS |= {"strides": [4, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "mlp_ratios": [2, 2]}
LLAVA: dict[str, Any] = {"text_config": {**KEYED, "model_type": "llama"}, "image_token_id": 28}
LLAVA |= {"vision_config": {**VISION, "model_type": "clip_vision_model"}, "vision_feature_layer": -1}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
SEEN = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 2}
TOKENS = {"image_token_id": 28, "video_token_id": 27, "vision_start_token_id": 26, "vision_end_token_id": 25}
REGNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "num_labels": 3}
SERIES = {"d_model": 16, "ffn_dim": 20, "num_attention_heads": 4, "num_hidden_layers": 1, "context_length": 16}
SERIES |= {
    "patch_length": 4,
    "patch_stride": 4,
    "num_input_channels": 2,
    "prediction_length": 3,
    "do_mask_input": False,
}
SOUND = {**SIZES, "max_length": 12, "num_mel_bins": 8, "patch_size": 4, "time_stride": 4, "frequency_stride": 4}

MODELS: dict[str, models.Named] = {
    "clip": ("CLIP", "Model", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 12}),
    "siglip": ("Siglip", "Model", {"text_config": {**TEXT, "projection_size": 16}, "vision_config": VISION}),
    "llava": ("Llava", "ForConditionalGeneration", LLAVA),
    "qwen2_vl": (
        "Qwen2VL",
        "ForConditionalGeneration",
        {"text_config": {**KEYED, "rope_parameters": ROPE}, "vision_config": SEEN, **TOKENS},
    ),
    "convnext": ("ConvNext", "ForImageClassification", {**STAGES, "num_stages": 2}),
    "segformer": ("Segformer", "ForSemanticSegmentation", BLOCKS),
    "vivit": ("Vivit", "ForVideoClassification", {**FILMS, "tubelet_size": [2, 4, 4]}),
    "timesformer": ("Timesformer", "ForVideoClassification", FILMS),
    "videomae": ("VideoMAE", "ForVideoClassification", {**FILMS, "tubelet_size": 2}),
    "regnet": ("RegNet", "ForImageClassification", REGNET),
    "patchtst": ("PatchTST", "ForPrediction", SERIES),
    "audio-spectrogram-transformer": ("AST", "ForAudioClassification", SOUND),
}
TELLING = ("clip", "siglip", "convnext")
TIMES = {"videomae": "ffn=2"}  # whose table of sinusoids is another at another hidden size
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in TELLING]


def saved(folder: Path, name: str) -> Path:
    prefix, head, fields = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**fields, architectures=[prefix + head])
    with quiet_transformers():
        models.randomised(getattr(transformers, prefix + head)(config), size=0.2).save_pretrained(folder)
    return folder


@pytest.mark.quick("convnext")
@pytest.mark.parametrize("name", [*TELLING, *OTHERS])
def test_outputs_and_training_stay(name: str, tmp_path: Path) -> None:
    small = saved(tmp_path / "small", name)
    upscale(small, tmp_path / "wide", times=TIMES.get(name, 2), progress=False, exact=True, verify=False)
    found = verify(small, tmp_path / "wide", dtype="float64", train=2)
    assert found.ok, found
    assert found.rows[-1].what == "outputs over 2 steps of AdamW"
    assert all(row.difference < 1e-10 for row in found.rows)
    assert len(found.rows) > 2


@pytest.mark.slow
def test_a_table_that_a_model_computes_for_its_width_is_refused(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", "videomae")
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
    small = saved(tmp_path / "small", name)
    made = upscale(small, tmp_path / "wide", times=times, progress=False, exact=True)
    assert made.comparison is not None
    assert made.comparison.ok
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert [config[f"{part}_config"]["hidden_size"] for part in ("text", "vision")] == [text, vision]
    assert all(f"{a} → {b}" in str(made) for a, b in ((16, text), (16, vision)) if a != b)


@pytest.mark.slow
def test_sizes_of_parts_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", "clip")
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
    small, wide = saved(tmp_path / "small", name), tmp_path / "wide"
    made = upscale(small, wide, grow=Fresh(lossless=lossless), progress=False, **asked)
    assert made.comparison is not None
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
    small = saved(tmp_path / "small", "clip")
    upscale(small, tmp_path / "middle", times="text=2", progress=False, exact=True)
    upscale(tmp_path / "middle", tmp_path / "last", times="vision=2", progress=False, exact=True)
    assert verify(small, tmp_path / "last", dtype="float64").ok


@pytest.mark.slow
def test_the_state_of_adamw_grows_with_the_parts(tmp_path: Path) -> None:
    """Saved after two steps, widened with the model, and trained on: both go on alike."""
    small = saved(tmp_path / "small", "clip")
    model = load_pretrained(open_source(small), torch.float64)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in make_batches(model, 3, 8)]
    for batch in batches[:2]:
        (model(**batch).logits_per_image ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    upscale(small, tmp_path / "wide", times="text=2", progress=False, exact=True)
    wide = load_pretrained(open_source(tmp_path / "wide"), torch.float64)[0]
    plan = Record.load(tmp_path / "wide").plan
    assert plan is not None
    mu.widen(model, wide, plan)
    report = mu.verify(
        model,
        wide,
        plan,
        batches,
        lambda model, batch: (model(**batch).logits_per_image ** 2).mean(),
        optimizer=optimizer,
        steps=3,
        tolerance=1e-10,
    )
    assert report.ok, str(report)


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", "clip")
    with pytest.raises(
        MupscaleError, match="'audio' is not a part of this model that grows: its parts are text, vision"
    ):
        upscale(small, tmp_path / "wide", times="audio=2", progress=False, exact=True)
    with pytest.raises(MupscaleError, match=r"hidden=32: config.json has the sizes text.hidden 16"):
        upscale(small, tmp_path / "wide", hidden=32, progress=False, exact=True)
    with pytest.raises(MupscaleError, match=r"hidden=\"text=wide\": give a whole number"):
        upscale(small, tmp_path / "wide", hidden="text=wide", progress=False, exact=True)
    with pytest.raises(MupscaleError, match=r"hidden=\"audio=24\": config.json has the sizes"):
        upscale(small, tmp_path / "wide", hidden="audio=24", grow=Fresh(), progress=False)
    assert not (tmp_path / "wide").exists()


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
    assert wide.comparison is not None
    assert "New channels of BatchNorm" in wide.comparison.verdict


def test_a_part_that_the_model_lacks_is_answered_with_its_parts(tmp_path: Path) -> None:
    config = {"model_type": "clip", "text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 8}}
    with pytest.raises(MupscaleError, match=r"names 'txt', which does not grow: text and vision \(text=2\)"):
        settle_growth(config, times="txt=2")
