"""`verify` compares the saved optimizer in full with what was written, or does not say that all is well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models as models
import mupscale as mu
from mupscale import hf
from mupscale.cli import main
from mupscale.hf import verifying
from mupscale.hf.source import open_source

Content = dict[str, Any]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint and its optimizer, beside the same ones grown."""
    place: Path = tmp_path_factory.mktemp("optimizer")
    model = models.save(place / "small", "gpt2", num_hidden_layers=1, n_layer=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), place / "small" / "optimizer.pt")
    hf.upscale(place / "small", place / "wide", times=2, exact=True, optimizer=place / "small", verify=False)
    return place


@pytest.fixture
def place(grown: Path, tmp_path: Path) -> Path:
    shutil.copytree(grown, tmp_path / "both")
    return tmp_path / "both"


def compared(place: Path) -> tuple[list[Any], str, list[str]]:
    """What `verify` finds of the optimizer: its row, the first difference, and notes."""
    relation = verifying.relate(open_source(place / "small"), open_source(place / "wide"))
    rows: list[Any] = []
    notes: list[str] = []
    first = verifying._compare_optimizer(relation, rows, notes)
    return rows, str(first), notes


def set_in_first_group(**hyper: Any) -> Callable[[Content], object]:
    return lambda content: content["param_groups"][0].update(hyper)


def move_a_parameter(content: Content) -> None:
    first, second, *_ = content["param_groups"]
    for key in ("params", "param_names"):
        second[key].append(first[key].pop())


def split_a_group(content: Content) -> None:
    """The values of each parameter stay as they are."""
    group = next(group for group in content["param_groups"] if len(group["params"]) > 1)
    other = {**group, "params": [group["params"].pop()], "param_names": [group["param_names"].pop()]}
    content["param_groups"].append(other)


def forget_a_state(content: Content) -> None:
    del content["state"][0]


def spoil_a_number(content: Content) -> None:
    content["state"][1]["exp_avg"].view(-1)[0] = torch.nan


CHANGES: dict[str, tuple[Callable[[Content], object], str]] = {
    "betas": (set_in_first_group(betas=(0.9, 0.99)), "betas of"),
    "amsgrad": (set_in_first_group(amsgrad=True), "amsgrad of"),
    "maximize": (set_in_first_group(maximize=True), "maximize of"),
    "decoupled decay": (set_in_first_group(decoupled_weight_decay=False), "decoupled_weight_decay of"),
    "lr_factor": (set_in_first_group(lr_factor=3.0), "lr_factor of"),
    "norm_factor": (set_in_first_group(norm_factor=3.0), "norm_factor of"),
    "rule for decay": (set_in_first_group(decay_rule="sqrt"), "decay_rule of"),
    "a stranger": (set_in_first_group(nesterov=True), "nesterov of"),
    "a parameter in another group": (move_a_parameter, " of transformer"),
    "another group": (split_a_group, "the group of"),
    "a lost state": (forget_a_state, "/"),
    "not a number": (spoil_a_number, "/exp_avg"),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=CHANGES)
def test_a_changed_optimizer_is_seen(place: Path, change: Callable[[Content], object], named: str) -> None:
    file = place / "wide" / "optimizer.pt"
    content = torch.load(file)
    torch.save(content, file)
    assert compared(place)[0][0].ok
    change(content)
    torch.save(content, file)
    rows, first, _ = compared(place)
    assert not rows[0].ok
    assert named in first


def test_without_the_small_ones_the_checksum_tells(place: Path) -> None:
    (place / "small" / "optimizer.pt").unlink()
    rows, _, notes = compared(place)
    assert rows[0].ok
    assert rows[0].note == "as recorded"
    assert not notes
    file = place / "wide" / "optimizer.pt"
    content = torch.load(file)
    set_in_first_group(betas=(0.9, 0.99))(content)
    torch.save(content, file)
    assert not compared(place)[0][0].ok


@pytest.mark.parametrize("with_small", [True, False])
@pytest.mark.parametrize("content", [b"", b"garbage", b"PK garbage", None])
def test_what_is_no_optimizer_is_no_note_in_passing(place: Path, content: bytes | None, with_small: bool) -> None:
    file = place / "wide" / "optimizer.pt"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    if not with_small:
        (place / "small" / "optimizer.pt").unlink()
    rows, first, _ = compared(place)
    assert not rows[0].ok
    assert "file 'optimizer.pt'" in first


def test_the_status_is_not_0(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "wide" / "optimizer.pt").unlink()
    assert main(["verify", str(place / "small"), str(place / "wide")]) == 1
    assert "mupscale.json says that it was written" in " ".join(capsys.readouterr().out.split())


def test_an_optimizer_that_nobody_wrote_is_a_note(place: Path) -> None:
    """As in a folder that an earlier version wrote, or to which a Trainer has saved since."""
    record = json.loads((place / "wide" / "mupscale.json").read_text())
    del record["optimizer"]
    (place / "wide" / "mupscale.json").write_text(json.dumps(record))
    assert compared(place)[0][0].ok
    (place / "small" / "optimizer.pt").unlink()
    rows, _, notes = compared(place)
    assert not rows
    assert "Not compared: optimizer.pt" in notes[0]


def test_a_second_growth_does_not_take_over_the_checksum(place: Path) -> None:
    first = hf.Record.load(place / "wide")
    assert first.optimizer
    hf.upscale(place / "wide", place / "wider", times=2, grow=mu.Copies(), exact=True, verify=False)
    assert not hf.Record.load(place / "wider").optimizer
