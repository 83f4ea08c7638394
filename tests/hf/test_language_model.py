"""A Hugging Face folder's model at any width, and a comparison that begins with it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import mupscale as mu
from hf_files import TOKENS, folder_with_tokenizer
from mupscale.cli import main
from mupscale.cli.studies import base_checkpoint, describe_tokens
from mupscale.data import Text, tinyshakespeare
from mupscale.data.tokenizer import load_tokenizer, make_tokenizer
from mupscale.hf import LanguageModel, hidden_size, load_language_model
from mupscale.system import MupscaleError
from mupscale.train import Recipe, Spec, find_checkpoint, read_snapshot
from refusals import refuses


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_its_weights_are_the_folders_and_it_grows_by_copies_exactly(tmp_path: Path, kind: str) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", kind)
    model, width = load_language_model(folder)
    assert width == hidden_size(folder) == 16
    tokens = torch.randint(0, TOKENS, (2, 6))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert torch.allclose(model.eval()(tokens), theirs, atol=1e-5)
    family = mu.Family(lambda width: LanguageModel(str(folder), width), base=16, init_at=16, inputs=tokens)
    model = model.double()
    wide, _ = family.upscale(model, width=48, exact=True)
    assert torch.allclose(
        wide.double()(tokens), model(tokens), rtol=0, atol=1e-6 if kind == "llama" else 1e-10
    )  # its norms compute in float32
    assert LanguageModel(str(folder), 8)(tokens).shape == (2, 6, TOKENS)


def test_a_width_that_cuts_a_head_is_refused(tmp_path: Path) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", "llama")
    with pytest.raises(
        MupscaleError,
        match=r"cannot have hidden size 12: .* number of key/value heads is 2, so .* 1\.5\. Choose a multiple of 8",
    ):
        LanguageModel(str(folder), 12)


def test_a_pretrained_tokenizer_packs_text_and_is_kept(tmp_path: Path) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", "gpt2")
    tokenizer = make_tokenizer(f"hf:{folder}", [])
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, special = tokenizer.encode_batch(["To be, or not to be", "</s>"])
    assert plain.tolist() == reference.encode("To be, or not to be").ids
    assert tokenizer.end_of_text not in special.tolist()  # what looks like it in a text is text
    assert tokenizer.end_of_text == reference.token_to_id("</s>")
    (tmp_path / "text.txt").write_text(tinyshakespeare()[:3000])
    source = str(tmp_path / "text.txt")
    data = Text(str(tmp_path / "tokens"), context=8, source=source, tokenizer=f"hf:{folder}")
    assert data.classes == TOKENS
    assert load_tokenizer(tmp_path / "tokens" / "tokenizer.json").fingerprint == tokenizer.fingerprint
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text("{}")
    refuses("does not say which token ends a text", make_tokenizer, f"hf:{folder}", [])
    (folder / "tokenizer.json").unlink()
    refuses(r"has no tokenizer\.json", make_tokenizer, f"hf:{folder}", [])


# ------------------------------------------------------------------------------------------------ mupscale run --from


def recipe_of(tmp_path: Path, folder: Path) -> str:
    """A recipe that names a text and a tokenizer."""
    (tmp_path / "text.txt").write_text(tinyshakespeare()[:20_000])
    arguments = {"tokens": f"{tmp_path}/tokens", "source": f"{tmp_path}/text.txt", "tokenizer": f"hf:{folder}"}
    data: dict[str, Any] = {"class_path": "mupscale.data.Text", "init_args": {**arguments, "context": 8}}
    (tmp_path / "text.yaml").write_text(json.dumps({"data": data}))
    return str(tmp_path / "text.yaml")


def words_of(tmp_path: Path, folder: Path, given: dict[str, Any], verb: str = "run") -> list[str]:
    """A command that begins with this folder; None for what is not to be said."""
    usual = {"from": folder, "width": 32, "steps": 24, "batch": 4, "optimizer": "AdamW", "optimizer.lr": 0.003}
    named = {**usual, "study.base_steps": 16, "device": "cpu", **given}
    words = [word for name, value in named.items() if value is not None for word in (f"--{name}", str(value))]
    return [verb, recipe_of(tmp_path, folder), *words]


def test_what_a_folder_does_not_tell_is_asked_for_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", "gpt2")
    assert main(["run", recipe_of(tmp_path, folder), "--from", str(folder), "--width", "32", "--steps", "8"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the learning rate it was trained with" in line
    assert "base_steps" in line
    assert "--steps" not in line
    assert not (tmp_path / "tokens").exists()


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_costs_are_flops_and_small_widths_are_named(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though transformers' masks look at values, which a model without memory does not have."""
    folder = folder_with_tokenizer(tmp_path / "model", kind)
    command = [*words_of(tmp_path, folder, {"study.budgets": [0.5, 1.0]}), "--dry-run"]
    assert main([*command, "--study.widths", "[8]"]) == 0
    out = capsys.readouterr().out
    assert "FLOPs" in out
    assert "cannot be counted" not in out
    steps = {name: int(count) for name, count in re.findall(r"(from scratch|continued|grown from copies) (\d+)", out)}
    assert steps["continued"] > 1.5 * steps["grown from copies"]
    assert main([*command, "--study.widths", "[6]"]) == 1
    growth = r"Choose a multiple of \d; a small model grows as the large one does, here from 6 → 12; give other small"
    assert re.search(growth, capsys.readouterr().err)
    assert main([*command, "--width", "18"]) == 1  # before any small width, of which none was given
    assert "cannot have hidden size 18" in capsys.readouterr().err
    assert main([*command, "--width", "16", "--study.widths", "[8]"]) == 1
    assert f"{folder} holds a model of width 16, and the width to grow to is 16" in capsys.readouterr().err
    assert main([*command, "--width", "24"]) == (1 if kind == "llama" else 0)  # 2 key/value heads, and 3
    why = r"16 its number of key/value heads is 2, so here it would be 1\.5.* 8 → 12; tune at the base "
    other = r"model's own width \(study\.widths \[16\]\), or grow to a multiple, such as 32$"
    assert bool(re.search(why + other, capsys.readouterr().err)) == (kind == "llama")


def save_other_weights(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    model.save_pretrained(folder)


def recipe_from(folder: Path, tokenizer: str) -> Recipe:
    data = Spec("mupscale.data.Text", {"tokens": "tokens", "tokenizer": tokenizer})
    model = Spec("mupscale.hf.LanguageModel", {"folder": str(folder)})
    sgd = Spec("torch.optim.SGD", {"lr": 0.1})
    return Recipe(model, data, sgd, width=32, base=16, steps=4, batch=2, start=str(folder))


def test_other_weights_in_the_folder_are_another_base_model(tmp_path: Path) -> None:
    folder, out = folder_with_tokenizer(tmp_path / "model", "gpt2"), tmp_path / "run"
    recipe = recipe_from(folder, f"hf:{folder}")
    first = base_checkpoint(recipe, out)
    assert base_checkpoint(recipe, out) == first
    save_other_weights(folder)
    second = base_checkpoint(recipe, out)
    assert second.start != first.start
    assert Path(str(second.start)).read_bytes() != Path(str(first.start)).read_bytes()
    assert base_checkpoint(recipe, out) == second


def test_tokens_of_another_tokenizer_are_kept_in_mind(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert describe_tokens(recipe_from(tmp_path / "model", f"hf:{tmp_path}/model/../model")) == []
    for name in ("model", "copy", "other"):  # a tokenizer is the same wherever it lies
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text("another" if name == "other" else "one")
    assert describe_tokens(recipe_from(tmp_path / "model", f"hf:{tmp_path}/copy")) == []
    for other in ("bytes", f"hf:{tmp_path}/other"):
        (said,) = describe_tokens(recipe_from(tmp_path / "model", other))
        assert f"does not name the tokenizer of {tmp_path / 'model'}" in said


@pytest.mark.slow
def test_what_is_to_be_kept_in_mind_is_said_before_anything_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", "gpt2")
    (folder / "optimizer.pt").write_bytes(b"a Trainer's")
    other = folder_with_tokenizer(tmp_path / "other", "gpt2")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    words = words_of(tmp_path, folder, {"study.widths": [8], "data.tokenizer": f"hf:{other}"})
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"Note: the recipe does not name the tokenizer of {folder}" in out
    assert f"Note: {folder} has its optimizer's state in optimizer.pt, which is not read" in out


@pytest.mark.slow
def test_a_family_from_a_folder_gives_a_folder_for_every_size(tmp_path: Path) -> None:
    folder, run = folder_with_tokenizer(tmp_path / "model", "gpt2"), tmp_path / "run"
    given = {"width": None, "study.base_steps": None, "sizes": "16,32", "steps": 8, "family.sunk": "true", "out": run}
    words = words_of(tmp_path, folder, given, "family")
    assert main(words) == 0
    tokens = torch.randint(0, TOKENS, (2, 6))
    for size in (16, 32):
        place = run / "sizes" / str(size)
        model = LanguageModel(str(folder), size)
        read_snapshot(find_checkpoint(str(place))).restore_model(model)
        saved = transformers.AutoModelForCausalLM.from_pretrained(place / "hf")
        assert saved.config.hidden_size == size
        assert torch.allclose(saved(tokens).logits, model.eval()(tokens), rtol=1e-4, atol=1e-5)
        assert (place / "hf" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
        card = (place / "hf" / "README.md").read_text()
        assert f"# Size {size}\n" in card
        assert "transformers.GPT2LMHeadModel.from_pretrained" in card
    inner = LanguageModel(str(run / "sizes" / "16" / "hf"), 16)  # and a family may begin with it
    assert hidden_size(inner.folder) == 16


@pytest.mark.slow
def test_small_sizes_are_such_as_the_model_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With heads of 8 units, an eighth and a quarter of 16 would be parts of a head."""
    folder = folder_with_tokenizer(tmp_path / "model", "gpt2")
    words = words_of(tmp_path, folder, {})
    assert main([*words, "--dry-run"]) == 0
    assert "8 → 16" in " ".join(capsys.readouterr().out.split())


def test_a_trainers_optimizer_is_read(tmp_path: Path) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", "gpt2")
    model, _ = load_language_model(folder)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=0.003)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    recipe = replace(recipe_from(folder, "bytes"), optimizer=Spec("torch.optim.AdamW", {"lr": 0.003}))
    start = read_snapshot(Path(str(base_checkpoint(recipe, tmp_path / "run").start)))
    again = start.restore_optimizer(torch.optim.AdamW, {"lr": 0.003}, model)
    for p, state in optimizer.state.items():
        assert torch.equal(again.state[p]["exp_avg"], state["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_comparison_from_a_hugging_face_folder(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with_tokenizer(tmp_path / "model", kind)
    given = {"study.widths": [8], "study.lrs": [0.003], "study.noises": [0.5], "study.budgets": [0.5, 1.0]}
    given |= {"study.seeds": 1, "study.small_seeds": 1, "out": tmp_path / "run"}
    words = words_of(tmp_path, folder, given)
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert main(words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["base"]["width"], summary["large"]["wide"]) == (16, 32)
    assert any("holds no optimizer state" in note for note in summary["notes"])
    assert not any("tokenizer" in note for note in summary["notes"])
    assert "Report:" in capsys.readouterr().out
    save_other_weights(folder)
    assert main(words) == 0
    again = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert again["small"] == summary["small"]
    assert again["large"] != summary["large"], "other weights were taken for the first"
