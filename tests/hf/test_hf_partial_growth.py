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
AST = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 32, "max_length": 64}
SERIES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("Swin", SWIN, "nothing of 'swin' would grow"),
        ("RegNet", REGNET, "only 10 of 62 tensors of 'regnet' would grow"),
        ("AST", AST | {"hidden_size": 16, "intermediate_size": 32}, "reads 'input_values', neither tokens nor pixels"),
        ("PatchTST", SERIES | {"d_model": 8, "num_attention_heads": 2, "ffn_dim": 16}, "reads 'past_values'"),
    ],
)
def test_refused_in_a_sentence(name: str, sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**sizes)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path / "small")
    with pytest.raises(mu.MupscaleError, match=message):
        hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False)
    assert not (tmp_path / "wide").exists()
