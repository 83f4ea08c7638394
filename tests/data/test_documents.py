"""Documents come out whole, in order, from every kind of file, and whatever is wrong is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from mupscale.data.documents import Corpus
from refusals import refuses

TEXTS = ["one\r\nline", "zwei: äöü ½ 日本", "three <|endoftext|>", "", "five 👩‍👧"]


def jsonl(path: Path, texts: list[str] = TEXTS, field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(json.dumps({"id": n, field: text}).encode() + b"\n" for n, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def parquet(path: Path, texts: list[str | None] | list[bytes], kind: str = "string", group: int = 2) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, getattr(pa, kind)())})
    pq.write_table(table, path, row_group_size=group)
    return path


def texts(source: Path | str, **options: str) -> list[str]:
    return [document.text for document in Corpus(str(source), **options).documents()]  # type: ignore[arg-type]


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "txt").mkdir(exist_ok=True)
        (tmp_path / "txt" / f"{number}.txt").write_bytes(text.encode())
    assert texts(tmp_path / "txt") == TEXTS
    assert texts(jsonl(tmp_path / "a.jsonl")) == TEXTS
    assert texts(jsonl(tmp_path / "a.jsonl.gz")) == TEXTS
    assert texts(parquet(tmp_path / "a.parquet", TEXTS)) == TEXTS
    assert texts(parquet(tmp_path / "b.parquet", TEXTS, "large_string")) == TEXTS


def test_a_folder_is_read_in_sorted_order_with_all_below(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/9.txt", "a/10.jsonl", "c.jsonl.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name) if name.endswith(".txt") else jsonl(path, [name])
    (tmp_path / "notes.md").write_text("not data")
    assert texts(tmp_path) == ["a/10.jsonl", "a/9.txt", "b/2.txt", "c.jsonl.gz"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a/9.txt", "b/2.txt"]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_reading_goes_on_after_any_document(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        parquet(tmp_path / f"{name}.{kind}", TEXTS) if kind == "parquet" else jsonl(tmp_path / f"{name}.{kind}")
    corpus = Corpus(str(tmp_path))
    documents = list(corpus.documents())
    assert len(documents) == 2 * len(TEXTS)
    for position, document in enumerate(documents):
        assert list(corpus.documents((document.file, document.number))) == documents[position + 1 :]
    read = [document.read for document in documents]
    assert read == sorted(read)
    assert read[-1] == corpus.size == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_a_dataset_is_streamed_through_the_datasets_library(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    jsonl(tmp_path / "train.jsonl")
    corpus = Corpus(f"datasets:{tmp_path}")
    documents = list(corpus.documents())
    assert [document.text for document in documents] == TEXTS
    assert list(corpus.documents((0, 2))) == documents[2:]
    assert texts(f"datasets:{tmp_path}:default") == TEXTS
    refuses(r"row 1 of .* has no field 'body'; it has 'id', 'text'", texts, f"datasets:{tmp_path}", field="body")
    refuses("could not be loaded: BuilderConfig 'other' not found", texts, f"datasets:{tmp_path}:other")
    refuses("could not be loaded: Couldn't find any data file", texts, f"datasets:{tmp_path}/nowhere")


def test_a_fingerprint_is_of_names_and_sizes(tmp_path: Path) -> None:
    def fingerprint(folder: str, *files: tuple[str, str]) -> str:
        for name, text in files:
            jsonl(tmp_path / folder / name, [text])
        return Corpus(str(tmp_path / folder)).fingerprint

    same = fingerprint("one", ("a.jsonl", "x"), ("b.jsonl", "y"))
    assert fingerprint("two", ("a.jsonl", "z"), ("b.jsonl", "y")) == same  # moved, and as long
    assert fingerprint("three", ("a.jsonl", "xx"), ("b.jsonl", "y")) != same
    assert fingerprint("four", ("a.jsonl", "x"), ("c.jsonl", "y")) != same


def test_empty_values_lines_and_byte_order_marks(tmp_path: Path) -> None:
    """No value is an empty document, an empty line is none, and a mark is no text."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n{"text": null}\n\n  \n{"text": "x"}')
    parquet(tmp_path / "c.parquet", [None, "x"])
    assert texts(tmp_path) == ["hello", "hello", "", "x", "", "x"]


def test_what_is_not_there(tmp_path: Path) -> None:
    refuses(r"there is no file or folder .*nowhere\.txt", Corpus, str(tmp_path / "nowhere.txt"))
    refuses(r"no file matches .*\*\.jsonl", Corpus, str(tmp_path / "*.jsonl"))
    refuses(r"has no file that ends in \.txt, \.jsonl, \.jsonl\.gz, \.parquet", Corpus, str(tmp_path))
    (tmp_path / "a.csv").write_text("a,b")
    refuses(r"a\.csv is of an unknown kind", Corpus, str(tmp_path / "a.csv"))


def test_damaged_gzip_files(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl.gz", [os.urandom(20_000).hex() for _ in range(5)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-30_000])
    documents = Corpus(str(path)).documents()
    assert [next(documents).number for _ in range(3)] == [1, 2, 3]
    refuses(r"a\.jsonl\.gz is a gzip file cut short, after 3 whole lines", list, documents)
    checksum = bytearray(whole)
    checksum[-6] ^= 1
    for content, said in ((bytes(checksum), "CRC check failed"), (b"never was one", "Not a gzipped file")):
        path.write_bytes(content)
        refuses(rf"damaged gzip file, after \d+ whole lines .*{said}", texts, path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut sho', r"a\.jsonl, line 2 is not valid JSON at column 10: Unterminated string starting$"),
        ("[" * 100_000, r"a\.jsonl, line 2 is not JSON that can be read"),
        ('["text"]', r"a\.jsonl, line 2 is not a JSON object, but of type list"),
        ('{"body": "x", "id": 1}', r"a\.jsonl, line 2 has no field 'text'; it has 'body', 'id'"),
        ("{}", r"a\.jsonl, line 2 has no field 'text'; it has none at all"),
        ('{"text": 3}', r"document 2 of .*a\.jsonl has no text at 'text', but a value of type int"),
        ('{"text": "ä\\ud800"}', r"document 2 of .*a\.jsonl has half of a surrogate pair at character 1"),
    ],
)
def test_a_bad_line(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n", encoding="utf-8")
    refuses(complaint, texts, tmp_path)


def test_invalid_utf8_is_refused_with_its_place_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xffdef")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": "b\xe9d"}\n')
    refuses(r"a\.txt is not valid UTF-8 at byte 3: .*errors=\"replace\"", texts, tmp_path / "a.txt")
    refuses(r"a\.jsonl is not valid UTF-8 at byte 28", texts, tmp_path / "a.jsonl")
    assert texts(tmp_path, errors="replace") == ["good", "b�d", "abc�def"]
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}')
    assert texts(tmp_path / "a.jsonl", errors="replace") == ["?"]


def test_bad_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["x"] * 5)
    refuses(r"a\.parquet has no field 'body'; it has 'id', 'text'", texts, path, field="body")
    refuses(r"document 1 of .*a\.parquet has no text at 'id', but a value of type int", texts, path, field="id")
    path.write_bytes(path.read_bytes()[:-10])
    refuses(r"a\.parquet is not a complete Parquet file", texts, path)
    bad = parquet(tmp_path / "b.parquet", [b"good", b"b\xffd"], "binary")
    refuses(r"document 2 of .*b\.parquet is not valid UTF-8 at byte 1", texts, bad)
    assert texts(bad, errors="replace") == ["good", "b�d"]


def test_a_parquet_file_of_far_more_text_than_bytes(tmp_path: Path) -> None:
    """Rows share one text, which a file holds once: they are read some at a time, and not without an end."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.DictionaryArray.from_arrays([0] * 10_000, ["x" * 100_000])}), path)
    refuses(r"a\.parquet has [0-9,]+ bytes and unpacks to more than 200 times as many", texts, path)


def test_a_folder_is_read_with_its_links_and_without_hidden_files(tmp_path: Path) -> None:
    """A link into another folder is followed, a loop is not, and what a system hides among the files is left out."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (*(folder / name for name in ("a.txt", "sub/b.txt", "._a.txt", ".cache/c.txt")), other / "d.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (folder / "linked").symlink_to(other)
    (folder / "sub" / "up").symlink_to(folder)
    assert sorted(d.text for d in Corpus(str(folder)).documents()) == ["a.txt", "b.txt", "d.txt"]
    globbed = [d.text for d in Corpus(str(folder / "**" / "*.txt")).documents()]
    assert sorted(globbed) == ["a.txt", "b.txt", "d.txt"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    jsonl(tmp_path / "files" / "a.jsonl").chmod(0)
    refuses(r"a\.jsonl cannot be read: Permission denied", texts, tmp_path / "files")
    (tmp_path / "closed").mkdir(mode=0)
    refuses("closed cannot be read", Corpus, str(tmp_path))
