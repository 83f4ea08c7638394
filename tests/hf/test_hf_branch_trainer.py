"""Several sizes out of one run of transformers' Trainer: branches that end finished, and a trunk that goes on."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mupscale as mu
from hf_trainer_runs import rates, small_llama, train
from mupscale import MupscaleError, hf
from mupscale.hf.record import Record

CONSTANT = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}


def family() -> list[Any]:
    """Hidden size 16, finished after step 5, and 24 with three layers, after step 9."""
    grow = hf.GrowTrainerCallback(at=5, hidden=24, heads=6, kv=3, grow=mu.Fresh(), layers=3)
    return [hf.BranchTrainerCallback(5, 2), grow, hf.BranchTrainerCallback(9, 3)]


def resume(folder: Path) -> Any:
    callbacks = family()
    callbacks[0].resume = callbacks[1].resume  # which the helper asks the first callback for
    return train(folder, *callbacks, steps=9, resume=True, **CONSTANT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, *family(), steps=9, eval_strategy="steps", eval_steps=5, **CONSTANT)


def same(ours: Any, theirs: Any) -> None:
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_branch_is_a_run_with_its_decay_and_the_trunk_goes_on_from_before_it(
    whole: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, trainer = whole
    model = small_llama()
    optimizer = torch.optim.AdamW(_decayed(model), lr=1e-2, eps=1e-3)
    multiples = [1.0, 1.0, 1.0, 2 / 3, 1 / 3, 0.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: multiples[step])
    alone = train(tmp_path, steps=5, model=model, optimizers=(optimizer, scheduler))
    finished = load(folder / "sizes" / "hidden-16-layers-2").state_dict()
    for name, value in alone.model.state_dict().items():  # the Trainer's own optimizer may round otherwise
        torch.testing.assert_close(finished[name], value, rtol=0, atol=1e-12)
    assert rates(trainer)[:6] == pytest.approx([1e-2, 1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3, 1e-2])
    trunk = mu.load(folder / "trunk-3" / "model.safetensors").model
    narrow = load(folder / "narrow-checkpoint-5").state_dict()
    assert all(torch.equal(value, narrow[name]) for name, value in trunk.items())
    same(load(folder / "sizes" / "hidden-24-layers-3"), trainer.model)  # the run ends with its last size
    assert Record.load(folder / "sizes" / "hidden-24-layers-3").growths


def test_a_card_tells_shape_steps_of_the_trunk_and_how_to_load(whole: tuple[Path, Any]) -> None:
    """Six steps before the second branch, of which two were the first branch's; the last size is evaluated."""
    first, last = (
        " ".join((whole[0] / "sizes" / name / "README.md").read_text(encoding="utf-8").split())
        for name in ("hidden-16-layers-2", "hidden-24-layers-3")
    )
    for card in (first, last):
        assert "pipeline_tag: text-generation" in card
        assert "is one size of a family" in card
    assert "after 3 of the trunk's steps, and its learning rate then fell to zero over 2 steps" in first
    assert "hidden size 16, feed-forward size 24, attention heads 4, key/value heads 2, layers 2" in first
    assert 'transformers.LlamaForCausalLM.from_pretrained("hidden-16-layers-2")' in first
    assert "evaluation" not in first  # the trunk was evaluated after that step
    assert "after 4 of the trunk's steps, and its learning rate then fell to zero over 3 steps" in last
    assert "finished before it: `hidden-16-layers-2`." in last
    evaluated = whole[1].state.log_history[-2]
    assert last.endswith(f"Its evaluation: eval_loss {evaluated['eval_loss']:.4g}.")
    assert evaluated["step"] == 9


def _decayed(model: Any) -> list[dict[str, Any]]:
    """The Trainer's two groups."""
    names = hf.decay_groups(model, 0.1)
    own = dict(model.named_parameters())
    return [{**group, "params": [own[name] for name in group["params"]]} for group in names]


@pytest.mark.quick("4")
@pytest.mark.parametrize(
    "stop", [pytest.param(2, marks=pytest.mark.slow), 4, 5, pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_family_that_was_stopped_goes_on_to_the_same_bits(whole: tuple[Path, Any], tmp_path: Path, stop: int) -> None:
    """Before the branch, in it, where the trunk has grown, and in the last branch."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    for path in folder.glob("checkpoint-*"):
        if int(path.name[11:]) > stop:
            shutil.rmtree(path)
    shutil.rmtree(folder / "sizes" / "hidden-24-layers-3")
    again = resume(folder)
    same(again.model, whole[1].model)
    for name in ("hidden-16-layers-2", "hidden-24-layers-3"):
        same(load(folder / "sizes" / name), load(whole[0] / "sizes" / name))


def test_a_line_in_the_log_and_a_record_wherever_the_model_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train(tmp_path, hf.GrowTrainerCallback(at=1, hidden=24, heads=6, kv=3, grow=mu.Fresh()), steps=2)
    printed = capsys.readouterr().out
    assert "grown: hidden size 16 → 24, attention heads 4 → 6, key/value heads 2 → 3, parameters " in printed
    assert any(
        entry.get("parameters") == sum(map(torch.numel, trainer.model.parameters()))
        for entry in trainer.state.log_history
    )
    trainer.save_model(str(tmp_path / "saved"))
    assert Record.load(tmp_path / "saved").growths == Record.load(tmp_path / "checkpoint-1").growths
    copy.deepcopy(trainer.model).save_pretrained(tmp_path / "copied")
    assert torch.equal(load(tmp_path / "copied").lm_head.weight, trainer.model.lm_head.weight)


def test_what_cannot_branch_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="leaves no steps for the trunk before it"):
        hf.BranchTrainerCallback(at=5, steps=5)
    with pytest.raises(MupscaleError, match="the name of a folder in OUT/sizes"):
        hf.BranchTrainerCallback(at=5, steps=2, name="../small")
    with pytest.raises(MupscaleError, match=r"lr_scheduler_type is cosine. Give constant or constant_with_warmup"):
        train(tmp_path, hf.BranchTrainerCallback(5, 2))
    with pytest.raises(MupscaleError, match="ends after step 50, but this run ends after 10"):
        train(tmp_path, hf.BranchTrainerCallback(50, 2), **CONSTANT)
    branch, grow, last = family()
    with pytest.raises(MupscaleError, match="put BranchTrainerCallback before GrowTrainerCallback"):
        train(tmp_path, grow, branch, last, **CONSTANT)
