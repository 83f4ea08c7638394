"""Documents, one after the other: text files, JSON lines, Parquet, or a dataset of the `datasets` library."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mupscale.data.parquet_files import ParquetFile, parquet_errors
from mupscale.system import MupscaleError, most_unpacked, open_gzip, require, setting

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
Errors = Literal["strict", "replace"]


class Document(NamedTuple):
    """A text and where it stands: the number of its file, its own in there, and the bytes read up to its end."""

    text: str
    file: int
    number: int
    read: int


_Raw = tuple[int, Any, int]
"""The number of a line or row, what stands at its text field, and the bytes of the file read so far."""


class _Unit(NamedTuple):
    """A file, or a whole dataset: its name, its bytes if known, and how to read it after so many documents."""

    name: str
    size: int
    read: Callable[[int], Iterator[_Raw]]


class Corpus:
    """All documents of a source, in an order that is always the same, from the start or from any place on.

    source: a file, a folder (all files in it of a known kind), a glob, or datasets:NAME[:CONFIG], which the `datasets`
    library streams, such as datasets:HuggingFaceFW/fineweb-edu:CC-MAIN-2013-20. field: where JSON lines, Parquet and
    datasets have the text. errors: whether invalid UTF-8 is refused or replaced.
    """

    def __init__(self, source: str, field: str = "text", errors: Errors = "strict") -> None:
        self.field, self.errors = field, errors
        self.modified = ""
        if source.startswith("datasets:"):
            self._units = [_Unit(source, 0, lambda skip: _dataset(source, field, skip))]
            identity: list[Any] = [source]
        else:
            try:
                files = _find_files(source)
                self._units = [_Unit(str(file), file.stat().st_size, self._reader(file)) for file in files]
                self.modified = datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC).isoformat()
            except OSError as error:
                raise MupscaleError(
                    f"{error.filename or source} cannot be read: {error.strerror or error}; fix that, or give another "
                    f"source"
                ) from None
            top = os.path.commonpath([file.absolute().parent for file in files])
            names = [file.absolute().relative_to(top).as_posix() for file in files]
            identity = [[name, unit.size] for name, unit in zip(names, self._units, strict=True)]
        self.size = sum(unit.size for unit in self._units)
        self.fingerprint = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def documents(self, after: tuple[int, int] = (0, 0)) -> Iterator[Document]:
        """The documents after the one with this file and number; empty ones included."""
        before = 0
        for index, unit in enumerate(self._units):
            if index >= after[0]:
                for number, value, read in unit.read(after[1] if index == after[0] else 0):
                    yield Document(self._text(value, unit.name, number), index, number, before + read)
            before += unit.size

    def _reader(self, file: Path) -> Callable[[int], Iterator[_Raw]]:
        def read(skip: int) -> Iterator[_Raw]:
            try:
                if file.suffix == ".txt":
                    yield from [] if skip else [(1, file.read_bytes(), file.stat().st_size)]
                elif file.suffix == ".parquet":
                    yield from _rows(file, self.field, skip)
                else:
                    yield from _lines(file, self.field, self.errors, skip)
            except OSError as error:
                raise MupscaleError(f"{file} cannot be read: {error.strerror or error}") from None

        return read

    def _text(self, value: Any, name: str, number: int) -> str:
        """The text that a field holds; no value at all is an empty one."""
        if value is None:
            return ""
        where = name if name.endswith(".txt") else f"document {number} of {name}"
        if isinstance(value, bytes):
            return _decode(value, self.errors, where)
        if not isinstance(value, str):
            raise MupscaleError(f"{where} has no text at {self.field!r}, but a value of type {type(value).__name__}")
        if value.isascii():
            return value
        try:  # JSON can spell half of a surrogate pair, which is no text
            return value.encode("utf-8", self.errors).decode()
        except UnicodeEncodeError as error:
            raise MupscaleError(
                f"{where} has half of a surrogate pair at character {error.start}, which is not text: correct it, or "
                f"replace it ({setting('errors', 'replace')})"
            ) from None


def source_name(source: str) -> str:
    return source if source.startswith("datasets:") else Path(source).name


def _find_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in _walk_files(path) if file.name.endswith(SUFFIXES) and file.is_file())
        if not files:
            raise MupscaleError(f"the folder {path} has no file that ends in {', '.join(SUFFIXES)}")
        return files
    if path.is_file():
        files = [path]
    elif glob.has_magic(source):
        matching = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        files = list({os.path.realpath(file): file for file in reversed(matching)}.values())[::-1]  # each once
        if not files:
            raise MupscaleError(f"no file matches {source}")
    else:
        raise MupscaleError(
            f"there is no file or folder {source}: give one, a glob in quotes, or datasets:NAME:CONFIG for a dataset "
            f"of the Hugging Face Hub"
        )
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise MupscaleError(f"{file} is of an unknown kind: its name must end in {', '.join(SUFFIXES)}")
    return files


def _walk_files(folder: Path) -> Iterator[Path]:
    """The files in a folder and in those in it, linked ones too, each once; hidden ones are not meant, as in a glob."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for where, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(where)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        yield from () if real in seen else (Path(where, name) for name in files if not name.startswith("."))
        seen.add(real)


def _lines(file: Path, field: str, errors: Errors, skip: int) -> Iterator[_Raw]:
    """JSON lines, compressed or not; empty lines are none."""
    number = offset = 0
    with file.open("rb") as raw:
        try:
            for number, line in enumerate(open_gzip(file, raw) if file.suffix == ".gz" else raw, 1):
                if number > skip and not line.isspace():
                    where = f"{file}, line {number}"
                    try:
                        fields = json.loads(_decode(line, errors, str(file), offset).rstrip())
                    except json.JSONDecodeError as error:
                        said = f"is not valid JSON at column {error.colno}: {error.msg.removesuffix(' at')}"
                        raise MupscaleError(f"{where} {said}") from None
                    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
                        raise MupscaleError(f"{where} is not JSON that can be read: {error}") from None
                    if not isinstance(fields, dict):
                        raise MupscaleError(f"{where} is not a JSON object, but of type {type(fields).__name__}")
                    yield number, _pick(fields, field, where), raw.tell()
                offset += len(line)
        except EOFError:
            raise MupscaleError(
                f"{file} is a gzip file cut short, after {number} whole lines with a document each: download it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise MupscaleError(
                f"{file} is a damaged gzip file, after {number} whole lines with a document each ({error}): download "
                f"it again"
            ) from None


def _pick(fields: dict[str, Any], field: str, where: str) -> Any:
    if field not in fields:
        raise MupscaleError(f"{where} has no field {field!r}; it has {', '.join(map(repr, fields)) or 'none at all'}")
    return fields[field]


def _rows(file: Path, field: str, skip: int) -> Iterator[_Raw]:
    """The rows of a Parquet file, some at a time, so that it can be larger than memory."""
    number = 0
    try:
        opened = ParquetFile(file)
        left = most_unpacked(opened.size)
        _pick(opened.types, field, str(file))
        holds_texts = opened.holds_text(field) or opened.holds_bytes(field)
        rows_by_group, first_group = opened.rows_by_group, 0
        while first_group < len(rows_by_group) and number + rows_by_group[first_group] <= skip:
            number += rows_by_group[first_group]
            first_group += 1
        for batch in opened.batches([field], range(first_group, len(rows_by_group))):
            column = batch.column(0)
            # whether a text is UTF-8 is checked when it is decoded, where its row is known
            values = opened.texts(column, as_bytes=True) if holds_texts else column.to_pylist()
            for value in values:
                number += 1
                left -= len(value) if isinstance(value, bytes) else 0
                if left < 0:
                    raise opened.too_much_unpacked()
                if number > skip:
                    yield number, value, opened.size * number // opened.rows
    except parquet_errors(file) as error:
        raise MupscaleError(
            f"{file} is not a complete Parquet file: {_first_line(error)}, after {number} rows; download it again"
        ) from None


def _dataset(source: str, field: str, skip: int) -> Iterator[_Raw]:
    datasets = require("datasets", reason=f"{source} needs the datasets library")
    _, name, *config = source.split(":", 2)
    try:
        rows = datasets.load_dataset(name, *config, split="train", streaming=True)
        for number, row in enumerate(rows.skip(skip), skip + 1):
            yield number, _pick(row, field, f"row {number} of {source}"), 0
    except MupscaleError:
        raise
    except Exception as error:  # the network, the Hub, the dataset itself: any library below may raise
        raise MupscaleError(
            f"{source} could not be loaded: {_first_line(error)}; without a network, give a folder of its files instead"
        ) from error


def _decode(raw: bytes, errors: Errors, where: str, offset: int = 0) -> str:
    """Text, without the byte order mark that some programs put at the beginning."""
    try:
        text = raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise MupscaleError(
            f"{where} is not valid UTF-8 at byte {offset + error.start}: convert it, or replace what is not "
            f"({setting('errors', 'replace')})"
        ) from None
    return text if offset else text.removeprefix("\ufeff")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
