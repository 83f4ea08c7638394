"""Summaries from disk: what was saved is loaded, and what is damaged is named by file and field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from comparisons import ALL, comparison, forecast_only
from mupscale import MupscaleError
from mupscale.report import write_report
from mupscale.study import load_summary
from summaries import example, write


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    for number, summary in enumerate((comparison(3, ALL), forecast_only(comparison()), example())):
        assert load_summary(write(tmp_path / str(number), summary)) == summary


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return change


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a field is missing": (lambda values: values.pop("recipe"), "'recipe' is missing"),
    "a list instead": (_set("recipe", to=[]), r"'recipe' is \[\], but must be a mapping"),
    "another version": (_set("format", to=7), "'format' is 7, but must be 3"),
    "no text": (_set("name", to=3), "'name' is 3, but must be text"),
    "a loss that is a text": (
        _set("large", "contenders", 1, "points", 0, "losses", 0, to="low"),
        r"large.contenders\[1\].points\[0\].losses\[0\]' is 'low'",
    ),
    "a loss that is none": (
        _set("small", 0, "contenders", 0, "points", 2, "losses", 0, to=float("nan")),
        r"small\[0\].contenders\[0\].points\[2\].losses\[0\]' is nan",
    ),
    "no points": (_set("large", "contenders", 0, "points", to=[]), r"large.contenders\[0\].points' is \[\]"),
    "a cost of nothing": (_set("large", "contenders", 0, "points", 0, "cost", to=0), "must be a number above 0"),
    "no learning rate": (_set("tuned", 0, "trials", 0, "lr", to=-1.0), r"tuned\[0\].trials\[0\].lr' is -1.0"),
    "costs that fall": (
        _set("large", "contenders", 0, "points", 2, "cost", to=1.0),
        "the costs of the contender from-scratch do not rise",
    ),
    "somebody twice": (_set("large", "contenders", 0, "name", to="fresh"), "the contender fresh is there twice"),
    "an answer about nobody": (_set("answer", "grown", to="paired-noise"), "not among large.contenders"),
    "an answer without a cost": (
        _set("answer", "break_even", "continued", "charged", to={"kind": "from", "cost": None}),
        "break_even.continued.charged has no cost",
    ),
    "a break-even of no kind": (_set("answer", "break_even", "continued", to={"charged": 3}), "charged' is 3"),
    "a gain that is a text": (_set("answer", "gain", to={"copies": "much"}), "'answer.gain.copies' is 'much'"),
    "a row too short": (_set("tables", 0, "rows", 0, to=["x"]), "has 4 columns, but a row of 1"),
    "half a coordinate check": (
        _set("coords", to={"title": "x", "rows": [{"width": 1}]}),
        r"'coords.rows\[0\].seed' is missing",
    ),
    "an unknown field": (_set("large", "more", to=1), "there is no field 'large.more'"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_summaries_are_named_in_a_sentence(case: str, tmp_path: Path) -> None:
    change, wanted = DAMAGES[case]
    values = copy.deepcopy(json.loads(json.dumps(asdict(comparison()))))
    change(values)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=wanted) as caught:
        write_report([tmp_path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", '"comparison"', "[" * 100_000], ids=len)
def test_files_that_are_no_summary(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(MupscaleError, match=r"summary\.json"):
        load_summary(tmp_path)
    with pytest.raises(MupscaleError, match=r"nowhere holds no study: cannot read its summary\.json"):
        load_summary(tmp_path / "nowhere")
    with pytest.raises(MupscaleError, match=r"sizes/8 holds no study: .*It is a part of the study in "):
        load_summary(tmp_path / "sizes" / "8")
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "summary.json").rename(tmp_path / "a" / "run" / "metrics.jsonl")
    with pytest.raises(MupscaleError, match="It is a single run: mupscale curves"):
        load_summary(tmp_path / "a" / "run")
    (tmp_path / "summary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(MupscaleError, match="is damaged"):
        load_summary(tmp_path)


@pytest.mark.parametrize("field", ["losses", "lowest", "highest"])
def test_a_curve_whose_columns_differ_in_length_is_refused(field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run") / "summary.json"
    values = json.loads(path.read_text())
    values["large"]["contenders"][0]["curves"][0][field] = [1.0, 2.0]
    path.write_text(json.dumps(values))
    with pytest.raises(MupscaleError, match=f"2 values in '{field}'"):
        load_summary(path.parent)
