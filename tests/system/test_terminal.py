"""Progress, as lines, as a bar, or not at all."""

import pytest

from mupscale.system import Display
from terminals import on_a_terminal


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    display = Display(["bar"], 3, lines="stderr")
    display.update(1, "one")
    display.advance()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", -1.0)
    display.update(1, "one", anything=5)
    display.note("for a bar", "for a line")
    display.note("for both")
    display.close()
    assert capsys.readouterr() == ("", "one\nfor a line\nfor both\n")


def test_the_first_line_at_once_and_the_last_always(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(["bar"], 3, lines="stdout", first_line_at_once=True)
    for done in (1, 2, 3):
        display.update(done, str(done), last=done == 3)
    assert capsys.readouterr() == ("1\n3\n", "")


def test_lines_tell_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mupscale.system.terminal.time.monotonic", lambda: now[0])
    monkeypatch.setattr("mupscale.system.terminal.SECONDS_BETWEEN_LINES", 10.0)
    timed, untimed = (Display(columns, 1000, lines="stdout") for columns in (["time left"], ["bar"]))
    for now[0], done in ((101.0, 500), (103.0, 505), (110.0, 545), (121.0, 600), (151.0, 630), (161.0, 1000)):
        timed.update(done, str(done))  # a run that went on after step 500: those took no time here
        untimed.update(done, "")
    timed.update(0, "others", total=50)
    now[0] = 171.0
    timed.update(5, "the others")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    left = [
        "545, about 2 min left",
        "600, about 2 min left",
        "630, about 7 min left",
        "1000",
        "the others, about 2 min left",
    ]
    assert lines == left


def test_nothing_where_no_lines_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for display in (Display(["bar"], 3), Display(["bar"], 3, lines="stdout", visible=False)):
        display.update(3, "all", last=True)
        display.advance()
        display.note("done")
        display.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal() -> None:
    def use() -> None:
        display = Display(["wide bar", "count", "{task.fields[what]}", "time left"], 4, what="boxes")
        assert display.bar is not None
        display.update(1, "never shown", what="[red]crates\x1b]0;t\x07")
        display.advance(2)
        display.note("[three] of them\x1b]0;t\x07")
        display.close()

    plain, coloured = on_a_terminal(use, NO_COLOR="1"), on_a_terminal(use)
    assert "\x1b[38;5" in coloured
    assert "\x1b[38;5" not in plain
    for shown in (plain, coloured):
        assert "3/4" in shown
        assert r"[red]crates\x1b]0;t\x07" in shown  # neither markup nor control characters of others
        assert r"[three] of them\x1b]0;t\x07" in shown
        assert "\x1b]" not in shown
        assert "never shown" not in shown


def test_a_bar_that_nobody_moved_is_not_shown() -> None:
    assert "%" not in on_a_terminal(lambda: Display(["bar", "percentage"], 4, started=False).close())
