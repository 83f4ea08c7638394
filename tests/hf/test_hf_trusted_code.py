"""A checkpoint with code of its own: run with the flag alone, and planned by running it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mupscale import MupscaleError
from mupscale.cli import main
from mupscale.hf import inspect, upscale, verify
from mupscale.hf.building import quiet_transformers

CONFIGURATION = """
from transformers import PretrainedConfig


class MixerConfig(PretrainedConfig):
    model_type = "my_mixer"

    def __init__(self, hidden_size=8, intermediate_size=12, vocab_size=11, **kwargs):
        self.hidden_size, self.intermediate_size, self.vocab_size = hidden_size, intermediate_size, vocab_size
        super().__init__(**kwargs)
"""

MODELLING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_mixer import MixerConfig


class MixerForCausalLM(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config):
        super().__init__(config)
        n, m = config.hidden_size, config.intermediate_size
        self.words = nn.Parameter(torch.randn(config.vocab_size, n))
        self.up, self.down = nn.Parameter(torch.randn(n, m) / n), nn.Parameter(torch.randn(m, n) / m)
        self.head = nn.Linear(n, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        x = self.words[input_ids]
        x = x + torch.tanh(x.cumsum(1) @ self.up) @ self.down
        return CausalLMOutput(logits=self.head(x))
"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    paths, modules = list(sys.path), {*sys.modules}
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "configuration_mixer.py").write_text(CONFIGURATION)
    (folder / "modeling_mixer.py").write_text(MODELLING)
    config = {
        "model_type": "my_mixer",
        "architectures": ["MixerForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mixer.MixerConfig",
            "AutoModelForCausalLM": "modeling_mixer.MixerForCausalLM",
        },
        "hidden_size": 8,
        "intermediate_size": 12,
        "vocab_size": 11,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"words": (11, 8), "up": (8, 12), "down": (12, 8), "head.weight": (11, 8), "head.bias": (11,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    yield folder
    sys.path[:] = paths
    for name in {*sys.modules} - modules:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_without_the_flag_it_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = checkpoint / "modeling_mixer.py"
    code.write_text(f"open({str(marker)!r}, 'w').close()\n{MODELLING}")
    for call in (lambda: upscale(checkpoint, tmp_path / "wide", exact=True), lambda: inspect(checkpoint)):
        with pytest.raises(
            MupscaleError, match=r"'my_mixer' is the checkpoint's own code .*trust_remote_code=True"
        ) as e:
            call()
        assert "\n" not in str(e.value)
    assert main(["inspect", str(checkpoint)]) == 1
    assert not marker.exists(), "code of the checkpoint's own was run"
    assert not (tmp_path / "wide").exists()


def test_with_the_flag_it_is_planned_by_running_and_verified(checkpoint: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    made = upscale(checkpoint, wide, times=2, trust_remote_code=True, progress=False, exact=True)
    assert made.comparison is not None
    assert made.comparison.ok
    assert all(row.difference < 1e-6 for row in made.comparison.rows)
    assert {n: tuple(t.shape) for n, t in load_file(wide / "model.safetensors").items()}["up"] == (16, 24)
    assert (wide / "modeling_mixer.py").read_text() == MODELLING
    assert verify(checkpoint, wide, dtype="float64", train=3, trust_remote_code=True).ok
    with pytest.raises(MupscaleError, match="trust_remote_code=True"):
        verify(checkpoint, wide)
    with quiet_transformers():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(wide, trust_remote_code=True)
    assert loaded.config.hidden_size == 16


@pytest.mark.slow
def test_the_commands_have_the_flag(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = str(tmp_path / "wide")
    assert main(["inspect", str(checkpoint), "--trust-remote-code"]) == 0
    assert "hidden_size 8 → 16" in capsys.readouterr().out
    assert main(["upscale", str(checkpoint), wide, "--trust-remote-code"]) == 0
    assert main(["verify", str(checkpoint), wide, "--trust-remote-code"]) == 0


def test_code_in_another_repository_is_not_fetched(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {name: f"somebody/else--{path}" for name, path in config["auto_map"].items()}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(MupscaleError, match="is in a different repository"):
        upscale(checkpoint, tmp_path / "wide", trust_remote_code=True, exact=True)
