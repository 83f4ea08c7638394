"""What a person sees: progress as lines, a bar or not at all; tables that fit 80 columns and break no word."""

from __future__ import annotations

import pytest

import mupscale as mu
from mupscale.models import GPT2
from mupscale.system import Display, html_table, name_of_group, text_table, wrap_text
from mupscale.system.terminal import shorten_middle
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


def test_names_of_groups() -> None:
    assert name_of_group(["a.weight"]) == "a.weight"
    assert name_of_group([f"h.{i}.e.{j}.w1" for i in range(4) for j in range(2)]) == "h.0–3.e.0–1.w1"
    assert name_of_group(["h.0.e.1.w", "h.1.e.0.w"]) == "h.*.e.*.w"  # not all of them: no range would be true
    assert name_of_group([f"h.{i}.w" for i in (0, 2, 4, 6, 8)]) == "h.*.w"
    assert name_of_group(["0.weight", "1.weight"]) == "0–1.weight"


@pytest.mark.parametrize("width", [1, 2, 7, 16, 17])
def test_shortened_names_have_the_width(width: int) -> None:
    text = "model.layers.0–11.weight"
    short = shorten_middle(text, width)
    assert len(short) == width
    assert text.startswith(short.partition("…")[0])
    assert text.endswith(short.partition("…")[2])


def test_tables_fit_and_words_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("model.layers.0–11.block_sparse_moe.experts.0–63.w1.weight", "1024×4096 → 2048×8192", "2", "0.25")]
    header = ("parameter", "shape", "out", "lr × (Adam)")
    assert rows[0][0] in text_table(header, rows)
    monkeypatch.setenv("COLUMNS", "60")
    table = text_table(header, rows, left=2)
    assert max(map(len, table.splitlines())) == 60
    assert "1024×4096 → 2048×8192" in table
    sentence = "equivalent: largest relative output difference 1.1e-15 over twenty steps of training-with-a-long-word"
    assert max(map(len, wrap_text(sentence).splitlines())) <= 60
    assert wrap_text(sentence).split() == sentence.split()


def test_html_is_escaped() -> None:
    assert "<script>" not in html_table(("name",), [("<script>",)], "<script>")


def test_a_plan_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = mu.plan(*(GPT2(32, 8, layers=3, heads=heads, head_dim=4, width=None) for heads in (2, 4)))
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(".0–2." in line for line in lines) >= 8  # a row for each kind of tensor in the blocks
    assert len(lines) < len(plan.parameters)
    page = plan._repr_html_()
    assert page.startswith("<table>")
    assert "0–2" in page


def test_a_plan_fits_80_columns_without_a_terminal_and_names_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    matrix = mu.Entry((1024, 4096), (2048, 8192), {0: mu.Axis(2, side="out"), 1: mu.Axis(2, side="in")})
    ends = [f"{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")]
    plan = mu.Plan({f"model.encoder.layers.{i}.self_attention.{end}": matrix for i in range(2) for end in ends})
    shapes, factors, _ = str(plan).split("\n\n")
    assert max(map(len, str(plan).splitlines())) <= 80
    for table in (shapes, factors):
        assert all(f"{end} " in table for end in ends)
        assert table.count("layers.0–1") == len(ends)
