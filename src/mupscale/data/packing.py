"""Text to train on: from documents to packed tokens, on all cores; and windows of them, read from where they lie.

A folder has train-00000.bin, train-00001.bin, … of plain little-endian integers, and the same for validation; a part is
its shards in this order. The index is written last, so a folder that has one is complete.

One thread reads, many tokenize (the `tokenizers` library lets go of Python's lock), and one writes in the order of
reading: the result depends on the source and the options alone. Every few seconds what is written is brought to the
disk and noted down; what a killed run wrote after its last note is dropped, and written again by the next.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from inspect import signature
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from mupscale.data.documents import SUFFIXES, Corpus, Document, Errors, source_name
from mupscale.data.own_data import TableFile
from mupscale.data.stream import Batch, Data
from mupscale.data.tokenizer import Bytes, Tokenizer, load_tokenizer, make_tokenizer, one_thread_each, tokenizer_name
from mupscale.system import (
    NOT_EMPTY,
    Display,
    MupscaleError,
    Must,
    derive,
    exclusive_lock,
    make_folder,
    open_file,
    parse_record,
    printable,
    read_json,
    remove,
    replace_text,
    setting,
    show,
    usable_cores,
    write_json,
)

Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = ("train", "validation")
INDEX, TOKENIZER, PROGRESS = "index.json", "tokenizer.json", "progress.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_VERSION = 1
_NAME = Must("the name of a shard", lambda value: bool(re.fullmatch(r"(train|validation)-\d{5,}\.bin", value)))
_Count = Annotated[int, Must("a whole number of 0 or more", lambda value: value >= 0)]


@dataclass
class TokenShard:
    """One file: how many tokens it has, and how many documents end in it."""

    file: Annotated[str, _NAME]
    tokens: _Count = 0
    documents: _Count = 0


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a folder holds, as its file has it; `made_from` is the source and the options it was packed with."""

    version: int = _VERSION
    dtype: Annotated[str, Must(" or ".join(DTYPES), DTYPES.__contains__)]
    vocab_size: _Count
    end_of_text: _Count
    tokenizer: dict[str, str]
    made_from: dict[str, Any]
    empty_documents_skipped: _Count
    train: Annotated[list[TokenShard], NOT_EMPTY]
    validation: Annotated[list[TokenShard], NOT_EMPTY]

    @property
    def shards(self) -> dict[Part, list[TokenShard]]:
        return {"train": self.train, "validation": self.validation}

    def tokens(self, part: Part) -> int:
        return sum(shard.tokens for shard in self.shards[part])

    def documents(self, part: Part) -> int:
        return sum(shard.documents for shard in self.shards[part])

    def write(self, folder: Path) -> None:
        """To its file, which makes the folder complete."""
        write_json(folder / INDEX, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Index:
        path = folder / INDEX
        try:
            content = read_json(path)
            version = content.get("version", _VERSION) if isinstance(content, dict) else _VERSION
            if version != _VERSION:
                raise MupscaleError(f"it has version {version}, and this mupscale reads version {_VERSION}")
            index = parse_record(cls, content)
            if 1 << 8 * DTYPES[index.dtype].itemsize < index.vocab_size:
                raise MupscaleError(f"{index.dtype} holds no vocabulary of {index.vocab_size}")
            return index
        except FileNotFoundError:
            if (folder / PROGRESS).exists():
                raise MupscaleError(
                    f"packing {folder} was interrupted: run the same `mupscale data tokenize` again to finish it"
                ) from None
            raise MupscaleError(
                f"there are no packed tokens in {folder}: make them with `mupscale data tokenize SOURCE {folder}`"
            ) from None
        except (OSError, MupscaleError) as error:
            why = str(error).removeprefix(f"{path} is ")
            raise MupscaleError(f"{path} is not an index of packed tokens: {why}; pack the text again") from None

    def open(self, folder: Path, part: Part) -> list[NDArray[Any]]:
        """A part's shards, mapped into memory: nothing is read yet."""
        dtype = DTYPES[self.dtype]
        opened: list[NDArray[Any]] = []
        for shard in self.shards[part]:
            path = folder / shard.file
            try:
                size = path.stat().st_size if path.exists() else 0
                mapped = np.memmap(path, dtype, "r") if size else None
            except OSError as error:
                remedy = "raise `ulimit -n`, or pack into larger shards" if error.errno == errno.EMFILE else "mend that"
                raise MupscaleError(f"{path} cannot be opened: {error.strerror}; {remedy}") from None
            except ValueError:  # no whole number of tokens: the sizes below say so
                mapped = None
            if size != shard.tokens * dtype.itemsize:
                raise MupscaleError(
                    f"{path} has {size} bytes, but {folder / INDEX} says {shard.tokens * dtype.itemsize}: copy it "
                    f"again, or pack the text again"
                )
            if mapped is not None:
                opened.append(mapped)
        return opened


class Windows:
    """Consecutive windows of `context` tokens and the one after, on a stream that is cut into shards anywhere."""

    def __init__(self, shards: Sequence[NDArray[Any]], context: int) -> None:
        self.context = context
        self._shards = [np.asarray(shard) for shard in shards]
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self._views = [sliding_window_view(s, context + 1) if len(s) > context else None for s in self._shards]
        self.tokens = int(self._starts[-1])

    def __len__(self) -> int:
        return max(0, self.tokens - 1) // self.context

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """These windows, as rows; only they are read."""
        starts = rows * self.context
        first = np.searchsorted(self._starts, starts, side="right") - 1
        whole = starts + self.context < self._starts[first + 1]
        taken = np.empty((len(rows), self.context + 1), self._shards[0].dtype)
        for shard in np.unique(first[whole]):
            inside = whole & (first == shard)
            taken[inside] = self._views[shard][starts[inside] - self._starts[shard]]
        for row in np.flatnonzero(~whole):
            taken[row] = self._across(int(starts[row]), int(first[row]))
        return taken

    def _across(self, start: int, shard: int) -> NDArray[Any]:
        """A window that goes on in the next shards."""
        end, parts = start + self.context + 1, []
        while start < end:
            offset = int(self._starts[shard])
            parts.append(self._shards[shard][start - offset : end - offset])
            start, shard = start + len(parts[-1]), shard + 1
        return np.concatenate(parts)


class ShardWriter:
    """Appends documents to the shards of a part, starting a new one when the last is full."""

    def __init__(self, folder: Path, part: Part, dtype: str, shard_tokens: int, shards: list[TokenShard]) -> None:
        self._folder, self._part, self._dtype, self._full = folder, part, DTYPES[dtype], shard_tokens
        self._file: IO[bytes] | None = None
        self.shards = shards
        self._go_back()

    def _go_back(self) -> None:
        """To where the shards say that everything was on the disk: what was written later is dropped."""
        for path in self._folder.glob(f"{self._part}-*.bin"):
            if path.name not in {shard.file for shard in self.shards}:
                remove(path)
        for shard in self.shards:
            path, size = self._folder / shard.file, shard.tokens * self._dtype.itemsize
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise MupscaleError(
                    f"{path} has lost tokens since it was written: remove {self._folder} and start again"
                )
            if there > size:
                with open_file(path, "r+b") as file:
                    file.truncate(size)

    def append(self, tokens: NDArray[Any], *, ends: bool) -> bool:
        """Write tokens, the last of a document if `ends`; whether a shard is full with them."""
        if not len(tokens):
            return False
        if self._file is None:
            if not self.shards or self.shards[-1].tokens >= self._full:
                self.shards.append(TokenShard(f"{self._part}-{len(self.shards):05d}.bin"))
            self._file = open_file(self._folder / self.shards[-1].file, "ab")
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)
        shard = self.shards[-1]
        shard.tokens, shard.documents = shard.tokens + len(tokens), shard.documents + ends
        full = ends and shard.tokens >= self._full
        if full:
            self.close()
        return full

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file that is open, with everything in it on the disk."""
        if self._file is not None:
            with self._file:
                self.sync()
            self._file = None


def check_packed_with(folder: Path, options: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if options.get(key) != value:
            raise MupscaleError(
                f"{folder} was packed with {key} {options.get(key)!r}, not {value!r}: give another folder, or remove "
                f"this one to pack it again"
            )


_LARGEST = 1 << 63  # that a hash stays below


@dataclass(frozen=True)
class DocumentSplit:
    """A document is for validation if a hash of the seed and its text is below `below`.

    So the parts do not depend on the order of documents or on how they are read, and no copy of a training document is
    in the validation part. Where there is one document alone, `below` is None, and its last tenth is for validation.
    """

    seed: int
    below: int | None

    def __call__(self, text: str) -> list[tuple[Part, str]]:
        """The parts of a text, and what of it belongs to them."""
        if self.below is None:
            cut = round(len(text) * 0.9)
            return [("train", text[:cut]), ("validation", text[cut:])]
        return [("validation" if _hash(self.seed, text) < self.below else "train", text)]


def find_split(texts: Iterable[str], validation: float, seed: int) -> DocumentSplit:
    """The split that has about a share `validation` of the documents for validation, and at least one in each part.

    Looks at documents only until both parts have one, about 1 / validation of them.
    """
    if not 0 < validation < 1:
        raise MupscaleError(f"validation is {validation}, but must be a share between 0 and 1")
    below = round(validation * _LARGEST)
    lowest, highest, text = _LARGEST, -1, ""
    for text in texts:
        value = _hash(seed, text)
        lowest, highest = min(lowest, value), max(highest, value)
        if lowest < below <= highest:
            return DocumentSplit(seed, below)
    if highest < 0:
        raise MupscaleError("there is no document with any text in it: look at the source and at its text field")
    if lowest < highest:
        return DocumentSplit(seed, lowest + 1 if below <= lowest else highest)
    split = DocumentSplit(seed, None)
    if not all(part for _, part in split(text)):
        raise MupscaleError(f"the only text, {text[:20]!r}, is too short to be cut into training and validation parts")
    return split


def _hash(seed: int, text: str) -> int:
    return derive(seed, "split", text)


Progress = Callable[[int, int, int], None]
In = TypeVar("In")
Out = TypeVar("Out")
_BATCH = 1_000_000  # characters that a thread tokenizes at a time
_PIECES = 10_000  # that it takes at most, with text or without
_NOTE_EVERY = 10.0  # seconds
_LOCK = ".lock"


def pack(
    source: str,
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    field: str = "text",
    errors: Errors = "strict",
    validation: float = 0.005,
    split_seed: int = 0,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    progress: Progress = lambda *_: None,
) -> Path:
    """Tokenize a source (see Corpus) into the folder `out`, each document followed by the end-of-text token.

    tokenizer: bytes, bpe:SIZE to learn one from the training documents, gpt2:FOLDER, or hf:FOLDER.
    validation, split_seed: see DocumentSplit.
    progress: called with bytes read, bytes in all (0 if not known) and tokens written.

    Finished already, nothing is done; killed before, it goes on; of several processes that ask for it, one does it.
    """
    for name, value in (("shard_tokens", shard_tokens), ("workers", workers)):
        if value is not None and value < 1:
            raise MupscaleError(f"{name} is {value}, but must be at least 1")
    corpus, out = Corpus(source, field, errors), Path(out).expanduser()
    made_from = {
        "source": source_name(source),
        "source_bytes": corpus.size,
        "source_fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_name(tokenizer),
        "field": field,
        "errors": errors,
        "validation": validation,
        "split_seed": split_seed,
        "shard_tokens": shard_tokens,
    }
    try:
        with exclusive_lock(make_folder(out) / _LOCK):
            if (out / INDEX).exists():
                check_packed_with(out, Index.read(out).made_from, made_from)
            else:
                _Packing(out, corpus, tokenizer, made_from, progress).go(workers or usable_cores())
            remove(out / PROGRESS)
            remove(out / _LOCK)
    except OSError as error:
        raise MupscaleError(
            f"packing into {out} failed: {error}; fix that and run it again to continue where it stopped"
        ) from None
    return out


@dataclass
class _Position:
    """Where packing stands: after which document (its file and number), and with which shards."""

    begun_with: dict[str, Any]
    after: tuple[int, int]
    empty: int
    shards: dict[Part, list[TokenShard]]

    @classmethod
    def read(cls, path: Path) -> _Position:
        try:
            return parse_record(cls, read_json(path))
        except MupscaleError as error:
            raise MupscaleError(f"{path} is damaged ({error}): remove {path.parent} and start again") from None

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(asdict(self)))


class _Piece(NamedTuple):
    """Some text of a document; or none, where a document ends or is empty."""

    part: Part
    text: str = ""
    ends: bool = False  # whether the end-of-text token follows
    completes: Document | None = None  # the document of which nothing is left to do after this


class _Packing:
    """Packs one folder: reads documents, tokenizes them on several threads, writes shards."""

    def __init__(self, out: Path, corpus: Corpus, spec: str, made_from: dict[str, Any], progress: Progress) -> None:
        self.out, self.corpus, self.made_from, self.progress = out, corpus, made_from, progress
        self.position = self._last_position()
        texts = (document.text for document in filter(_has_text, corpus.documents()))
        self.split = find_split(texts, made_from["validation"], made_from["split_seed"])
        self.position.write(out / PROGRESS)
        path = out / TOKENIZER  # which is in the folder if an earlier run came that far
        if not path.exists() or spec.startswith(("gpt2:", "hf:")):
            made = make_tokenizer(spec, self._training_texts())
            if path.exists():
                check_packed_with(out, {"tokenizer": load_tokenizer(path).fingerprint}, {"tokenizer": made.fingerprint})
            replace_text(path, made.to_json())
        self.tokenizer = load_tokenizer(path)
        size = self.tokenizer.vocab_size
        self.dtype = next(name for name, stored in DTYPES.items() if size <= 1 << 8 * stored.itemsize)
        self.writers = {
            part: ShardWriter(out, part, self.dtype, made_from["shard_tokens"], self.position.shards[part])
            for part in PARTS
        }

    def _last_position(self) -> _Position:
        path, begun_with = self.out / PROGRESS, {**self.made_from, "source_modified": self.corpus.modified}
        if path.exists():
            position = _Position.read(path)
            if begun_with["errors"] == "replace":  # what is packed already had nothing to replace
                position.begun_with["errors"] = "replace"
            check_packed_with(self.out, position.begun_with, begun_with)
            return position
        if any(not file.name.startswith(".") for file in self.out.iterdir()):
            raise MupscaleError(f"the folder {self.out} has other files in it: give one that is empty or not there yet")
        return _Position(begun_with, (0, 0), 0, {part: [] for part in PARTS})

    def _training_texts(self) -> Iterator[str]:
        for document in filter(_has_text, self.corpus.documents()):
            yield from (text for part, text in self.split(document.text) if part == "train")
            self.progress(document.read, self.corpus.size, 0)

    def go(self, workers: int) -> None:
        """Write all that is missing, and at last the index."""
        with ExitStack() as opened:
            for writer in self.writers.values():
                opened.callback(writer.close)
            self._write(opened.enter_context(closing(_in_order(self._encode, _batches(self._pieces()), workers))))
        Index(
            dtype=self.dtype,
            vocab_size=self.tokenizer.vocab_size,
            end_of_text=self.tokenizer.end_of_text,
            tokenizer={"file": TOKENIZER, "fingerprint": self.tokenizer.fingerprint},
            made_from=self.made_from,
            empty_documents_skipped=self.position.empty,
            train=self.position.shards["train"],
            validation=self.position.shards["validation"],
        ).write(self.out)

    def _write(self, batches: Iterable[list[tuple[_Piece, NDArray[Any]]]]) -> None:
        position, noted_at, read = self.position, time.monotonic(), 0
        for batch in batches:
            for piece, tokens in batch:
                full = self.writers[piece.part].append(tokens, ends=piece.ends)
                if document := piece.completes:
                    position.after, read = (document.file, document.number), document.read
                    position.empty += not piece.ends
                    if full or time.monotonic() > noted_at + _NOTE_EVERY:
                        for writer in self.writers.values():
                            writer.sync()
                        position.write(self.out / PROGRESS)
                        noted_at = time.monotonic()
            self.progress(
                read, self.corpus.size, sum(shard.tokens for part in PARTS for shard in position.shards[part])
            )

    def _pieces(self) -> Iterator[_Piece]:
        for document in self.corpus.documents(self.position.after):
            parts = self.split(document.text) if _has_text(document) else []
            for part, text in parts:
                yield from (_Piece(part, piece) for piece in self.tokenizer.pieces(text))
                yield _Piece(part, ends=True, completes=document if part == parts[-1][0] else None)
            if not parts:
                yield _Piece("train", completes=document)

    def _encode(self, batch: list[_Piece]) -> list[tuple[_Piece, NDArray[Any]]]:
        end = np.array([self.tokenizer.end_of_text])
        encoded = self.tokenizer.encode_batch([piece.text for piece in batch])
        return [(piece, end if piece.ends else tokens) for piece, tokens in zip(batch, encoded, strict=True)]


def _has_text(document: Document) -> bool:
    return bool(document.text) and not document.text.isspace()


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH or len(batch) >= _PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(function: Callable[[In], Out], items: Iterable[In], workers: int) -> Generator[Out]:
    """The function of each item, computed by several threads a few items ahead."""
    pool = ThreadPoolExecutor(workers)
    try:
        with one_thread_each():
            waiting: deque[Future[Out]] = deque()
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar where stderr is a terminal, a line now and then elsewhere."""
    columns = ("description", "bar", "percentage", "time left", "{task.fields[tokens]:,} tokens")
    with Display(columns, 100, started=False, lines="stderr", tokens=0) as display:  # one that waits shows nothing

        def update(done: int, total: int, tokens: int) -> None:
            what = "packing" if tokens else "learning the vocabulary"
            shown = (f"{done / total:.0%} read" if total else "", f"{tokens:,} tokens" if tokens else "")
            line = f"{what}: {', '.join(filter(None, shown))}"
            display.update(done, line, total=total or None, description=what, tokens=tokens)

        yield update


def tokenize(
    source: str,
    out: str,
    *,
    vocab: int | None = None,
    gpt2: str | None = None,
    field: str = "text",
    validation: float = 0.005,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    split_seed: int = 0,
    errors: Errors = "strict",
) -> Path:
    """Tokenize text once, for all training runs on it; run again after an interruption, it goes on where it was.

    Tokens are bytes, unless --vocab or --gpt2 say otherwise.

    Args:
        source: a .txt, .jsonl, .jsonl.gz or .parquet file, a folder or a quoted glob of them, or datasets:NAME:CONFIG,
            e.g. datasets:HuggingFaceFW/fineweb-edu:CC-MAIN-2013-20
        out: folder for the packed tokens
        vocab: learn a byte-pair encoding of so many tokens from the training documents, e.g. 8192
        gpt2: take GPT-2's tokenizer, from the folder with its encoder.json and vocab.bpe
        field: where JSON lines, Parquet and datasets have the text
        validation: share of the documents kept for validation; a single document keeps its last tenth
        shard_tokens: tokens after which a new file is begun
        workers: how many threads tokenize; all cores if not given
        split_seed: which documents are kept for validation
        errors: whether text that is not valid UTF-8 is refused (strict) or gets a replacement character (replace)

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text.txt").write_text("To be, or not to be, that is the question.")
        ...     _ = tokenize(f"{folder}/text.txt", f"{folder}/tokens")
        tokenizer   bytes, 257 tokens, stored as uint16
        source      text.txt, 42 bytes
        train       39 tokens, documents: 1, files: 1
        validation  5 tokens, documents: 1, files: 1
        begins      To be, or not to be, that is the quest<|endoftext|>
    """
    if vocab is not None and gpt2 is not None:
        raise MupscaleError(f"{setting('vocab')} learns a tokenizer and {setting('gpt2')} takes one: give one of them")
    spec = f"bpe:{vocab}" if vocab is not None else f"gpt2:{gpt2}" if gpt2 is not None else "bytes"
    parts: dict[str, Any] = {"validation": validation, "split_seed": split_seed, "shard_tokens": shard_tokens}
    with shown_progress() as progress:
        pack(source, out, spec, field=field, errors=errors, workers=workers, progress=progress, **parts)
    info(out)
    return Path(out)


def info(tokens: str, **table: Any) -> None:
    """Print what a folder of packed tokens holds, or what a table in a file becomes.

    Args:
        tokens: the folder, or a CSV or Parquet file
        table: how to read a table: what `TableFile` takes

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source = Path(folder, "lines.jsonl")
        ...     _ = source.write_text('{"text": "one"}\\n{"text": "two"}\\n')
        ...     info(str(pack(str(source), Path(folder, "tokens"))))
        tokenizer   bytes, 257 tokens, stored as uint16
        source      lines.jsonl, 32 bytes
        train       4 tokens, documents: 1, files: 1
        validation  4 tokens, documents: 1, files: 1
        begins      two<|endoftext|>
    """
    folder, usual = Path(tokens).expanduser(), signature(TableFile).parameters
    given = {name: value for name, value in table.items() if value != usual[name].default}
    if folder.is_file():
        try:
            read = TableFile(tokens, **table)
        except MupscaleError as error:
            text = f". If it is text, and no table: mupscale data tokenize {tokens} FOLDER"
            raise MupscaleError(f"{error}{text if folder.name.endswith(SUFFIXES) else ''}") from None
        spec = json.dumps({"path": tokens, **given})
        gaps = [f"{name} {count:,}" for name, count in read.empty.most_common(10)]
        gaps += [f"{read.dropped:,} rows dropped"] * bool(read.dropped)
        rows = {  # what a recipe has to say about the table, and what to look at before it does
            "rows": f"{read.size:,} to train on, {len(read.split.test_y):,} held out",
            "empty": "; ".join(gaps) or "no cells",
            "inputs": ", ".join(read.inputs),
            "target": f"classification: {', '.join(read.labels)}" if read.labels else "regression, standardised",
            "the data": f"{{class_path: mupscale.data.TableFile, init_args: {spec}}}",
            "the model": f"d_in: {len(read.inputs)}, d_out: {len(read.labels) or 1}",
            "the loss": "mupscale.train.cross_entropy (the default)" if read.labels else "torch.nn.functional.mse_loss",
        }
        show(*(f"{name:<12}{printable(value)}" for name, value in rows.items()))
        return
    if not folder.exists():
        raise MupscaleError(f"there is no file or folder {tokens}")
    index = Index.read(folder)
    if given:
        raise MupscaleError(f"{tokens} is a folder of tokens, so {', '.join(given)} is of no use: it is for tables")
    shards = {part: index.open(folder, part) for part in PARTS}
    rows = {
        "tokenizer": f"{index.made_from.get('tokenizer', '?')}, {index.vocab_size:,} tokens, stored as {index.dtype}",
        "source": f"{index.made_from.get('source', '?')}, {index.made_from.get('source_bytes', 0):,} bytes",
    }
    for part in PARTS:
        rows[part] = f"{index.tokens(part):,} tokens, documents: {index.documents(part):,}, files: {len(shards[part])}"
    if index.empty_documents_skipped:
        rows["skipped"] = f"{index.empty_documents_skipped:,} empty documents"
    beginning = load_tokenizer(folder / TOKENIZER).decode(shards["train"][0][:400].tolist())
    lines = [printable(line) for line in beginning.strip().splitlines()[:4]]
    show(*(f"{name:<12}{printable(value)}" for name, value in rows.items()))
    show(f"{'begins':<12}" + "\n            ".join(lines))


class TokenWindows(Data):
    """Windows of a stream of tokens; the targets are the same window one token on."""

    unit = "tokens"
    rows_on = torch.device("cpu")

    def __init__(
        self, train: list[NDArray[Any]], validation: list[NDArray[Any]], context: int, vocab_size: int
    ) -> None:
        if context < 1:
            raise MupscaleError(f"context is {context}, but a window has at least one token")
        self._train, self._validation = Windows(train, context), Windows(validation, context)
        for part, windows in (("training", self._train), ("validation", self._validation)):
            if not len(windows):
                raise MupscaleError(
                    f"the {part} text has {windows.tokens} tokens, too few for a window of {context} and the one after "
                    f"it: take a smaller context, or pack more text for {part}"
                )
        self.per_example, self.classes = context, vocab_size

    @property
    def size(self) -> int:
        return len(self._train)

    def examples(self, rows: Tensor) -> Batch:
        return self._batch(self._train, rows)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for rows in torch.arange(len(self._validation)).split(batch):
            yield self._batch(self._validation, rows)

    def _batch(self, windows: Windows, rows: Tensor) -> Batch:
        tokens = torch.from_numpy(windows.take(rows.cpu().numpy()))
        if self.device.type == "cuda":  # narrow integers travel, and nobody waits for them
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        x, y = (part.to(self.device, torch.int64) for part in (tokens[:, :-1], tokens[:, 1:]))
        return x, y


class Text(TokenWindows):
    """Packed tokens, made from a source on first use or by `mupscale data tokenize` beforehand.

    Of several processes that use it first, one packs and the others wait.

    Args:
        tokens: folder of the packed tokens
        context: tokens in a window
        source: what to pack if the folder is not there: a .txt, .jsonl, .jsonl.gz or .parquet file, a folder or a glob
            of them, or datasets:NAME:CONFIG
        tokenizer: bytes, bpe:8192 to learn one of that size, gpt2:FOLDER, or hf:FOLDER (of any Hugging Face model, its
            tokenizer.json); bytes if not given, or what is there
        field: where JSON lines, Parquet and datasets have the text
        validation: share of the documents kept for validation; a single document keeps its last tenth
        split_seed: which documents are kept for validation
        errors: whether text that is not valid UTF-8 is refused (strict) or gets a replacement character (replace)
    """

    def __init__(
        self,
        tokens: str,
        *,
        context: int = 1024,
        source: str | None = None,
        tokenizer: str | None = None,
        field: str = "text",
        validation: float = 0.005,
        split_seed: int = 0,
        errors: Errors = "strict",
    ) -> None:
        folder = Path(tokens).expanduser()
        options: dict[str, Any] = {"field": field, "validation": validation, "split_seed": split_seed}
        if source is not None and not (folder / INDEX).exists():
            with shown_progress() as progress:
                pack(source, folder, tokenizer or "bytes", errors=errors, progress=progress, **options)
        index = Index.read(folder)
        if tokenizer is not None:
            check_packed_with(folder, index.made_from, {"tokenizer": tokenizer_name(tokenizer)})
        if source is not None:
            options = {"source": source_name(source), **options}
            check_packed_with(folder, index.made_from, options)
            if not source.startswith("datasets:") and Path(source).expanduser().exists():  # it may be gone by now
                check_packed_with(folder, index.made_from, {"source_fingerprint": Corpus(source).fingerprint})
        super().__init__(index.open(folder, "train"), index.open(folder, "validation"), context, index.vocab_size)
        self._folder = folder

    @classmethod
    def writes_to(cls, arguments: Mapping[str, Any]) -> Path | None:
        """The folder that would be packed: there is a source, and no packed tokens yet."""
        if arguments.get("source") is None:
            return None
        folder = Path(str(arguments.get("tokens"))).expanduser()
        return None if (folder / INDEX).exists() else folder

    @classmethod
    def shape_without_files(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Windows of the context's length; how many there are only the packed tokens tell."""
        if (Path(str(arguments.get("tokens"))).expanduser() / INDEX).exists():
            return None
        return {"shape": [int(arguments.get("context", 1024))], "is_text": True}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the packed text; training does not need it."""
        return load_tokenizer(self._folder / TOKENIZER)


def tinyshakespeare() -> str:
    """The text of Tiny Shakespeare: 1.1 MB of plays in the public domain, collected by Andrej Karpathy.

    >>> print(tinyshakespeare()[:50])
    First Citizen:
    Before we proceed any further, hear
    """
    return resources.files("mupscale.data").joinpath("tinyshakespeare.txt").read_text(encoding="utf-8")


class Shakespeare(TokenWindows):
    """Tiny Shakespeare, which ships with the package, as bytes in memory; its last tenth is for validation.

    Args:
        context: bytes in a window

    Example:
        >>> x, y = Shakespeare(context=8).batch(seed=0, start=0, count=2)
        >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())  # targets are the next tokens
        (torch.Size([2, 8]), True)
    """

    def __init__(self, context: int = 256) -> None:
        self.tokenizer = Bytes()
        ends = np.array([self.tokenizer.end_of_text], np.uint16)
        texts = dict(DocumentSplit(seed=0, below=None)(tinyshakespeare()))
        parts = {part: np.append(self.tokenizer.encode_batch([text])[0], ends) for part, text in texts.items()}
        super().__init__([parts["train"]], [parts["validation"]], context, self.tokenizer.vocab_size)
