"""Your own data, as a recipe takes it: tables in files, torch's Dataset and DataLoader, arrays, DataFrames, `datasets`.

Columns of numbers and words become inputs and a target. What a column is, is read off its cells by one rule each, and
what cannot be told is asked for. Errors name the column, the row and the remedy.
"""

from __future__ import annotations

import csv
import io
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from mupscale.data.in_memory import Split, Table, open_maybe_zipped
from mupscale.data.parquet_files import ParquetFile, parquet_errors
from mupscale.data.stream import Batch, Data
from mupscale.system import MupscaleError, available_memory, derive, describe_shortage, generator, show_short

Task = Literal["classification", "regression"]
Missing = Literal["refuse", "drop", "mean"]
TARGETS = ("label", "labels", "target", "y")
"""What a target is called where nobody says it."""

_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""What counts as empty in a column of numbers, in capitals or not; among words only a cell with nothing in it does."""
_FILLS = ("missing: mean fills in the column's mean", "missing: mean counts it as none of the column's words")
_MOST_CLASSES, _MOST_CATEGORIES = 20, 100
_MOST_COLUMNS = 20_000
_MOST_LINE, _CELLS_AT_ONCE = 1 << 26, 1 << 22


class Columns(NamedTuple):
    """Columns by name: float64, NaN where nothing stands; or texts, None where nothing stands.

    name: what errors call the table. lines: in the file, of every row. unread: what else there is, and its type. empty:
    how the first empty cell of a column of numbers is written.
    """

    name: str
    values: dict[str, NDArray[Any]]
    lines: NDArray[np.int64] | None = None
    unread: Mapping[str, str] = MappingProxyType({})
    empty: Mapping[str, str] = MappingProxyType({})

    @property
    def rows(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def refuse(self, column: str, row: int, problem: str) -> NoReturn:
        place = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
        raise MupscaleError(f"{self.name}, {place}, column {column!r}: {problem}")

    def check_has(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self.values and name not in self.unread:
                raise MupscaleError(f"{self.name} has no column {name!r} ({what}); it has {_listed(self.values)}")


@dataclass(frozen=True)
class TableSettings:
    """How columns become inputs and a target; see `TableFile`."""

    target: str | None = None
    inputs: Sequence[str] | None = None
    skip: Sequence[str] = ()
    task: Task | None = None
    categories: Sequence[str] = ()
    missing: Missing = "refuse"
    standardise: bool = True
    held_out: float = 0.1
    split_seed: int = 0

    def takes_words(self, name: str) -> bool:
        """Whether nobody needs numbers of a column: its cells are names, or it is left out."""
        is_input = self.inputs is None or name in self.inputs or name == self.target or name in TARGETS
        return name in self.categories or name in self.skip or not is_input


class TableFile(Table):
    """A table in a file: one column is the target, the others are inputs. CSV (also zipped), TSV or Parquet.

    Numbers are standardised on the training part (columns of zeros and ones stay), columns of words become one input
    for each word. A target of words, or of at most 20 whole numbers, is a class; one of other numbers is regression,
    whose targets are standardised, too (loss: torch.nn.functional.mse_loss).

    Args:
        path: the file; a CSV file's first line names its columns
        target: the column to predict (default: the one called label, labels, target or y)
        inputs: the columns to predict it from (default: all others)
        skip: columns to leave out
        task: classification or regression, if the target could be either
        categories: columns whose numbers are names, such as postcodes
        missing: what to do about empty cells: refuse them, drop their rows, or fill in the column's mean (words: none);
            a row without a target is dropped with either
        standardise: whether columns of numbers get mean 0 and standard deviation 1
        test: a second file, to evaluate on (default: some rows of the first, see held_out)
        held_out: share of the rows to evaluate on, without a second file
        split_seed: seed that chooses these rows

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "plants.csv")
        ...     _ = path.write_text("height,colour,kind\\n" + "3.5,red,rose\\n1,green,moss\\n2.5,green,fern\\n" * 4)
        ...     data = TableFile(str(path), target="kind")
        >>> data.inputs, data.labels, data.size
        (['height', 'colour=green', 'colour=red'], ['fern', 'moss', 'rose'], 11)
    """

    def __init__(
        self,
        path: str,
        target: str | None = None,
        *,
        inputs: list[str] | None = None,
        skip: list[str] | None = None,
        task: Task | None = None,
        categories: list[str] | None = None,
        missing: Missing = "refuse",
        standardise: bool = True,
        test: str | None = None,
        held_out: float = 0.1,
        split_seed: int = 0,
    ) -> None:
        settings = TableSettings(
            target, inputs, skip or (), task, categories or (), missing, standardise, held_out, split_seed
        )
        files = [path] if test is None else [path, test]
        self._take([read_columns(Path(file).expanduser(), settings.takes_words) for file in files], settings)

    @classmethod
    def of(cls, train: Columns, test: Columns | None, settings: TableSettings) -> TableFile:
        table = cls.__new__(cls)
        table._take([train] if test is None else [train, test], settings)
        return table

    def _take(self, parts: Sequence[Columns], settings: TableSettings) -> None:
        """Learn what the columns are from the rows to train on, and encode all."""
        target = _find_target(parts[0], settings)
        names = _find_inputs(parts[0], target, settings)
        for part in parts[1:]:
            part.check_has([*names, target], f"which {parts[0].name} has")
        self.empty, before = Counter[str](), sum(part.rows for part in parts)
        parts = [_filled(part, [*names, target], settings, self.empty) for part in parts]
        self.dropped, rows = before - sum(part.rows for part in parts), parts[0].rows
        if len(parts) == 2:
            held_out = torch.arange(rows + parts[1].rows) >= rows
        else:
            held_out = choose_held_out(rows, settings.held_out, settings.split_seed, parts[0].name)
        self._settings, self._columns = settings, [_learn(name, parts, ~held_out, settings) for name in names]
        self.inputs = [shown for column in self._columns for shown in column.shown]
        _check_memory(sum(part.rows for part in parts), len(self.inputs), parts[0].name)
        x = torch.cat([torch.cat([column.encode(part) for column in self._columns], 1) for part in parts])
        y, self.labels, self._scale = _encode_target(target, parts, ~held_out, settings)
        Table.__init__(self, Split(x[~held_out], y[~held_out], x[held_out], y[held_out]), len(self.labels) or None)

    def encode(self, rows: Any) -> Tensor:
        """The inputs of other rows, as those that were trained on: for predictions. They need no target.

        rows: a file, or what `as_data` takes as a table, such as a DataFrame.
        """
        if isinstance(rows, str | os.PathLike):
            more = read_columns(Path(rows).expanduser(), self._settings.takes_words)
        elif _is_table(rows):
            more = columns_of(_name(rows), _table(rows))
        else:
            raise MupscaleError(f"rows to encode must be a file or a table with named columns, not {_name(rows)}")
        more.check_has([column.name for column in self._columns], "which the model was trained on")
        for column in self._columns:
            if self._settings.missing != "mean" and (gap := _gaps(more.values[column.name])).any():
                remedy = "the cell is empty: fill it, or train with missing: mean"
                more.refuse(column.name, int(gap.argmax()), remedy)
        return torch.cat([column.encode(more) for column in self._columns], 1)

    def decode(self, outputs: Tensor) -> list[Any]:
        """A model's outputs as the target's column has them: the most likely label of each row, or a number.

        Example:
            >>> from mupscale.data import as_data
            >>> data = as_data({"age": np.arange(3.0), "kind": np.array(["moss", "fern", "moss"])}, target="kind")
            >>> data.decode(torch.tensor([[0.1, 2.0], [3.0, -1.0]]))
            ['moss', 'fern']
        """
        if self.labels:
            return [self.labels[number] for number in outputs.argmax(1)]
        mean, std = self._scale
        return (outputs.double().flatten() * std + mean).tolist()


def read_columns(path: Path, takes_words: Callable[[str], bool] = lambda name: False) -> Columns:
    """The columns of a CSV, TSV or Parquet file; takes_words: whether a CSV's column is read as words at any rate."""
    if not path.is_file():
        raise MupscaleError(f"there is no file {path}")
    if path.suffix in (".parquet", ".pq"):
        return _read_parquet(path)
    if not {".csv", ".tsv", ".txt", ".data"} & set(path.suffixes):
        raise MupscaleError(f"{path} is not a table: its name must end in .csv, .csv.gz, .tsv or .parquet")
    try:
        with open_maybe_zipped(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            return _read_csv(path, text, takes_words)
    except UnicodeDecodeError as error:
        raise MupscaleError(f"{path} is not UTF-8 text at byte {error.start}: convert it") from None
    except csv.Error as error:
        raise MupscaleError(f"{path} cannot be read as CSV: {error}") from None
    except (EOFError, OSError) as error:
        raise MupscaleError(f"{path} cannot be read: {error}") from None


def _read_csv(path: Path, text: io.TextIOWrapper, takes_words: Callable[[str], bool]) -> Columns:
    """Every column as most of its cells are: numbers, or texts."""
    lines_of_text = _bounded_lines(path, text)
    first = next(lines_of_text, "")
    reader = csv.reader(chain([first], lines_of_text), delimiter=max(",;\t", key=first.count))
    names = [name.strip() for name in next(reader, [])]
    if not names or any(name == "" or _is_number(name) for name in names):
        raise MupscaleError(f"{path}: its first line must name the columns, but is {show_short(first.strip())}")
    _check_names(names, str(path))
    rows_at_once = max(1, _CELLS_AT_ONCE // len(names))
    pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    empty = dict[str, str]()
    lines: list[NDArray[np.int64]] = []
    numbered = ((reader.line_num, row) for row in reader if row)
    while rows := list(islice(numbered, rows_at_once)):
        for number, row in rows:
            if len(row) != len(names):
                raise MupscaleError(f"{path}, line {number} has {len(row)} cells, and the first line {len(names)}")
        lines.append(np.array([number for number, _ in rows]))
        for name, cells in zip(names, zip(*(row for _, row in rows), strict=True), strict=True):
            piece: NDArray[Any] | None = None
            if not takes_words(name):
                with suppress(ValueError):  # numbers take less memory
                    piece = np.array(cells, dtype=np.float64)
            if piece is None:
                piece = np.array([cell.strip() or None for cell in cells], dtype=object)
            if name not in empty and (piece.dtype == object or np.isnan(piece).any()):
                empty.update((name, cell.strip()) for cell in islice(filter(_is_empty, cells), 1))
            pieces[name].append(piece)
    if not lines:
        raise MupscaleError(f"{path} has names of columns, but no rows")
    table = Columns(str(path), {}, np.concatenate(lines), empty=empty)
    words = {name for name in names if takes_words(name) or not _holds_numbers(name, pieces[name], table)}
    if any(piece.dtype != object for name in words for piece in pieces[name]):  # whose texts are gone
        return read_columns(path, lambda name: name in words)
    for name in names:
        parts = pieces[name]
        for number, piece in enumerate(parts) if name not in words else ():
            if piece.dtype == object:
                parts[number] = np.array([np.nan if _is_empty(cell) else float(cell) for cell in piece])
        table.values[name] = np.concatenate(parts)
    return table


def _bounded_lines(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_MOST_LINE):
        if len(line) == _MOST_LINE:
            raise MupscaleError(f"{path} has a line of more than {_MOST_LINE:,} characters, so it is not a table")
        yield line


def _is_empty(cell: str | None) -> bool:
    return cell is None or cell.strip().lower() in _MISSING


def _holds_numbers(name: str, pieces: Sequence[NDArray[Any]], table: Columns) -> bool:
    """Whether a column holds numbers, by all of its cells. A word among more numbers than words is an error."""
    numbers = sum(int(piece.size - np.isnan(piece).sum()) for piece in pieces if piece.dtype != object)
    counts = Counter(cell for piece in pieces if piece.dtype == object for cell in piece if not _is_empty(cell))
    words = {cell: count for cell, count in counts.items() if not _is_number(cell)}
    numbers += counts.total() - sum(words.values())
    if words and numbers > sum(words.values()):
        row = next(row for row, cell in enumerate(chain.from_iterable(pieces)) if cell in words)
        table.refuse(
            name,
            row,
            f"{show_short(next(iter(words)))} is not a number, as most cells of the column are: fix it, leave the "
            f"column out (skip: [{name}]), or take its cells as names (categories: [{name}])",
        )
    return not words


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path) -> Columns:
    try:
        file = ParquetFile(path)
        _check_names(file.names, str(path))
        unread = dict[str, str]()
        pieces = dict[str, list[NDArray[Any]]]()
        known_words = dict[str, str]()
        for name in file.names:
            if file.holds_text(name) or file.holds_numbers(name):
                pieces[name] = []
            else:
                unread[name] = str(file.types[name])
        file.check_numbers(len(pieces))
        for batch in file.batches([*pieces]):
            for name in pieces:
                column = batch.column(name)
                is_text = file.holds_text(name)
                pieces[name].append(file.texts(column, known_words) if is_text else file.numbers(column))
    except parquet_errors(path) as error:
        raise MupscaleError(f"{path} is not a complete Parquet file: {str(error).splitlines()[0]}") from None
    values = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in pieces.items()}
    return Columns(str(path), values, unread=unread)


def _check_names(names: Sequence[str], table: str) -> None:
    """Refuse a table whose columns cannot be told apart, or are too many to be looked at one by one."""
    if len(names) > _MOST_COLUMNS:
        raise MupscaleError(
            f"{table} has {len(names):,} columns, more than the {_MOST_COLUMNS:,} of a table: keep the columns that "
            f"matter, or return arrays (x, y) from a function of your own, which may have any width"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise MupscaleError(f"{table}: two columns are called {twice[0]!r}: give each a name of its own")


def columns_of(name: str, values: Mapping[str, Any]) -> Columns:
    """Arrays by name, such as a DataFrame's, as columns."""
    _check_names([str(key) for key in values], name)
    columns = {}
    for key, array in ((key, np.asarray(value)) for key, value in values.items()):
        if array.dtype.kind in "fiub":
            columns[str(key)] = array.astype(np.float64)
            continue
        texts = [None if v is None or (isinstance(v, float) and v != v) else str(v) for v in array.tolist()]
        columns[str(key)] = np.array(texts, dtype=object)
    return Columns(name, columns)


def _find_target(table: Columns, settings: TableSettings) -> str:
    if settings.target is None:
        known = [name for name in TARGETS if name in table.values]
        if len(known) == 1:
            return known[0]
        raise MupscaleError(f"which column of {table.name} is the target? Set target to one of {_listed(table.values)}")
    table.check_has([settings.target], "target")
    if settings.target in table.unread:
        raise MupscaleError(f"{table.name}: the target {settings.target!r} is of type {table.unread[settings.target]}")
    return settings.target


def _find_inputs(table: Columns, target: str, settings: TableSettings) -> list[str]:
    table.check_has(settings.inputs or (), "inputs")
    table.check_has(settings.skip, "skip")
    table.check_has(settings.categories, "categories")
    asked = settings.inputs if settings.inputs is not None else [*table.values, *table.unread]
    names = [name for name in asked if name != target and name not in settings.skip]
    for name in names:
        if name in table.unread:
            raise MupscaleError(
                f"{table.name}: column {name!r} is of type {table.unread[name]}, which is neither a number nor a word: "
                f"leave it out (skip: [{name}]), or make numbers of it"
            )
    if not names:
        raise MupscaleError(
            f"{table.name} has no column beside its target {target!r}: there is nothing to predict it from"
        )
    return names


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:20]) + (f" … ({len(names)} in all)" if len(names) > 20 else "")


def _filled(table: Columns, names: Sequence[str], settings: TableSettings, count: Counter[str]) -> Columns:
    """The table without the rows that a gap drops; a gap that is not allowed is an error. count: of gaps by column."""
    gaps = {name: _gaps(table.values[name]) for name in names}
    gone = np.zeros(table.rows, dtype=bool)
    for name, gap in gaps.items():
        is_target = name == names[-1]
        if not gap.any():
            continue
        count[name] += int(gap.sum())
        if settings.missing == "drop" or (settings.missing == "mean" and is_target):
            gone |= gap  # what a row is to predict cannot be filled in
        elif settings.missing == "refuse":
            is_words = table.values[name].dtype == object
            written = None if is_words else table.empty.get(name)
            problem = f"{show_short(written)} counts as empty" if written else "the cell is empty"
            remedies = f"missing: drop drops such rows, {_FILLS[is_words]}, and skip: [{name}] ignores the column"
            if is_target:
                remedies = (
                    "A row needs its target: missing: drop drops such rows and those with other empty cells, "
                    "missing: mean drops these rows and fills the other cells"
                )
            table.refuse(name, int(gap.argmax()), f"{problem}. {remedies}")
    if gone.all():
        raise MupscaleError(f"{table.name}: every row has an empty cell, so no rows are left")
    kept = {name: table.values[name][~gone] for name in names}
    return Columns(table.name, kept, None if table.lines is None else table.lines[~gone])


def _gaps(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype == object:
        return np.array([value is None for value in values], dtype=bool)
    gaps: NDArray[np.bool_] = np.isnan(values)
    return gaps


def choose_held_out(rows: int, share: float, seed: int, name: str) -> Tensor:
    """Which of so many rows are to evaluate on: a share of them, at least one, chosen by the seed."""
    if not 0 < share < 1:
        raise MupscaleError(f"held_out is {share}, but must lie between 0 and 1")
    if rows < 2:
        raise MupscaleError(
            f"{name} has {rows} row{'s' * (rows != 1)}: at least 2 are needed, to train and to evaluate on"
        )
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[torch.randperm(rows, generator=generator(seed, "split"))[: min(max(round(share * rows), 1), rows - 1)]] = (
        True
    )
    return chosen


def _check_memory(rows: int, inputs: int, table: str) -> None:
    """Refuse inputs that do not fit: a column of words takes two bytes a cell in a file, and 400 as numbers."""
    columns_and_table_and_parts = 3  # all are held for a moment
    needed = columns_and_table_and_parts * torch.float32.itemsize * rows * inputs
    free = available_memory()
    if free is not None and needed > free:
        raise MupscaleError(
            f"{table}: {rows:,} rows with {inputs:,} inputs (each word of a column is one) take "
            f"{describe_shortage(needed, free)}: leave out columns of words (skip), or use fewer rows"
        )


def _encode_target(
    name: str, parts: Sequence[Columns], train: Tensor, settings: TableSettings
) -> tuple[Tensor, list[str], tuple[float, float]]:
    """Classes from 0, with their labels; or numbers, with none, and the mean and standard deviation they had."""
    values, table = _joined(name, parts), parts[0].name
    is_text = values.dtype == object
    for part in () if is_text else parts:
        _refuse_where(~np.isfinite(part.values[name]), part, name, "a target must be finite")
    distinct = sorted(set(values)) if is_text else np.unique(values).tolist()
    task = settings.task
    if task is None and not is_text and any(value != int(value) for value in distinct):
        task = "regression"
    elif task is None and not is_text and len(distinct) > _MOST_CLASSES:
        raise MupscaleError(
            f"{table}: the target {name!r} holds {len(distinct)} whole numbers: are they classes or amounts? "
            f"Say task: classification or task: regression"
        )
    if task == "regression":
        if is_text:
            raise MupscaleError(
                f"{table}: the target {name!r} holds words such as {show_short(distinct[0])}, but regression needs "
                f"numbers"
            )
        y = torch.from_numpy(values)[:, None]
        if not settings.standardise:
            return y.float(), [], (0.0, 1.0)
        std, mean = map(float, torch.std_mean(y[train]))
        std = std if std > 0 else 1.0
        return ((y - mean) / std).float(), [], (mean, std)
    if len(distinct) > max(len(values) // 2, 2):
        raise MupscaleError(
            f"{table}: the target {name!r} has {len(distinct)} classes in {len(values)} rows: is it an identifier? "
            f"Name the column to predict (target)"
        )
    place = {label: number for number, label in enumerate(distinct)}
    labels = [label if is_text else f"{label:g}" for label in distinct]
    return torch.tensor([place[value] for value in values.tolist()]), labels, (0.0, 1.0)


def _joined(name: str, parts: Sequence[Columns]) -> NDArray[Any]:
    values = [part.values[name] for part in parts]
    if len({value.dtype == object for value in values}) > 1:
        raise MupscaleError(
            f"column {name!r} holds numbers in one of {parts[0].name} and {parts[1].name}, and words in the other"
        )
    return np.concatenate(values)


def _refuse_where(wrong: NDArray[np.bool_], table: Columns, name: str, problem: str) -> None:
    if wrong.any():
        table.refuse(name, int(wrong.argmax()), problem)


@dataclass(frozen=True)
class _Column:
    """A column of inputs: its words, each of which is an input; or numbers, and how they are filled and scaled."""

    name: str
    words: Sequence[str] | None = None
    fill: float = 0.0
    mean: float = 0.0
    std: float = 1.0
    is_binary: bool = False

    @property
    def shown(self) -> list[str]:
        return [self.name] if self.words is None else [f"{self.name}={word}" for word in self.words]

    def encode(self, table: Columns) -> Tensor:
        values = table.values[self.name]
        if self.words is not None:
            place = {word: number for number, word in enumerate(self.words)} | {None: len(self.words)}
            texts = _words(values)
            for row in (row for row, text in enumerate(texts) if text not in place):
                problem = f"no training row has {self.name}={texts[row]}, so the model has no input for it"
                table.refuse(self.name, row, problem)
            return torch.eye(len(place))[torch.tensor([place[text] for text in texts])][:, :-1]
        if values.dtype == object:
            raise MupscaleError(
                f"{table.name}: column {self.name!r} holds words, and numbers where the model was trained"
            )
        _refuse_where(np.isinf(values), table, self.name, "the number is infinite, and must be finite")
        filled = np.where(np.isnan(values), self.fill, values)
        if self.is_binary:
            wrong = (filled != 0) & (filled != 1)
            _refuse_where(wrong, table, self.name, "the column has 0 and 1 alone in training")
        return torch.from_numpy((filled - self.mean) / self.std).float()[:, None]


def _learn(name: str, parts: Sequence[Columns], train: Tensor, settings: TableSettings) -> _Column:
    """What a column is, from the rows to train on; words, and whether a column is binary, from all."""
    values = _joined(name, parts)
    if values.dtype == object or name in settings.categories:
        words = sorted({text for text in _words(values) if text is not None})
        if len(words) > _MOST_CATEGORIES:
            remedy = "to train on text, tokenize it first (mupscale data tokenize)"
            if all(_is_number(word.replace(".", "").replace(",", ".")) for word in words):
                remedy = "if its numbers have decimal commas, write them with points"
            raise MupscaleError(
                f"{parts[0].name}, column {name!r} holds {len(words)} different texts, such as "
                f"{show_short(words[0])}: leave the column out (skip: [{name}]); {remedy}"
            )
        return _Column(name, words)
    column = torch.from_numpy(values)
    gaps = column.isnan()
    fill = float(column[train & ~gaps].mean().nan_to_num())
    column = torch.where(gaps, fill, column)
    if bool(((column == 0) | (column == 1)).all()):
        return _Column(name, fill=fill, is_binary=True)
    if not settings.standardise:
        return _Column(name, fill=fill)
    std, mean = torch.std_mean(column[train])
    return _Column(name, fill=fill, mean=float(mean), std=float(std) if std > 0 else 1.0)


def _words(values: NDArray[Any]) -> list[str | None]:
    """A column as words; numbers in it, too."""
    texts = zip(values, _gaps(values), strict=True)
    return [None if gap else value if isinstance(value, str) else f"{value:g}" for value, gap in texts]


HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""What the part to evaluate on is called in a mapping of parts."""

_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)
_TAKEN = (
    "a torch.utils.data.Dataset or DataLoader, arrays (x, y), a DataFrame, a datasets.Dataset, or a pair of these "
    "to train and to evaluate on"
)


def as_data(
    source: Any,
    *,
    inputs: str | None = None,
    target: str | None = None,
    held_out: float = 0.1,
    split_seed: int = 0,
    **table: Any,
) -> Data:
    """Any data of yours as a recipe takes it. A recipe's `data` calls it on what a function of yours returns.

    source: a torch.utils.data.Dataset or DataLoader, arrays (x, y), a DataFrame, a datasets.Dataset; or two of them,
        to train and to evaluate on: a pair, a mapping of "train" and "test", or (x, y, test_x, test_y).
    inputs, target: what to read from examples that have names.
    held_out: without a second part, the share of rows to evaluate on, which `split_seed` chooses.
    table: of tables with names: skip, task, categories, missing and standardise, as in `TableFile`.

    The recipe decides on batches and their order: of a DataLoader its dataset and `collate_fn` are taken. Random
    numbers that an example draws, to augment it, follow from the seed and its position, so that a resume is exact.

    >>> x, y = np.random.rand(20, 3), np.arange(20) % 2
    >>> data = as_data((x, y))
    >>> data.size, data.classes
    (18, 2)
    """
    if isinstance(source, Data):
        return source
    train, test = _parts(source)
    if _is_arrays(train):
        if test is not None and not _is_arrays(test):
            raise MupscaleError(f"the part to train on is a pair of arrays, and the one to evaluate on a {_name(test)}")
        x, y = _pair(train)
        if test is not None:
            return Table(Split(x, y, *_pair(test)))
        chosen = choose_held_out(len(x), held_out, split_seed, "the data")
        return Table(Split(x[~chosen], y[~chosen], x[chosen], y[chosen]))
    if _is_table(train) and (test is None or _is_table(test)):
        tables = [columns_of(_name(part), _table(part)) for part in (train, test) if part is not None]
        shares: dict[str, Any] = {"held_out": held_out, "split_seed": split_seed}
        settings = TableSettings(target, None if inputs is None else [inputs], **shares, **table)
        return TableFile.of(tables[0], tables[1] if test is not None else None, settings)
    if table:
        raise MupscaleError(f"{next(iter(table))} is for tables whose columns have names, and not for {_name(train)}")
    whole = _indexed(train)
    if test is not None:
        return IndexedData(whole, _indexed(test), inputs, target)
    chosen = choose_held_out(len(whole.rows), held_out, split_seed, whole.name)
    kept, other = (whole._replace(rows=part.nonzero()[:, 0].tolist()) for part in (~chosen, chosen))
    return IndexedData(kept, other, inputs, target)


def _parts(source: Any) -> tuple[Any, Any]:
    if isinstance(source, Mapping):  # a datasets.DatasetDict is one, too
        held_out = [name for name in HELD_OUT if name in source]
        if "train" in source and held_out:
            return source["train"], source[held_out[0]]
        if "train" in source and len(source) == 1:
            return source["train"], None
        if not all(_is_array(value) for value in source.values()):
            raise MupscaleError(
                f"data by name needs 'train' and 'test', but has {', '.join(map(str, source)) or 'nothing'}"
            )
        return source, None
    if isinstance(source, tuple | list) and len(source) == 4 and all(map(_is_array, source)):
        return tuple(source[:2]), tuple(source[2:])
    if isinstance(source, tuple | list) and len(source) == 2 and not all(map(_is_array, source)):
        return source[0], source[1]
    return source, None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor)


def _is_arrays(part: Any) -> bool:
    return (isinstance(part, tuple | list) and len(part) == 2 and all(map(_is_array, part))) or (
        isinstance(part, TensorDataset) and len(part.tensors) == 2
    )


def _pair(part: Any) -> Batch:
    arrays = part.tensors if isinstance(part, TensorDataset) else part
    for array in (each for each in arrays if not isinstance(each, Tensor)):
        if array.dtype.kind not in "fiub":
            raise MupscaleError(
                f"an array holds {array.dtype}, and not numbers: a table with words is a DataFrame or a file"
            )
    x, y = (each if isinstance(each, Tensor) else torch.from_numpy(np.ascontiguousarray(each)) for each in arrays)
    if len(x) != len(y) or not len(x):
        raise MupscaleError(f"there must be as many inputs as targets, and some, but there are {len(x)} and {len(y)}")
    for what, values in (("inputs", x), ("targets", y)):
        if values.is_floating_point() and not (fine := values.isfinite().reshape(len(values), -1).all(1)).all():
            row = int((~fine).nonzero()[0])
            raise MupscaleError(f"the {what} of row {row} are not finite: fill them in, or leave that row out")
    return plain_inputs(x), plain_targets(y)


def plain_inputs(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs as models take them: pictures in bytes from 0 to 1, as torchvision's ToTensor has them."""
    return x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype) if x.is_floating_point() else x.long()


def plain_targets(y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets as losses take them: classes as int64; numbers in a column, so that they meet a model's one output."""
    return y.long() if not y.is_floating_point() else (y[:, None] if y.dim() == 1 else y).to(dtype)


def _is_table(part: Any) -> bool:
    """A DataFrame, arrays by name, or a datasets.Dataset whose examples are rows of single values."""
    if isinstance(part, Mapping):
        return bool(part) and all(_is_array(value) for value in part.values())
    if hasattr(part, "with_format"):
        first = part.with_format(None)[0] if len(part) else {}
        return all(value is None or isinstance(value, int | float | str | bool) for value in first.values())
    return hasattr(part, "columns") and hasattr(part, "iloc")


def _table(part: Any) -> Mapping[str, Any]:
    if isinstance(part, Mapping):
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in part.items()}
    if hasattr(part, "with_format"):
        columns: Mapping[str, Any] = part.with_format(None)[:]
        return {name: np.array(values) for name, values in columns.items()}
    return {str(name): part[name].to_numpy() for name in part.columns}


def _name(part: Any) -> str:
    return f"the {type(part).__name__}"


class _Part(NamedTuple):
    """Rows of a data set that are asked for by number, and what makes a batch of examples."""

    dataset: Any
    rows: Sequence[int]
    collate: Callable[[list[Any]], Any]

    @property
    def name(self) -> str:
        return _name(self.dataset)


def _indexed(part: Any) -> _Part:
    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(part, DataLoader):
        if not isinstance(part.dataset, IterableDataset) and not isinstance(part.sampler, _SAMPLERS):
            raise MupscaleError(
                f"the DataLoader chooses its rows with a {type(part.sampler).__name__}, but a recipe orders the rows "
                f"itself, which makes a resume exact: give a Dataset with the rows that you want"
            )
        part, collate = part.dataset, part.collate_fn
    if hasattr(part, "with_format"):
        part = part.with_format("torch")
    if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        if isinstance(part, IterableDataset | Iterator):
            raise MupscaleError(
                f"{_name(part)} can only be read from its beginning, but a resumed run asks for any row: give a "
                f"Dataset with __len__ and __getitem__, such as list(…); for text, mupscale data tokenize"
            )
        raise MupscaleError(f"{_name(part)} is no data: give {_TAKEN}")
    return _Part(part, range(len(part)), collate)


class IndexedData(Data):
    """Examples that are read one by one when they are asked for, from anything with __len__ and __getitem__."""

    rows_on = torch.device("cpu")

    def __init__(self, train: _Part, test: _Part, inputs: str | None, target: str | None) -> None:
        for part, what in ((train, "train"), (test, "evaluate")):
            if not len(part.rows):
                raise MupscaleError(f"{part.name} has no rows to {what} on")
        self.train, self.test, self._names = train, test, (inputs, target)
        self._dtype = torch.float32
        x, y = self.examples(torch.zeros(1, dtype=torch.int64))
        if y.dim() == 2 and x.shape == y.shape and not y.is_floating_point():
            self.unit, self.per_example = "tokens", y.shape[1]
        else:
            self.classes = _classes(train.dataset, target)

    @property
    def size(self) -> int:
        return len(self.train.rows)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> IndexedData:
        self.device, self._dtype = device, dtype
        return self

    def examples(self, rows: Tensor) -> Batch:
        """These rows; what they draw at random depends on the row alone."""
        places = rows.tolist()
        return self._read(self.train, places, [derive(0, "row", row) for row in places])

    def batch(self, seed: int, start: int, count: int) -> Batch:
        """A stretch of the stream; what its examples draw at random depends on the seed and their place in it."""
        draws = [derive(seed, "draws", position) for position in range(start, start + count)]
        return self._read(self.train, self._order(seed).rows(start, count).tolist(), draws)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for start in range(0, len(self.test.rows), batch):
            places = range(start, min(start + batch, len(self.test.rows)))
            yield self._read(self.test, places, [derive(0, "row", row) for row in places])

    def _read(self, part: _Part, places: Sequence[int], draws: Sequence[int]) -> Batch:
        items, rows = [], [part.rows[place] for place in places]
        with _drawing() as seed:
            for row, draw in zip(rows, draws, strict=True):
                seed(draw)
                try:
                    items.append(part.dataset[row])
                except Exception as error:  # code of the user's
                    said = f"{type(error).__name__}: {error}"
                    raise MupscaleError(f"row {row} of {part.name} cannot be read: {said}") from error
            try:
                batch = part.collate(items)
            except (TypeError, RuntimeError, ValueError) as error:
                raise MupscaleError(_explain(part.name, rows, items, error)) from error
        x, y = _pick(batch, *self._names, part.name)
        return plain_inputs(x, self._dtype).to(self.device), plain_targets(y, self._dtype).to(self.device)


@contextmanager
def _drawing() -> Iterator[Callable[[int], None]]:
    """Seeds the generators that code of users draws from; they are as before afterwards."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        random.seed(value)
        np.random.seed(value % (1 << 32))

    try:
        yield seed
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def _pick(batch: Any, inputs: str | None, target: str | None, name: str) -> Batch:
    """Inputs and targets of a batch: a pair, or by name."""
    if isinstance(batch, Mapping):
        for asked in (inputs, target):
            if asked is not None and asked not in batch:
                raise MupscaleError(f"the examples of {name} have no {asked!r}; they have {', '.join(batch)}")
        target = target or next((each for each in TARGETS if each in batch), None)
        ids, others = batch.get("input_ids"), [n for n, v in batch.items() if n != target and isinstance(v, Tensor)]
        if inputs is None and isinstance(ids, Tensor) and (target is None or batch[target].shape == ids.shape):
            # text: every token's target is the next
            batch = ids[:, :-1], (ids if target is None else batch[target])[:, 1:]
        elif target is None or (inputs is None and len(others) != 1):
            raise MupscaleError(
                f"which of {', '.join(batch)} is the input of {name}, and which the target? Return "
                f"mupscale.data.as_data(…, inputs=NAME, target=NAME)"
            )
        else:
            batch = batch[inputs or others[0]], batch[target]
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        kind = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise MupscaleError(f"an example of {name} is {kind}, but must be a pair of an input and a target")
    for what, value in zip(("input", "target"), batch, strict=True):
        if not isinstance(value, Tensor):
            is_text = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)
            raise MupscaleError(
                f"the {what} of {name} is {show_short(value)} and not a tensor: give tensors, numpy arrays or numbers"
                + (", and tokenize text first (mupscale data tokenize)" if is_text else "")
            )
    return batch[0], batch[1]


def _classes(dataset: Any, target: str | None) -> int | None:
    """How many classes there are, where a dataset says so: as torchvision's and `datasets`' do."""
    features = getattr(dataset, "features", None)
    for name in (target, *TARGETS):
        if isinstance(features, Mapping) and isinstance(count := getattr(features.get(name), "num_classes", None), int):
            return count
    classes = getattr(dataset, "classes", None)
    return len(classes) if isinstance(classes, list | tuple) else None


def _explain(name: str, rows: Sequence[int], items: Sequence[Any], error: Exception) -> str:
    """Which row does not go with the first, and how."""
    first = _shape(items[0])
    for row, item in zip(rows, items, strict=True):
        if (shape := _shape(item)) != first:
            return (
                f"rows of {name} cannot be joined into a batch: row {row} is {shape}, and row {rows[0]} is {first}; "
                f"resize or pad them in the dataset, or give a DataLoader with a collate_fn"
            )
    return (
        f"rows of {name} cannot be joined into a batch: row {rows[0]} is {first} "
        f"({str(error).splitlines()[0][:100]}); return tensors, numpy arrays or numbers (for images, through a "
        f"transform such as torchvision's ToTensor)"
    )


def _shape(item: Any) -> str:
    if isinstance(item, Mapping):
        return ", ".join(f"{name}: {_shape(value)}" for name, value in item.items())
    if isinstance(item, tuple | list):
        return f"({', '.join(map(_shape, item))})" if len(item) <= 4 else f"{len(item)} values"
    return f"{type(item).__name__} {tuple(item.shape)}" if hasattr(item, "shape") else type(item).__name__
