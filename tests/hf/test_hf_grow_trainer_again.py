"""A model that grows more than once in one run of transformers' Trainer, or that had grown before it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mupscale as mu
from hf_trainer_runs import losses, rates, small_llama, train
from mupscale import MupscaleError, hf
from mupscale.hf.record import Record

TOKENS = torch.arange(8)[None]


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
    assert hf.verify(tmp_path / "grown/narrow-checkpoint-6", tmp_path / "grown/checkpoint-6", dtype="float64").ok


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[{"times": 2}, {"layers": 4}], [{"layers": 3}, {"times": 2}]])
def test_width_and_depth_at_steps_of_their_own(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    """The second growth changes nothing where it happens, and can be told from the files."""
    callbacks = [hf.GrowTrainerCallback(at=at, **one) for at, one in zip((2, 4), asked, strict=True)]
    trainer = train(tmp_path, *callbacks, steps=6)
    assert trainer.model.config.hidden_size == 32
    assert trainer.model.config.num_hidden_layers in (3, 4)
    for step in (2, 4):
        assert hf.verify(tmp_path / f"narrow-checkpoint-{step}", tmp_path / f"checkpoint-{step}", dtype="float64").ok


@pytest.mark.slow
def test_two_growths_at_one_step_are_as_one_of_both(tmp_path: Path) -> None:
    apart = [hf.GrowTrainerCallback(at=2, times=2, exact=True), hf.GrowTrainerCallback(at=2, layers=4)]
    twice = train(tmp_path / "apart", *apart, steps=4)
    once = train(tmp_path / "once", hf.GrowTrainerCallback(at=2, times=2, layers=4, exact=True), steps=4)
    for (name, ours), theirs in zip(twice.model.state_dict().items(), once.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    for folder in ("narrow-checkpoint-2", "checkpoint-2"):
        ours, theirs = (tmp_path / run / folder / "config.json" for run in ("apart", "once"))
        assert ours.read_text() == theirs.read_text()


@pytest.mark.quick("4")
@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.slow), 4, 6])
def test_a_run_with_two_growths_goes_on_after_a_stop(tmp_path: Path, stop: int) -> None:
    """Before the first, between them and after both: with the weights, bit for bit, of one that was not stopped."""

    def callbacks() -> list[Any]:
        first = hf.GrowTrainerCallback(at=3, hidden=24, heads=6, kv=3, grow=mu.Fresh(), scale_lr=0.5)
        return [first, hf.GrowTrainerCallback(at=5, times=2, layers=3, noise=0.5)]

    settings = {"save_strategy": "steps", "save_steps": 1, "steps": 7}
    whole = train(tmp_path / "run", *callbacks(), **settings)
    for path in (tmp_path / "run").iterdir():
        if path.name[11:].isdecimal() and int(path.name[11:]) > stop:
            shutil.rmtree(path)
    again = train(tmp_path / "run", *callbacks(), resume=True, **settings)
    assert again.state.global_step == 7
    assert again.args.max_grad_norm == whole.args.max_grad_norm == 0.5
    assert rates(again)[-1] == rates(whole)[-1]
    for (name, ours), theirs in zip(again.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


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
        settings = {"save_strategy": "steps", "save_steps": 1, "max_grad_norm": 0.1, "steps": 5}
        more = {"optimizers": (optimizer, schedule), "model": model, "resume": resume}
        return train(tmp_path / folder, *callbacks, **settings, **more)

    def run_wide(resume: bool) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float64)
        groups = hf.param_groups(tmp_path / "wide", model, torch.optim.AdamW, **hyper)
        return run(
            "run",
            model,
            groups,
            hf.GrowTrainerCallback(at=2, times=2, exact=True),
            hf.Clip(tmp_path / "wide"),
            resume=resume,
        )

    small = small_llama()
    alone = run("alone", small, small.parameters())
    whole = run_wide(resume=False)
    assert whole.model.config.hidden_size == 64
    torch.testing.assert_close(losses(whole), losses(alone), rtol=1e-5, atol=0)
    assert Record.load(tmp_path / "run/checkpoint-5").times.hidden == 4
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"run/checkpoint-{step}")
    again = run_wide(resume=True)
    assert torch.equal(again.model.lm_head.weight, whole.model.lm_head.weight)
    assert Record.load(tmp_path / "run/checkpoint-5").times.hidden == 4
    assert again.args.max_grad_norm == 0.1


@pytest.mark.slow
def test_half_of_what_the_rates_would_have_been(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", steps=6)
    halved = train(tmp_path / "halved", hf.GrowTrainerCallback(at=2, times=2, grow=mu.Fresh(), scale_lr=0.5), steps=6)
    ratio = [ours / theirs for ours, theirs in zip(rates(halved), rates(alone), strict=True)]
    factor = halved.optimizer.param_groups[0]["lr_factor"]
    assert ratio[:2] == pytest.approx([1.0, 1.0])
    assert ratio[2:] == pytest.approx([0.5 * factor] * 4)


@pytest.mark.parametrize("given", [{"scale_lr": 0.5, "lr": 1e-3}, {"scale_lr": 0.0}, {"scale_lr": float("nan")}])
def test_a_factor_that_is_none_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(MupscaleError, match="positive factor for the learning rates, instead of lr="):
        hf.GrowTrainerCallback(at=2, times=2, **given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"noise": 0.5}, {"grow": mu.Fresh()}])
def test_what_a_second_growth_draws_counts_from_the_first_model(how: dict[str, Any], tmp_path: Path) -> None:
    """As in files: verify draws it again by the record, and finds the same."""
    train(
        tmp_path,
        hf.GrowTrainerCallback(at=1, times=2, exact=True),
        hf.GrowTrainerCallback(at=2, times=2, **how),
        steps=2,
    )
    assert hf.verify(tmp_path / "narrow-checkpoint-2", tmp_path / "checkpoint-2", dtype="float64").ok
    record = Record.load(tmp_path / "checkpoint-2")
    replace(record, growths=(record.growths[0], replace(record.growths[1], seed=1))).save(tmp_path / "checkpoint-2")
    assert not hf.verify(tmp_path / "narrow-checkpoint-2", tmp_path / "checkpoint-2", dtype="float64").ok


def test_a_run_is_not_resumed_with_another_growth(tmp_path: Path) -> None:
    """In a sentence; the Trainer raised a list of shapes that do not fit."""
    settings = {"save_strategy": "steps", "save_steps": 2, "steps": 2}
    train(tmp_path, hf.GrowTrainerCallback(at=1, times=2), **settings)
    message = "holds a model of hidden size 32, .* but after step 2 this Trainer's would have hidden size 64, "
    with pytest.raises(MupscaleError, match=message):
        train(tmp_path, hf.GrowTrainerCallback(at=1, times=4), resume=True, **settings)
