"""Three tokenizers behind one interface; GPT-2's against its publisher's algorithm written out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mupscale.data import tinyshakespeare
from mupscale.data import tokenizer as tokenizing
from mupscale.data.tokenizer import BPE, Bytes, load_tokenizer, make_tokenizer, one_thread_each
from refusals import refuses

NASTY = [
    "I'll say it's DON'T, we've 'tis",
    "  two  spaces   three\n\n\n\ttabs \r\n x ",
    "日本語, Ελληνικά, 👩‍👩‍👧 ²³½ Ⅷ 1234 3.14 x1y2",
    "before<|endoftext|> after",
    "a\u00a0b\u3000c\x1c\x1d\x85d\u2028e",
    "",
]


@cache
def learnt() -> BPE:
    pytest.importorskip("tokenizers")
    gaps = "".join(f"{gap * length}x" for gap in (" ", "\n", "\t") for length in range(1, 9))  # words of spaces alone
    return BPE.learn([tinyshakespeare()[:200_000], gaps * 500], 600)


def gpt2_files(folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe")) -> Path:
    """A vocabulary in the files and with the layout that GPT-2's has: bytes, merges, the end of a text last."""
    content = json.loads(learnt().to_json())["model"]
    folder.mkdir(exist_ok=True)
    (folder / names[0]).write_text(json.dumps({**content["vocab"], "<|endoftext|>": len(content["vocab"])}))
    merges = "\n".join(" ".join(pair) for pair in content["merges"])
    (folder / names[1]).write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return folder


def published_gpt2(folder: Path, text: str) -> list[int]:
    """GPT-2's encoder.py, as published."""
    regex = pytest.importorskip("regex")
    encoder = json.loads((folder / "encoder.json").read_text())
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    found = []
    for word in regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text):
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda pair: ranks.get(pair, 10**9))
            if pair not in ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                both = tuple(parts[i : i + 2]) == pair
                merged.append("".join(parts[i : i + 1 + both]))
                i += 1 + both
            parts = merged
        found += [encoder[part] for part in parts]
    return found


@pytest.mark.parametrize("text", [*NASTY, tinyshakespeare()[:5000]])
def test_gpt2_is_as_published(tmp_path: Path, text: str) -> None:
    folder = gpt2_files(tmp_path)
    tokenizer = make_tokenizer(f"gpt2:{folder}", [])
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (600, 599)
    tokens = tokenizer.encode_batch([text])[0].tolist()
    assert tokens == published_gpt2(folder, text)
    assert tokenizer.decode(tokens) == text
    others = gpt2_files(tmp_path / "others", ("vocab.json", "merges.txt"))
    assert BPE.gpt2(others).fingerprint == tokenizer.fingerprint


LETTERS = st.integers(0, sys.maxunicode).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)
"""All that UTF-8 can write; st.text() would look up what each of them is first, which takes seconds."""


@pytest.mark.parametrize("spec", ["bytes", "bpe:600"])
@settings(max_examples=50)
@given(text=st.lists(LETTERS).map("".join))
def test_round_trip(spec: str, text: str) -> None:
    tokenizer = Bytes() if spec == "bytes" else learnt()
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(tokens.tolist()) == text
    assert len(tokens) <= len(text.encode())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_special_token_in_a_text_is_text(kind: str) -> None:
    tokenizer = Bytes() if kind == "bytes" else learnt()
    text = "<|endoftext|>"
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.end_of_text not in tokens
    assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_text]) == text + text


@settings(max_examples=40)
@given(
    words=st.lists(
        st.sampled_from([" ", "\n", "\t", "\x1c", "\u3000", "a", "'ll", "1", "é", "日", ".", "ab "]), max_size=60
    ),
    size=st.integers(1, 10),
)
def test_pieces_have_the_tokens_of_the_whole(words: list[str], size: int) -> None:
    text, before = "".join(words), tokenizing._PIECE
    tokenizing._PIECE = size
    try:
        pieces = list(learnt().pieces(text))
    finally:
        tokenizing._PIECE = before
    assert "".join(pieces) == text
    whole = learnt().encode_batch([text])[0]
    assert np.concatenate(learnt().encode_batch(pieces)).tolist() == whole.tolist()
    if len(text) > 10 * size + 10 and " a" * 3 in text:
        assert len(pieces) > 1


def test_a_long_text_is_cut() -> None:
    pieces = list(learnt().pieces(tinyshakespeare()))
    assert max(map(len, pieces)) < 10_100
    assert len(pieces) > 100


@pytest.mark.parametrize("spec", ["bytes", "bpe:400", "gpt2"])
def test_saved_and_loaded_it_is_the_same(tmp_path: Path, spec: str) -> None:
    if spec != "bytes":
        pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(f"gpt2:{gpt2_files(tmp_path)}" if spec == "gpt2" else spec, [tinyshakespeare()[:50_000]])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    for ours, theirs in zip(loaded.encode_batch(NASTY), tokenizer.encode_batch(NASTY), strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.slow
def test_learning_is_deterministic() -> None:
    """In a process with another hash seed and three threads."""
    pytest.importorskip("tokenizers")
    text = tinyshakespeare()[:100_000]
    here = BPE.learn([text[i : i + 500] for i in range(0, 100_000, 500)], 500).fingerprint
    script = (
        "from mupscale.data.tokenizer import BPE; from mupscale.data import tinyshakespeare as t\n"
        "text = t()[:100_000]; print(BPE.learn([text[i:i+500] for i in range(0, 100_000, 500)], 500).fingerprint)"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there.strip() == here


def test_the_vocabulary_has_the_size_that_was_asked_for() -> None:
    assert learnt().vocab_size == 600
    assert learnt().end_of_text == 599
    few = BPE.learn(["abcabc"], 600)
    assert 257 < few.vocab_size < 600
    assert few.end_of_text == few.vocab_size - 1


def test_learning_looks_at_the_beginning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizing, "_LEARN_FROM", 1000)
    text = tinyshakespeare()
    looked = iter([text[:600], text[600:2000], "never seen"])
    assert BPE.learn(looked, 300).fingerprint == BPE.learn([text[:600], text[600:1000]], 300).fingerprint
    assert next(looked) == "never seen"


def test_one_thread_each_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "true"):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        with one_thread_each():
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_bad_tokenizers(tmp_path: Path) -> None:
    for spec in ("words", "bytes:3", "bpe", "bpe:many", "gpt2", "gpt2:"):
        refuses(r"there is no tokenizer .*: take bytes, bpe:8192", make_tokenizer, spec, [])
    pytest.importorskip("tokenizers")
    refuses(r"a vocabulary of 256 is too small: .* 257", make_tokenizer, "bpe:256", ["text"])
    refuses(r"has no encoder\.json or vocab\.json", BPE.gpt2, tmp_path)
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    refuses(r"has no vocab\.bpe or merges\.txt", BPE.gpt2, tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    refuses(r"has no <\|endoftext\|>", BPE.gpt2, tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nno such merge\n")
    refuses("hold no byte-pair encoding", BPE.gpt2, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    refuses(r"tokenizer\.json holds no tokenizer", load_tokenizer, tmp_path / "tokenizer.json")
    refuses(r"nothing\.json cannot be read", load_tokenizer, tmp_path / "nothing.json")
