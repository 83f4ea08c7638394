"""Checkpoints of which nothing would grow, or a part, or that cannot be compared: refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mupscale as mu
from mupscale import hf

transformers = pytest.importorskip("transformers")

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
