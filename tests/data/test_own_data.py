"""Data of one's own: files, Datasets, loaders, arrays and tables with names, each by one line of a recipe."""

from __future__ import annotations

import gzip
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from commands import refused, told
from mupscale import MupscaleError
from mupscale.cli import main
from mupscale.data import TableFile, as_data
from mupscale.data.own_data import read_columns
from mupscale.train import RunFolder, read_snapshot
from refusals import refuses
from weights import identical

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text()
MODULE = "\n".join(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if block.startswith("# mine.py"))
LINES = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
PLANTS = "height,colour,kind\n" + "3.5,red,rose\n1,green,moss\n2.5,green,fern\n2,,fern\n" * 4


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's module and file."""
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine", None)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "plants.csv").write_text(PLANTS.replace("2,,fern\n", ""))
    yield tmp_path
    sys.modules.pop("mine", None)


def recipe(line: str, d_in: int, d_out: int) -> dict[str, Any]:
    model = {"class_path": "mupscale.models.MLP", "init_args": {"d_in": d_in, "d_out": d_out}}
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}}
    run = {"width": 4, "base": 4, "steps": 4, "batch": 4, "device": "cpu", "checkpoints": {"every": 2, "keep": 9}}
    return {"model": model, "optimizer": sgd, **run, **yaml.safe_load(line)}


@pytest.mark.quick("*Plants*", "*TableFile*")
@pytest.mark.parametrize("line", LINES)
def test_every_line_of_the_page_trains_and_resumes_to_the_bit(line: str, here: Path) -> None:
    """The first line of a file, and the Dataset, which draws at random, to the end; the others for two steps."""
    shape = (
        (3, 3) if "target: kind" in line else (5, 1) if "height" in line else (2, 2) if "plants}" in line else (3, 2)
    )
    Path("r.yaml").write_text(yaml.safe_dump(recipe(line, *shape)))
    assert main(["train", "r.yaml", "--steps", "2", "--out", "half"]) == 0
    if "target: kind" not in line and "Plants" not in line:
        return
    random.random(), torch.randn(3), np.random.rand()  # the generators stand elsewhere
    assert main(["train", "r.yaml", "--resume", "--out", "half"]) == 0
    assert main(["train", "r.yaml", "--out", "whole"]) == 0
    whole, half = (read_snapshot(RunFolder(n).checkpoint(4, sharded=False)).content.model for n in ("whole", "half"))
    assert identical(whole, half)


def write(tmp_path: Path, text: str, name: str = "t.csv") -> str:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv", "semicolons.csv"])
def test_a_file_becomes_inputs_and_classes(tmp_path: Path, name: str) -> None:
    separator = "\t" if "tsv" in name else ";" if "semi" in name else ","
    text = "﻿" + '"a",b,flag,word,y\n' + "".join(f'{i},{i * i}.5,{i % 2},"w{i % 3}",{i % 2 + 1}\n' for i in range(40))
    data = TableFile(write(tmp_path, text.replace(",", separator), name))
    assert data.inputs == ["a", "b", "flag", "word=w0", "word=w1", "word=w2"]
    assert (data.labels, data.classes, data.size) == (["1", "2"], 2, 36)
    assert data.split.train_x[:, :2].mean(0).abs().max() < 1e-6
    assert set(data.split.train_x[:, 2].tolist()) == {0.0, 1.0}
    assert torch.equal(data.split.train_y, data.split.train_x[:, 2].long())  # rows stay together
    assert torch.equal(data.split.train_x, TableFile(str(tmp_path / name)).split.train_x)


def test_a_number_that_is_no_class_is_regression_in_a_column(tmp_path: Path) -> None:
    data = TableFile(write(tmp_path, "a,price\n" + "".join(f"{i},{i * 1000}.5\n" for i in range(30))), "price")
    assert data.classes is None
    assert data.split.train_y.shape == (27, 1)
    assert abs(float(data.split.train_y.std()) - 1) < 1e-6
    prices = sorted(data.decode(torch.cat([data.split.train_y, data.split.test_y])))
    assert prices == pytest.approx([i * 1000 + 0.5 for i in range(30)], abs=0.01)
    raw = TableFile(str(tmp_path / "t.csv"), "price", standardise=False)
    assert float(raw.split.train_y.min()) % 1000 == 0.5
    assert raw.decode(raw.split.train_y[:1]) == [float(raw.split.train_y[0])]


def test_parquet_and_csv_give_the_same(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"a": [1, 2, None, 4], "b": [0.5, 1.5, 2.5, 3.5], "word": ["x", "y", "x", "y"], "y": ["p", "q", "p", "q"]}
    when = pa.array([0, 1, 2, 3], pa.timestamp("ms"))
    parquet.write_table(pa.table({**columns, "when": when}), tmp_path / "t.parquet")
    cells = zip(*columns.values(), strict=True)
    csv = write(
        tmp_path, "a,b,word,y\n" + "".join(",".join("" if c is None else str(c) for c in row) + "\n" for row in cells)
    )
    one = TableFile(csv, missing="mean")
    other = TableFile(str(tmp_path / "t.parquet"), skip=["when"], missing="mean")
    assert one.inputs == other.inputs
    assert identical(one.split, other.split)
    refuses(r"column 'when' is of type timestamp\[ms\].*skip: \[when\]", TableFile, str(tmp_path / "t.parquet"))


def test_two_files_share_words_and_scales(tmp_path: Path) -> None:
    train = write(tmp_path, "a,word,y\n" + "1,x,p\n3,y,q\n" * 3, "train.csv")
    data = TableFile(train, test=write(tmp_path, "y,word,a\nq,z,5\n", "test.csv"))
    assert data.inputs == ["a", "word=x", "word=y", "word=z"]
    assert (data.size, len(data.split.test_y)) == (6, 1)
    assert data.split.test_x[0, 0] > 2  # (5 - 2) / std of the training part


GOOD = "a,b,y\n" + "1,x,0\n2,y,1\n" * 5
BAD_TABLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a word among numbers": (
        GOOD + "oops,x,0\n",
        {},
        r"t\.csv, line 12, column 'a': 'oops' is not a number.*categories: \[a\]",
    ),
    "a word in the first line of numbers": (
        GOOD.replace("1,x", "unknown,x", 1),
        {},
        r"line 2, column 'a': 'unknown' is not a number, as most cells of the column are.*categories: \[a\]",
    ),
    "a word for an empty cell": (GOOD + "NA,x,0\n", {}, "line 12, column 'a': 'NA' counts as empty. missing: drop"),
    "no word": (GOOD + "1,,0\n", {}, "line 12, column 'b': the cell is empty.*mean counts it as none of the column's"),
    "an empty cell": (GOOD + ",x,0\n", {}, r"line 12, column 'a': the cell is empty. missing: drop.*skip: \[a\]"),
    "an empty target": (
        GOOD + "1,x,\n",
        {},
        "line 12, column 'y': the cell is empty. .*missing: mean drops these rows and fills the other cells",
    ),
    "an infinite number": (GOOD + "inf,x,0\n", {}, "line 12, column 'a': the number is infinite"),
    "too few cells": (GOOD + "1,x\n", {}, "line 12 has 2 cells, and the first line 3"),
    "no header": ("1,2,3\n4,5,6\n", {}, "its first line must name the columns, but is '1,2,3'"),
    "a name twice": ("a,a\n1,2\n", {}, "two columns are called 'a'"),
    "no rows": ("a,y\n", {}, "names of columns, but no rows"),
    "one row": ("a,y\n1,2\n", {}, "has 1 row: at least 2 are needed"),
    "an unknown target": (GOOD, {"target": "z"}, r"no column 'z' \(target\); it has a, b, y"),
    "no target": (GOOD, {"skip": ["q"]}, r"no column 'q' \(skip\)"),
    "which target": ("a,b\n1,2\n3,4\n", {}, "which column of .* is the target\\? Set target to one of a, b"),
    "nothing beside": ("y\n1\n2\n", {}, "no column beside its target 'y'"),
    "amounts or classes": ("a,y\n" + "".join(f"0,{i}\n" for i in range(30)), {}, "30 whole numbers.*task: regression"),
    "an identifier": ("a,y\n" + "".join(f"0,n{i}\n" for i in range(9)), {}, "9 classes in 9 rows: is it an identifier"),
    "words for numbers": (GOOD, {"target": "b", "task": "regression"}, "holds words such as 'x'"),
    "prose": (
        "t,y\n" + "".join(f"text {i},0\n" for i in range(200)),
        {},
        r"200 different texts.*skip: \[t\].*tokenize",
    ),
    "decimal commas": (
        "t;y\n" + "".join(f"1.{i:03},5;{i % 2}\n" for i in range(200)),
        {},
        r"such as '1\.000,5'.* decimal commas, write them with points",
    ),
    "a share": (GOOD, {"held_out": 1.5}, "held_out is 1.5"),
    "nothing left": ("a,y\n,1\n,0\n", {"missing": "drop"}, "every row has an empty cell"),
}


def test_filling_cells_drops_rows_without_a_target(tmp_path: Path) -> None:
    whole = TableFile(write(tmp_path, GOOD))
    filled = TableFile(write(tmp_path, GOOD + "1,x,\n,x,0\n"), missing="mean")
    assert (filled.size + len(filled.split.test_x)) - (whole.size + len(whole.split.test_x)) == 1
    assert (filled.dropped, filled.empty.total(), whole.dropped) == (1, 2, 0)


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_table_that_cannot_be_used_is_named_with_place_and_remedy(tmp_path: Path, case: str) -> None:
    text, settings, message = BAD_TABLES[case]
    refuses(message, TableFile, write(tmp_path, text), **settings)


@pytest.mark.parametrize("at_once", [1 << 16, 8])
def test_the_whole_column_tells_its_type_and_what_is_asked_for_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """In pieces, too, whose first hold numbers alone: their texts are read again, with their zeros."""
    monkeypatch.setattr("mupscale.data.own_data._CELLS_AT_ONCE", at_once)
    rows = "01,1,gas,0\n02,,None,1\n03,n/a,,0\nx,4,NA,1\ny,5,gas,0\nz,6,gas,1\nz,oops,gas,0\n"
    path = write(tmp_path, "code,rooms,heating,y\n" + rows)
    refuses("line 8, column 'rooms': 'oops' is not a number", TableFile, path, missing="mean")
    codes = [f"code={code}" for code in ("01", "02", "03", "x", "y", "z")]
    heating = ["heating=NA", "heating=None", "heating=gas"]
    assert TableFile(path, skip=["rooms"], missing="mean").inputs == [*codes, *heating]
    assert TableFile(path, inputs=["heating"], missing="mean").inputs == heating
    rooms = TableFile(path, categories=["rooms"], skip=["code", "heating"], missing="mean").inputs
    assert rooms == [f"rooms={word}" for word in ("1", "4", "5", "6", "n/a", "oops")]


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name, content, message in (
        ("t.xlsx", b"x", "is not a table"),
        ("t.csv", b"a,y\n\xff,1\n", "not UTF-8 text"),
        ("t.csv.gz", gzip.compress(b"a,y\n1,2\n" * 999)[:-20], "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        refuses(message, TableFile, str(tmp_path / name))
    refuses("there is no file", TableFile, str(tmp_path / "absent.csv"))


def write_parquet(path: Path, columns: dict[str, Any]) -> str:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), path)
    return str(path)


def test_a_parquet_file_that_stands_for_far_more_numbers_than_it_holds(tmp_path: Path) -> None:
    """A column of one value costs a file nothing: these 20 million rows are 250 kB, and would take gigabytes."""
    zeros = np.zeros(10_000_000)
    path = write_parquet(tmp_path / "t.parquet", {"a": zeros, "y": zeros})
    refuses(r"t.parquet has [0-9,]+ bytes and unpacks to more than 200 times as many", TableFile, path)


def test_a_text_that_many_rows_of_a_parquet_file_share_is_in_memory_once(tmp_path: Path) -> None:
    """As words written out these rows are 4 GB."""
    pa = pytest.importorskip("pyarrow")
    word = "x" * 100_000
    words = pa.DictionaryArray.from_arrays([0, None] * 20_000, [word])
    path = write_parquet(tmp_path / "t.parquet", {"word": words, "y": [0, 1] * 20_000})
    texts = read_columns(Path(path)).values["word"]
    assert {id(text) for text in texts[::2]} == {id(texts[0])}
    assert texts[0] == word
    assert texts[1] is None


def test_too_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at by itself: a hundred thousand would take a minute."""
    monkeypatch.setattr("mupscale.data.own_data._MOST_COLUMNS", 20)
    names = [f"c{number}" for number in range(21)]
    path = write(tmp_path, ",".join(names) + "\n" + ",".join("1" * len(names)) + "\n")
    said = r"has 21 columns, more than the 20 of a table.*return arrays \(x, y\)"
    refuses(said, TableFile, path)
    refuses(said, as_data, dict.fromkeys(names, np.zeros(3)))
    refuses(said, TableFile, write_parquet(tmp_path / "t.parquet", dict.fromkeys(names, np.zeros(1))))


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.data.own_data._MOST_LINE", 100)
    refuses("has a line of more than 100 characters", TableFile, write(tmp_path, "a,y\n1," + "2" * 200))


def test_words_that_would_not_fit_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.data.own_data.available_memory", lambda: 100)
    refuses(
        "16 rows with 3 inputs .* leave out columns of words",
        TableFile,
        write(tmp_path, PLANTS),
        "kind",
        missing="mean",
    )


class Pictures(Dataset[Any]):
    """Bytes, and a random flip."""

    classes = ("cat", "dog", "eel")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        picture = torch.arange(12, dtype=torch.uint8).reshape(3, 4) + i
        return picture.flip(-1) if torch.rand(()) < 0.5 else picture, i % 3


class Tokens:
    """As `datasets` has tokenized text: examples by name, of a format that can be asked for."""

    features: Mapping[str, Any] = {}

    def __init__(self, names: tuple[str, ...] = ("input_ids", "attention_mask")) -> None:
        self.names = names

    def with_format(self, kind: str | None) -> Tokens:
        return self

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: torch.arange(i, i + 6) for name in self.names}


def test_a_dataset_draws_by_seed_and_position_and_leaves_the_generators() -> None:
    data = as_data(Pictures())
    assert (data.size, data.classes) == (18, 3)
    before = torch.get_rng_state(), random.getstate()
    x, y = data.batch(3, 0, 8)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    parts = [data.batch(3, start, 4) for start in (0, 4)]
    assert torch.equal(x, torch.cat([part for part, _ in parts]))  # however the stretch is cut
    assert torch.equal(y, torch.cat([part for _, part in parts]))
    assert x.dtype == torch.float32
    assert float(x.max()) < 0.2  # bytes
    assert not torch.equal(x, data.batch(4, 0, 8)[0])
    rows = data._order(3)
    epochs = [
        dict(zip(rows.rows(at, 18).tolist(), data.batch(3, at, 18)[0][:, 0, 0].tolist(), strict=True)) for at in (0, 18)
    ]
    assert epochs[0] != epochs[1]  # drawn anew in every epoch
    assert torch.equal(data.examples(torch.arange(5))[0], data.examples(torch.arange(5))[0])
    assert len(torch.cat([part for _, part in data.evaluation(1)])) == 2


def test_text_by_name_has_the_next_token_as_target() -> None:
    data = as_data(Tokens())
    x, y = data.examples(torch.tensor([0]))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert (data.unit, data.per_example, data.classes) == ("tokens", 5, None)
    labelled = as_data(Tokens(("input_ids", "labels")))
    assert torch.equal(labelled.examples(torch.tensor([0]))[1], y)


def test_arrays_and_pairs() -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 3
    alone, both = as_data((x, y)), as_data((x, y, x[:5], y[:5]))
    assert (alone.size, both.size, both.classes) == (18, 20, 3)
    assert as_data((torch.from_numpy(x), torch.linspace(0, 1, 20))).examples(torch.arange(3))[1].shape == (3, 1)
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    assert as_data({"train": tensors, "validation": tensors}).size == 20
    assert as_data((Subset(Pictures(), range(5)), DataLoader(Pictures(), shuffle=True))).size == 5
    table = as_data({"a": x[:, 0], "word": np.array(["p", "q"] * 10), "label": y})
    assert (table.size, table.classes) == (18, 3)
    assert as_data(table) is table
    assert as_data({"a": x[:, 0], "b": np.array(["p", None] * 10), "label": y}, missing="drop").size == 9
    refuses("skip is for tables whose columns have names", as_data, Pictures(), skip=["a"])


class Examples(Pictures):
    """What a function gives for each number."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


class Stream(IterableDataset[Any]):
    """Has a beginning alone."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


RAGGED = Examples(lambda i: (torch.zeros(3 + (i == 7)), 0))
BROKEN = Examples(lambda i: {}["nothing"] if i == 7 else (torch.zeros(3), 0))
WORDS = Examples(lambda i: {"text": "once upon a time", "label": 0, "other": 1.0, "third": 2.0})
SAMPLER = WeightedRandomSampler([1.0] * 20, 20)
BAD_SOURCES: dict[str, tuple[Any, str]] = {
    "ragged": (RAGGED, r"row 7 is \(Tensor \(4,\), int\), and row .* is \(Tensor \(3,\), int\); resize or pad"),
    "broken": (BROKEN, "row 7 of the Examples cannot be read: KeyError: 'nothing'"),
    "a stream": (Stream(), "the Stream can only be read from its beginning.*__getitem__"),
    "a loader of a stream": (DataLoader(Stream()), "the Stream can only be read from its beginning"),
    "an iterator": (iter(()), "can only be read from its beginning"),
    "a sampler": (DataLoader(Pictures(), sampler=SAMPLER), "WeightedRandomSampler, but a recipe orders the rows"),
    "names": (WORDS, r"which of text, label, other, third is the input.*as_data\(…, inputs=NAME, target=NAME\)"),
    "objects": (Examples(lambda i: (object(), 0)), "row .* is .object, int. .*return tensors"),
    "nothing": (None, "the NoneType is no data: give a torch.utils.data.Dataset"),
    "no pair": (TensorDataset(torch.zeros(5, 2)), "an example of the TensorDataset is 1 parts"),
    "words in arrays": ((np.array(["a", "b"]), np.arange(2)), "an array holds <U1"),
    "unequal arrays": ((np.zeros((3, 2)), np.zeros(2)), "there are 3 and 2"),
    "not finite": ((np.array([[0.0], [np.nan]]), np.arange(2)), "inputs of row 1 are not finite"),
    "no test": ({"train": Pictures(), "extra": Pictures()}, "needs 'train' and 'test', but has train, extra"),
    "arrays and rows": (((np.zeros((3, 2)), np.zeros(3)), Pictures()), "evaluate on a the Pictures"),
    "nothing there": (Subset(Pictures(), []), "has 0 rows"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_data_that_cannot_be_used_is_named_with_row_and_remedy(case: str) -> None:
    source, message = BAD_SOURCES[case]
    refuses(message, lambda: as_data(source).examples(torch.arange(18)))


def test_text_named_as_the_input_is_to_be_tokenized() -> None:
    with pytest.raises(MupscaleError, match=r"the input of the Examples is .*'once upon a time'.*tokenize text first"):
        as_data(WORDS, inputs="text", target="label")
    refuses("have no 'txt'; they have text, label, other, third", as_data, WORDS, inputs="txt", target="label")


def test_a_function_that_gives_no_data_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(
        "def load(): return 3\ndef numbers():\n    import numpy as np\n    return np.zeros((9, 3)), np.zeros(9)\n"
    )
    for name, message in (("load", "data: mine.load: the int is no data"), ("numbers", "for regression give a loss")):
        Path("r.yaml").write_text(yaml.safe_dump(recipe(f"data: mine.{name}", 3, 1)))
        assert main(["train", "r.yaml", "--out", "none"]) != 0
        assert message in capsys.readouterr().err


def test_datasets_of_the_hub_library() -> None:
    datasets = pytest.importorskip("datasets")
    flat = datasets.Dataset.from_dict(
        {"a": [float(i) for i in range(20)], "word": ["p", "q"] * 10, "label": [0, 1] * 10}
    )
    assert (as_data(flat).size, as_data(flat).classes) == (18, 2)
    both = datasets.DatasetDict({"train": flat, "test": flat})
    assert as_data(both).size == 20
    ids = datasets.Dataset.from_dict({"input_ids": [list(range(i, i + 6)) for i in range(10)]})
    assert as_data(ids).per_example == 5


def test_data_info_tells_what_a_recipe_has_to_say(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "d_in: 3, d_out: 3" in told(capsys, "data info plants.csv --target kind")
    shown = told(capsys, "data info plants.csv --target kind --skip height --missing=drop")
    assert '{"path": "plants.csv", "target": "kind", "skip": ["height"], "missing": "drop"}}' in shown
    assert "inputs      height" not in shown
    assert "torch.nn.functional.mse_loss" in told(capsys, "data info plants.csv --target height")
    with open("plants.csv", "a") as file:
        file.write("1.5,,moss\n,7,moss\n")
    assert "2 rows dropped" in told(capsys, "data info plants.csv --target kind --missing=drop")


def test_data_info_adds_up_what_is_given_again_and_names_a_file_that_is_not_there(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.csv").write_text("id,garden,a,y\n" + "n1,x,1,0\nn2,y,2,1\n" * 5)
    assert '"skip": ["id", "garden"]' in told(capsys, "data info t.csv --skip id --skip=garden")
    assert "there is no file or folder nofile.csv" in refused(capsys, "data info nofile.csv", 1)


def test_rows_of_another_file_are_encoded_as_those_that_were_trained_on(tmp_path: Path) -> None:
    lines = [f"{1.5 * n},{('red', 'green')[n % 2]},{n % 2},{'ab'[n % 2]}" for n in range(20)]
    head, train, new = "height,colour,wet,kind", tmp_path / "train.csv", tmp_path / "new.csv"
    train.write_text("\n".join([head, *lines]))
    data = TableFile(str(train), target="kind")
    new.write_text("\n".join([head.removesuffix(",kind"), *(line[:-2] for line in lines)]))  # without a target
    x = data.encode(str(new))
    for row in data.split.train_x:
        assert (x - row).abs().sum(1).min() < 1e-6
    colours = np.array(["red", "green"] * 10)
    columns = {"height": 1.5 * np.arange(20), "colour": colours, "wet": np.arange(20) % 2}
    assert torch.equal(data.encode(columns), x)
    refuses("a file or a table with named columns, not the list", data.encode, [1.5, "red", 0])
    for cells, message in {
        "1,blue,0": "no training row has colour=blue",
        "1,red,2": "the column has 0 and 1 alone in training",
        ",red,0": "line 2, column 'height': the cell is empty: fill it",
    }.items():
        new.write_text(f"height,colour,wet\n{cells}\n2,red,1")
        refuses(message, data.encode, str(new))
    new.write_text("height,wet\n1,0")
    refuses("has no column 'colour'", data.encode, str(new))
