"""Checkpoints with more layers: every described architecture, per-layer settings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import build, inputs, randomised, tiny  # noqa: E402
from mupscale import hf  # noqa: E402
from mupscale.cli.command_table import main  # noqa: E402
from mupscale.growth import Identity  # noqa: E402
from mupscale.hf.deepening import WRITERS  # noqa: E402
from mupscale.planning import find_writers  # noqa: E402
from mupscale.system import MupscaleError  # noqa: E402
from slow_cases import with_slow  # noqa: E402

RESIDUAL = sorted(WRITERS)


def saved(name: str, folder: Path, **config: Any) -> Any:
    made, _ = tiny(name, **config)
    model = randomised(build(made))
    model.save_pretrained(folder)  # type: ignore[operator]
    return made


@pytest.mark.parametrize("name", with_slow(RESIDUAL, ("gpt2", "llama", "gemma2", "mixtral")))
def test_identity_keeps_the_function_of_every_described_architecture(name: str, tmp_path: Path) -> None:
    config = saved(name, tmp_path / "small")
    deepened = hf.deepen_checkpoint(tmp_path / "small", tmp_path / "deep", layers=5)
    assert deepened.difference is not None
    assert deepened.difference < 1e-5
    stored = json.loads((tmp_path / "deep" / "config.json").read_text())
    assert stored.get("num_hidden_layers", stored.get("n_layer")) == 5
    types = getattr(config, "layer_types", None)
    if types:
        assert stored["layer_types"] == [types[place.block] for place in Identity().places(2, 5)]


@pytest.mark.parametrize("name", RESIDUAL)
def test_what_is_described_is_what_a_run_shows(name: str) -> None:
    config, _ = tiny(name)
    model = build(config)
    path = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    found, reasons = find_writers(model, [f"{path}.0"], inputs(config, count=1)[0])
    assert not reasons
    patterns, value = WRITERS[name]
    described = {
        local: value
        for local in (n.removeprefix(f"{path}.0.") for n, _ in model.named_parameters() if n.startswith(f"{path}.0."))
        if any(re.fullmatch(rf"{pattern}(\.weight|\.bias)?", local) for pattern in patterns)
    }
    assert described == found[f"{path}.0"]


def test_stack_says_by_how_much_outputs_change(tmp_path: Path) -> None:
    saved("llama", tmp_path / "small")
    stacked = hf.deepen_checkpoint(tmp_path / "small", tmp_path / "deep", layers=4, how="stack", shard_size="4kB")
    assert stacked.difference is not None
    assert stacked.difference > 0.01
    assert len(list((tmp_path / "deep").glob("model-*.safetensors"))) > 1
    assert "outputs differ by" in str(stacked)


def test_refused(tmp_path: Path) -> None:
    saved("bert", tmp_path / "bert")
    with pytest.raises(MupscaleError, match="post-norm"):
        hf.deepen_checkpoint(tmp_path / "bert", tmp_path / "deep", layers=4)
    assert hf.deepen_checkpoint(tmp_path / "bert", tmp_path / "deep", layers=4, how="stack").layers == (2, 4)
    saved("llama", tmp_path / "llama")
    with pytest.raises(MupscaleError, match="a deeper model more than that"):
        hf.deepen_checkpoint(tmp_path / "llama", tmp_path / "other", layers=2)
    assert not (tmp_path / "other").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonargparse")
    saved("gpt2", tmp_path / "small")
    words = ["upscale", str(tmp_path / "small"), str(tmp_path / "deep"), "--layers", "3", "--how", "identity"]
    assert main(words) == 0
    assert "2 layers are 3 (identity)" in capsys.readouterr().out
    assert main([*words[:2], str(tmp_path / "again"), "--layers", "3", "--noise", "1"]) != 0
