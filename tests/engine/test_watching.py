"""What a person sees of many runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mupscale.engine import lowest_loss_bar


@pytest.fixture
def all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", -1.0)


@pytest.mark.usefixtures("all_lines")
def test_runs_of_one_program_are_one_bar_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with lowest_loss_bar(20, 2) as tell:
        tell(10, {0: 0.5, 1: 0.25})
        tell(15, {0: math.nan})
        tell(20, {0: 0.125})
    assert capsys.readouterr().out.splitlines() == ["step 10/20  loss 0.2500", "step 20/20  loss 0.1250"]


@pytest.mark.usefixtures("all_lines")
def test_runs_after_others_count_those_that_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    with lowest_loss_bar(20, 4) as tell:
        update = tell.display.update
        tell.display.update = lambda done, line, **rest: (shown.append(done), update(done, line, **rest))  # type: ignore[method-assign,func-returns-value,assignment]
        tell(10, {0: 0.5, 1: 0.25})
        tell(20, {0: 0.5})
        tell(10, {2: 0.25})
        tell(10, {3: 0.25})
        tell(20, {3: 0.25})
    assert shown == [5, 10, 12.5, 17.5, 20]  # in steps of all of them
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 0.2500",
        "step 20/20  loss 0.5000",
        "2 of 4 runs done, step 10/20  loss 0.2500",
        "3 of 4 runs done, step 10/20  loss 0.2500",
        "3 of 4 runs done, step 20/20  loss 0.2500",
    ]
