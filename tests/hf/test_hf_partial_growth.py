"""Checkpoints of which nothing would grow, or a part, or that cannot be compared: refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import mupscale as mu
from mupscale import hf

SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
REGNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "groups_width": 4}
SERIES = {"prediction_length": 2, "context_length": 8, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.slow
def test_sizes_of_stages_with_heads_in_a_list(tmp_path: Path) -> None:
    """Every size of Swin follows from embed_dim, and its biases by distance are copied with their heads."""
    transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)).save_pretrained(tmp_path / "small")
    made = hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, exact=True)
    assert made.comparison is not None
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
        with pytest.raises(mu.MupscaleError, match=message):
            hf.upscale(small, tmp_path / "other", progress=False, **ask)


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"hidden": 24}, "it must stay: all stages grow by .* times=2"), ({"hidden": 24, "heads": 3}, STAGES)],
)
def test_heads_of_stages_in_a_list(asked: dict[str, int], message: str, tmp_path: Path) -> None:
    transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN)).save_pretrained(tmp_path / "small")
    with pytest.raises(mu.MupscaleError, match=message):
        hf.upscale(tmp_path / "small", tmp_path / "wide", progress=False, **asked)


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
    with pytest.raises(mu.MupscaleError, match=message):
        hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, exact=True)
    assert not (tmp_path / "wide").exists()
