"""Training an upscaled checkpoint on: parameter groups from the small model's hyperparameters and mupscale.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import optim
from mupscale.core import Plan, dtensor, naming
from mupscale.hf.files import Record
from mupscale.hf.training.model_parameters import decay_groups, named_as_in, refuse_untrainable, shapes_of
from mupscale.hf.training.saved_optimizer import read_optimizer
from mupscale.optim import scale, traits
from mupscale.system import MupscaleError

__all__ = ["decay_groups", "param_groups", "plan", "resume_optimizer"]

OPTIMIZER = "optimizer.pt"


def plan(path: str | Path, model: nn.Module) -> Plan:
    """How the model grew from the first small one on, by its own parameter names: for clip_grad_norm_ and the like.

    path: the folder that `mupscale upscale` wrote, or its mupscale.json. The model may be wrapped (DDP, torch.compile)
    and in any floating-point dtype.
    """
    refuse_untrainable(model)
    record = Record.load(path)
    try:
        model_plan = named_as_in(model, record.plan_for(shapes_of(model)))
        model_plan.check(model)
    except MupscaleError as error:
        kind = type(naming.unwrap(model)).__name__
        raise MupscaleError(
            f"{path} tells of a model that grew {record.times} times, and this {kind} is another one: {error}"
        ) from None
    return model_plan


def param_groups(
    path: str | Path,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    **hyper: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for an upscaled model; lr, weight decay and eps are those that were right for the small one.

    `param_groups("path/to/wide", model, torch.optim.AdamW, lr=2e-5, groups=decay_groups(model, 0.1))`: groups as for
    torch, where parameters may be given by name. Schedulers that multiply each group's rate, as all of transformers'
    do, need nothing else; those that are given rates take mupscale.per_group(optimizer, lr).
    """
    return optim.param_groups(model, plan(path, model), optimizer_class, groups=groups, **hyper)


def resume_optimizer(
    path: str | Path, model: nn.Module, optimizer_class: type[Optimizer], *, lr: float | None = None
) -> Optimizer:
    """The optimizer of an upscaled checkpoint, with the groups and state that `mupscale upscale --optimizer` widened.

    path: the checkpoint's folder, or the optimizer's file. lr: another learning rate, in the small model's units.
    """
    refuse_untrainable(model)
    path = Path(path)
    saved = read_optimizer(path / OPTIMIZER if path.is_dir() else path, model)
    own, held = traits(optimizer_class), {key for state in saved.states.values() for key in state}
    if strangers := held - {*own.state, *own.as_is}:
        raise MupscaleError(f"{saved.path} holds '{min(strangers)}', which is no state of {optimizer_class.__name__}")
    parameters = naming.parameters(model)
    groups = [{"params": [(n, parameters[n]) for n in names], **hyper} for names, hyper in saved.groups]
    for group in groups if lr is not None else ():
        group["lr"] = scale(lr, group.get("lr_factor", 1.0))
        group.pop("initial_lr", None)
    build: Callable[[Any], Optimizer] = optimizer_class
    optimizer = build(groups)
    content = optimizer.state_dict()
    numbers = [name for group in content["param_groups"] for name in group["param_names"]]
    content["state"] = {number: saved.states[name] for number, name in enumerate(numbers) if name in saved.states}
    optimizer.load_state_dict(content)
    for p, state in optimizer.state.items():
        whole = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
        state.update({key: dtensor.like(value, p) for key, value in whole.items()})
    return optimizer
