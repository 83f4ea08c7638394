"""Windows of packed tokens: the right ones, across shards, without reading the rest; and folders that are not right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mupscale.data import Shakespeare, Text, tinyshakespeare
from mupscale.data.packing import Index, TokenShard, Windows, pack
from mupscale.system.errors import MupscaleError
from processes import Script


def source(path: Path, documents: int = 40) -> str:
    texts = [f"document {number}: " + "to be or not to be, " * (number % 5 + 2) for number in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(source(tmp_path / "a.jsonl"), tmp_path / "tokens", shard_tokens=600, validation=0.2)


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
    given, tokens = source(tmp_path / "a.jsonl"), str(tmp_path / "tokens")
    options = {"context": 20, "source": given, "validation": 0.2}
    first = Text(tokens, **options)  # type: ignore[arg-type]
    assert first.tokenizer.decode(first.examples(torch.tensor([0]))[0][0].tolist()) == "document 3: to be or"
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
        with pytest.raises(MupscaleError, match=f"tokens was packed with {name} {there}: give another folder"):
            Text(tokens, **{**options, name: value})  # type: ignore[arg-type]


def write_index(folder: Path, dtype: str, vocab_size: int, tokens: tuple[int, int]) -> None:
    parts: dict[str, Any] = {
        name: [TokenShard(f"{name}-00000.bin", count, 1)]
        for name, count in zip(("train", "validation"), tokens, strict=True)
    }
    more: dict[str, Any] = {"tokenizer": {}, "made_from": {}, "empty_documents_skipped": 0, **parts}
    Index(dtype=dtype, vocab_size=vocab_size, end_of_text=0, **more).write(folder)


def test_a_vocabulary_that_needs_32_bits(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").write_bytes(np.arange(70_000, 70_100, dtype="<u4").tobytes())
    (tmp_path / "validation-00000.bin").write_bytes(np.arange(50, dtype="<u4").tobytes())
    write_index(tmp_path, "uint32", 80_000, tokens=(100, 50))
    x, y = Text(str(tmp_path), context=10).examples(torch.tensor([8]))
    assert x[0].tolist() == list(range(70_080, 70_090))
    assert y[0].tolist() == list(range(70_081, 70_091))


def test_a_file_larger_than_memory_is_opened_and_read_where_asked(tmp_path: Path) -> None:
    size = 1 << 34  # tokens, on a disk that stores no zeros
    with (tmp_path / "train-00000.bin").open("wb") as file:
        file.truncate(2 * size)
        file.seek(2 * (size - 5))
        file.write(np.arange(1, 6, dtype="<u2").tobytes())
    (tmp_path / "validation-00000.bin").write_bytes(bytes(2 * 5000))
    write_index(tmp_path, "uint16", 257, tokens=(size, 5000))
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
        with pytest.raises(MupscaleError, match=message):
            Text(str(folder), context=10)

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
        (index.replace('"version": 1', '"version": 2'), "of version 2"),
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
    with pytest.raises(MupscaleError, match=r"the training text has \d+ tokens, too few"):
        Text(str(packed), context=10**6)
    with pytest.raises(MupscaleError, match="context is 0, but a window has at least one token"):
        Text(str(packed), context=0)


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
    with pytest.raises(MupscaleError, match="source_fingerprint"):
        Text(tokens, context=8, source=str(tmp_path / "b" / "train.txt"))
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
