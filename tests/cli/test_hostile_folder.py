"""Somebody else's files are data: every command that reads such a file, on a folder made to do harm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch

import hostile_folders
from commands import refused
from hf_files import llama_config, write_checkpoint
from mupscale import Role, hf
from mupscale.cli import main
from mupscale.hf.config_family import GIVEN

RECIPE = "mlp-covtype-tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the files are, and the current folder; nothing of it is ever run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text("open('ran', 'w')\n")
    yield tmp_path
    assert not list(tmp_path.rglob("ran"))
    assert "payload" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [
        ["resume"],
        ["report"],
        ["curves"],
        ["train", RECIPE, "--out", "new", "--width", "64", "--from"],
        ["run", RECIPE, "--out", "new", "--width", "64", "--dry-run", "--from"],
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_folders_of_runs(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for run in hostile_folders.hostile_runs(folder / "runs"):
        refused(capsys, [*words, str(run)])


def test_trust_is_asked_for_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {run.name: str(run) for run in hostile_folders.hostile_runs(folder / "runs")}
    assert "os.system" in (said := refused(capsys, ["resume", runs["system"]]))
    assert "--trust os" in said
    assert "os.system is neither a mupscale.data.Data" in refused(capsys, ["resume", runs["system"], "--trust", "os"])
    assert "--trust payload" in refused(capsys, ["resume", runs["imports"]])
    assert "must be at most 16,777,216" in refused(capsys, ["resume", runs["endless"]])


@pytest.mark.parametrize("words", [["inspect"], ["upscale"], ["verify"]], ids=lambda words: words[0])
def test_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for checkpoint in hostile_folders.hostile_checkpoints(folder / "checkpoints"):
        more = {"inspect": [], "upscale": ["wide", "--no-verify"], "verify": [str(checkpoint)]}[words[0]]
        refused(capsys, [*words, str(checkpoint), *more])
        assert not Path("wide").exists()


@pytest.mark.parametrize("words", [["train"], ["run", "--paper"]])
def test_recipes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for recipe in hostile_folders.hostile_recipes(folder / "recipes"):
        refused(capsys, [*words, str(recipe)])


def test_a_file_with_the_name_of_a_recipe_that_ships(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not the recipe that was asked for."""
    (folder / RECIPE).write_text("model: {class_path: payload.Net}\n")
    assert main(["train", RECIPE, "--print-config"]) == 0
    assert "mupscale.models.MLP" in capsys.readouterr().out


def test_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [refused(capsys, ["data", "tokenize", str(path), "out"]) for path in hostile_folders.hostile_texts(folder)]
    assert "more than 200 times as many" in said[0]


def test_pickled_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = hostile_folders.pickled_code(folder)
    said = refused(capsys, ["train", RECIPE, "--from", str(weights), "--from_width", "32", "--width", "64"])
    assert "which is code" in said


FROM = ["--width", "64", "--from_width", "32", "--from", "HERE"]
TAKES_A_FOLDER = {
    "inspect": ["inspect", "HERE"],
    "upscale": ["upscale", "HERE", "wide", "--no-verify"],
    "verify": ["verify", "HERE", "HERE"],
    "train": ["train", RECIPE, "--out", "new", *FROM],
    "run": ["run", RECIPE, "--out", "new", "--dry-run", *FROM],
    "resume": ["resume", "HERE"],
    "report": ["report", "HERE"],
    "curves": ["curves", "HERE"],
    "data info": ["data", "info", "HERE"],
}


@pytest.mark.quick("train", "upscale", "resume", "inspect")
@pytest.mark.parametrize("words", TAKES_A_FOLDER.values(), ids=TAKES_A_FOLDER)
@pytest.mark.filterwarnings("ignore:.*single process.*")
def test_folders_of_torch_distributed(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for checkpoint in hostile_folders.hostile_dcp_folders(folder / "dcp"):
        command = [str(checkpoint) if word == "HERE" else word for word in words]
        is_clean = checkpoint.name in ("second", "step-000000001")  # its own index
        if words[0] in ("inspect", "verify") and is_clean:
            assert main(command) == 0
            assert ("model.weight" if words[0] == "inspect" else "are those of") in capsys.readouterr().out
        else:
            refused(capsys, [*command])


def test_a_name_that_looks_like_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a table it is shown as it is written, control characters written out."""
    config = {**llama_config(), "num_hidden_layers": 1}
    write_checkpoint(folder / "odd", config, {"[/]weight\x1b[2J\nforged": torch.ones(16, 16)})
    hf.register("llama", {"*forged": Role(out=0, in_=1)})
    try:
        assert main(["inspect", "odd"]) == 0
    finally:
        GIVEN.clear()
    assert r"[/]weight\x1b[2J\nforged" in capsys.readouterr().out
