"""A model that grows in the middle of a run of transformers' Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import mupscale as mu  # noqa: E402
from mupscale import MupscaleError, hf  # noqa: E402


def small_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=31,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config).double()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(31, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(folder: Path, *callbacks: Any, steps: int = 10, resume: bool = False, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        adam_epsilon=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"learning_rate": 1e-2, "save_strategy": "no", **settings},
    )
    trainer = transformers.Trainer(small_llama(), arguments, train_dataset=Texts(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=callbacks[0].resume(trainer) if resume else None)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_copies_go_on_as_the_small_model_would(tmp_path: Path) -> None:
    """Cosine schedule, decay for some parameters, clipping: all as if the model had not grown.

    transformers computes norms and losses in float32, so that is how close they are; a rate that is 1 % off is not.
    """
    alone = train(tmp_path / "alone")
    grow = hf.GrowTrainerCallback(at=4, times=2)
    grown = train(tmp_path / "grown", grow)
    assert grown.model.config.hidden_size == 32
    assert grown.model.lm_head.weight.shape == (31, 32)
    torch.testing.assert_close(losses(grown), losses(alone), rtol=1e-5, atol=0)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(grown.model(tokens).logits, alone.model(tokens).logits, rtol=0, atol=1e-4)
    other = train(tmp_path / "other", learning_rate=1.01e-2)
    assert (other.model(tokens).logits - alone.model(tokens).logits).abs().max() > 3e-4
    rates = {group["lr_factor"] for group in grown.optimizer.param_groups}
    assert rates == {0.5, 1.0}
    assert grown.args.max_grad_norm == 0.5


def test_checkpoints_before_and_after(tmp_path: Path) -> None:
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2), steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-2-narrow"]
    narrow, wide = tmp_path / "checkpoint-2-narrow", tmp_path / "checkpoint-2"
    assert hf.verify(narrow, wide, dtype="float64").ok
    assert (wide / "mupscale.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(wide)
    groups = hf.param_groups(wide, model, torch.optim.AdamW, lr=1e-2)
    assert {group["lr"] for group in groups} == {5e-3, 1e-2}
    assert torch.load(narrow / "optimizer.pt", weights_only=True)["state"]
    assert (wide / "optimizer.pt").is_file()


def test_fresh_units_and_another_rate(tmp_path: Path) -> None:
    grow = hf.GrowTrainerCallback(at=2, hidden=24, heads=6, kv=3, grow=mu.Fresh(), lr=1e-3)
    trainer = train(tmp_path, grow, steps=5)
    assert trainer.model.config.hidden_size == 24
    assert trainer.model.config.num_key_value_heads == 3
    assert all(loss == loss for loss in losses(trainer))


def test_what_cannot_grow_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="say either by how much"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, hidden=32), steps=3)


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_a_run_that_was_stopped_goes_on_before_and_after_its_growth(tmp_path: Path, stop: int) -> None:
    """Stopped after so many steps of ten, it ends with the same weights, bit for bit, as one that was not."""
    settings = {"save_strategy": "steps", "save_steps": 1}
    whole = train(tmp_path / "whole", hf.GrowTrainerCallback(at=4, times=2, noise=0.5), **settings)
    for path in (tmp_path / "whole").iterdir():
        if path.name[11:].isdecimal() and int(path.name[11:]) > stop:
            shutil.rmtree(path)
    (tmp_path / "whole" / "checkpoint-9").mkdir()  # of which a kill has left nothing
    again = train(tmp_path / "whole", hf.GrowTrainerCallback(at=4, times=2, noise=0.5), resume=True, **settings)
    assert again.state.global_step == 10
    assert again.args.max_grad_norm == 0.5
    for (name, ours), theirs in zip(again.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    if stop >= 4:
        with pytest.raises(MupscaleError, match=r"callback\.resume\(trainer\)"):
            hf.GrowTrainerCallback(at=4, times=2).on_train_begin(again.args, again.state, None, model=again.model)
