"""The rows of the last table in docs/foreign-files.md: disks, folders, streams and names as machines have them."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from commands import refused
from mupscale.cli import main
from mupscale.cli.command_table import COMMANDS
from mupscale.cli.training import read_recipe
from processes import Script

BEFORE = Path(__file__).parents[1] / "written_before"
RESULTS = Path(__file__).parents[2] / "results"
SHORT = ["train", "mlp-covtype-tiny", "--steps", "2", "--grow", "[]", "--width", "8", "--base", "8", "--batch", "20"]


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A command that ends so."""

    def run(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(COMMANDS["recipes"], "function", run)


def test_a_full_disk(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "weights"))
    assert "weights cannot be written: No space left on device; free some space" in refused(capsys, ["recipes"], 1)


@pytest.mark.parametrize("room", [0, 300, 6000], ids=["none", "for a line", "not for a checkpoint"])
def test_a_disk_that_becomes_full(here: Path, room: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No file may grow beyond so many bytes, by the system's own limit: the whole command, and what it leaves."""
    resource, words = pytest.importorskip("resource"), [*SHORT, "--out", str(here / "run")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        said = refused(capsys, words, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in said
    assert str(here / "run") in said
    assert not list((here / "run").rglob("*.tmp"))
    assert main([*words, "--overwrite"]) == 0


WITHOUT_ROOTS_RIGHTS = """
import json, os, sys
from processes import give_up_rights
from commands import refused
from mupscale.cli import main
give_up_rights()
if os.access(sys.argv[1], os.W_OK):
    sys.exit(77)
print([main(words) for words in json.loads(sys.argv[2])])
"""


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    """Root may write everywhere, so that a process of root's gives that up first."""
    closed = here / "closed"
    closed.mkdir(mode=0o500)
    writers = {
        "closed/run cannot be written: Permission denied": [*SHORT, "--out"],
        "closed/run (Permission denied)": ["report", f"{RESULTS}/comparison-shakespeare-64-128", "--out"],
        "closed/run failed: [Errno 13] Permission denied": ["data", "tokenize", str(BEFORE / "choice.txt")],
        "closed/run.png cannot be written: Permission denied": ["curves", str(BEFORE / "run"), "--out"],
    }
    commands = [[*words, f"{closed}/run{'.png' * (words[0] == 'curves')}"] for words in writers.values()]
    status = (script := Script(here / "said", WITHOUT_ROOTS_RIGHTS, closed, json.dumps(commands))).wait()
    if status == 77:
        pytest.skip("this system lets root write everywhere, whatever root gives up")
    *said, statuses = script.output.read_text().splitlines()
    assert (status, statuses) == (0, "[1, 1, 1, 1]")
    assert all(sentence in line for sentence, line in zip(writers, said, strict=True)), said


def test_a_file_where_a_folder_belongs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert "file" in refused(capsys, [*SHORT, "--out", "file/run"], 1)


@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["train", "--help"]])
def test_streams_that_are_closed_or_ascii(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for stdout in (None, io.TextIOWrapper(io.BytesIO(), encoding="ascii")):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("at_once", [False, True], ids=["when it ends", "at once"])
def test_a_full_stdout(at_once: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help, which is lost while it is written, or when the buffer is flushed in the end."""
    for words in ("--help", "recipes", *(f"{command} --help" for command in COMMANDS)):
        with open("/dev/full", "wb", buffering=0 if at_once else 1 << 20) as full, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
            assert main(words.split()) == 1
        said = capsys.readouterr().err
        assert "No space left on device" in said
        assert said.count("\n") == 1


def test_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said about `mupscale train --help | head -1`."""
    for words in (["train", "--help"], ["recipes"]):
        end, start = os.pipe()
        os.close(end)
        with open(start, "wb", buffering=0) as pipe:
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
            assert main(words) == 141
            assert capsys.readouterr().err == ""


@pytest.mark.quick("100%", "*u221e", "-x")
@pytest.mark.parametrize("name", ["a b", "100%", "#1", "what?", 'it\'s "so"', "μ→∞", "-x", "{run}"])
def test_odd_path_names(here: Path, name: str) -> None:
    recipe = here / f"{name}.yaml"
    recipe.write_text("steps: 3\n")
    assert read_recipe(["mlp-covtype-tiny", str(recipe), "--grow", "[]", f"--out={here / name}"])[0].steps == 3


@pytest.mark.parametrize("name", ["x" * 5000, "a\x00b"])
def test_names_that_no_system_takes(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for words in (["resume", name], ["inspect", name], ["curves", name], ["report", name], ["train", name]):
        refused(capsys, words)


WORLDS = {
    "no number": ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
    "no processes": ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but RANK is not set"),
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
    "no address": ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
    "a rank too many": (
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        "WORLD_SIZE is 2, but RANK is 2",
    ),
    "a rank that is none": ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK is 'first'"),
}


@pytest.mark.parametrize(("variables", "words"), WORLDS.values(), ids=WORLDS)
def test_processes_that_nobody_has_started(
    variables: dict[str, str],
    words: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = refused(capsys, SHORT, 1)
    assert words in shown
    assert "torchrun" in shown


ERRORS = {
    "no memory": (MemoryError(), "there is not enough memory"),
    "no memory of torch's": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
    "brackets": (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    "a mistake": (KeyError("x"), "KeyError: 'x'; -v shows where it comes from"),
    "many lines": (RuntimeError("one\ntwo\x1b[2J"), "RuntimeError: one two\\x1b[2J"),
}


@pytest.mark.parametrize(("error", "words"), ERRORS.values(), ids=ERRORS)
def test_whatever_is_left_is_a_sentence(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, error)
    assert main(["recipes"]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    with pytest.raises(type(error)):
        main(["recipes", "-v"])
