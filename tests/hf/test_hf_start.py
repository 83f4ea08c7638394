"""New units in files start as transformers starts a model: seen without the laws that they were drawn by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hf_models as models
import mupscale as mu
from mupscale import hf
from mupscale.core import Initial
from mupscale.growth import FreshTensor
from mupscale.hf import config_family
from mupscale.hf.miniatures import initial_laws
from mupscale.hf.source import open_source
from mupscale.hf.starting_values import ALLOWED, compare_start
from mupscale.hf.verifying import relate
from slow_cases import with_slow

ROW = "start of new units"
SIZES: dict[str, Any] = {"n_embd": 32, "num_hidden_layers": 1}
MATRIX, GAIN = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.ln_1.weight"
QUERIES = (0.02 * 1.3, 0.02, 0.02)

WRONG: dict[str, tuple[Callable[[str, Initial], Initial], str, str]] = {
    "spread": (lambda _, law: replace(law, std=1.3 * (law.std or 0.0)), "", "standard deviation of"),
    "mean": (lambda _, law: replace(law, means=((law.std or 0.0) / 3,)) if law.std else law, "", "have a mean of"),
    "constants": (
        lambda name, law: replace(law, means=(0.0,)) if name == GAIN else law,
        GAIN,
        "up to 1 away from the constant 1",
    ),
    "part": (
        lambda name, law: replace(law, means=(0.0,) * 3, stds=QUERIES, dim=1) if name == MATRIX else law,
        MATRIX,
        "New units in part 1 of 3 of dimension 1",
    ),
}
"""By what is wrong of them: laws made from the right ones, the tensor that is named, and what is said of it."""


def start_row(found: hf.Comparison) -> Any:
    (row,) = (row for row in found.rows if row.what.startswith(ROW))
    return row


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_law_fails_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It passed: the files hold what the wrong law draws, to the bit."""
    wrong, name, words = WRONG[what]

    def laws_of(config: Any) -> dict[str, Initial]:
        return {name: wrong(name, law) for name, law in initial_laws(config).items()}

    models.save(tmp_path / "small", "gpt2", **SIZES)
    monkeypatch.setattr(config_family, "initial_laws", laws_of)
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=3, grow=mu.Fresh(), verify=False, progress=False)
    found = hf.verify(tmp_path / "small", tmp_path / "wide")
    assert [row.what for row in found.rows if not row.ok] == [start_row(found).what]
    assert found.first is not None
    assert name in ("", found.first.name)
    assert words in found.verdict


def test_trained_entries_say_how_large_new_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(tmp_path / "small", "gpt2", **SIZES)
    usual = FreshTensor._trained_law

    def wrong(tensor: FreshTensor, read: Any) -> Initial:
        law = usual(tensor, read)
        return replace(law, std=1.3 * (law.std or 0.0), stds=tuple(1.3 * std for std in law.stds))

    told: dict[str, Any] = {"times": 3, "grow": mu.Fresh(spread="trained"), "verify": False, "progress": False}
    hf.upscale(tmp_path / "small", tmp_path / "wide", **told)
    assert start_row(hf.verify(tmp_path / "small", tmp_path / "wide")).ok
    monkeypatch.setattr(FreshTensor, "_trained_law", wrong)
    hf.upscale(tmp_path / "small", tmp_path / "wrong", **told)
    assert not start_row(hf.verify(tmp_path / "small", tmp_path / "wrong")).ok


@pytest.mark.parametrize("operator", [mu.Fresh(), mu.Fresh(lossless=True), mu.Fresh(outgoing=0.5)], ids=str)
@pytest.mark.parametrize("name", with_slow(models.CONFIGS, ("gpt2", "gemma", "phi3", "mamba2")))
@pytest.mark.filterwarnings("ignore::mupscale.UncheckedPlan")
def test_new_units_of_every_architecture_start_right(tmp_path: Path, name: str, operator: mu.Fresh) -> None:
    models.save(tmp_path / "small", name)
    told: dict[str, Any] = {"times": models.usual_times(name), "grow": operator, "verify": False, "progress": False}
    try:
        hf.upscale(tmp_path / "small", tmp_path / "wide", **told)
    except mu.MupscaleError:  # which takes no fresh units
        assert name in ("bloom", "mpt", "wav2vec2")
        return
    relation = relate(open_source(tmp_path / "small"), open_source(tmp_path / "wide"))
    start = compare_start(relation.small, relation.wide, relation.steps)
    assert start.tensors >= 5
    assert start.errors <= ALLOWED


def test_a_second_growth_counts_from_the_first_model(tmp_path: Path) -> None:
    """μP's factor of both growths together; a later one to more layers changes nothing."""
    models.save(tmp_path / "small", "gpt2", **SIZES)
    told: dict[str, Any] = {"grow": mu.Fresh(), "verify": False, "progress": False}
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, **told)
    hf.upscale(tmp_path / "wide", tmp_path / "wider", times=2, **told)
    hf.upscale(tmp_path / "wide", tmp_path / "deep", layers=3, verify=False, progress=False)
    for small, wide in (("small", "wider"), ("wide", "wider"), ("small", "deep")):
        row = start_row(hf.verify(tmp_path / small, tmp_path / wide))
        assert row.ok, (small, wide)
        assert row.difference > 0
