"""JSON and packed files that somebody else may have written: of a bounded size and depth, or refused by name."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
from pathlib import Path
from typing import IO, Any

from mupscale.system.errors import MupscaleError

FOLD, FLOOR = 200, 64 << 20


class _Bounded(io.RawIOBase):
    """What gzip unpacks, up to a number of bytes."""

    def __init__(self, source: gzip.GzipFile, path: Path, packed: int) -> None:
        self._source, self._path, self._packed = source, path, packed
        self._left = max(FLOOR, FOLD * packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._source.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise MupscaleError(
                f"{self._path} has {self._packed:,} bytes and unpacks to more than {FOLD} times as many, which no real "
                f"data does: unpack it yourself if you trust it"
            )
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def open_gzip(path: Path, raw: IO[bytes] | None = None) -> IO[bytes]:
    """A gzip file to be read, of which no more is unpacked than 200 times its size (64 MiB of a small one).

    raw: the file where it is open already.
    """
    packed = path.stat().st_size if raw is None else os.fstat(raw.fileno()).st_size
    source = gzip.GzipFile(path) if raw is None else gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_Bounded(source, path, packed), 1 << 16)


MOST_BYTES, MOST_DEPTH = 256 << 20, 100
_NESTED = {dict, list}
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_json(path: str | Path) -> Any:
    """The values in a JSON file; an OSError where it cannot be opened, and a sentence for whatever else is wrong."""
    return parse_json(read_regular(path), path)


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file of a bounded size: a pipe would be waited for, and a device never ends."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is not None:
            raise MupscaleError(f"{path} is {kind}, not a file")
        if status.st_size > most:
            raise MupscaleError(
                f"{path} has {status.st_size:,} bytes, more than the {most:,} that are read of such a file"
            )
        return file.read(most + 1)[:most]


def parse_json(text: str | bytes, where: object) -> Any:
    """The values of a JSON text that is not nested too deeply; `where` is named in the error.

    >>> from mupscale.system import parse_json
    >>> parse_json("[" * 1000 + "]" * 1000, "deep.json")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: deep.json is damaged: its values are nested more than 100 deep
    """
    deep = f"its values are nested more than {MOST_DEPTH} deep"
    try:
        values = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise MupscaleError(f"{where} is damaged: {deep}") from None
    except UnicodeDecodeError as error:
        raise MupscaleError(f"{where} is damaged: it is not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise MupscaleError(f"{where} is damaged: {error}") from None
    if _is_deeper(values, MOST_DEPTH):
        raise MupscaleError(f"{where} is damaged: {deep}")
    return values


def _is_deeper(values: Any, most: int) -> bool:
    """Whether lists and mappings are nested deeper than this."""
    level = [values]
    for _ in range(most + 1):
        parts = [value.values() if isinstance(value, dict) else value for value in level if type(value) in _NESTED]
        nested = [
            part for part in parts if not _NESTED.isdisjoint(map(type, part))
        ]  # not the million numbers of a curve
        level = [inner for part in nested for inner in part if type(inner) in _NESTED]
        if not level:
            return False
    return True
