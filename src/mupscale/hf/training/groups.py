"""Training an upscaled checkpoint on: parameter groups from the small model's hyperparameters and mupscale.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import optim
from mupscale.core import Plan, RuleSet, laid_out_like, naming
from mupscale.hf.files import Record
from mupscale.hf.training.model_parameters import decay_groups, plan_for_model, refuse_untrainable
from mupscale.hf.training.saved_optimizer import read_optimizer
from mupscale.optim import scale, traits_of
from mupscale.system import MupscaleError, NotNegative, checks_arguments, warn

__all__ = ["decay_groups", "param_groups", "plan", "resume_optimizer"]

OPTIMIZER = "optimizer.pt"


@checks_arguments
def plan(path: str | Path, model: nn.Module) -> Plan:
    """How the model grew from the first small one on, by its own parameter names: for clip_grad_norm_ and the like.

    path: the folder that `mupscale upscale` wrote, or its mupscale.json. The model may be wrapped (DDP, torch.compile)
    and in any floating-point dtype.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> from mupscale import hf
    >>> _ = hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", verify=False, progress=False)
    >>> model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder.name}/wide")
    >>> plan(f"{folder.name}/wide", model)["transformer.h.0.mlp.c_fc.weight"].rule.in_
    2
    >>> folder.cleanup()
    """
    refuse_untrainable(model)
    record = Record.load(path)
    try:
        model_plan = plan_for_model(model, record)
        model_plan.check(model)
    except MupscaleError as error:
        kind = type(naming.unwrap(model)).__name__
        raise MupscaleError(
            f"{path} describes a model that grew {record.in_words}, and this {kind} is a different one: {error}"
        ) from None
    return model_plan


@checks_arguments
def param_groups(
    path: str | Path,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    rules: RuleSet | None = None,
    **hyper: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for an upscaled model; lr, weight decay and eps are those that were right for the small one.

    `param_groups("path/to/wide", model, torch.optim.AdamW, lr=2e-5, groups=decay_groups(model, 0.1))`: groups as for
    torch, where parameters may be given by name. Schedulers that multiply each group's rate, as all of transformers'
    do, need nothing else; those that are given rates take mupscale.per_group(optimizer, lr). rules: as in
    mupscale.param_groups.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> import torch
    >>> from mupscale import hf
    >>> _ = hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", verify=False, progress=False)
    >>> model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder.name}/wide")
    >>> groups = param_groups(f"{folder.name}/wide", model, torch.optim.AdamW, lr=1e-3)
    >>> sorted({group["lr"] for group in groups})  # hidden matrices take half the rate
    [0.0005, 0.001]
    >>> folder.cleanup()
    """
    return optim.param_groups(model, plan(path, model), optimizer_class, groups=groups, rules=rules, **hyper)


@checks_arguments
def resume_optimizer(
    path: str | Path, model: nn.Module, optimizer_class: type[Optimizer], *, lr: NotNegative | None = None
) -> Optimizer:
    """The optimizer of an upscaled checkpoint, with the groups and state that `mupscale upscale --optimizer` widened.

    path: the checkpoint's folder, or the optimizer's file. lr: another learning rate, in the small model's units; of a
    run whose schedule has ended at 0 it must be given, unless a new schedule begins: without it there is a warning.

    >>> import tempfile, transformers
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)
    >>> transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder.name}/small")
    >>> import torch
    >>> from mupscale import hf
    >>> small = transformers.GPT2LMHeadModel.from_pretrained(f"{folder.name}/small")
    >>> optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3)
    >>> small(input_ids=torch.ones(1, 4, dtype=int)).logits.sum().backward()
    >>> optimizer.step()
    >>> torch.save(optimizer.state_dict(), f"{folder.name}/optimizer.pt")
    >>> saved = {"optimizer": f"{folder.name}/optimizer.pt", "verify": False, "progress": False}
    >>> _ = hf.upscale(f"{folder.name}/small", f"{folder.name}/wide", **saved)
    >>> model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder.name}/wide")
    >>> resumed = resume_optimizer(f"{folder.name}/wide", model, torch.optim.AdamW)
    >>> resumed.state[model.transformer.wte.weight]["exp_avg"].shape
    torch.Size([11, 16])
    >>> folder.cleanup()
    """
    refuse_untrainable(model)
    path = Path(path)
    saved = read_optimizer(path / OPTIMIZER if path.is_dir() else path, model)
    own, held = traits_of(optimizer_class), {key for state in saved.states.values() for key in state}
    if strangers := held - {*own.state, *own.as_is}:
        raise MupscaleError(
            f"{saved.path} holds '{min(strangers)}', which is not a state of {optimizer_class.__name__}"
        )
    parameters = naming.parameters(model)
    groups = [{"params": [(n, parameters[n]) for n in names], **hyper} for names, hyper in saved.groups]
    for group in groups if lr is not None else ():
        group["lr"] = scale(lr, group.get("lr_factor", 1.0))
        group.pop("initial_lr", None)
    if not any(group.get("lr", 1.0) for group in groups):
        _warn_of_no_rate(saved.path, groups)
    build: Callable[[Any], Optimizer] = optimizer_class
    optimizer = build(groups)
    content = optimizer.state_dict()
    numbers = [name for group in content["param_groups"] for name in group["param_names"]]
    content["state"] = {number: saved.states[name] for number, name in enumerate(numbers) if name in saved.states}
    optimizer.load_state_dict(content)
    for p, state in optimizer.state.items():
        whole = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
        state.update({key: laid_out_like(value, p) for key, value in whole.items()})
    return optimizer


def _warn_of_no_rate(path: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    """Of a schedule that has ended at 0, as the Trainer's does: with these rates nothing would be learnt."""
    first = groups[0]
    began = f"{float(first['initial_lr']) / first.get('lr_factor', 1.0):g}" if "initial_lr" in first else "1e-4"
    warn(
        f"{path} was saved with a learning rate of 0, at the end of its schedule. Give a learning rate in the small "
        f"model's units (lr={began}), or let a new run's scheduler set it, as the Trainer's does"
    )
