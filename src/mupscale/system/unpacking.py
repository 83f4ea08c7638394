"""Packed files that unpack to much more than anybody would pack: refused, and not before some of it was read."""

from __future__ import annotations

import gzip
import io
import os
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
                f"{self._path} has {self._packed:,} bytes and unpacks to more than {FOLD} times as many, which no data "
                f"does: unpack it yourself if you trust it"
            )
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


def open_gzip(path: Path, raw: IO[bytes] | None = None) -> IO[bytes]:
    """A gzip file to be read, of which no more is unpacked than 200 times its size (64 MiB of a small one).

    raw: the file where it is open already.

    >>> import gzip, tempfile
    >>> from pathlib import Path
    >>> from mupscale.system import open_gzip
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "zeros.gz"
    ...     size = path.write_bytes(gzip.compress(b"0" * 70_000_000))
    ...     with open_gzip(path) as file:
    ...         content = file.read()
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: ...zeros.gz has ... bytes and unpacks to more than 200 times as many, ...
    """
    packed = path.stat().st_size if raw is None else os.fstat(raw.fileno()).st_size
    source = gzip.GzipFile(path) if raw is None else gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_Bounded(source, path, packed), 1 << 16)
