"""All that is printed passes one place, which writes control characters out: whatever somebody's files hold."""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

from commands import told
from mupscale.cli import main
from mupscale.system import Display, show, text_table, wrap_text
from syntax import nodes

SOURCE = Path(__file__).parents[2] / "src" / "mupscale"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "a\x1b]0;title\x07b\x1b[2Jc\rd\x9b31me\u202ef\u2066g\x7fh\x0bi\u2028j\u200fk"
SHOWN = r"a\x1b]0;title\x07b\x1b[2Jc\rd\x9b31me\u202ef\u2066g\x7fh"


def test_nothing_else_prints() -> None:
    """No print, no stream written to and no console of rich's but where all of them belong."""
    found = []
    for path in SOURCE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path == SOURCE / "system" / "terminal.py" or not re.search(r"\bprint\b|sys\.(__)?std|rich.console", source):
            continue
        for node in nodes(path):
            text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | ast.Constant) else ""
            if text == "print" or re.fullmatch(r"sys\.(__)?std(out|err)(__)?\.write(lines)?|.?rich\.console.?", text):
                found.append(f"{path.relative_to(SOURCE)}: {text}")
    assert not found


def shown_by(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(words)) == status
    said = capsys.readouterr()
    assert not RAW.search(said.out + said.err)
    return said.out + said.err


def test_text_and_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tokens = tmp_path / f"{EVIL[:3]}.txt", tmp_path / "tokens"
    text.write_text(f"{EVIL}\nsecond\n" * 30, encoding="utf-8", newline="")
    said = shown_by(capsys, "data", "tokenize", str(text), str(tokens))
    assert "begins      a\\x1b]0;title\\x07b\\x1b[2Jc\n            d\\x9b31me\\u202e" in said  # lines end at \r, too
    index = json.loads((tokens / "index.json").read_text())
    index["made_from"]["source"] = f"{EVIL}\ntrain       9 tokens"
    (tokens / "index.json").write_text(json.dumps(index))
    said = shown_by(capsys, "data", "info", str(tokens))
    assert f"source      {SHOWN}" in said
    assert sum(line.startswith("train") for line in said.splitlines()) == 1, "a line is forged"


def test_a_recipe_that_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("out: 'a\u202eb\u200fc'\n", encoding="utf-8")
    said = told(capsys, ["train", "mlp-covtype-tiny", str(tmp_path / "recipe.yaml"), "--print-config"])
    assert r"a\u202eb\u200fc" in said
    assert not RAW.search(said)


def test_warnings_and_errors_with_their_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # to be put back
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt) as caught:
        raise KeyboardInterrupt(EVIL)
    shown_by(capsys, "--version")
    assert not RAW.search(warnings.formatwarning(UserWarning(EVIL), UserWarning, EVIL, 1, "x"))
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert not RAW.search(said)
    assert said.startswith("Traceback")
    assert f"KeyboardInterrupt: {SHOWN}" in said


def test_tables_and_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    show(wrap_text(f"{EVIL} "), text_table(("name",), [(f"{EVIL}\nforged",)]))
    Display(["bar"], 1, lines="stderr", first_line_at_once=True).update(1, EVIL)
    said = capsys.readouterr()
    assert not RAW.search(said.out + said.err)
    assert [line for line in said.out.splitlines() if not line.startswith(("name", r"a\x1b]0"))] == []
    assert said.err.startswith(SHOWN)
