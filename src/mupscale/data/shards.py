"""Packed tokens: files of plain little-endian integers, mapped into memory, and an index that says what they hold.

A folder has train-00000.bin, train-00001.bin, … and the same for validation; a part is its shards in this order. The
index is written last, so a folder that has one is complete.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mupscale.system import (
    NOT_EMPTY,
    MupscaleError,
    Must,
    derive,
    open_file,
    parse_record,
    read_json,
    remove,
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
                raise MupscaleError(f"it is of version {version}, and this mupscale reads version {_VERSION}")
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
        """Make sure that everything is on the disk."""
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
    """Refuse a folder that was packed with other options than these."""
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
