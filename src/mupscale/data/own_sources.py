"""Your own data, as a recipe takes it: torch's Dataset and DataLoader, arrays, DataFrames, `datasets`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from mupscale.data.own_tables import TARGETS, TableFile, TableSettings, choose_held_out, columns_of
from mupscale.data.stream import Batch, Data
from mupscale.data.tabular import Split, Table
from mupscale.system import MupscaleError, derive, show_short

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
    (rows, collate), other = _indexed(train), None if test is None else _indexed(test)
    if other is None:
        chosen = choose_held_out(len(rows), held_out, split_seed, _name(rows))
        train, test = (Subset(rows, part.nonzero()[:, 0].tolist()) for part in (~chosen, chosen))
        return IndexedData(train, test, collate, collate, inputs, target)
    train, test = (Subset(part, range(len(part))) for part in (rows, other[0]))
    return IndexedData(train, test, collate, other[1], inputs, target)


def _parts(source: Any) -> tuple[Any, Any]:
    """What to train on, and what to evaluate on if that is another."""
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


def _indexed(part: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """A part whose rows can be asked for by number, and what makes a batch of them."""
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
    return part, collate


class IndexedData(Data):
    """Examples that are read one by one when they are asked for, from anything with __len__ and __getitem__."""

    rows_on = torch.device("cpu")

    def __init__(
        self,
        train: Subset[Any],
        test: Subset[Any],
        collate: Callable[[list[Any]], Any],
        test_collate: Callable[[list[Any]], Any],
        inputs: str | None,
        target: str | None,
    ) -> None:
        for part, what in ((train, "train"), (test, "evaluate")):
            if not len(part):
                raise MupscaleError(f"{_name(part.dataset)} has no rows to {what} on")
        self.train, self.test, self._names = train, test, (inputs, target)
        self._collate, self._test_collate = collate, test_collate
        self._dtype = torch.float32
        x, y = self.examples(torch.zeros(1, dtype=torch.int64))
        if y.dim() == 2 and x.shape == y.shape and not y.is_floating_point():
            self.unit, self.per_example = "tokens", y.shape[1]
        else:
            self.classes = _classes(train.dataset, target)

    @property
    def size(self) -> int:
        return len(self.train)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> IndexedData:
        self.device, self._dtype = device, dtype
        return self

    def examples(self, rows: Tensor) -> Batch:
        """These rows; what they draw at random depends on the row alone."""
        places = rows.tolist()
        return self._read(self.train, self._collate, places, [derive(0, "row", row) for row in places])

    def batch(self, seed: int, start: int, count: int) -> Batch:
        """A stretch of the stream; what its examples draw at random depends on the seed and their place in it."""
        draws = [derive(seed, "draws", position) for position in range(start, start + count)]
        return self._read(self.train, self._collate, self._order(seed).rows(start, count).tolist(), draws)

    def evaluation(self, batch: int) -> Iterator[Batch]:
        for start in range(0, len(self.test), batch):
            places = list(range(start, min(start + batch, len(self.test))))
            yield self._read(self.test, self._test_collate, places, [derive(0, "row", row) for row in places])

    def _read(
        self, part: Subset[Any], collate: Callable[[list[Any]], Any], rows: Sequence[int], draws: Sequence[int]
    ) -> Batch:
        items = []
        with _drawing() as seed:
            for row, draw in zip(rows, draws, strict=True):
                seed(draw)
                place = part.indices[row]
                try:
                    items.append(part.dataset[place])
                except Exception as error:  # code of the user's
                    raise MupscaleError(
                        f"row {place} of {_name(part.dataset)} cannot be read: {type(error).__name__}: {error}"
                    ) from error
            try:
                batch = collate(items)
            except (TypeError, RuntimeError, ValueError) as error:
                raise MupscaleError(_explain(part, rows, items, error)) from error
        x, y = _pick(batch, *self._names, _name(part.dataset))
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


def _explain(part: Subset[Any], rows: Sequence[int], items: Sequence[Any], error: Exception) -> str:
    """Which row does not go with the first, and how."""
    first = _shape(items[0])
    for row, item in zip(rows, items, strict=True):
        if (shape := _shape(item)) != first:
            return (
                f"rows of {_name(part.dataset)} cannot be joined into a batch: row {part.indices[row]} is {shape}, and "
                f"row {part.indices[rows[0]]} is {first}; resize or pad them in the dataset, or give a DataLoader with "
                f"a collate_fn"
            )
    return (
        f"rows of {_name(part.dataset)} cannot be joined into a batch: row {part.indices[rows[0]]} is {first} "
        f"({str(error).splitlines()[0][:100]}); return tensors, numpy arrays or numbers (for images, through a "
        f"transform such as torchvision's ToTensor)"
    )


def _shape(item: Any) -> str:
    if isinstance(item, Mapping):
        return ", ".join(f"{name}: {_shape(value)}" for name, value in item.items())
    if isinstance(item, tuple | list):
        return f"({', '.join(map(_shape, item))})" if len(item) <= 4 else f"{len(item)} values"
    return f"{type(item).__name__} {tuple(item.shape)}" if hasattr(item, "shape") else type(item).__name__
