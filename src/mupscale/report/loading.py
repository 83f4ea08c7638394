"""The summary in a study's folder; what is damaged is named by file and field."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from mupscale.study import StudySummary, SystemRuns
from mupscale.system import Finite, MupscaleError, Positive, parse_record, read_json


class _Even(TypedDict):
    kind: Literal["always", "from", "never", "unknown"]
    cost: Positive | None


class _Reference(TypedDict):
    loss: Finite
    label: str


class _Answer(TypedDict):
    """What the page reads of a preset's own numbers; it may hold more."""

    grown: NotRequired[str | None]
    break_even: NotRequired[dict[str, dict[Literal["charged", "there"], _Even]]]
    gain: NotRequired[dict[str, float | None]]
    reference: NotRequired[_Reference]


class _Answered(TypedDict):
    answer: _Answer


def load_summary(folder: str | Path) -> StudySummary:
    """What a study wrote into its folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "summary.json")
    ...     _ = path.write_text('{"format": 3, "name": 3}')
    ...     try:
    ...         load_summary(folder)
    ...     except MupscaleError as error:
    ...         str(error).removeprefix(str(path))
    ": this is not the summary of a study ('name' is 3, but must be text): run the study again"
    """
    path = Path(folder) / "summary.json"
    try:
        summary = StudySummary.from_json(read_json(path))
    except OSError as error:
        raise MupscaleError(f"{folder} holds no study: cannot read its summary.json ({error.strerror})") from None
    except MupscaleError as error:
        raise MupscaleError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    try:
        for place, runs in enumerate(summary.small):
            _check_system(runs, f"small[{place}]")
        if summary.large is not None:
            _check_system(summary.large, "large")
        _check_answer(summary)
    except MupscaleError as error:
        raise MupscaleError(f"{path} is damaged: {error}; run the study again") from None
    return summary


def _check_system(runs: SystemRuns, at: str) -> None:
    """Costs rise, and no contender is there twice."""
    names = [one.name for one in runs.contenders]
    for place, one in enumerate(runs.contenders):
        if any(later.cost <= earlier.cost for earlier, later in pairwise(one.points)):
            raise MupscaleError(f"{at}.contenders[{place}].points: their costs do not rise")
        if names.count(one.name) > 1:
            raise MupscaleError(f"{at}.contenders holds {one.name} twice")


def _check_answer(summary: StudySummary) -> None:
    """Break-evens are of a contender that took part, and have a cost."""
    answer: dict[str, Any] = dict(parse_record(_Answered, {"answer": summary.answer})["answer"])
    grown, even = answer.get("grown"), answer.get("break_even", {})
    if grown is not None and (summary.large is None or summary.large.get(grown) is None):
        raise MupscaleError(f"answer.grown is {grown!r}, which is not among large.contenders")
    for rival, ways in even.items():
        for way, one in ways.items():
            if one["kind"] == "from" and (one["cost"] is None or grown is None):
                raise MupscaleError(f"answer.break_even.{rival}.{way} has no cost")
