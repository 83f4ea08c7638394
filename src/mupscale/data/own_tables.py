"""A table of your own: columns of numbers and words become inputs and a target.

What a column is, is read off its cells by one rule each, and what cannot be told is asked for. Errors name the column,
the row and the remedy.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mupscale.data.tabular import Split, Table, open_maybe_zipped
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
        return len(next(iter(self.values.values()), ()))

    def refuse(self, column: str, row: int, problem: str) -> NoReturn:
        place = f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"
        raise MupscaleError(f"{self.name}, {place}, column {column!r}: {problem}")

    def check_has(self, names: Iterable[str], what: str) -> None:
        """Refuse a table without one of these columns."""
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
        """The same from columns that are in memory."""
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
        x = torch.cat([torch.cat([column.encode(part) for column in self._columns], 1) for part in parts])
        y, self.labels, self._scale = _encode_target(target, parts, ~held_out, settings)
        Table.__init__(self, Split(x[~held_out], y[~held_out], x[held_out], y[held_out]), len(self.labels) or None)

    def encode(self, path: str) -> Tensor:
        """The inputs of another file's rows, as those that were trained on: for predictions. It needs no target."""
        more = read_columns(Path(path).expanduser(), self._settings.takes_words)
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
    reason = f"{path} needs pyarrow to be read"
    pa, parquet = (require(name, reason=reason) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise MupscaleError(f"{path} is not a complete Parquet file: {str(error).splitlines()[0]}") from None
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
    """Arrays by name, such as a DataFrame's, as columns."""
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
