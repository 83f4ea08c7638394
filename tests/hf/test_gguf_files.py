"""GGUF files, read through transformers' own loader where that is asked for: every tensor of theirs, and no other."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mupscale import hf
from mupscale.cli import main
from mupscale.hf.gguf_files import read_gguf_header
from refusals import refuses

HIDDEN, FFN, VOCABULARY = 64, 96, 40
Arrays = dict[str, np.ndarray[Any, Any]]
DOWN = "blk.1.ffn_down.weight"


def write_gguf(path: Path, *, layers: int = 2, change: Callable[[Arrays], None] = lambda _: None) -> Arrays:
    """A LLaMA of two blocks with weights of 8 bits, by gguf's own writer; returns the numbers before rounding.

    layers: what the header says. change: of the tensors, before they are written.
    """
    gguf = pytest.importorskip("gguf")
    writer, draw = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(layers)
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
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{n}": (HIDDEN, HIDDEN) for n in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{n}": (FFN, HIDDEN) for n in ("gate", "up")} | {f"blk.{i}.ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{i}.{n}_norm": (HIDDEN,) for n in ("attn", "ffn")}
    numbers = {f"{name}.weight": draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    change(numbers)
    for name, array in numbers.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about tokenizers
def test_a_gguf_file_grows_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "model-Q8_0.gguf", tmp_path / "wide"
    numbers = write_gguf(file)
    assert main(["upscale", str(file), str(out), "--times", "2", "--exact", "--dequantise"]) == 0
    assert "equivalent" in capsys.readouterr().out
    assert main(["verify", str(file), str(out), "--dequantise"]) == 0
    assert main(["inspect", str(file), "--dequantise"]) == 0
    assert "llama (planned by running miniatures of it)" in capsys.readouterr().out
    assert "`model-Q8_0`" in (out / "README.md").read_text(encoding="utf-8")
    import transformers

    grown = transformers.AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().weight
    assert torch.allclose(grown[:, ::2], torch.from_numpy(numbers["token_embd.weight"]), atol=0.03)  # as 8 bits have it
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
    refuses(r"give model\.gguf itself, through mupscale\.hf\.read_gguf", hf.inspect, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it ends within its header"),
        (b"GGML\x03\x00\x00\x00", "does not start with the letters GGUF"),
        (b"GGUF\x07\x00\x00\x00", "version 7 of the format is not known"),
        (b"GGUF\x03\x00\x00\x00" + struct.pack("<QQ", 2**62, 0), "4,611,686,018,427,387,904 tensors"),
        (b"GGUF\x03\x00\x00\x00" + struct.pack("<QQ", 1, 1), "it ends within its header"),
        (b"GGUF\x03\x00\x00\x00" + struct.pack("<QQQ", 0, 1, 2**40), "a name in it would be 1,099,511,627,776 bytes"),
        (b"GGUF\x03\x00\x00\x00" + struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 9, 8, 2**33), "more than 2,097,152 items"),
    ],
)
def test_a_damaged_header(tmp_path: Path, content: bytes, message: str) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    refuses(message, hf.read_gguf, tmp_path / "model.gguf")


def without(name: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__delitem__(name)


def with_(name: str, array: np.ndarray[Any, Any]) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: array})


SQUARE, NOT_FINITE = np.zeros((HIDDEN, HIDDEN), np.float32), np.full(HIDDEN, np.nan, np.float32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor is missing": ({"change": without(DOWN)}, f"lacks '{DOWN}', which transformers would fill with random"),
    "a norm is missing": ({"change": without("output_norm.weight")}, "lacks 'output_norm.weight'"),
    "a tensor more": ({"change": with_("blk.0.attn_gate.weight", SQUARE)}, "holds 'blk.0.attn_gate.weight', which"),
    "one in place of another": (
        {"change": lambda arrays: arrays.update({"blk.1.ffn_dawn.weight": arrays.pop(DOWN)})},
        "lacks 'model.layers.1.mlp.down_proj.weight'",
    ),
    "a smaller vocabulary": ({"change": with_("token_embd.weight", SQUARE[:32])}, "they do not belong together"),
    "more layers": (
        {"layers": 3},
        r"block_count is 3, and holds tensors of 2 blocks \(blk.0 to blk.1\)",
    ),
    "fewer layers": ({"layers": 1}, "llama.block_count is 1, and holds tensors of 2"),
    "very many layers": ({"layers": 10**9}, "llama.block_count is 1000000000, and"),
    "numbers that are not": ({"change": with_("blk.1.ffn_norm.weight", NOT_FINITE)}, "not finite in 'model.layers.1"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore")  # of transformers, about tokenizers
def test_what_the_file_lacks_is_not_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str
) -> None:
    """Missing tensors were filled with random numbers, and the growth was called verified."""
    write_gguf(tmp_path / "model.gguf", **changed)
    refuses(message, hf.read_gguf, tmp_path / "model.gguf")
    out = tmp_path / "out"
    assert main(["upscale", str(tmp_path / "model.gguf"), str(out), "--exact", "--dequantise"]) == 1
    assert not out.exists()


def test_tensors_lie_one_after_the_other_and_fill_the_file(tmp_path: Path) -> None:
    """An offset off by 32 gave a model of other weights."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    name = DOWN.encode()
    offset_at = whole.index(name) + len(name) + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", whole, offset_at)

    moved = bytearray(whole)
    struct.pack_into("<Q", moved, offset_at, offset - 32)
    file.write_bytes(moved)
    refuses(f"'{DOWN}' starts at byte", hf.read_gguf, file)

    for damaged in (whole[:-100], whole + bytes(100)):
        file.write_bytes(damaged)
        refuses("bytes, and .* follow its header", hf.read_gguf, file)

    file.write_bytes(whole)
    header = read_gguf_header(file)
    assert header.shapes[DOWN] == (HIDDEN, FFN)
    assert header.has_equal_bytes(DOWN, DOWN)
    assert not header.has_equal_bytes(DOWN, "blk.0.ffn_down.weight")


@pytest.mark.filterwarnings("ignore")  # of transformers, about tokenizers
def test_nothing_beside_the_file_is_run_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at the terminal whether it may run code that a tokenizer_config.json names."""

    def asked(*_: object) -> str:
        pytest.fail("a prompt")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    own_code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}}
    for name in ("tokenizer_config.json", "config.json", "adapter_config.json"):
        (tmp_path / name).write_text(json.dumps({**own_code, "tokenizer_class": "Evil"}))
    source = hf.read_gguf(tmp_path / "model.gguf")
    assert source.config["num_hidden_layers"] == 2
    assert "auto_map" not in source.config
    assert not (tmp_path / "ran").exists()
    assert "evil" not in "".join(file.read_text() for file in source.folder.glob("*.json"))
