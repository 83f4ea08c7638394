"""The summary in a run's folder, whichever kind of run it was; what is damaged is named by file and field."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from mupscale.comparison import CONTENDERS, ComparisonSummary, SystemRuns
from mupscale.method import Summary
from mupscale.report import shapes
from mupscale.report.shapes import any_text, by_name, either, fields, list_of, mapping, nothing, number, positive
from mupscale.system import MupscaleError, read_json

_FORMAT = 2
_NAMES = frozenset(one.name for one in CONTENDERS)
_CONTENDER = shapes.one_of(_NAMES)
_WIDTH = either(by_name(number), positive)
_LOSSES = list_of(either(nothing, positive), least=1)
_POINT = fields({"budget": positive, "steps": positive, "cost": positive, "losses": _LOSSES})
_RUNS = fields(
    {"name": _CONTENDER, "width": _WIDTH, "lr": positive, "noise": number, "points": list_of(_POINT, least=1)}
)
_SYSTEM = fields(
    {
        "narrow": _WIDTH,
        "wide": _WIDTH,
        "base_cost": either(nothing, positive),
        "unit": shapes.one_of(("FLOPs", "steps")),
        "contenders": list_of(_RUNS, least=1),
    }
)
_TRIED = fields(
    {"lr": positive, "noise": number, "losses": _LOSSES, "budget": positive}, optional=frozenset({"budget"})
)
_TUNED = fields(
    {
        "name": shapes.one_of(_NAMES | {"the base model"}),
        "lr": positive,
        "noise": number,
        "tried": list_of(_TRIED),
        "remarks": list_of(any_text),
    }
)
_RANGE = either(fields({"no_rule": any_text}), fields({"low": number, "value": number, "high": number}))
_JUDGED = {"what": any_text, "held": either(nothing, shapes.truth)}
_HELD = either(
    fields({**_JUDGED, "forecast": either(nothing, _CONTENDER), "measured": _CONTENDER}),
    fields({**_JUDGED, "forecast": _RANGE, "measured": number}),
)
_FORECAST = fields(
    {
        "sentence": any_text,
        "above_continued": by_name(_RANGE, _CONTENDER),
        "cost": by_name(fields({"charged": _RANGE, "there": _RANGE}), _CONTENDER),
        "held": list_of(_HELD),
    },
    optional=frozenset({"held"}),
)
_RATIO = either(nothing, fields({"value": positive, "bound": shapes.one_of(("", "at most", "at least"))}))
_EVEN = fields(
    {"kind": shapes.one_of(("always", "from", "never", "unknown")), "cost": either(nothing, positive)},
)
_EVENS = by_name(fields({"charged": _EVEN, "there": _EVEN}, optional=frozenset({"charged"})), _CONTENDER)
_ANSWER = fields(
    {
        "sentence": any_text,
        "grown": either(nothing, _CONTENDER),
        "cost_charged": _RATIO,
        "cost_there": _RATIO,
        "above_continued": either(nothing, number),
        "break_even": _EVENS,
    }
)
_COMPARISON = fields(
    {
        "name": any_text,
        "command": any_text,
        "recipe": mapping,
        "settings": mapping,
        "base": fields({"steps": either(nothing, number), "width": _WIDTH}),
        "tuned": list_of(_TUNED),
        "small": list_of(_SYSTEM, least=1),
        "forecast": _FORECAST,
        "large": either(nothing, _SYSTEM),
        "answer": mapping,
        "stages": list_of(fields({"name": any_text, "cost": number, "seconds": number})),
        "notes": list_of(any_text),
    }
)


def load_summary(folder: str | Path) -> Summary | ComparisonSummary:
    """What a finished run wrote: a comparison's summary, or one of the paper's method.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "summary.json")
    ...     _ = path.write_text('{"kind": "comparison", "format": 2, "name": 3}')
    ...     try:
    ...         load_summary(folder)
    ...     except MupscaleError as error:
    ...         str(error).removeprefix(str(path))
    ' is damaged: name is 3, but must be a text; run the comparison again'
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


def _load_comparison(values: Mapping[str, Any], path: Path) -> ComparisonSummary:
    if values.get("format") != _FORMAT:
        raise MupscaleError(
            f"{path} is of format {values.get('format')!r}, and this version of mupscale reads format {_FORMAT}"
        )
    try:
        _COMPARISON(values, "")
        if values["large"] is not None:
            _ANSWER(values["answer"], "answer")
        summary = ComparisonSummary.from_json(values)
        for place, runs in enumerate(summary.small):
            _check_system(runs, f"small[{place}]")
        if summary.large is not None:
            _check_system(summary.large, "large")
            _check_answer(summary.answer, summary.large)
    except (shapes.WrongShapeError, MupscaleError) as error:
        raise MupscaleError(f"{path} is damaged: {error}; run the comparison again") from None
    return summary


def _check_system(runs: SystemRuns, at: str) -> None:
    """Costs rise, and no contender is there twice."""
    names = [one.name for one in runs.contenders]
    for place, one in enumerate(runs.contenders):
        costs = [point.cost for point in one.points]
        if any(later <= earlier for earlier, later in pairwise(costs)):
            raise shapes.WrongShapeError(f"{at}.contenders[{place}].points: their costs do not rise")
        if names.count(one.name) > 1:
            raise shapes.WrongShapeError(f"{at}.contenders holds {one.name} twice")


def _check_answer(answer: Mapping[str, Any], large: SystemRuns) -> None:
    """It is about a contender that took part."""
    if answer["grown"] is not None and large.get(answer["grown"]) is None:
        raise shapes.WrongShapeError(f"answer.grown is {answer['grown']!r}, which is not among large.contenders")
    for rival, ways in answer["break_even"].items():
        for way, even in ways.items():
            if even["kind"] == "from" and (even["cost"] is None or answer["grown"] is None):
                raise shapes.WrongShapeError(f"answer.break_even.{rival}.{way} has no cost")
