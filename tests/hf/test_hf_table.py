"""The tables of architectures in the docs, against what the tests take."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
import test_hf_fresh
import test_hf_generic
import test_hf_miniatures

import hf_models as models
from mupscale import Fresh, MupscaleError
from mupscale.hf import upscale, verify

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface-architectures.md").read_text(encoding="utf-8")
ASKED_FOR = """Gemma 3, Qwen2-MoE, Qwen3-MoE, Llama 4, DeepSeek-V2, V3, gpt-oss, SmolLM3, OLMo 3, OLMoE, Granite,
GraniteMoE, Phi-3, StarCoder2, Cohere 2, StableLM, Falcon, BLOOM, MPT, T5, BART, RoBERTa, DistilBERT, ModernBERT,
DeBERTa v2, ELECTRA, CLIP, SigLIP, DINOv2, Whisper, wav2vec 2.0, Mamba, Mamba 2, Qwen3-Next,
LLaVA, Qwen2-VL, ConvNeXt, SegFormer"""


def tables() -> list[dict[str, list[str]]]:
    """Of each table: the cells of a row by each model_type in it."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", PAGE, re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        assert rows[0] == ["architecture", "`model_type`", "copies", "fresh", "tied", "optimizer", "verified", "notes"]
        found.append({name: row for row in rows[2:] for name in re.findall(r"`([^`]+)`", row[1])})
    return found


def test_every_row_is_tested() -> None:
    first, others = tables()
    assert first.keys() == models.CONFIGS.keys()
    generic = {**test_hf_generic.EXACT, **test_hf_generic.MORE_EXACT, **test_hf_generic.MODELS}
    assert others.keys() <= generic.keys()
    variants = {**test_hf_miniatures.VARIANTS, **test_hf_miniatures.MORE}
    assert {name for name, _, _ in variants.values()} == first.keys()


def test_what_is_said_of_fresh_units() -> None:
    """Where the function is said to stay, a test shows it."""
    whole = {name for name, *_ in {**test_hf_fresh.LOSSLESS, **test_hf_fresh.MORE_LOSSLESS}.values()}
    hidden = {name for name, *_ in {**test_hf_fresh.EXACT, **test_hf_fresh.MORE_EXACT}.values()}
    alike = {"xlm-roberta", "camembert"}  # RoBERTa by other names
    for name, row in tables()[0].items():
        if row[3].startswith("lossless"):
            assert name in whole | (hidden if "while heads stay" in row[3] else set()), name
        elif "lossless" in row[3]:
            assert name in hidden | alike, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*it changes no output on the batch")  # RegNet's gates, behind a ReLU
@pytest.mark.parametrize("name", tables()[1])
def test_what_is_said_of_fresh_units_of_the_others(name: str, tmp_path: Path) -> None:
    said, small = tables()[1][name][3], tmp_path / "small"
    if name in test_hf_generic.MODELS:
        test_hf_generic.saved_part(small, name)
    else:
        test_hf_generic.saved(small, *{**test_hf_generic.EXACT, **test_hf_generic.MORE_EXACT}[name])
    taken = {"lossless": "2", "`ffn` lossless": "ffn=2"}.get(said)
    for times in ("2", "ffn=2"):
        if times == taken:
            made = upscale(small, tmp_path / times, times=times, grow=Fresh(lossless=True), progress=False)
            assert made.comparison.ok
            assert "not lossless" not in str(made.comparison)
        elif times == "2":  # refused, or what comes of it is told
            with suppress(MupscaleError):
                made = upscale(small, tmp_path / times, times=times, grow=Fresh(lossless=True), progress=False)
                assert "not lossless" in str(made.comparison)


def test_every_architecture_that_was_asked_for_is_there() -> None:
    cells = " | ".join(row[0] for table in tables() for row in table.values())
    known = cells.replace("Gemma 1 to 3", "Gemma 3")
    assert [
        name for name in re.split(r",\s+", ASKED_FOR) if not re.search(rf"(^|[ ,|]){re.escape(name)}\b", known)
    ] == []


ON_DISK = ("whisper", "wav2vec2", "bloom", "mpt", "mamba2", "qwen3_next", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of '.*' the batch does not show:mupscale.UncheckedPlan")  # wav2vec 2.0's mask
@pytest.mark.parametrize("name", ON_DISK)
def test_from_shards_to_shards_and_verified(name: str, tmp_path: Path) -> None:
    """Sound, layers that differ from each other, constants that files round: verified as users would."""
    small, wide = tmp_path / "small", tmp_path / "wide"
    models.randomised(models.build(models.tiny(name)[0])).save_pretrained(small, max_shard_size="20KB")
    made = upscale(small, wide, times=models.usual_times(name), shard_size="40KB", progress=False, exact=True)
    assert made.files > 1
    assert verify(small, wide, dtype="float64", train=3).ok
