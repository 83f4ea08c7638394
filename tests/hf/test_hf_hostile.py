"""Checkpoints that somebody prepared to do harm: they are data, whose sizes and links are looked at first."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_files import llama_config, llama_tensors, write_checkpoint
from mupscale import MupscaleError, hf
from mupscale.cli import main


def checkpoint(folder: Path, without: str = "", **changed: Any) -> Path:
    """A small LLaMA, its config changed afterwards."""
    tensors = {name: tensor for name, tensor in llama_tensors(llama_config()).items() if name != without}
    return write_checkpoint(folder, {**llama_config(), "max_position_embeddings": 64, **changed}, tensors)


SIZES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**9},
    "fewer layers": {"num_hidden_layers": 10**6},
    "vocabulary": {"vocab_size": 10**12},
    "hidden": {"hidden_size": 10**15},
    "heads": {"num_attention_heads": 10**9},
    "labels": {"num_labels": 10**9},
    "positions": {"max_position_embeddings": 10**12},
    "a part": {"text_config": {"num_hidden_layers": 10**9}},
}


@pytest.mark.parametrize("changed", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("command", ["inspect", "upscale", "verify"])
def test_sizes_that_no_tensor_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, changed: dict[str, Any]
) -> None:
    folder = checkpoint(tmp_path / "small", **changed)
    words = {"inspect": [], "upscale": [str(tmp_path / "wide")], "verify": [str(folder)]}[command]
    assert main([command, str(folder), *words]) == 1
    said = capsys.readouterr().err
    assert "do not belong together" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("lost", "changed"),
    [
        ("model.norm.weight", {}),
        ("model.layers.1.mlp.up_proj.weight", {}),
        ("lm_head.weight", {}),
        ("", {"num_hidden_layers": 3}),
    ],
)
def test_missing_tensors_without_verification(tmp_path: Path, lost: str, changed: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "small", without=lost, **changed)
    with pytest.raises(MupscaleError, match=f"lacks '{lost or 'model.layers.2'}") as refused:
        hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert "do not belong together" in str(refused.value)
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tie_word_embeddings": True}, "different numbers for .* which are one tensor by config.json"),
        ({"num_hidden_layers": 1}, "is in the files, and by config.json 'model.layers' has 1 layers"),
    ],
)
def test_tensors_that_the_config_does_not_know(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(MupscaleError, match=f"{message}.* do not belong together"):
        hf.upscale(checkpoint(tmp_path / "small", **changed), tmp_path / "wide", progress=False)
    assert not (tmp_path / "wide").exists()


def test_links_that_lead_out_are_not_copied(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = checkpoint(tmp_path / "small")
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(MupscaleError, match=r"tokenizer\.json is a link to .*secret, outside the checkpoint"):
        hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert not (tmp_path / "wide").exists()
    (folder / "tokenizer.json").unlink()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "chat.jinja").write_text("secret")
    with pytest.raises(MupscaleError, match="outside the checkpoint"):
        hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)


def test_links_within_the_checkpoint_and_the_hubs_store_are_files(tmp_path: Path) -> None:
    """The hub keeps files as blobs/… and links to them from snapshots/….”"""
    repository = tmp_path / "models--x"
    folder = checkpoint(repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/123")
    (folder / "merges.txt").symlink_to("tokenizer.json")
    hf.upscale(folder, tmp_path / "wide", verify=False, progress=False, exact=True)
    assert (tmp_path / "wide" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "wide" / "merges.txt").is_symlink()


@pytest.mark.quick("GPT2LMHeadModel")
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_text_without_a_tokenizer_to_read_it(kind: str, tmp_path: Path) -> None:
    """transformers makes one of special tokens alone, to which a text is nothing, or unknown words."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 120}
    if kind.startswith("GPT2"):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 120}
    model = getattr(transformers, kind)
    model(model.config_class(**sizes)).save_pretrained(tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "wide", verify=False, progress=False, exact=True)
    (tmp_path / "text").write_text("to be or not to be")
    with pytest.raises(MupscaleError, match=r"small has no tokenizer that .*: put its files there"):
        hf.verify(tmp_path / "small", tmp_path / "wide", text=tmp_path / "text")


def test_a_tokenizer_of_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wide, text = checkpoint(tmp_path / "small"), tmp_path / "wide", tmp_path / "text"
    text.write_text("to be or not to be")
    trace = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    auto = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto))
    hf.upscale(folder, wide, verify=False, progress=False, exact=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    assert main(["verify", str(folder), str(wide), "--text", str(text)]) == 1
    assert "--trust-remote-code" in capsys.readouterr().err
    assert sys.stdin.read() == "y\n" * 10
    assert not trace.exists()


def test_a_pipe_as_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "small")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    for words in (["inspect", str(folder)], ["upscale", str(folder), str(tmp_path / "wide")]):
        assert main(words) == 1
        assert "config.json is a named pipe, not a file" in capsys.readouterr().err
