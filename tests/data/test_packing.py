"""Packed tokens: the right ones in the right parts, whatever the cores, kills and processes; and windows of them."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mupscale.data import Shakespeare, Text, info, packing, tinyshakespeare, tokenize
from mupscale.data.packing import Index, TokenShard, Windows, find_split, pack, shown_progress
from mupscale.data.tokenizer import load_tokenizer
from mupscale.system.errors import MupscaleError
from processes import Script
from refusals import refuses
from terminals import on_a_terminal

WORDS = ["the", "of", "and", "to", "in", "that", "it", "is", "was", "for", "on", "are", "as", "with", "his", "they"]


def corpus(path: Path, documents: int = 60, empty: bool = True) -> Path:
    """Documents of different lengths; every seventh is empty."""
    draw = np.random.default_rng(0)
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            words = draw.choice(WORDS, draw.integers(5, 60))
            text = " \n" if empty and number % 7 == 3 else f"{number} é " + " ".join(words)
            file.write(json.dumps({"text": text}) + "\n")
    return path


def texts_in(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [text for line in file if (text := json.loads(line)["text"]).strip()]


def stream(folder: Path, part: Any) -> list[int]:
    return np.concatenate(Index.read(folder).open(folder, part)).tolist()


def decoded(folder: Path, part: Any) -> list[str]:
    """The documents of a part: each must be followed by the end of a text."""
    index, tokenizer = Index.read(folder), load_tokenizer(folder / "tokenizer.json")
    documents: list[list[int]] = [[]]
    for token in stream(folder, part):
        if token == index.end_of_text:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    assert len(documents) == index.documents(part)
    return [tokenizer.decode(tokens) for tokens in documents]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_every_document_is_packed_once_in_order(tmp_path: Path, tokenizer: str) -> None:
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    source = corpus(tmp_path / "a.jsonl.gz")
    out = pack(str(source), tmp_path / "out", tokenizer, validation=0.2)
    train, validation = decoded(out, "train"), decoded(out, "validation")
    texts = texts_in(source)
    assert 2 < len(validation) < 25
    assert train == [text for text in texts if text not in validation]
    assert validation == [text for text in texts if text not in train]
    index = Index.read(out)
    assert index.empty_documents_skipped == 9
    assert index.vocab_size == (257 if tokenizer == "bytes" else 280)
    names = " ".join(sorted(file.name for file in out.iterdir()))
    assert names == "index.json tokenizer.json train-00000.bin validation-00000.bin"


def test_a_learnt_vocabulary_has_not_seen_the_validation_documents(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from mupscale.data.tokenizer import BPE

    source = corpus(tmp_path / "a.jsonl")
    out = pack(str(source), tmp_path / "out", "bpe:280", validation=0.3)
    assert Index.read(out).tokenizer["fingerprint"] == BPE.learn(decoded(out, "train"), 280).fingerprint
    assert Index.read(out).tokenizer["fingerprint"] != BPE.learn(texts_in(source), 280).fingerprint


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_the_result_does_not_depend_on_workers_or_batches(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    source = str(corpus(tmp_path / "a.jsonl"))
    one = pack(source, tmp_path / "one", tokenizer, workers=1, shard_tokens=1000)
    monkeypatch.setattr(packing, "_BATCH", 300)
    three = pack(source, tmp_path / "three", tokenizer, workers=3, shard_tokens=1000)
    assert content(one) == content(three)


def test_shards_hold_whole_documents_and_the_same_stream(tmp_path: Path) -> None:
    source = str(corpus(tmp_path / "a.jsonl"))
    whole, cut = pack(source, tmp_path / "whole"), pack(source, tmp_path / "cut", shard_tokens=700)
    assert len(Index.read(whole).shards["train"]) == 1
    assert len(Index.read(cut).shards["train"]) > 5
    for shard, tokens in zip(Index.read(cut).shards["train"], Index.read(cut).open(cut, "train"), strict=True):
        assert tokens[-1] == 256
        assert (tokens == 256).sum() == shard.documents
    assert all(700 <= shard.tokens < 1100 for shard in Index.read(cut).shards["train"][:-1])
    for part in ("train", "validation"):
        assert stream(whole, part) == stream(cut, part)


# ------------------------------------------------------------------------------------------- the split


def test_a_document_is_in_the_same_part_wherever_it_stands(tmp_path: Path) -> None:
    source = corpus(tmp_path / "all" / "a.jsonl", documents=200)
    (tmp_path / "cut").mkdir()
    lines = source.read_text().splitlines(keepends=True)
    for number in range(4):
        (tmp_path / "cut" / f"{number}.jsonl").write_text("".join(reversed(lines[number::4])))
    one, other = (pack(str(tmp_path / name), tmp_path / f"{name}-out", validation=0.1) for name in ("all", "cut"))
    assert set(decoded(one, "validation")) == set(decoded(other, "validation"))
    assert 5 < len(decoded(one, "validation")) < 40
    another = pack(str(source), tmp_path / "seed", validation=0.1, split_seed=1)
    assert set(decoded(one, "validation")) != set(decoded(another, "validation"))


@settings(max_examples=30)
@given(
    texts=st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=8).filter(lambda t: len(set(t)) > 1),
    validation=st.sampled_from([1e-6, 0.005, 0.5, 0.995]),
    seed=st.integers(0, 1000),
)
def test_both_parts_have_a_document_and_none_is_in_both(texts: list[str], validation: float, seed: int) -> None:
    split = find_split(iter(texts), validation, seed)
    parts: dict[str, set[str]] = {"train": set(), "validation": set()}
    for text in texts:
        ((part, whole),) = split(text)
        assert whole == text
        parts[part].add(text)
    assert parts["train"]
    assert parts["validation"]
    assert not parts["train"] & parts["validation"]


def test_the_share_for_validation_is_the_one_asked_for() -> None:
    texts = iter(map(str, range(10**6)))
    split = find_split(texts, 0.02, 0)
    assert int(next(texts)) < 1000  # and no more is read than must be
    held_out = sum(split(str(number))[0][0] == "validation" for number in range(20_000))
    assert 0.017 < held_out / 20_000 < 0.023


@pytest.mark.parametrize("copies", [1, 3])
def test_one_document_alone_is_cut(tmp_path: Path, copies: int) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    for number in range(copies):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    out = pack(str(tmp_path / "in"), tmp_path / "out")
    cut = round(0.9 * len(text))
    assert decoded(out, "train") == [text[:cut]] * copies
    assert decoded(out, "validation") == [text[cut:]] * copies


# ------------------------------------------------------------------------------------------- kills, disks, processes


@pytest.mark.parametrize(
    ("tokenizer", "killed_after", "note_every"), [("bpe:280", 1, 10.0), ("bytes", 5, 10.0), ("bpe:280", 9, 0.0)]
)
def test_killed_and_run_again_it_is_the_same(
    tmp_path: Path, tokenizer: str, killed_after: int, note_every: float
) -> None:
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    source = corpus(tmp_path / "a.jsonl.gz")
    whole = pack(str(source), tmp_path / "whole", tokenizer, shard_tokens=800, validation=0.2)
    script = f"""
import os, signal, sys, mupscale.data.packing as packing
packing._BATCH = 500  # there are many
packing._NOTE_EVERY = {note_every}
calls = []
def progress(done, total, tokens):
    calls.append(tokens)
    if tokens and len([c for c in calls if c]) == {killed_after}:
        os.kill(os.getpid(), signal.SIGKILL)
packing.pack(sys.argv[1], sys.argv[2], sys.argv[3], shard_tokens=800, validation=0.2, workers=2, progress=progress)
"""
    out = tmp_path / "out"
    assert Script(tmp_path / "log", script, source, out, tokenizer).wait() == -signal.SIGKILL
    assert not (out / "index.json").exists()
    noted = json.loads((out / "progress.json").read_text())
    finished = [out / shard["file"] for shard in noted["shards"]["train"][:-1]]
    before = [file.stat() for file in finished]
    assert (len(finished) > 0) == (killed_after > 1)
    seen: list[int] = []
    pack(str(source), out, tokenizer, shard_tokens=800, validation=0.2, progress=lambda *told: seen.append(told[2]))
    assert content(out) == content(whole)
    assert [(s.st_ino, s.st_mtime_ns) for s in before] == [(f.stat().st_ino, f.stat().st_mtime_ns) for f in finished]
    assert seen[0] > sum(shard["tokens"] for shard in noted["shards"]["train"])


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(packing, "_BATCH", 500)
    monkeypatch.setattr(packing, "_NOTE_EVERY", 0.0)
    source, out = corpus(tmp_path / "a.jsonl"), tmp_path / "out"
    whole = pack(str(source), tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((whole / "train-00000.bin").stat().st_size // 2, before[1]))
    try:
        refuses(r"packing into .* failed: .*File too large; fix that and run it again", pack, str(source), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert json.loads((out / "progress.json").read_text())["after"][1] > 5
    pack(str(source), out)
    assert content(out) == content(whole)


@pytest.mark.skipif(os.name == "nt", reason="no locks on folders there")
def test_of_several_processes_one_packs(tmp_path: Path) -> None:
    source, out = corpus(tmp_path / "a.jsonl"), tmp_path / "out"
    whole = pack(str(source), tmp_path / "whole")
    script = f"""
import time, mupscale.data.packing as packing
packing._BATCH = 200
told = []
def slowly(*_):
    told.append(1); time.sleep(0.01)
packing.pack({str(source)!r}, {str(out)!r}, progress=slowly)
print(len(told))
"""
    started = [Script(tmp_path / f"log-{number}", script) for number in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    idle, busy = sorted(int(process.output.read_text()) for process in started)
    assert idle == 0
    assert busy > 10
    assert content(out) == content(whole)


def test_finished_it_is_left_alone(tmp_path: Path) -> None:
    source = str(corpus(tmp_path / "a.jsonl"))
    out = pack(source, tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    pack(source, out, progress=lambda *_: pytest.fail("packed again"))
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    other = {"validation": 0.1, "split_seed": 3, "shard_tokens": 5, "field": "body", "errors": "replace"}
    for name, value in other.items():
        refuses(f"was packed with {name} .*, not .*: give another folder", pack, source, out, **{name: value})
    refuses("was packed with tokenizer 'bytes', not 'bpe:280'", pack, source, out, "bpe:280")


def interrupted(source: Path, out: Path, tokenizer: str = "bytes", after: int = 1) -> object:
    calls = iter(range(1, 1000))

    def stop(done: int, total: int, tokens: int) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pack(str(source), out, tokenizer, shard_tokens=500, progress=stop)
    return caught  # a traceback that is kept, as a notebook does, keeps all that was open


@pytest.mark.quick("2")
@pytest.mark.parametrize("after", [2, 3, 4])
def test_interrupted_and_run_again_in_the_same_process(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path / "a.jsonl")
    whole = pack(str(source), tmp_path / "whole", shard_tokens=500)
    monkeypatch.setattr(packing, "_BATCH", 100)  # so small that it ends within a document, which is then not noted
    monkeypatch.setattr(packing, "_NOTE_EVERY", 0.0)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    kept = interrupted(source, tmp_path / "out", after=after)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    pack(str(source), tmp_path / "out", shard_tokens=500)
    del kept
    gc.collect()
    assert content(tmp_path / "out") == content(whole)


def test_going_on_after_a_change_is_refused(tmp_path: Path) -> None:
    source, out = corpus(tmp_path / "a.jsonl"), tmp_path / "out"
    interrupted(source, out)

    def refused(message: str, shard_tokens: int = 500) -> None:
        refuses(message, pack, str(source), out, shard_tokens=shard_tokens)

    refused("was packed with shard_tokens 500, not 900", shard_tokens=900)
    modified = source.stat().st_mtime
    os.utime(source, (1, 1))
    refused(r"was packed with source_modified '20.*', not '1970-01-01T00:00:01\+00:00': .* remove this one")
    os.utime(source, (1, modified))
    os.truncate(out / "train-00000.bin", 100)
    refused(r"train-00000\.bin has lost tokens since it was written: remove")
    source.write_text(source.read_text() + '{"text": "more"}\n')
    refused(r"was packed with source_bytes \d+, not \d+: .* remove this one")
    (out / "progress.json").write_text("{}")
    refused(r"progress\.json is damaged .*: remove")


def test_going_on_with_another_tokenizer_of_that_name_is_refused(tmp_path: Path) -> None:
    source, folders = corpus(tmp_path / "a.jsonl"), [tmp_path / "one", tmp_path / "other"]
    for folder, size in zip(folders, (300, 400), strict=True):
        folder.mkdir()
        large_vocabulary(folder, size)
    interrupted(source, tmp_path / "out", f"gpt2:{folders[0]}")
    refuses("was packed with tokenizer '", pack, str(source), tmp_path / "out", f"gpt2:{folders[1]}", shard_tokens=500)
    pack(str(source), tmp_path / "out", f"gpt2:{folders[0]}", shard_tokens=500)


# ------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    source, short, out = corpus(tmp_path / "in" / "a.jsonl"), tmp_path / "short.txt", tmp_path / "out"
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n{"text": " \\n"}\n{"text": null}\n')
    short.write_text("x")
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (source, {"shard_tokens": 0}, "shard_tokens is 0, but must be at least 1"),
        (source, {"workers": 0}, "workers is 0, but must be at least 1"),
        *((source, {"validation": share}, f"validation is {share}, but") for share in (0.0, 1.0, -1, 7)),
        (empty, {}, "there is no document with any text in it"),
        (short, {}, "the only text, 'x', is too short to be cut"),
    ]
    for path, options, message in refused:
        refuses(message, pack, str(path), out, **options)
    empty.write_text('{"text": "mended"}\n')
    pack(str(empty), out)  # the failures have left nothing behind
    refuses("has other files in it", pack, str(source), tmp_path)


def large_vocabulary(folder: Path, size: int) -> Path:
    """Files as GPT-2's with so many tokens, none of which is used but the bytes and the last."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{number}>" for number in range(size - 257)), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.mark.quick("65537-uint32")
@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_token_type_holds_the_vocabulary(tmp_path: Path, size: int, dtype: str) -> None:
    source, spec = str(corpus(tmp_path / "a.jsonl")), f"gpt2:{large_vocabulary(tmp_path, size)}"
    out = pack(source, tmp_path / "out", spec)
    assert Index.read(out).dtype == dtype
    tokens = stream(out, "train")
    assert max(tokens) == size - 1
    assert Text(str(out), context=10).examples(torch.arange(99))[0].flatten().tolist() == tokens[:990]
    assert len(decoded(out, "train")) + len(decoded(out, "validation")) == 51


# ------------------------------------------------------------------------------------------- commands


def test_tokenize_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(corpus(tmp_path / "a.jsonl"))
    assert tokenize(source, str(tmp_path / "out"), validation=0.2) == tmp_path / "out"
    shown = capsys.readouterr().out
    info(str(tmp_path / "out"))
    assert capsys.readouterr().out == shown
    assert "tokenizer   bytes, 257 tokens, stored as uint16" in shown
    assert f"source      a.jsonl, {Path(source).stat().st_size:,} bytes" in shown
    assert "skipped     9 empty documents" in shown
    assert f"begins      {decoded(tmp_path / 'out', 'train')[0][:50]}" in shown
    refuses("folder of tokens, so target is of no use", info, str(tmp_path / "out"), target="kind")
    with pytest.raises(MupscaleError, match=r"vocab= learns .* gpt2= takes one: give one of them"):
        tokenize(source, str(tmp_path / "other"), vocab=280, gpt2="folder")
    pytest.importorskip("tokenizers")
    tokenize(source, str(tmp_path / "bpe"), vocab=280)
    assert "tokenizer   bpe:280, 280 tokens" in capsys.readouterr().out
    (tmp_path / "gpt2").mkdir()
    tokenize(source, str(tmp_path / "gpt2-out"), gpt2=str(large_vocabulary(tmp_path / "gpt2", 300)))
    assert "tokenizer   gpt2, 300 tokens" in capsys.readouterr().out


def test_progress_is_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown_progress() as progress:
        progress(5, 10, 7)
        assert capsys.readouterr().err == ""  # not at every call
        monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", -1.0)
        progress(5, 10, 0)
        progress(5, 10, 7000)
        progress(5, 0, 7000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["learning the vocabulary: 50% read", "packing: 50% read, 7,000 tokens", "packing: 7,000 tokens"]


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    def use() -> None:
        with shown_progress() as progress:
            pack(str(corpus(tmp_path / "a.jsonl")), tmp_path / "out", progress=progress)

    shown = on_a_terminal(use)
    assert "packing" in shown
    assert "100%" in shown
    total = sum(Index.read(tmp_path / "out").tokens(part) for part in ("train", "validation"))
    assert f"{total:,} tokens" in shown


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(str(corpus(tmp_path / "a.jsonl")), tmp_path / "tokens", shard_tokens=600, validation=0.2)


@settings(max_examples=50)
@given(data=st.data(), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8), context=st.integers(1, 15))
def test_windows_are_slices_of_the_stream(data: st.DataObject, sizes: list[int], context: int) -> None:
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    windows = Windows(np.split(tokens, np.cumsum(sizes)[:-1]), context)
    assert len(windows) == len(range(0, len(tokens) - context, context))
    if len(windows):
        rows = data.draw(st.lists(st.integers(0, len(windows) - 1), max_size=10))
        taken = windows.take(np.array(rows, np.int64))
        assert taken.shape == (len(rows), context + 1)
        for row, window in zip(rows, taken, strict=True):
            assert window.tolist() == tokens[row * context : row * context + context + 1].tolist()


def test_examples_are_windows_of_the_training_stream(packed: Path) -> None:
    text = Text(str(packed), context=50)
    index = Index.read(packed)
    assert len(index.shards["train"]) > 3
    tokens = torch.from_numpy(np.concatenate(index.open(packed, "train")).astype(np.int64))
    assert text.size == (len(tokens) - 1) // 50
    assert (text.unit, text.per_example, text.classes) == ("tokens", 50, 257)
    x, y = text.examples(torch.arange(text.size))
    assert torch.equal(x.flatten(), tokens[: text.size * 50])
    assert torch.equal(y.flatten(), tokens[1 : text.size * 50 + 1])
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_evaluation_is_the_validation_stream_in_order(packed: Path) -> None:
    text = Text(str(packed), context=30)
    tokens = torch.from_numpy(np.concatenate(Index.read(packed).open(packed, "validation")).astype(np.int64))
    batches = list(text.evaluation(4))
    assert len(batches) > 2
    assert all(len(x) == 4 for x, _ in batches[:-1])
    x, y = (torch.cat(part).flatten() for part in zip(*batches, strict=True))
    assert len(x) == (len(tokens) - 1) // 30 * 30
    assert torch.equal(x, tokens[: len(x)])
    assert torch.equal(y, tokens[1 : len(x) + 1])


def test_a_source_is_packed_on_first_use_and_opened_afterwards(tmp_path: Path) -> None:
    given, tokens = str(corpus(tmp_path / "a.jsonl")), str(tmp_path / "tokens")
    options = {"context": 20, "source": given, "validation": 0.2}
    first = Text(tokens, **options)  # type: ignore[arg-type]
    beginning = first.tokenizer.decode(first.examples(torch.tensor([0]))[0][0].tolist())
    assert decoded(tmp_path / "tokens", "train")[0].startswith(beginning)
    before = (tmp_path / "tokens" / "train-00000.bin").stat().st_mtime_ns
    os.remove(given)  # not needed any more
    again = Text(tokens, **options)  # type: ignore[arg-type]
    assert (tmp_path / "tokens" / "train-00000.bin").stat().st_mtime_ns == before
    assert torch.equal(first.batch(0, 0, 5)[0], again.batch(0, 0, 5)[0])
    for name, value, there in (
        ("source", "b.jsonl", "'a.jsonl', not 'b.jsonl'"),
        ("validation", 0.3, "0.2, not 0.3"),
        ("split_seed", 4, "0, not 4"),
        ("field", "body", "'text', not 'body'"),
        ("tokenizer", "bpe:8192", "'bytes', not 'bpe:8192'"),
    ):
        refuses(f"tokens was packed with {name} {there}: give another folder", Text, tokens, **{**options, name: value})


def test_a_file_larger_than_memory_is_opened_and_read_where_asked(tmp_path: Path) -> None:
    size = 1 << 34  # tokens, on a disk that stores no zeros
    with (tmp_path / "train-00000.bin").open("wb") as file:
        file.truncate(2 * size)
        file.seek(2 * (size - 5))
        file.write(np.arange(1, 6, dtype="<u2").tobytes())
    (tmp_path / "validation-00000.bin").write_bytes(bytes(2 * 5000))
    shards: dict[str, Any] = {
        part: [TokenShard(f"{part}-00000.bin", tokens, 1)] for part, tokens in (("train", size), ("validation", 5000))
    }
    made: dict[str, Any] = {"tokenizer": {}, "made_from": {}, "empty_documents_skipped": 0}
    Index(dtype="uint16", vocab_size=257, end_of_text=0, **made, **shards).write(tmp_path)
    text = Text(str(tmp_path), context=1023)
    x, y = text.examples(torch.tensor([0, text.size - 1]))
    assert x.shape == (2, 1023)
    start = (text.size - 1) * 1023
    assert y[1].tolist() == [max(0, place - (size - 6)) for place in range(start + 1, start + 1024)]


def test_shakespeare_is_what_packing_its_text_gives(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(tinyshakespeare(), encoding="utf-8", newline="")
    embedded, text = Shakespeare(context=100), Text(str(pack(str(tmp_path / "a.txt"), tmp_path / "t")), context=100)
    assert (embedded.classes, embedded.size) == (text.classes, text.size) == (257, 10_038)
    assert torch.equal(embedded.batch(3, 10, 20)[1], text.batch(3, 10, 20)[1])
    for ours, theirs in zip(embedded.evaluation(300), text.evaluation(300), strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert embedded.tokenizer.decode(embedded.examples(torch.tensor([0]))[0][0].tolist()).startswith("First Citizen:")


# ------------------------------------------------------------------------------------------- folders that are not right


def test_folders_that_are_not_whole(packed: Path, tmp_path: Path) -> None:
    def refused(message: str, folder: Path = packed) -> None:
        refuses(message, Text, str(folder), context=10)

    refused(r"no packed tokens in .*: make them with `mupscale data tokenize SOURCE", tmp_path / "nothing")
    index = (packed / "index.json").read_text()
    size = (packed / "train-00001.bin").stat().st_size
    os.truncate(packed / "train-00001.bin", size - 2)
    refused(rf"train-00001\.bin has {size - 2} bytes, but .*index\.json says {size}")
    (packed / "train-00001.bin").unlink()
    refused(r"train-00001\.bin has 0 bytes")
    for text, said in (
        ('{"version": 1', ""),
        ("[]", ""),
        (index.replace('"version": 1', '"version": 2'), "has version 2"),
    ):
        (packed / "index.json").write_text(text)
        refused(f"is not an index of packed tokens: .*{said}")
    (packed / "index.json").rename(packed / "progress.json")
    refused(r"was interrupted: run the same `mupscale data tokenize` again")


def edited(packed: Path, **changes: object) -> str:
    content = json.loads((packed / "index.json").read_text())
    (packed / "index.json").write_text(json.dumps({**content, **changes}))
    return str(packed)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "train-00000.bin/../../x", "a.bin", "", 3])
def test_names_that_lead_out_of_the_folder(packed: Path, name: object) -> None:
    with pytest.raises(MupscaleError, match=r"index\.json is not an index of packed tokens: "):
        Text(edited(packed, train=[{"file": name, "tokens": 10, "documents": 1}]), context=10)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dtype": "float64"}, "'dtype' is 'float64', but must be uint16 or uint32"),
        ({"vocab_size": 70_000}, "uint16 holds no vocabulary of 70000"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many', but must be a whole number"),
        ({"train": 3}, "'train' is 3, but must be a list"),
        ({"train": [{"file": "train-00000.bin", "tokens": -1, "documents": 1}]}, r"'train\[0\].tokens' is -1"),
        ({"tokenizer": None}, "'tokenizer' is None, but must be a mapping"),
    ],
)
def test_a_damaged_index(packed: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(MupscaleError, match=f"is not an index of packed tokens: .*{complaint}.*; pack the text again"):
        Text(edited(packed, **changes), context=10)


def test_text_too_short_for_the_context(packed: Path) -> None:
    tokens = Index.read(packed).tokens("validation")
    assert len(list(Text(str(packed), context=tokens - 1).evaluation(8))) == 1
    with pytest.raises(
        MupscaleError, match=f"the validation text has {tokens} tokens, too few for a window of {tokens}"
    ):
        Text(str(packed), context=tokens)
    refuses(r"the training text has \d+ tokens, too few", Text, str(packed), context=10**6)
    refuses("context is 0, but a window has at least one token", Text, str(packed), context=0)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(packed: Path) -> None:
    here, there = Text(str(packed), context=50), Text(str(packed), context=50).to(torch.device("cuda"))
    for position in range(0, 40, 8):
        for ours, theirs in zip(here.batch(0, position, 8), there.batch(0, position, 8), strict=True):
            assert theirs.is_cuda
            assert torch.equal(ours, theirs.cpu())
    for ours, theirs in zip(here.evaluation(4), there.evaluation(4), strict=True):
        assert torch.equal(ours[1], theirs[1].cpu())


def test_another_source_of_the_same_name_is_refused(tmp_path: Path) -> None:
    for name, text in (("a", "one and two " * 50), ("b", "quite another text " * 90)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(text)
    tokens = str(tmp_path / "tokens")
    Text(tokens, context=8, source=str(tmp_path / "a" / "train.txt"))
    Text(tokens, context=8, source=str(tmp_path / "a" / "train.txt"))
    refuses("source_fingerprint", Text, tokens, context=8, source=str(tmp_path / "b" / "train.txt"))
    (tmp_path / "a" / "train.txt").unlink()
    Text(tokens, context=8, source=str(tmp_path / "a" / "train.txt"))  # packed is packed


def test_too_many_shards_for_the_system(tmp_path: Path) -> None:
    """A real limit on open files, in a process of its own."""
    (tmp_path / "t.jsonl").write_text((json.dumps({"text": "words " * 20}) + "\n") * 300)
    script = (
        "import resource, sys\n"
        "from mupscale.data.packing import pack\nfrom mupscale.data import Text\nfrom mupscale import MupscaleError\n"
        "folder = pack(sys.argv[1], sys.argv[2], shard_tokens=100)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "try:\n    Text(str(folder), context=8)\nexcept MupscaleError as error:\n    print(error)\n"
    )
    process = Script(tmp_path / "log", script, tmp_path / "t.jsonl", tmp_path / "out")
    assert process.wait() == 0
    assert "ulimit -n" in process.output.read_text()
