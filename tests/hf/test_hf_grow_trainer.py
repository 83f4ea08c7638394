"""A model that grows in the middle of a run of transformers' Trainer."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mupscale as mu
from hf_trainer_runs import losses, rates, small_llama, train
from mupscale import MupscaleError, hf
from mupscale.hf.record import Record


def test_copies_go_on_as_the_small_model_would(tmp_path: Path) -> None:
    """Cosine schedule, decay for some parameters, clipping: all as if the model had not grown.

    transformers computes norms and losses in float32, so that is how close they are; a rate that is 1 % off is not.
    """
    alone = train(tmp_path / "alone")
    grow = hf.GrowTrainerCallback(at=4, times=2, exact=True)
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
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "narrow-checkpoint-2"]
    narrow, wide = tmp_path / "narrow-checkpoint-2", tmp_path / "checkpoint-2"
    assert hf.verify(narrow, wide, dtype="float64").ok
    assert (wide / "mupscale.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(wide)
    groups = hf.param_groups(wide, model, torch.optim.AdamW, lr=1e-2)
    assert {group["lr"] for group in groups} == {5e-3, 1e-2}
    assert torch.load(narrow / "optimizer.pt", weights_only=True)["state"]
    assert (wide / "optimizer.pt").is_file()


def test_fresh_units_another_rate_and_another_rule_for_decay(tmp_path: Path) -> None:
    rules = mu.RuleSet(decay="fixed")
    grow = hf.GrowTrainerCallback(at=2, hidden=24, heads=6, kv=3, grow=mu.Fresh(), lr=1e-3, rules=rules)
    trainer = train(tmp_path, grow, steps=5)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0, 0.1}
    groups = hf.param_groups(tmp_path / "checkpoint-2", trainer.model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    assert {group["weight_decay"] for group in groups} == {0.1}  # by the rule that the folder records
    assert len({group["lr_factor"] for group in trainer.optimizer.param_groups}) > 1
    assert trainer.model.config.hidden_size == 24
    assert trainer.model.config.num_key_value_heads == 3
    assert all(loss == loss for loss in losses(trainer))


@pytest.mark.parametrize(("how", "times"), [({"lr": 1e-3}, 0.4), ({"scale_lr": 0.5, "layers": 3}, 0.5)])
def test_verify_knows_the_rate_that_the_growth_set(how: dict[str, Any], times: float, tmp_path: Path) -> None:
    """From mupscale.json, which says the same after a stop; a later checkpoint is told from the one of the growth."""
    settings = {"save_strategy": "steps", "save_steps": 1, "steps": 3}
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, **how), **settings)
    narrow, wide, later = (tmp_path / name for name in ("narrow-checkpoint-2", "checkpoint-2", "checkpoint-3"))
    report = hf.verify(narrow, wide)
    assert report.ok
    assert next(row.note for row in report.rows if row.what == "optimizer.pt") == f"rates × {times}"
    assert f"{wide} is the checkpoint right after the growth" in hf.verify(narrow, later).verdict
    shutil.rmtree(later)
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, **how), resume=True, **settings)
    assert Record.load(later).growths == Record.load(wide).growths
    record = Record.load(wide)
    replace(record, growths=(*record.growths[:-1], replace(record.growths[-1], scale_lr=1.0))).save(wide)
    assert "'lr of " in hf.verify(narrow, wide).verdict


def test_what_cannot_grow_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="give either how much"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, hidden=32, exact=True), steps=3)
    with pytest.raises(MupscaleError, match=r"hidden=24 is not a whole multiple of 16, .*: grow=mupscale\.Fresh\(\)"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, hidden=24, heads=6, exact=True), steps=3)


@pytest.mark.quick("7-4")
@pytest.mark.parametrize(("stop", "layers"), [pytest.param(3, None, marks=pytest.mark.slow), (4, None), (7, 4)])
def test_a_run_that_was_stopped_goes_on_before_and_after_its_growth(
    tmp_path: Path, stop: int, layers: int | None
) -> None:
    """Stopped after so many steps of ten, it ends with the same weights, bit for bit, as one that was not."""
    settings = {"save_strategy": "steps", "save_steps": 1}
    whole = train(tmp_path / "whole", hf.GrowTrainerCallback(at=4, times=2, layers=layers, noise=0.5), **settings)
    for path in (tmp_path / "whole").iterdir():
        if path.name[11:].isdecimal() and int(path.name[11:]) > stop:
            shutil.rmtree(path)
    (tmp_path / "whole" / "checkpoint-9").mkdir()  # of which a kill has left nothing
    grow = hf.GrowTrainerCallback(at=4, times=2, layers=layers, noise=0.5)
    again = train(tmp_path / "whole", grow, resume=True, **settings)
    assert again.state.global_step == 10
    assert again.args.max_grad_norm == 0.5
    for (name, ours), theirs in zip(again.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    if stop >= 4:
        with pytest.raises(MupscaleError, match=r"callback\.resume\(trainer\)"):
            hf.GrowTrainerCallback(at=4, times=2, exact=True).on_train_begin(
                again.args, again.state, None, model=again.model
            )


def test_new_units_are_drawn_by_the_names_in_files(tmp_path: Path) -> None:
    """As the command draws them: GPT-NeoX's readout is called otherwise in files."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(vocab_size=31, max_position_embeddings=16, **sizes)
    )
    grow = hf.GrowTrainerCallback(at=1, times=2, layers=2)
    train(tmp_path, grow, steps=2, model=model, save_strategy="steps", save_steps=1)
    report = hf.verify(tmp_path / "narrow-checkpoint-1", tmp_path / "checkpoint-1")
    assert report.ok, report.verdict


def test_a_model_whose_files_have_other_names_resumes_whole(tmp_path: Path) -> None:
    """GPT-NeoX's readout, which the Trainer does not find: before the growth, after it, and in the best model."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.GPTNeoXConfig(vocab_size=31, max_position_embeddings=16, **sizes)
    best = {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss"}
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **best}

    def run(**more: Any) -> Any:
        """It ends with the model whose loss was largest."""
        model = transformers.GPTNeoXForCausalLM(config)
        return train(tmp_path, hf.GrowTrainerCallback(at=2, layers=2), steps=3, model=model, **settings, **more)

    def saved(step: int) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")

    ended = run()
    assert ended.state.best_global_step == 2
    assert torch.equal(ended.model.lm_head.weight, saved(2)["embed_out.weight"])
    whole = saved(3)
    assert not torch.equal(ended.model.lm_head.weight, whole["embed_out.weight"])
    shutil.rmtree(tmp_path / "checkpoint-3")
    run(resume=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved(3).items())
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    grow = hf.GrowTrainerCallback(at=2, layers=2)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    small = transformers.Trainer(transformers.GPTNeoXForCausalLM(config), arguments, callbacks=[grow])
    small._load_from_checkpoint(grow.resume(small))
    assert torch.equal(small.model.lm_head.weight, saved(1)["embed_out.weight"])


def test_more_layers_go_on_where_the_shallow_model_was(tmp_path: Path) -> None:
    """The loss is the shallow model's at first, and another once new layers have learnt; both checkpoints verify."""
    alone = train(tmp_path / "alone", steps=6)
    grown = train(tmp_path / "grown", hf.GrowTrainerCallback(at=3, layers=5), steps=6)
    assert grown.model.config.num_hidden_layers == len(grown.model.model.layers) == 5
    ours, theirs = losses(grown), losses(alone)
    assert ours[:4] == pytest.approx(theirs[:4], rel=1e-5)
    assert abs(ours[5] - theirs[5]) > 1e-4
    narrow, deep = tmp_path / "grown" / "narrow-checkpoint-3", tmp_path / "grown" / "checkpoint-3"
    report = hf.verify(narrow, deep, dtype="float64")
    assert report.ok
    assert "the function is the same" in report.verdict
    hf.upscale(narrow, tmp_path / "deep", layers=5, verify=False, progress=False)
    in_memory, in_files = (transformers.LlamaForCausalLM.from_pretrained(f) for f in (deep, tmp_path / "deep"))
    assert all(torch.equal(p, in_files.get_parameter(n)) for n, p in in_memory.named_parameters())
    new = grown.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    assert new.abs().max() > 0
    assert grown.optimizer.state[new]["step"] == 3


def test_a_deeper_run_resumes(tmp_path: Path) -> None:
    """From checkpoint-STEP, with a Trainer that knows nothing of the growth, to the same losses and weights."""
    grown = train(tmp_path, hf.GrowTrainerCallback(at=3, layers=3), steps=6, max_grad_norm=0.0)
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "checkpoint-3")
    model = transformers.LlamaForCausalLM(config).double()
    trainer = train(tmp_path / "again", steps=6, model=model, resume=tmp_path / "checkpoint-3", max_grad_norm=0.0)
    assert losses(trainer)[-3:] == losses(grown)[-3:]
    assert all(torch.equal(p, grown.model.get_parameter(n)) for n, p in trainer.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("deepen", ["identity", "stack"])
def test_width_and_layers_at_once(deepen: Any, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", steps=5)
    grown = train(
        tmp_path / "grown", hf.GrowTrainerCallback(at=3, times=2, layers=4, deepen=deepen, exact=True), steps=5
    )
    assert (grown.model.config.hidden_size, grown.model.config.num_hidden_layers) == (32, 4)
    close = losses(grown)[3] == pytest.approx(losses(alone)[3], rel=1e-5)
    assert close == (deepen == "identity")
    narrow, both = tmp_path / "grown" / "narrow-checkpoint-3", tmp_path / "grown" / "checkpoint-3"
    assert hf.verify(narrow, both, dtype="float64").ok
    rates = {name: group["lr_factor"] for group in grown.optimizer.param_groups for name in group["param_names"]}
    assert rates["model.layers.3.mlp.up_proj.weight"] == rates["model.layers.0.mlp.up_proj.weight"] == 0.5


def test_too_few_layers_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match=r"the model has 2 layers. A deeper model needs more than that, not 2"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, layers=2), steps=3)


@pytest.mark.quick("asked0")
@pytest.mark.parametrize("asked", [{"times": 2}, {"layers": 3}])
def test_loading_the_grown_model_into_the_small_one_names_the_remedy(tmp_path: Path, asked: dict[str, Any]) -> None:
    """trainer.train(resume_from_checkpoint=…) without callback.resume(trainer)."""
    train(tmp_path, hf.GrowTrainerCallback(at=1, **asked), steps=2)
    with pytest.raises(MupscaleError, match=r"grew after step 1.*callback\.resume\(trainer\)") as caught:
        train(tmp_path, hf.GrowTrainerCallback(at=1, **asked), steps=3, resume=tmp_path / "checkpoint-1")
    assert "\n" not in str(caught.value)


def test_the_best_checkpoint_is_one_of_the_grown_model(tmp_path: Path) -> None:
    """By a measure that gets worse: the first small model is the best of all, and cannot be loaded into a wide one."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    each_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=3, **best, **each_step)
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert trainer.state.best_global_step == 2
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(trainer.model.lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize("at", [0, -1, 2.0, True])
def test_a_growth_before_the_first_step_is_refused_when_it_is_asked_for(at: Any) -> None:
    with pytest.raises(MupscaleError, match=rf"at= is {at}, .* 1 or more. .* use mupscale\.hf\.upscale"):
        hf.GrowTrainerCallback(at=at, times=2, exact=True)


def test_a_run_that_ends_before_the_growth_is_warned_of_when_it_begins(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"will not grow: .*at=50.* this run ends after step 1\.") as met:
        train(tmp_path, hf.GrowTrainerCallback(at=50, times=2, exact=True), steps=1)
    named = {Path(one.filename).name for one in met if "will not grow" in str(one.message)}
    assert named == {"hf_trainer_runs.py"}  # whose line called the Trainer


@pytest.mark.quick("1")
@pytest.mark.parametrize("limit", [1, 2])
def test_the_small_model_stays_where_few_checkpoints_are_kept(tmp_path: Path, limit: int) -> None:
    """And so does the grown one, to go on from, which would have to make room for it."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": limit}
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=2, **settings)
    assert {"checkpoint-2", "narrow-checkpoint-2"} <= {path.name for path in tmp_path.iterdir()}
    again = train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=4, resume=True, **settings)
    assert again.model.config.hidden_size == 32
    names = {f"checkpoint-{step}" for step in (3, 4)[-limit:]} | {"narrow-checkpoint-2"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "narrow-checkpoint-2").config.hidden_size == 16


def grow_lossless(folder: Path, model: Any) -> Any:
    train(folder, hf.GrowTrainerCallback(at=1, hidden=24, heads=6, grow=mu.Fresh(lossless=True)), steps=1, model=model)


@pytest.mark.slow
def test_a_lossless_growth_as_described_is_not_called_untried(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", mu.UncheckedPlan)
        grow_lossless(tmp_path, small_llama())
    assert hf.verify(tmp_path / "narrow-checkpoint-1", tmp_path / "checkpoint-1", dtype="float64").ok


@pytest.mark.slow
def test_a_growth_that_is_lossless_in_name_only_warns(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=31, max_position_embeddings=16))
    with pytest.warns(UserWarning, match="the growth is not lossless: a norm comes after a sum"):
        grow_lossless(tmp_path, model)


@pytest.mark.slow
def test_lr_is_the_rate_at_the_step_of_growth(tmp_path: Path) -> None:
    """Half of what a linear schedule would have been, as the docs say it; what it is already is no news, and said."""
    linear = {"lr_scheduler_type": "linear", "learning_rate": 8e-3, "max_grad_norm": 0.0}
    alone = train(tmp_path / "alone", **linear)
    halved = train(
        tmp_path / "halved", hf.GrowTrainerCallback(at=5, times=2, lr=8e-3 * (1 - 5 / 10) / 2, exact=True), **linear
    )
    half = [rate / 2 if step > 5 else rate for step, rate in enumerate(rates(alone), start=1)]
    torch.testing.assert_close(rates(halved), half, rtol=1e-6, atol=0)
    with pytest.warns(UserWarning, match=r"lr=0.004 changes nothing: .* after step 5. For half .* give lr=0.002"):
        train(tmp_path / "same", hf.GrowTrainerCallback(at=5, times=2, lr=4e-3, exact=True), **linear)
