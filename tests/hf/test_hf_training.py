"""An upscaled model trained on with transformers' Trainer, with accelerate and in a plain loop, as documented."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_models as models
import mupscale as mu
from mupscale.hf import groups as training
from mupscale.hf.config_family import ConfigFamily
from mupscale.hf.groups import match_plan
from mupscale.hf.multipliers import Times
from mupscale.hf.record import GrowthStep, Record
from mupscale.hf.trainer import Clip
from mupscale.optim import decay_groups
from slow_cases import with_slow

ARCHITECTURES = {
    **{name: (name, None) for name in models.FIRST},
    "llama-Model": ("llama", "Model"),
    "bert-ForPreTraining": ("bert", "ForPreTraining"),
}
LR, DECAY, EPS, CLIP, STEPS = 1e-2, 0.3, 1e-3, 0.3, 20


def config_of(name: str, head: str | None = None, **more: Any) -> dict[str, Any]:
    layers = {n: 1 for n in ("num_hidden_layers", "n_layer") if n in models.CONFIGS[name][2]}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if name == "gpt2" else {}
    config = models.tiny(name, head, **{**layers, **no_dropout, **more})[0]
    return {**config.to_dict(), "architectures": config.architectures}


def pair(folder: Path, name: str = "llama", times: int | str = 2, **more: Any) -> tuple[nn.Module, nn.Module]:
    """A model whose parameters are all of some size, and the same one upscaled, with its record in the folder."""
    config, growth = config_of(name, **more), Times.of(times)
    family = ConfigFamily(config)
    small, wide = models.build(config), models.build(family.wide_config(growth))
    for p in small.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.1)
    mu.widen(small, wide, match_plan(small, family.plan(growth, initial=False)))
    Record(config, (GrowthStep(growth),)).save(folder)
    return small, wide


def tokens(count: int = STEPS, rows: int = 2) -> Tensor:
    return torch.randint(1, 29, (count * rows, 12), generator=torch.Generator().manual_seed(1))


class Data(torch.utils.data.Dataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(folder: Path, **more: Any) -> Any:
    given = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "adam_epsilon": EPS,
        "max_grad_norm": CLIP,
        "warmup_steps": 3,
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**{**given, **more})


class Recording(transformers.Trainer):
    """The Trainer itself, which logs losses with four digits, with all of them."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(model, inputs, *args, **kwargs)
        self.__dict__.setdefault("losses", []).append((result[0] if isinstance(result, tuple) else result).item())
        return result


def trained(model: nn.Module, args: Any, **more: Any) -> list[float]:
    """The losses of a Trainer's run."""
    trainer = Recording(model, args, train_dataset=Data(tokens()), **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.losses


def ours(folder: Path, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    decay = decay_groups(model, DECAY)
    groups = training.param_groups(folder, model, torch.optim.AdamW, lr=LR, eps=EPS, groups=decay, **more)
    return torch.optim.AdamW(groups)


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The Trainer's groups for a model that did not grow."""
    groups = [{**g, "params": [model.get_parameter(n) for n in g["params"]]} for g in decay_groups(model, DECAY)]
    return torch.optim.AdamW(groups, lr=LR, eps=EPS)


def looped(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], Any], steps: int = 10) -> list[float]:
    losses = []
    for batch in tokens(steps).view(steps, -1, 12):
        optimizer.zero_grad()
        value = loss_of(model, batch)
        value.backward()
        clip()
        optimizer.step()
        losses.append(value.item())
    return losses


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of the logits; of a model without a readout, a function of the mean over its wide states."""
    if model.main_input_name == "pixel_values":
        drawn = torch.Generator().manual_seed(int(batch.sum()))
        pixels = torch.randn(len(batch), model.config.num_channels, 8, 8, generator=drawn)  # type: ignore[union-attr]
        return nn.functional.cross_entropy(model(pixel_values=pixels).logits, batch[:, 0] % 2)
    out = model(input_ids=batch)
    logits = out.get("prediction_logits", out.get("logits"))
    if logits is None:
        states = out.last_hidden_state.unflatten(-1, (16, -1)).mean(-1)
        return (states - batch[..., None] / 29).square().mean()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def close(small: list[float], wide: list[float], tolerance: float = 1e-10) -> bool:
    assert len(small) == len(wide) >= 10
    assert max(small) - min(small) > 0.05
    return torch.allclose(torch.tensor(small), torch.tensor(wide), rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", with_slow(("llama", "gemma", "gpt2"), ("llama",)))
def test_the_trainer_goes_on_as_with_the_small_model(name: str, tmp_path: Path, double: None) -> None:
    small, wide = pair(tmp_path, name)
    losses = trained(small, arguments(tmp_path))  # its own AdamW, decay and clipping
    args = arguments(tmp_path, weight_decay=123.0, adam_epsilon=123.0)  # which the optimizer given overrules
    clip = Clip(tmp_path)
    assert close(losses, trained(wide, args, optimizers=(ours(tmp_path, wide), None), callbacks=[clip]))
    assert clip.norm is not None
    assert clip.norm > CLIP  # so it did clip


@pytest.mark.quick("no clip")
@pytest.mark.parametrize(
    "wrong", with_slow(["no clip", "uniform lr", "uniform decay", "plain eps"], ("no clip", "uniform lr"))
)
def test_the_trainer_differs_without_any_of_it(wrong: str, tmp_path: Path) -> None:
    small, wide = pair(tmp_path)
    losses = trained(small, arguments(tmp_path))
    optimizer = ours(tmp_path, wide)
    for group in optimizer.param_groups:
        group["lr"] = LR if wrong == "uniform lr" else group["lr"]
        group["weight_decay"] = min(group["weight_decay"], DECAY) if wrong == "uniform decay" else group["weight_decay"]
        group["eps"] = EPS if wrong == "plain eps" else group["eps"]
    callbacks = [] if wrong == "no clip" else [Clip(tmp_path)]
    assert not close(
        losses, trained(wide, arguments(tmp_path), optimizers=(optimizer, None), callbacks=callbacks), 1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ({"gradient_accumulation_steps": 2, "max_steps": 10, "gradient_checkpointing": True}, 1e-4),
        ({"bf16": True}, 1e-2),
    ],
)
def test_the_trainers_own_ways(more: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    small, wide = pair(tmp_path)
    losses = trained(small, arguments(tmp_path, **more))
    given = {"optimizers": (ours(tmp_path, wide), None), "callbacks": [Clip(tmp_path)]}
    assert close(losses, trained(wide, arguments(tmp_path, **more), **given), tolerance)


def test_clip_takes_over_and_gives_back(tmp_path: Path) -> None:
    _, wide = pair(tmp_path)
    args, clip = arguments(tmp_path, max_steps=2), Clip(tmp_path)
    trainer = transformers.Trainer(wide, args, train_dataset=Data(tokens()), callbacks=[clip])
    for _ in range(2):  # the second time, too
        trainer.train()
        assert (args.max_grad_norm, clip.max_norm) == (CLIP, CLIP)
    noted = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert noted[-1]["invariant_grad_norm"] == clip.norm.item()
    before, own = copy.deepcopy(wide), Clip(tmp_path, max_norm=1e-9)
    plain = torch.optim.SGD(wide.parameters(), lr=1.0)
    args.lr_scheduler_type = "constant"
    transformers.Trainer(wide, args, train_dataset=Data(tokens()), callbacks=[own], optimizers=(plain, None)).train()
    moved = max(
        (p - q).detach().abs().max().item() for p, q in zip(wide.parameters(), before.parameters(), strict=True)
    )
    assert moved < 1e-7  # as float32 can show


def test_clip_puts_the_record_beside_what_the_trainer_saves(tmp_path: Path) -> None:
    _, wide = pair(tmp_path)
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    transformers.Trainer(wide, args, train_dataset=Data(tokens()), callbacks=[Clip(tmp_path)]).train()
    assert Record.load(tmp_path / "run" / "checkpoint-2") == Record.load(tmp_path)


def test_clip_knows_the_norm_after_an_interrupted_run(tmp_path: Path) -> None:
    """As in a notebook: the arguments stay, and Trainer and Clip are made anew."""
    _, wide = pair(tmp_path)
    args = arguments(tmp_path)
    Clip(tmp_path).on_train_begin(args, None, None, model=wide)
    assert args.max_grad_norm == 0.0
    again = Clip(tmp_path)
    again.on_train_begin(args, None, None, model=wide)
    assert again.max_norm == CLIP
    again.on_train_end(args, None, None)
    assert args.max_grad_norm == CLIP
    assert args.to_dict().keys() == arguments(tmp_path).to_dict().keys()


def test_clip_refuses_scaled_gradients(tmp_path: Path) -> None:
    _, wide = pair(tmp_path)
    args = arguments(tmp_path)
    for field, reason in (("fp16", "bf16"), ("deepspeed", "DeepSpeed")):
        other = copy.copy(args)
        setattr(other, field, True)
        with pytest.raises(mu.MupscaleError, match=reason):
            Clip(tmp_path).on_train_begin(other, None, None, model=wide)


def test_accelerate(tmp_path: Path, double: None) -> None:
    from accelerate import Accelerator

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[nn.Module], Any]) -> list[float]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(Data(tokens(2 * STEPS)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    clip(model)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    small, wide = pair(tmp_path)
    plan = training.plan(tmp_path, wide)
    losses = run(small, plain_adamw(small), lambda model: nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    assert close(losses, run(wide, ours(tmp_path, wide), lambda model: mu.clip_grad_norm_(model, CLIP, plan)))


@pytest.mark.quick("bert-ForPreTraining")
@pytest.mark.parametrize("case", with_slow(ARCHITECTURES, ("gpt2", "bert-ForPreTraining")))
def test_a_plain_loop_with_every_architecture(case: str, tmp_path: Path, double: None) -> None:
    """Names, ties and decay groups of the real models: a few exact steps of each."""
    name, head = ARCHITECTURES[case]
    small, wide = pair(tmp_path, name, head=head)
    small.eval()
    wide.eval()
    plan = training.plan(tmp_path, wide)
    losses = looped(small, plain_adamw(small), lambda: nn.utils.clip_grad_norm_(small.parameters(), CLIP))
    theirs = looped(wide, ours(tmp_path, wide), lambda: mu.clip_grad_norm_(wide, CLIP, plan))
    assert close(losses, theirs)


@pytest.mark.parametrize("name", with_slow(models.CONFIGS, ("llama", "gemma")))
def test_decay_groups_are_the_trainers(name: str) -> None:
    model = models.build(config_of(name))
    decayed = transformers.Trainer.get_decay_parameter_names(None, model)
    every = [n for n, p in model.named_parameters() if p.requires_grad]  # Whisper's positions are frozen
    with_decay, without = decay_groups(model, 0.1)
    assert with_decay == {"params": [n for n in every if n in decayed], "weight_decay": 0.1}
    assert without == {"params": [n for n in every if n not in decayed], "weight_decay": 0.0}
    assert with_decay["params"]
    assert without["params"]


def test_decay_groups_leave_frozen_parameters_out() -> None:
    model: Any = models.build(config_of("llama"))
    model.model.embed_tokens.requires_grad_(False)
    named = [name for group in decay_groups(model, 0.1) for name in group["params"]]
    assert named == [n for n in named if n != "model.embed_tokens.weight"]
    assert len(named) == len(list(model.named_parameters())) - 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tied_parameters_have_all_their_names(name: str, tmp_path: Path) -> None:
    _, wide = pair(tmp_path, name, tie_word_embeddings=True)
    plan = training.plan(tmp_path, wide)
    embedding = next(iter(plan.parameters))
    assert plan.parameters[embedding].names == (embedding, "lm_head.weight")
    assert plan.parameters.keys() == dict(wide.named_parameters()).keys()
    norm = "model.norm.weight" if name == "llama" else "transformer.ln_f.weight"
    assert float(plan.parameters[norm].fold) == 0.5


TIED = ("llama", "gpt2", "phi", "gpt_neox", "opt", "gemma")


@pytest.mark.slow
@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("name", with_slow(TIED, ("gpt2", "gemma")))
def test_a_tied_model_with_a_classifier_in_place_of_its_readout(name: str, tmp_path: Path, double: None) -> None:
    """The norm before it has the readout's 1/k, so that the classifier's rates are those of one that takes it back."""
    tied = {} if name == "gemma" else {"tie_word_embeddings": True}
    small, wide = pair(tmp_path, name, **tied)
    kind = models.CONFIGS[name][0] + "ForSequenceClassification"
    few, many = (getattr(transformers, kind)(copy.deepcopy(model.config)).eval() for model in (small, wide))
    few.load_state_dict(small.state_dict(), strict=False)
    many.load_state_dict(wide.state_dict(), strict=False)
    plan = training.plan(tmp_path, many)
    assert plan.parameters["score.weight"].fold == (2 if tied else pytest.approx(2**0.5))
    mu.widen(few, many, plan)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
        for batch in tokens(10).view(-1, 1, 12):
            loss = nn.functional.cross_entropy(model(input_ids=batch).logits, batch[:, 0] % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    assert close(list(losses(few, plain_adamw(few))), list(losses(many, ours(tmp_path, many))))


def test_ties_other_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    pair(tmp_path, tie_word_embeddings=True)
    record = Record.load(tmp_path)
    wide = ConfigFamily(record.config).wide_config(record.times)
    with pytest.raises(mu.MupscaleError, match="are two tensors in this model, but were one"):
        training.plan(tmp_path, models.build({**wide, "tie_word_embeddings": False}))
    pair(tmp_path, tie_word_embeddings=False)
    with pytest.raises(mu.MupscaleError, match="are one tensor in this model, but were two"):
        training.plan(tmp_path, models.build({**wide, "tie_word_embeddings": True}))


@pytest.mark.quick("llama-*")
@pytest.mark.parametrize(
    ("name", "small", "head"),
    [
        ("bert", "BertForSequenceClassification", "BertForMaskedLM"),
        ("bert", "BertModel", "BertForMaskedLM"),
        ("llama", "LlamaModel", "LlamaForCausalLM"),
    ],
)
def test_a_tied_readout_that_was_not_upscaled_is_refused(tmp_path: Path, name: str, small: str, head: str) -> None:
    """Nothing has its 1/k, so that its logits are k times as large; both remedies are open."""
    config = {**config_of(name, tie_word_embeddings=True), "architectures": [small]}
    models.build(config).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    models.grow(tmp_path / "small", tmp_path / "wide")
    kind = getattr(transformers, head)
    with pytest.raises(mu.MupscaleError) as refused:
        _groups(tmp_path / "wide", kind.from_pretrained(tmp_path / "wide"))
    assert f"the {small} that was upscaled had no such readout" in str(refused.value)
    assert f"Load the small model as {head}, save it, and upscale that" in str(refused.value)
    assert _groups(tmp_path / "wide", kind.from_pretrained(tmp_path / "wide", tie_word_embeddings=False))
    kind.from_pretrained(tmp_path / "small").save_pretrained(tmp_path / "with head")
    models.grow(tmp_path / "with head", tmp_path / "wide with head")
    assert _groups(tmp_path / "wide with head", kind.from_pretrained(tmp_path / "wide with head"))


def test_a_model_that_is_not_described_brings_its_plan(tmp_path: Path) -> None:
    small, wide = pair(tmp_path)
    expected = [{**g, "params": [n for n, _ in g["params"]]} for g in _groups(tmp_path, wide)]
    record = Record.load(tmp_path)
    Record({**record.config, "model_type": "nobody knows"}, record.growths, mu.plan(small, wide)).save(tmp_path)
    assert [{**g, "params": [n for n, _ in g["params"]]} for g in _groups(tmp_path, wide)] == expected
    for other in (small, small.model, models.build(config_of("gpt2"))):
        with pytest.raises(mu.MupscaleError, match="is a different one: "):
            training.plan(tmp_path, other)


def _groups(folder: Path, model: nn.Module) -> list[dict[str, Any]]:
    return training.param_groups(folder, model, torch.optim.AdamW, lr=LR)


def test_another_model_is_refused(tmp_path: Path) -> None:
    small, wide = pair(tmp_path)
    said = r"grew by 2 in width, and this Llama\w+ is a different one: .* has shape \(29, 16\) but .* \(29, 32\)"
    with pytest.raises(mu.MupscaleError, match=said):
        training.plan(tmp_path, small)
    wide.extra = nn.Linear(3, 3)
    with pytest.raises(mu.MupscaleError, match=r"the parameter 'extra.weight', which the upscaled"):
        training.plan(tmp_path, wide)
    with pytest.raises(mu.MupscaleError, match=r"there is no mupscale.json at"):
        training.plan(tmp_path / "nowhere", wide)


def test_wrapped_models_get_the_same_groups(tmp_path: Path) -> None:
    """torch.compile's and DDP's names, and bfloat16."""
    _, wide = pair(tmp_path)
    plain = ours(tmp_path, wide).param_groups
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = [torch.compile(wide), nn.parallel.DistributedDataParallel(wide), nn.DataParallel(wide)]
    finally:
        torch.distributed.destroy_process_group()
    for model in (*wrapped, wide.bfloat16()):
        groups = ours(tmp_path, model).param_groups
        assert [g["param_names"] for g in groups] == [g["param_names"] for g in plain]
        assert [g["lr"] for g in groups] == [g["lr"] for g in plain]
        assert training.plan(tmp_path, model) == training.plan(tmp_path, wide)


def test_two_growths_are_one(tmp_path: Path) -> None:
    """Rates are those of the first small model, however often it grew."""
    _, wide = pair(tmp_path, times=4)
    once = training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR)
    record = Record.load(tmp_path)
    Record(record.config, (GrowthStep(Times.of(2)), GrowthStep(Times.of(2), mu.Copies(0.3), 1))).save(tmp_path)
    twice = training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR)
    assert [{**g, "params": [n for n, _ in g["params"]]} for g in once] == [
        {**g, "params": [n for n, _ in g["params"]]} for g in twice
    ]
    assert {g["lr_factor"] for g in once} == {1.0, 0.25}


def test_decay_of_a_norm_with_an_offset_leads_to_decay_groups(tmp_path: Path) -> None:
    _, wide = pair(tmp_path, "gemma")
    with pytest.raises(mu.MupscaleError, match=r"model.norm.weight.*mupscale.hf.decay_groups"):
        training.param_groups(tmp_path, wide, torch.optim.AdamW, lr=LR, weight_decay=0.1)
    assert training.param_groups(
        tmp_path, wide, torch.optim.AdamW, lr=LR, groups=decay_groups(wide, 0.1), weight_decay=0.1
    )


def test_adapters_and_quantised_models_are_refused(tmp_path: Path) -> None:
    _, wide = pair(tmp_path)
    quantised = copy.deepcopy(wide)
    quantised.lm_head.weight = nn.Parameter(torch.zeros(29, 32, dtype=torch.int8), requires_grad=False)
    marked = copy.deepcopy(wide)
    marked.is_quantized = True
    adapted = copy.deepcopy(wide)
    adapted.model.layers[0].mlp.up_proj.lora_A = nn.Linear(32, 2, bias=False)
    for model, reason in ((quantised, "quantised"), (marked, "quantised"), (adapted, "PEFT adapter")):
        for refused in (
            lambda m: training.plan(tmp_path, m),
            lambda m: training.param_groups(tmp_path, m, torch.optim.AdamW, lr=LR),
            lambda m: training.resume_optimizer(tmp_path, m, torch.optim.AdamW),
        ):
            with pytest.raises(mu.MupscaleError, match=reason):
                refused(model)
    Wrapper = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})
    wrapper = Wrapper()
    wrapper.base_model = wide
    with pytest.raises(mu.MupscaleError, match=r"PEFT adapter.*merge_and_unload"):
        training.plan(tmp_path, wrapper)
