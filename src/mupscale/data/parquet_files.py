"""Parquet files, read in batches of a bounded size whatever they claim to hold.

A column that repeats one value costs a file next to nothing, so a megabyte can stand for more numbers than any memory
holds. What a file says of itself is compared with its size before a column is read. Texts are read as a dictionary with
an index per row: a text that a million rows share is in memory once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mupscale.system import MupscaleError, most_unpacked, require, too_much_unpacked

_ROWS_AT_ONCE = 1 << 12
_BYTES_PER_NUMBER = 8


def _pyarrow(path: Path, module: str = "") -> Any:
    return require(f"pyarrow{module}", reason=f"{path} needs pyarrow to be read")


def parquet_errors(path: Path) -> tuple[type[Exception], ...]:
    """What reading the file raises where it is damaged."""
    return _pyarrow(path).ArrowException, OSError


class ParquetFile:
    """A Parquet file: its columns with their types, and its rows in batches. See `parquet_errors`."""

    def __init__(self, path: Path) -> None:
        self._pa = _pyarrow(path)
        self._parquet = _pyarrow(path, ".parquet")
        self.path, self.size = path, path.stat().st_size
        with self._parquet.ParquetFile(path) as file:
            self._metadata = file.metadata
            schema = file.schema_arrow
        self.names: list[str] = schema.names
        self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        self._check_unpacked()

    @property
    def rows(self) -> int:
        return int(self._metadata.num_rows)

    @property
    def rows_by_group(self) -> list[int]:
        return [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]

    def _check_unpacked(self) -> None:
        groups = range(self._metadata.num_row_groups)
        self._check_size(sum(self._metadata.row_group(group).total_byte_size for group in groups))

    def check_numbers(self, columns: int) -> None:
        """Refuse a file whose rows of so many numbers would be far larger than the file."""
        self._check_size(_BYTES_PER_NUMBER * self.rows * columns)

    def _check_size(self, unpacked: int) -> None:
        if unpacked > most_unpacked(self.size):
            raise self.too_much_unpacked()

    def too_much_unpacked(self) -> MupscaleError:
        return too_much_unpacked(self.path, self.size, "convert it to another format yourself")

    def holds_text(self, name: str) -> bool:
        kind = self._kind(name)
        return bool(self._pa.types.is_string(kind) or self._pa.types.is_large_string(kind))

    def holds_bytes(self, name: str) -> bool:
        kind = self._kind(name)
        return bool(self._pa.types.is_binary(kind) or self._pa.types.is_large_binary(kind))

    def holds_numbers(self, name: str) -> bool:
        kind, types = self._kind(name), self._pa.types
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    def _kind(self, name: str) -> Any:
        """The type of a column's values, which a dictionary of them may stand for."""
        kind = self.types[name]
        return kind.value_type if self._pa.types.is_dictionary(kind) else kind

    def batches(self, names: Sequence[str], groups: Iterable[int] | None = None) -> Iterator[Any]:
        """Some rows of these columns at a time, texts as dictionaries.

        groups: the row groups to read (default: all).
        """
        texts = [name for name in names if self.holds_text(name) or self.holds_bytes(name)]
        with self._parquet.ParquetFile(self.path, read_dictionary=texts, pre_buffer=False) as file:
            yield from file.iter_batches(_ROWS_AT_ONCE, columns=list(names), row_groups=groups, use_threads=False)

    def numbers(self, column: Any) -> NDArray[np.float64]:
        """A batch's column of numbers; NaN where nothing stands."""
        if self._pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        values: NDArray[np.float64] = column.cast(self._pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return values

    def texts(self, column: Any, known: dict[Any, Any] | None = None, *, as_bytes: bool = False) -> NDArray[Any]:
        """A batch's column of texts, equal ones as one object; None where nothing stands.

        known: texts of the batches before, by themselves, which are used again. as_bytes: without decoding, which is
        for whoever names the row of a text that is not UTF-8.
        """
        if not self._pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        indices = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        used, places = np.unique(indices, return_inverse=True)  # a dictionary may be that of a million rows
        present = column.dictionary.take(self._pa.array(used[used >= 0]))
        if as_bytes:
            present = present.cast(self._pa.large_binary())
        words = present.to_pylist()
        if known is not None:
            words = [known.setdefault(word, word) for word in words]
        values = np.empty(len(used), dtype=object)  # None wherever nothing is put
        values[used >= 0] = words
        taken: NDArray[Any] = values[places]
        return taken
