"""GGUF files are read through transformers' own loader, dequantised where that is asked for, and else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mupscale import MupscaleError, hf
from mupscale.cli import main

HIDDEN, FFN, LAYERS, VOCABULARY = 64, 96, 1, 40


def _write_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A LLaMA with weights of 8 bits, by gguf's own writer; returns the numbers before they were rounded."""
    gguf = pytest.importorskip("gguf")
    writer, draw = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(VOCABULARY - 3))])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *([1] * (VOCABULARY - 3))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{n}": (HIDDEN, HIDDEN) for n in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{n}": (FFN, HIDDEN) for n in ("gate", "up")} | {f"blk.{i}.ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{i}.{n}_norm": (HIDDEN,) for n in ("attn", "ffn")}
    numbers = {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, array in numbers.items():
        if array.ndim == 1:
            writer.add_tensor(f"{name}.weight", array)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about tokenizers
def test_a_gguf_file_grows_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "model-Q8_0.gguf", tmp_path / "wide"
    numbers = _write_gguf(file)
    assert main(["upscale", str(file), str(out), "--times", "2", "--exact", "--dequantise"]) == 0
    assert "equivalent" in capsys.readouterr().out
    assert main(["verify", str(file), str(out), "--dequantise"]) == 0
    assert main(["inspect", str(file), "--dequantise"]) == 0
    assert "llama (planned by running miniatures of it)" in capsys.readouterr().out
    assert "`model-Q8_0`" in (out / "README.md").read_text(encoding="utf-8")
    import transformers

    grown = transformers.AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().weight
    assert torch.allclose(grown[:, ::2], torch.from_numpy(numbers["token_embd"]), atol=0.03)  # as 8 bits have it
    assert torch.equal(grown[:, ::2], grown[:, 1::2])


def test_without_being_asked_it_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    for words in (["inspect", str(file)], ["upscale", str(file), str(tmp_path / "out")], ["verify", str(file), "x/y"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "is a GGUF file" in said
        assert "--dequantise" in said
    file.rename(tmp_path / "model.gguf")
    with pytest.raises(MupscaleError, match=r"give model\.gguf itself, through mupscale\.hf\.read_gguf"):
        hf.inspect(tmp_path)


def test_a_damaged_gguf_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(40))
    with pytest.raises(MupscaleError, match=r"transformers cannot read .*model\.gguf"):
        hf.read_gguf(tmp_path / "model.gguf")
