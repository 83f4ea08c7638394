"""A model that grows in the middle of a run of transformers' Trainer."""

from __future__ import annotations

import copy
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
from hf_trainer_runs import decayed, losses, rates, small_llama, train
from mupscale import MupscaleError, hf
from mupscale.hf import miniatures
from mupscale.hf.record import Record
from refusals import refuses

TOKENS = torch.arange(8)[None]
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
CONSTANT = {"lr_scheduler_type": "constant", **EACH_STEP}


def same(ours: Any, theirs: Any) -> None:
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def pair(folder: Path, step: int) -> tuple[Path, Path]:
    """Where the model was saved before it grew, and after it."""
    return folder / f"narrow-checkpoint-{step}", folder / f"checkpoint-{step}"


def forget(folder: Path, stop: int) -> None:
    """As if the run had been stopped after this step."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name[11:]) > stop:
            shutil.rmtree(path)


def neox() -> Any:
    """A model whose readout is called otherwise in files."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1}
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(vocab_size=31, max_position_embeddings=16, **sizes)
    )


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
    torch.testing.assert_close(grown.model(TOKENS).logits, alone.model(TOKENS).logits, rtol=0, atol=1e-4)
    other = train(tmp_path / "other", learning_rate=1.01e-2)
    assert (other.model(TOKENS).logits - alone.model(TOKENS).logits).abs().max() > 3e-4
    rates = {group["lr_factor"] for group in grown.optimizer.param_groups}
    assert rates == {0.5, 1.0}
    assert grown.args.max_grad_norm == 0.5


def test_a_model_with_adapters_is_refused_by_that_name(tmp_path: Path) -> None:
    """Before the first step; its class was called unknown to transformers."""
    kind = type("PeftModelForCausalLM", (transformers.LlamaForCausalLM,), {"__module__": "peft.peft_model"})
    adapted = small_llama()
    adapted.__class__ = kind
    grow = hf.GrowTrainerCallback(at=2, times=2, exact=True)
    refuses("the model has a LoRA or another PEFT adapter", train, tmp_path, grow, model=adapted)


def test_checkpoints_before_and_after(tmp_path: Path) -> None:
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "narrow-checkpoint-2"]
    narrow, wide = pair(tmp_path, 2)
    assert hf.verify(narrow, wide, dtype="float64").ok
    assert (wide / "mupscale.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(wide)
    groups = hf.param_groups(wide, model, torch.optim.AdamW, lr=1e-2)
    assert {group["lr"] for group in groups} == {5e-3, 1e-2}
    assert torch.load(narrow / "optimizer.pt", weights_only=True)["state"]
    assert (wide / "optimizer.pt").is_file()


def test_a_growth_takes_as_many_of_the_runs_own_numbers_whatever_was_grown_before(tmp_path: Path) -> None:
    """Else dropout after it would depend on that. What is known of initial values is measured once in a process."""
    miniatures._start.cache_clear()
    drawn = []
    for name in ("first", "second"):
        train(tmp_path / name, hf.GrowTrainerCallback(at=2, times=2, noise=0.5), steps=2)
        drawn.append(torch.load(tmp_path / name / "checkpoint-2" / "rng_state.pth", weights_only=False)["cpu"])
    assert torch.equal(*drawn)


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
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, **how), steps=3, **EACH_STEP)
    (narrow, wide), later = pair(tmp_path, 2), tmp_path / "checkpoint-3"
    report = hf.verify(narrow, wide)
    assert report.ok
    assert next(row.note for row in report.rows if row.what == "optimizer.pt") == f"rates × {times}"
    assert f"{wide} is the checkpoint right after the growth" in hf.verify(narrow, later).verdict
    shutil.rmtree(later)
    train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, **how), resume=True, steps=3, **EACH_STEP)
    assert Record.load(later).growths == Record.load(wide).growths
    record = Record.load(wide)
    replace(record, growths=(*record.growths[:-1], replace(record.growths[-1], scale_lr=1.0))).save(wide)
    assert "'lr of " in hf.verify(narrow, wide).verdict


def test_what_cannot_grow_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(MupscaleError, match="give either how much"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, hidden=32, exact=True), steps=3)
    with pytest.raises(MupscaleError, match=r"hidden=24 is not a whole multiple of 16, .*: grow=mupscale\.Fresh\(\)"):
        train(tmp_path, hf.GrowTrainerCallback(at=2, hidden=24, heads=6, exact=True), steps=3)


def one_growth(layers: int | None) -> list[Any]:
    return [hf.GrowTrainerCallback(at=4, times=2, layers=layers, noise=0.5)]


def two_growths(layers: int | None) -> list[Any]:
    first = hf.GrowTrainerCallback(at=3, hidden=24, heads=6, kv=3, grow=mu.Fresh(), scale_lr=0.5)
    return [first, hf.GrowTrainerCallback(at=5, times=2, layers=layers, noise=0.5)]


@pytest.mark.quick("one_growth-7-4", "two_growths-4-3")
@pytest.mark.parametrize(
    ("callbacks", "stop", "layers"),
    [
        *((one_growth, stop, layers) for stop, layers in ((3, None), (4, None), (7, 4))),
        *((two_growths, stop, 3) for stop in (2, 4, 6)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_that_was_stopped_goes_on_before_between_and_after_its_growths(
    tmp_path: Path, callbacks: Any, stop: int, layers: int | None
) -> None:
    """Stopped after so many steps of nine, it ends with the same weights, bit for bit, as one that was not."""
    whole = train(tmp_path, *callbacks(layers), steps=9, **EACH_STEP)
    forget(tmp_path, stop)
    (tmp_path / "checkpoint-8").mkdir()  # of which a kill has left nothing
    again = train(tmp_path, *callbacks(layers), steps=9, resume=True, **EACH_STEP)
    assert again.state.global_step == 9
    assert again.args.max_grad_norm == whole.args.max_grad_norm == 0.5
    assert rates(again)[-1] == rates(whole)[-1]
    same(again.model, whole.model)
    if stop >= 5:
        with pytest.raises(MupscaleError, match=r"callback\.resume\(trainer\)"):
            callbacks(layers)[0].on_train_begin(again.args, again.state, None, model=again.model)


def test_new_units_are_drawn_by_the_names_in_files(tmp_path: Path) -> None:
    """As the command draws them: GPT-NeoX's readout is called otherwise in files."""
    train(tmp_path, hf.GrowTrainerCallback(at=1, times=2, layers=2), steps=2, model=neox(), **EACH_STEP)
    report = hf.verify(*pair(tmp_path, 1))
    assert report.ok, report.verdict


def test_a_model_whose_files_have_other_names_resumes_whole(tmp_path: Path) -> None:
    """GPT-NeoX's readout, which the Trainer does not find: before the growth, after it, and in the best model."""

    def run(**more: Any) -> Any:
        """It ends with the model whose loss was largest."""
        best = {"model": neox(), "metric_for_best_model": "loss", **EACH_STEP, **EVALUATED}
        return train(tmp_path, hf.GrowTrainerCallback(at=2, layers=2), steps=3, **best, **more)

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
    small = transformers.Trainer(neox(), arguments, callbacks=[grow])
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
    narrow, deep = pair(tmp_path / "grown", 3)
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
    grow = hf.GrowTrainerCallback(at=3, times=2, layers=4, deepen=deepen, exact=True)
    grown = train(tmp_path / "grown", grow, steps=5)
    assert (grown.model.config.hidden_size, grown.model.config.num_hidden_layers) == (32, 4)
    close = losses(grown)[3] == pytest.approx(losses(alone)[3], rel=1e-5)
    assert close == (deepen == "identity")
    assert hf.verify(*pair(tmp_path / "grown", 3), dtype="float64").ok
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
    best = {"metric_for_best_model": "eval_loss", **EACH_STEP, **EVALUATED}
    trainer = train(tmp_path, hf.GrowTrainerCallback(at=2, times=2, exact=True), steps=3, **best)
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
    settings = {**EACH_STEP, "save_total_limit": limit}
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
    assert hf.verify(*pair(tmp_path, 1), dtype="float64").ok


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
    grow = hf.GrowTrainerCallback(at=5, times=2, lr=8e-3 * (1 - 5 / 10) / 2, exact=True)
    halved = train(tmp_path / "halved", grow, **linear)
    half = [rate / 2 if step > 5 else rate for step, rate in enumerate(rates(alone), start=1)]
    torch.testing.assert_close(rates(halved), half, rtol=1e-6, atol=0)
    with pytest.warns(UserWarning, match=r"lr=0.004 changes nothing: .* after step 5. For half .* give lr=0.002"):
        train(tmp_path / "same", hf.GrowTrainerCallback(at=5, times=2, lr=4e-3, exact=True), **linear)


# --- A model that grows more than once in one run of transformers' Trainer, or that had grown before it.
def test_two_growths_by_copies_go_on_as_the_small_model_would(tmp_path: Path) -> None:
    """Clipped by the small model's norm all the way; each callback was once given the plan of its own growth alone."""
    alone = train(tmp_path / "alone", max_grad_norm=0.1)
    grow, again = hf.GrowTrainerCallback(at=3, times=2, exact=True), hf.GrowTrainerCallback(at=6, times=2, exact=True)
    grown = train(tmp_path / "grown", again, grow, max_grad_norm=0.1)  # in any order
    assert grown.model.config.hidden_size == 64
    torch.testing.assert_close(losses(grown), losses(alone), rtol=1e-5, atol=0)
    torch.testing.assert_close(grown.model(TOKENS).logits, alone.model(TOKENS).logits, rtol=0, atol=1e-4)
    free = train(tmp_path / "free", max_grad_norm=0.2)
    assert (free.model(TOKENS).logits - alone.model(TOKENS).logits).abs().max() > 1e-3, "clipping does not matter"
    assert {group["lr_factor"] for group in grown.optimizer.param_groups} == {0.25, 1.0}
    assert grown.args.max_grad_norm == 0.1
    for folder, times in (("checkpoint-3", 2), ("narrow-checkpoint-6", 2), ("checkpoint-6", 4)):
        assert Record.load(tmp_path / "grown" / folder).times.hidden == times
    assert hf.verify(*pair(tmp_path / "grown", 6), dtype="float64").ok


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[{"times": 2}, {"layers": 4}], [{"layers": 3}, {"times": 2}]])
def test_width_and_depth_at_steps_of_their_own(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    """The second growth changes nothing where it happens, and can be told from the files."""
    callbacks = [hf.GrowTrainerCallback(at=at, **one) for at, one in zip((2, 4), asked, strict=True)]
    trainer = train(tmp_path, *callbacks, steps=6)
    assert trainer.model.config.hidden_size == 32
    assert trainer.model.config.num_hidden_layers in (3, 4)
    for step in (2, 4):
        assert hf.verify(*pair(tmp_path, step), dtype="float64").ok


@pytest.mark.slow
def test_two_growths_at_one_step_are_as_one_of_both(tmp_path: Path) -> None:
    apart = [hf.GrowTrainerCallback(at=2, times=2, exact=True), hf.GrowTrainerCallback(at=2, layers=4)]
    twice = train(tmp_path / "apart", *apart, steps=4)
    once = train(tmp_path / "once", hf.GrowTrainerCallback(at=2, times=2, layers=4, exact=True), steps=4)
    same(twice.model, once.model)
    for folder in ("narrow-checkpoint-2", "checkpoint-2"):
        ours, theirs = (tmp_path / run / folder / "config.json" for run in ("apart", "once"))
        assert ours.read_text() == theirs.read_text()


@pytest.mark.slow
def test_a_size_that_fits_only_after_the_first_growth_is_not_refused_before(tmp_path: Path) -> None:
    first = hf.GrowTrainerCallback(at=1, hidden=24, heads=6, kv=3, grow=mu.Fresh())
    trainer = train(tmp_path, first, hf.GrowTrainerCallback(at=2, hidden=72, exact=True), steps=3)
    assert trainer.model.config.hidden_size == 72


@pytest.mark.slow
def test_a_checkpoint_that_was_upscaled_grows_again_under_clip(tmp_path: Path) -> None:
    """From files with Clip, then in the middle of the run: still what the small model would do, also after a stop."""
    small_llama().save_pretrained(tmp_path / "small")
    hf.upscale(tmp_path / "small", tmp_path / "wide", times=2, progress=False, exact=True)
    hyper: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}

    def run(folder: str, model: Any, groups: Any, *callbacks: Any, resume: bool = False) -> Any:
        optimizer = torch.optim.AdamW(groups, **hyper)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, 5)
        settings = {**EACH_STEP, "max_grad_norm": 0.1, "steps": 5}
        more = {"optimizers": (optimizer, schedule), "model": model, "resume": resume}
        return train(tmp_path / folder, *callbacks, **settings, **more)

    def run_wide(resume: bool) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float64)
        groups = hf.param_groups(tmp_path / "wide", model, torch.optim.AdamW, **hyper)
        callbacks = hf.GrowTrainerCallback(at=2, times=2, exact=True), hf.Clip(tmp_path / "wide")
        return run("run", model, groups, *callbacks, resume=resume)

    small = small_llama()
    alone = run("alone", small, small.parameters())
    whole = run_wide(resume=False)
    assert whole.model.config.hidden_size == 64
    torch.testing.assert_close(losses(whole), losses(alone), rtol=1e-5, atol=0)
    assert Record.load(tmp_path / "run/checkpoint-5").times.hidden == 4
    forget(tmp_path / "run", 3)
    again = run_wide(resume=True)
    assert torch.equal(again.model.lm_head.weight, whole.model.lm_head.weight)
    assert Record.load(tmp_path / "run/checkpoint-5").times.hidden == 4
    assert again.args.max_grad_norm == 0.1


@pytest.mark.parametrize("given", [{"scale_lr": 0.5, "lr": 1e-3}, {"scale_lr": 0.0}, {"scale_lr": float("nan")}])
def test_a_factor_that_is_none_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(MupscaleError, match="positive factor for the learning rates, instead of lr="):
        hf.GrowTrainerCallback(at=2, times=2, **given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"noise": 0.5}, {"grow": mu.Fresh()}])
def test_what_a_second_growth_draws_counts_from_the_first_model(how: dict[str, Any], tmp_path: Path) -> None:
    """As in files: verify draws it again by the record, and finds the same."""
    first = hf.GrowTrainerCallback(at=1, times=2, exact=True)
    train(tmp_path, first, hf.GrowTrainerCallback(at=2, times=2, **how), steps=2)
    narrow, wide = pair(tmp_path, 2)
    assert hf.verify(narrow, wide, dtype="float64").ok
    record = Record.load(wide)
    replace(record, growths=(record.growths[0], replace(record.growths[1], seed=1))).save(wide)
    assert not hf.verify(narrow, wide, dtype="float64").ok


def test_a_run_is_not_resumed_with_another_growth(tmp_path: Path) -> None:
    """In a sentence; the Trainer raised a list of shapes that do not fit."""
    settings = {"save_strategy": "steps", "save_steps": 2, "steps": 2}
    train(tmp_path, hf.GrowTrainerCallback(at=1, times=2), **settings)
    message = "holds a model of hidden size 32, .* but after step 2 this Trainer's would have hidden size 64, "
    refuses(message, train, tmp_path, hf.GrowTrainerCallback(at=1, times=4), resume=True, **settings)


# --- Several sizes out of one run of transformers' Trainer: branches that end finished, and a trunk that goes on.
def family() -> list[Any]:
    """Hidden size 16, finished after step 5, and 24 with three layers, after step 9."""
    grow = hf.GrowTrainerCallback(at=5, hidden=24, heads=6, kv=3, grow=mu.Fresh(), layers=3)
    return [hf.BranchTrainerCallback(5, 2), grow, hf.BranchTrainerCallback(9, 3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, *family(), steps=9, eval_strategy="steps", eval_steps=5, **CONSTANT)


def test_a_branch_is_a_run_with_its_decay_and_the_trunk_goes_on_from_before_it(
    whole: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, trainer = whole
    model = small_llama()
    optimizer = torch.optim.AdamW(decayed(model), lr=1e-2, eps=1e-3)
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


@pytest.mark.quick("4")
@pytest.mark.parametrize("stop", [2, 4, 5, 7])
def test_a_family_that_was_stopped_goes_on_to_the_same_bits(whole: tuple[Path, Any], tmp_path: Path, stop: int) -> None:
    """Before the branch, in it, where the trunk has grown, and in the last branch."""
    folder, callbacks = tmp_path / "run", family()
    shutil.copytree(whole[0], folder)
    forget(folder, stop)
    shutil.rmtree(folder / "sizes" / "hidden-24-layers-3")
    callbacks[0].resume = callbacks[1].resume  # which the helper asks the first callback for
    same(train(folder, *callbacks, steps=9, resume=True, **CONSTANT).model, whole[1].model)
    for name in ("hidden-16-layers-2", "hidden-24-layers-3"):
        same(load(folder / "sizes" / name), load(whole[0] / "sizes" / name))


def test_a_line_in_the_log_and_a_record_wherever_the_model_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train(tmp_path, hf.GrowTrainerCallback(at=1, hidden=24, heads=6, kv=3, grow=mu.Fresh()), steps=2)
    printed = capsys.readouterr().out
    assert "grown: hidden size 16 → 24, attention heads 4 → 6, key/value heads 2 → 3, parameters " in printed
    count = sum(map(torch.numel, trainer.model.parameters()))
    assert any(entry.get("parameters") == count for entry in trainer.state.log_history)
    trainer.save_model(str(tmp_path / "saved"))
    assert Record.load(tmp_path / "saved").growths == Record.load(tmp_path / "checkpoint-1").growths
    copy.deepcopy(trainer.model).save_pretrained(tmp_path / "copied")
    assert torch.equal(load(tmp_path / "copied").lm_head.weight, trainer.model.lm_head.weight)


def test_what_cannot_branch_is_said_before_training(tmp_path: Path) -> None:
    refuses("leaves no steps for the trunk before it", hf.BranchTrainerCallback, at=5, steps=5)
    refuses("the name of a folder in OUT/sizes", hf.BranchTrainerCallback, at=5, steps=2, name="../small")
    with pytest.raises(MupscaleError, match=r"lr_scheduler_type is cosine. Give constant or constant_with_warmup"):
        train(tmp_path, hf.BranchTrainerCallback(5, 2))
    with pytest.raises(MupscaleError, match="ends after step 50, but this run ends after 10"):
        train(tmp_path, hf.BranchTrainerCallback(50, 2), **CONSTANT)
    branch, grow, last = family()
    refuses("put BranchTrainerCallback before GrowTrainerCallback", train, tmp_path, grow, branch, last, **CONSTANT)
