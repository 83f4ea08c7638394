"""Values that no command can do anything with: each is one sentence that names it, and the right exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from commands import refused
from hf_files import llama_config, llama_tensors, write_checkpoint

DIGITS = "9" * 5000
SMALL = ["--steps", "4", "--width", "8", "--base", "8", "--batch", "20", "--out", "none"]
TRAIN = ["train", "mlp-covtype-tiny", "--grow", "[]", *SMALL]
OWN = """
import torch
from mupscale.data import CoverTypeSample
from torch import nn

def silent(outputs, targets):
    return torch.tensor(1.0)

def many(outputs, targets):
    return (outputs.sum(-1) - targets) ** 2

class Beyond(CoverTypeSample):
    def examples(self, rows):
        x, y = super().examples(rows)
        return x, y + 100

class Tokens(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.readout = nn.Embedding(5, width), nn.Linear(width, 7)

    def forward(self, x):
        return self.readout(self.embedding(x.long().abs() + 3).mean(-2))
"""


@pytest.fixture(autouse=True)
def _own_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bad_values_of_ones_own", "raises", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (here / "bad_values_of_ones_own.py").write_text(OWN)
    (here / "raises.py").write_text("raise RuntimeError('one\\ntwo')\n")
    (here / "leaves.py").write_text("import sys\nsys.exit(0)\n")


MINE = "bad_values_of_ones_own"
TRAININGS = {
    "lr 1e300": (["--optimizer.lr", "1e300"], "AdamW cannot take a step with a learning rate of 1e+300"),
    "lr 1e400": (["--optimizer.lr", "1e400"], "the optimizer's lr is inf, but must be a number that is finite"),
    "device meta": (["--device", "meta"], "device meta stores no values"),
    "device nowhere": (["--device", "nowhere"], "there is no device 'nowhere'"),
    "SparseAdam": (
        ["--optimizer", "torch.optim.SparseAdam", "--optimizer.lr", "0.1"],
        "SparseAdam cannot take a step with a learning rate of 0.1: SparseAdam does not support dense gradients",
    ),
    "a loss that is a number": (["--loss", "math.pi"], "the loss math.pi is not a function of outputs and targets"),
    "a loss that is a word": (["--loss", "5"], "'5' is not an import path"),
    "a loss of dots": (["--loss", ".."], "'..' is not an import path: give module.name"),
    "a loss of truth": (["--loss", "operator.is_"], "the loss operator.is_ gives a bool, not a tensor"),
    "a loss of one's own": (["--loss", f"{MINE}.many"], f"the loss {MINE}.many gives shape (20,), not one number"),
    "a silent loss": (["--loss", f"{MINE}.silent"], "does not depend on the model's weights"),
    "a loss of other shapes": (["--loss", "operator.add"], "cannot take outputs of shape (20, 7) and targets of shape"),
    "labels": (["--data", f"{MINE}.Beyond"], "cannot take outputs of shape (20, 7) and targets of shape (20,) from 10"),
    "tokens": (["--model", f'{{"class_path": "{MINE}.Tokens"}}'], f"the model {MINE}.Tokens cannot take inputs of"),
    "a batch for no memory": (["--batch", str(10**12)], "must be at most 16,777,216"),
    "a width for no memory": (["--width", "1000000"], "there is not enough memory for width 1000000"),
    "noise beyond what weights hold": (["--grow", "[{at: 2, width: 16, noise: 1e308}]"], "use less noise"),
    **{f"{name} of 5000 digits": ([name, DIGITS], "5000 digits") for name in ("--width", "--steps", "--seeds.init")},
    "a width beyond counting": (["--width", "99999999999"], "a model of width 99999999999 is too large"),
}


@pytest.mark.parametrize(("more", "words"), TRAININGS.values(), ids=TRAININGS)
def test_training(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, [*TRAIN, *more])


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**llama_config(), "max_position_embeddings": 64}
    write_checkpoint(tmp_path / "small", config, llama_tensors(llama_config()))
    upscale, inspect = ["upscale", "small", "wide"], ["inspect", "small"]
    assert "use less noise" in refused(capsys, [*upscale, "--noise", "1e308"], 1)
    assert "is not a shard size. Write it as 5GB" in refused(capsys, [*upscale, "--shard-size", "9" * 400], 1)
    for words in (upscale, inspect):
        assert "raises.py: the module raises RuntimeError: one" in refused(
            capsys, [*words, "--describe", "raises.py"], 2
        )
        assert "leaves.py: the module raises SystemExit: 0" in refused(capsys, [*words, "--describe", "leaves.py"], 2)
    assert not list(tmp_path.glob("*wide*"))


def test_a_vocabulary_beyond_all_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n")
    tokenize = ["data", "tokenize", "text.txt", "tokens", "--vocab"]
    assert "10,000,000 tokens are the most" in refused(capsys, [*tokenize, "9999999999"], 1)
    assert "5000 digits" in refused(capsys, [*tokenize, DIGITS], 2)


@pytest.mark.slow
def test_a_nul_in_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    (Path("text.txt")).write_text("to be\n")
    for words in (["--out", "a\x00b"], ["--from", "a\x00b"]):
        refused(capsys, [*TRAIN, *words], 1)
    for words in (["data", "tokenize", "text.txt", "a\x00b"], ["sweep", "mlp-covtype-tiny", "--storage", "a\x00b"]):
        assert "NUL" in refused(capsys, words, 1)
