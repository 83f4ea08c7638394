"""A table of your own: columns of numbers and words become inputs and a target.

What a column is, is read off its cells by one rule each, and what cannot be told is asked for. Errors name the column,
the row and the remedy.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mupscale.data.embedded import Split, standardise
from mupscale.data.tabular import Table, open_maybe_zipped
from mupscale.system import MupscaleError, generator, require, show_short

Task = Literal["classification", "regression"]
Missing = Literal["refuse", "drop", "mean"]
TARGETS = ("label", "labels", "target", "y")
"""What a target is called where nobody says it."""

_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""What counts as empty in a column of numbers, in capitals or not; among words only a cell with nothing in it does."""
_FILLS = ("missing: mean fills in the column's mean", "missing: mean counts it as none of the column's words")
_MOST_CLASSES, _MOST_CATEGORIES, _ROWS_AT_ONCE = 20, 100, 1 << 16


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
        """Number of rows."""
        return len(next(iter(self.values.values()), ()))

    def refuse(self, column: str, row: int, problem: str) -> NoReturn:
        """An error at one cell."""
        place = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
        raise MupscaleError(f"{self.name}, {place}, column {column!r}: {problem}")


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


@dataclass(frozen=True)
class EncodedTable:
    """Inputs and targets in two parts; the names of the inputs, and of the classes, where the target has some."""

    split: Split
    inputs: list[str]
    labels: list[str] = field(default_factory=list)


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
        self._take(partial(_read_files, [path] if test is None else [path, test], settings), settings)

    @classmethod
    def of(cls, train: Columns, test: Columns | None, settings: TableSettings) -> TableFile:
        """The same from columns that are in memory."""
        table = cls.__new__(cls)
        table._take(partial(list, [train] if test is None else [train, test]), settings)
        return table

    def _take(self, read: Callable[[], list[Columns]], settings: TableSettings) -> None:
        self._read, self._settings = read, settings
        encoded = encode_columns(*read(), settings=settings)
        self.inputs, self.labels = encoded.inputs, encoded.labels
        Table.__init__(self, encoded.split, len(encoded.labels) or None)

    def encode(self, path: str) -> Tensor:
        """The inputs of another file's rows, as those that were trained on: for predictions. It needs no target.

        Numbers are standardised by the training rows of this table, which is read once more.
        """
        more = read_columns(Path(path).expanduser(), self._settings.takes_words)
        x, shown, train = _encode_more(self._read(), more, self._settings)
        if unknown := [name for name in shown if name not in self.inputs]:
            raise MupscaleError(f"{path}: no training row has {unknown[0]}, so the model has no input for it")
        if not torch.allclose(x[: len(train)][train], self.split.train_x.cpu().float(), atol=0.05):
            raise MupscaleError(f"{path}: a column holds other numbers than 0 and 1, which are all it has to train on")
        return x[len(train) :]


def _read_files(paths: Sequence[str], settings: TableSettings) -> list[Columns]:
    return [read_columns(Path(path).expanduser(), settings.takes_words) for path in paths]


def read_columns(path: Path, takes_words: Callable[[str], bool] = lambda name: False) -> Columns:
    """The columns of a CSV, TSV or Parquet file; takes_words: whether a CSV's column is read as words at any rate."""
    if not path.is_file():
        raise MupscaleError(f"there is no file {path}")
    if path.suffix in (".parquet", ".pq"):
        return _read_parquet(path)
    if not {".csv", ".tsv", ".txt", ".data"} & set(path.suffixes):
        raise MupscaleError(f"{path} is none of .csv, .csv.gz, .tsv and .parquet, which are read as tables")
    try:
        with open_maybe_zipped(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            return _read_csv(path, text, takes_words)
    except UnicodeDecodeError as error:
        raise MupscaleError(f"{path} is no text in UTF-8 at byte {error.start}: convert it") from None
    except csv.Error as error:
        raise MupscaleError(f"{path} is no CSV that can be read: {error}") from None
    except (EOFError, OSError) as error:
        raise MupscaleError(f"{path} cannot be read: {error}") from None


def _read_csv(path: Path, text: io.TextIOWrapper, takes_words: Callable[[str], bool]) -> Columns:
    """Every column as most of its cells are: numbers, or texts."""
    first = text.readline()
    reader = csv.reader(chain([first], text), delimiter=max(",;\t", key=first.count))
    names = [name.strip() for name in next(reader, [])]
    if not names or any(name == "" or _is_number(name) for name in names):
        raise MupscaleError(f"{path}: its first line must name the columns, but is {show_short(first.strip())}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise MupscaleError(f"{path}: two columns are called {twice!r}: give each a name of its own")
    pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    empty = dict[str, str]()
    lines: list[NDArray[np.int64]] = []
    numbered = ((reader.line_num, row) for row in reader if row)
    while rows := list(islice(numbered, _ROWS_AT_ONCE)):
        for number, row in rows:
            if len(row) != len(names):
                raise MupscaleError(f"{path}, line {number} has {len(row)} cells, and the first line {len(names)}")
        lines.append(np.array([number for number, _ in rows]))
        for name, cells in zip(names, zip(*(row for _, row in rows), strict=True), strict=True):
            piece = _as_texts(cells) if takes_words(name) else _numbers_or_texts(cells)
            if name not in empty and (piece.dtype == object or np.isnan(piece).any()):
                empty.update((name, cell.strip()) for cell in islice(filter(_is_empty, cells), 1))
            pieces[name].append(piece)
    if not lines:
        raise MupscaleError(f"{path} has a line of names and no rows")
    table = Columns(str(path), {}, np.concatenate(lines), empty=empty)
    words = {name for name in names if takes_words(name) or not _holds_numbers(name, pieces[name], table)}
    if any(piece.dtype != object for name in words for piece in pieces[name]):  # whose texts are gone
        return read_columns(path, lambda name: name in words)
    for name in names:
        parts = pieces[name] if name in words else [_as_numbers(piece) for piece in pieces[name]]
        table.values[name] = np.concatenate(parts)
    return table


def _is_empty(cell: str | None) -> bool:
    return cell is None or cell.strip().lower() in _MISSING


def _as_texts(cells: Sequence[str]) -> NDArray[Any]:
    return np.array([cell.strip() or None for cell in cells], dtype=object)


def _numbers_or_texts(cells: Sequence[str]) -> NDArray[Any]:
    """Some cells of a column: as numbers, which take less memory, if all are."""
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        return _as_texts(cells)


def _as_numbers(piece: NDArray[Any]) -> NDArray[Any]:
    if piece.dtype != object:
        return piece
    return np.array([np.nan if _is_empty(cell) else float(cell) for cell in piece])


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
            f"{show_short(next(iter(words)))} is no number, as most cells of the column are: mend it, leave the column "
            f"out (skip: [{name}]), or take its cells as names (categories: [{name}])",
        )
    return not words


def _as_column(values: NDArray[Any]) -> NDArray[Any]:
    """Any one-dimensional array as columns have it."""
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    missing = [v is None or (isinstance(v, float) and v != v) for v in values.tolist()]
    return np.array([None if gone else str(v) for v, gone in zip(values.tolist(), missing, strict=True)], dtype=object)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_parquet(path: Path) -> Columns:
    reason = f"{path} needs pyarrow to be read"
    pa, parquet = (require(name, reason=reason) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise MupscaleError(f"{path} is no whole Parquet file: {str(error).splitlines()[0]}") from None
    values, unread = dict[str, NDArray[Any]](), dict[str, str]()
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            values[name] = np.array(column.to_pylist(), dtype=object)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            values[name] = np.array([np.nan if v is None else v for v in column.to_pylist()], dtype=np.float64)
        else:
            unread[name] = str(kind)
    return Columns(str(path), values, unread=unread)


def columns_of(name: str, values: Mapping[str, Any]) -> Columns:
    """Arrays by name, such as a DataFrame's, as columns.

    >>> columns_of("plants", {"height": np.array([3, 1]), "kind": np.array(["rose", "moss"])}).rows
    2
    """
    return Columns(name, {str(key): _as_column(np.asarray(value)) for key, value in values.items()})


def _encode_more(parts: Sequence[Columns], more: Columns, settings: TableSettings) -> tuple[Tensor, list[str], Tensor]:
    """Inputs of a table and of further rows behind them, their names, and which of the table's rows are to train on."""
    target = _find_target(parts[0], settings)
    names = _find_inputs(parts[0], target, settings)
    for name in names:
        if name not in more.values:
            raise MupscaleError(f"{more.name} has no column {name!r}, which {parts[0].name} has")
        if settings.missing != "mean" and (gap := _gaps(more.values[name])).any():
            more.refuse(name, int(gap.argmax()), "the cell is empty: fill it, or train with missing: mean")
    parts = [_filled(part, [*names, target], settings) for part in parts]
    train = ~_held_out(parts, settings)
    mixed = {name: _joined(name, [*parts, more]) for name in names}
    fitted = torch.cat([train, torch.zeros(more.rows, dtype=torch.bool)])
    return *_encode_inputs(mixed, [*parts, more], fitted, settings), train


def encode_columns(train: Columns, test: Columns | None = None, *, settings: TableSettings) -> EncodedTable:
    """The numbers that a model sees."""
    target = _find_target(train, settings)
    names = _find_inputs(train, target, settings)
    used = [*names, target]
    if test is not None:
        for name in used:
            if name not in test.values:
                raise MupscaleError(f"{test.name} has no column {name!r}, which {train.name} has")
    parts = [_filled(part, used, settings) for part in (train, test) if part is not None]
    held_out = _held_out(parts, settings)
    mixed = {name: _joined(name, parts) for name in used}
    y, labels = _encode_target(mixed[target], target, parts, ~held_out, settings)
    x, shown = _encode_inputs({name: mixed[name] for name in names}, parts, ~held_out, settings)
    return EncodedTable(Split(x[~held_out], y[~held_out], x[held_out], y[held_out]), shown, labels)


def _find_target(table: Columns, settings: TableSettings) -> str:
    if settings.target is None:
        known = [name for name in TARGETS if name in table.values]
        if len(known) == 1:
            return known[0]
        raise MupscaleError(f"which column of {table.name} is the target? Set target to one of {_listed(table.values)}")
    _check_known(table, [settings.target], "target")
    if settings.target in table.unread:
        raise MupscaleError(f"{table.name}: the target {settings.target!r} is of type {table.unread[settings.target]}")
    return settings.target


def _find_inputs(table: Columns, target: str, settings: TableSettings) -> list[str]:
    _check_known(table, settings.inputs or (), "inputs")
    _check_known(table, settings.skip, "skip")
    _check_known(table, settings.categories, "categories")
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


def _check_known(table: Columns, names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in table.values and name not in table.unread:
            raise MupscaleError(f"{table.name} has no column {name!r} ({what}); it has {_listed(table.values)}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:20]) + (f" … ({len(names)} in all)" if len(names) > 20 else "")


def _filled(table: Columns, names: Sequence[str], settings: TableSettings) -> Columns:
    """The table without the rows that a gap drops; a gap that is not allowed is an error."""
    gaps = {name: _gaps(table.values[name]) for name in names}
    gone = np.zeros(table.rows, dtype=bool)
    for name, gap in gaps.items():
        is_target = name == names[-1]
        if not gap.any():
            continue
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
        raise MupscaleError(f"{table.name}: no row is without an empty cell, so none is left")
    kept = {name: table.values[name][~gone] for name in names}
    return Columns(table.name, kept, None if table.lines is None else table.lines[~gone])


def _gaps(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype == object:
        return np.array([value is None for value in values], dtype=bool)
    gaps: NDArray[np.bool_] = np.isnan(values)
    return gaps


def _held_out(parts: Sequence[Columns], settings: TableSettings) -> Tensor:
    """Which rows are to evaluate on: those of the second part, or some of the first."""
    rows = parts[0].rows
    if len(parts) == 2:
        return torch.arange(rows + parts[1].rows) >= rows
    return choose_held_out(rows, settings.held_out, settings.split_seed, parts[0].name)


def choose_held_out(rows: int, share: float, seed: int, name: str) -> Tensor:
    """Which of so many rows are to evaluate on: a share of them, at least one, chosen by the seed.

    >>> choose_held_out(10, 0.2, 0, "a table").sum()
    tensor(2)
    """
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


def _joined(name: str, parts: Sequence[Columns]) -> NDArray[Any]:
    values = [part.values[name] for part in parts]
    if len({value.dtype == object for value in values}) > 1:
        raise MupscaleError(
            f"column {name!r} holds numbers in one of {parts[0].name} and {parts[1].name}, and words in the other"
        )
    return np.concatenate(values)


def _refuse(parts: Sequence[Columns], column: str, row: int, problem: str) -> NoReturn:
    for part in parts:
        if row < part.rows:
            part.refuse(column, row, problem)
        row -= part.rows
    raise AssertionError("no such row")


def _encode_target(
    values: NDArray[Any], name: str, parts: Sequence[Columns], train: Tensor, settings: TableSettings
) -> tuple[Tensor, list[str]]:
    """Classes from 0, with their labels; or numbers, with none."""
    is_text = values.dtype == object
    if not is_text and not np.isfinite(values).all():
        _refuse(parts, name, int((~np.isfinite(values)).argmax()), "a target must be finite")
    distinct = sorted(set(values)) if is_text else np.unique(values).tolist()
    if (settings.task or _guess_task(name, parts, is_text, distinct)) == "regression":
        if is_text:
            raise MupscaleError(
                f"{parts[0].name}: the target {name!r} holds words such as {show_short(distinct[0])}, but regression "
                f"needs numbers"
            )
        y = torch.from_numpy(values)[:, None]
        return (standardise(y, train) if settings.standardise else y).float(), []
    if len(distinct) > max(len(values) // 2, 2):
        raise MupscaleError(
            f"{parts[0].name}: the target {name!r} has {len(distinct)} classes in {len(values)} rows: is it an "
            f"identifier? Name the column to predict (target)"
        )
    place = {label: number for number, label in enumerate(distinct)}
    labels = [label if is_text else f"{label:g}" for label in distinct]
    return torch.tensor([place[value] for value in values.tolist()]), labels


def _guess_task(name: str, parts: Sequence[Columns], is_text: bool, distinct: Sequence[Any]) -> Task:
    if is_text:
        return "classification"
    if any(value != int(value) for value in distinct):
        return "regression"
    if len(distinct) <= _MOST_CLASSES:
        return "classification"
    raise MupscaleError(
        f"{parts[0].name}: the target {name!r} holds {len(distinct)} whole numbers: are they classes or amounts? "
        f"Say task: classification or task: regression"
    )


def _encode_inputs(
    columns: Mapping[str, NDArray[Any]], parts: Sequence[Columns], train: Tensor, settings: TableSettings
) -> tuple[Tensor, list[str]]:
    """A column for each of numbers, and one for each word of the others."""
    encoded, shown = list[Tensor](), list[str]()
    for name, values in columns.items():
        if values.dtype == object or name in settings.categories:
            texts = [
                None if gap else v if isinstance(v, str) else f"{v:g}"
                for v, gap in zip(values, _gaps(values), strict=True)
            ]
            words = sorted({text for text in texts if text is not None})
            if len(words) > _MOST_CATEGORIES:
                raise MupscaleError(
                    f"{parts[0].name}, column {name!r} holds {len(words)} different texts, such as "
                    f"{show_short(words[0])}: leave the column out (skip: [{name}]); to train on text, tokenize it "
                    f"first (mupscale data tokenize)"
                )
            place = {word: number for number, word in enumerate(words)} | {None: len(words)}
            hot = torch.eye(len(words) + 1)[torch.tensor([place[text] for text in texts])]
            encoded.append(hot[:, :-1])
            shown += [f"{name}={word}" for word in words]
            continue
        if np.isinf(values).any():
            _refuse(parts, name, int(np.isinf(values).argmax()), "the number is infinite, and must be finite")
        column = torch.from_numpy(values)
        if (gaps := column.isnan()).any():
            column = torch.where(gaps, column[train & ~gaps].mean().nan_to_num(), column)
        is_binary = bool(((column == 0) | (column == 1)).all())
        scaled = standardise(column[:, None], train) if settings.standardise and not is_binary else column[:, None]
        encoded.append(scaled.float())
        shown.append(name)
    return torch.cat(encoded, 1), shown
