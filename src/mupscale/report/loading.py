"""The summary in a run's folder, whichever kind of run it was; what is damaged is named by file and field."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from mupscale.method import Summary
from mupscale.study import CONTENDERS, StudySummary, SystemRuns
from mupscale.system import NOT_EMPTY, Finite, MupscaleError, Must, Positive, parse_record, read_json

_FORMAT = 2
_NAMES = frozenset(one.name for one in CONTENDERS)
_TUNED_NAMES = _NAMES | {"the base model"}
_Name = Annotated[str, Must(f"one of {', '.join(sorted(_NAMES))}", _NAMES.__contains__)]
_TunedName = Annotated[str, Must(f"one of {', '.join(sorted(_TUNED_NAMES))}", _TUNED_NAMES.__contains__)]
_Width = dict[str, Finite] | Positive
_Losses = Annotated[list[Positive | None], NOT_EMPTY]


class _Point(TypedDict):
    budget: Positive
    steps: Positive
    cost: Positive
    losses: _Losses


class _Runs(TypedDict):
    name: _Name
    width: _Width
    lr: Positive
    noise: Finite
    points: Annotated[list[_Point], NOT_EMPTY]


class _System(TypedDict):
    narrow: _Width
    wide: _Width
    base_cost: Positive | None
    unit: Literal["FLOPs", "steps"]
    contenders: Annotated[list[_Runs], NOT_EMPTY]


class _Tried(TypedDict):
    lr: Positive
    noise: Finite
    losses: _Losses
    budget: NotRequired[Positive]


class _Tuned(TypedDict):
    name: _TunedName
    lr: Positive
    noise: Finite
    tried: list[_Tried]
    remarks: list[str]


class _NoRule(TypedDict):
    no_rule: str


class _Range(TypedDict):
    low: Finite
    value: Finite
    high: Finite


class _Ways(TypedDict):
    charged: _NoRule | _Range
    there: _NoRule | _Range


class _HeldName(TypedDict):
    what: str
    held: bool | None
    forecast: _Name | None
    measured: _Name


class _HeldNumber(TypedDict):
    what: str
    held: bool | None
    forecast: _NoRule | _Range
    measured: Finite


class _Forecast(TypedDict):
    sentence: str
    above_continued: dict[_Name, _NoRule | _Range]
    cost: dict[_Name, _Ways]
    held: NotRequired[list[_HeldName | _HeldNumber]]


class _Ratio(TypedDict):
    value: Positive
    bound: Literal["", "at most", "at least"]


class _Even(TypedDict):
    kind: Literal["always", "from", "never", "unknown"]
    cost: Positive | None


class _Evens(TypedDict):
    charged: NotRequired[_Even]
    there: _Even


class _Answer(TypedDict):
    sentence: str
    grown: _Name | None
    cost_charged: _Ratio | None
    cost_there: _Ratio | None
    above_continued: Finite | None
    break_even: dict[_Name, _Evens]


class _Answered(TypedDict):
    answer: _Answer


class _Base(TypedDict):
    steps: Finite | None
    width: _Width


class _Stage(TypedDict):
    name: str
    cost: Finite
    seconds: Finite


class _Comparison(TypedDict):
    name: str
    command: str
    recipe: dict[str, Any]
    settings: dict[str, Any]
    base: _Base
    tuned: list[_Tuned]
    small: Annotated[list[_System], NOT_EMPTY]
    forecast: _Forecast
    large: _System | None
    answer: dict[str, Any]
    stages: list[_Stage]
    notes: list[str]


def load_summary(folder: str | Path) -> Summary | StudySummary:
    """What a finished run wrote: a comparison's summary, or one of the paper's method.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "summary.json")
    ...     _ = path.write_text('{"kind": "comparison", "format": 2, "name": 3}')
    ...     try:
    ...         load_summary(folder)
    ...     except MupscaleError as error:
    ...         str(error).removeprefix(str(path))
    " is damaged: 'name' is 3, but must be text; run the comparison again"
    """
    path = Path(folder) / "summary.json"
    try:
        values = read_json(path)
    except OSError as error:
        raise MupscaleError(
            f"{folder} holds no finished run of the method and no comparison: cannot read its summary.json "
            f"({error.strerror})"
        ) from None
    kind = values.get("kind") if isinstance(values, Mapping) else None
    if kind is None:
        return _load_method(values, path)
    if kind != "comparison":
        raise MupscaleError(f"{path} is of the kind {kind!r}, which this version of mupscale does not know")
    return _load_comparison(values, path)


def _load_method(values: Any, path: Path) -> Summary:
    try:
        return Summary.from_json(values)
    except MupscaleError as error:
        raise MupscaleError(f"{path}: {error}") from None


def _load_comparison(values: Mapping[str, Any], path: Path) -> StudySummary:
    if values.get("format") != _FORMAT:
        raise MupscaleError(
            f"{path} is of format {values.get('format')!r}, and this version of mupscale reads format {_FORMAT}"
        )
    try:
        parse_record(_Comparison, values)
        if values["large"] is not None:
            parse_record(_Answered, values)
        summary = StudySummary.from_json(values)
        for place, runs in enumerate(summary.small):
            _check_system(runs, f"small[{place}]")
        if summary.large is not None:
            _check_system(summary.large, "large")
            _check_answer(summary.answer, summary.large)
    except MupscaleError as error:
        raise MupscaleError(f"{path} is damaged: {error}; run the comparison again") from None
    return summary


def _check_system(runs: SystemRuns, at: str) -> None:
    """Costs rise, and no contender is there twice."""
    names = [one.name for one in runs.contenders]
    for place, one in enumerate(runs.contenders):
        costs = [point.cost for point in one.points]
        if any(later <= earlier for earlier, later in pairwise(costs)):
            raise MupscaleError(f"{at}.contenders[{place}].points: their costs do not rise")
        if names.count(one.name) > 1:
            raise MupscaleError(f"{at}.contenders holds {one.name} twice")


def _check_answer(answer: Mapping[str, Any], large: SystemRuns) -> None:
    """It is about a contender that took part."""
    if answer["grown"] is not None and large.get(answer["grown"]) is None:
        raise MupscaleError(f"answer.grown is {answer['grown']!r}, which is not among large.contenders")
    for rival, ways in answer["break_even"].items():
        for way, even in ways.items():
            if even["kind"] == "from" and (even["cost"] is None or answer["grown"] is None):
                raise MupscaleError(f"answer.break_even.{rival}.{way} has no cost")
