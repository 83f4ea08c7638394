"""A torch optimizer that was saved: which of its parameters is which, and which optimizer it is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Shape, laid_out_like, naming
from mupscale.optim.groups import rate_shares, recognise_optimizer
from mupscale.optim.optimizer_traits import scale
from mupscale.optim.registration import traits_of
from mupscale.system import MupscaleError, checks_arguments, warn

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")
State = Mapping[str, Any]


@checks_arguments
def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Names in two groups, as transformers' Trainer makes them: weight decay for all but biases and norms.

    For `groups=` of param_groups, which puts parameters for names: torch's optimizers take none. Frozen parameters are
    in neither.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [(group["params"], group["weight_decay"]) for group in decay_groups(model, 0.1)]
    [(['0.weight'], 0.1), (['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    norms = tuple(f"{path}." for path, module in naming.modules(model).items() if isinstance(module, nn.LayerNorm))
    trained = [name for name, p in naming.parameters(model).items() if p.requires_grad]
    spared = [name for name in trained if name.startswith(norms) or _NO_DECAY.search(name.lower())]
    decayed = [name for name in trained if name not in {*spared}]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


@dataclass(frozen=True)
class SavedOptimizer:
    """Names and hyperparameters of each group, and the state of each parameter by its name in the model."""

    path: Path
    groups: list[tuple[list[str], dict[str, Any]]]
    states: dict[str, State]

    @property
    def hyper_by_name(self) -> dict[str, dict[str, Any]]:
        return {name: hyper for names, hyper in self.groups for name in names}

    def optimizer_class(self) -> type[Optimizer]:
        """The optimizer of torch whose hyperparameters and state these are; Adam and AdamW say which by a flag."""
        held = {key for state in self.states.values() for key in state}
        return recognise_optimizer(held, self.groups[0][1], self.path)

    def build(self, model: nn.Module, optimizer_class: type[Optimizer], lr: float | None = None) -> Optimizer:
        """The optimizer for this model, with the saved groups and state; lr: another rate, in the base's units."""
        own, held = traits_of(optimizer_class), {key for state in self.states.values() for key in state}
        if strangers := held - {*own.state, *own.as_is}:
            raise MupscaleError(
                f"{self.path} holds '{min(strangers)}', which is not a state of {optimizer_class.__name__}"
            )
        parameters = naming.parameters(model)
        groups = [{"params": [(n, parameters[n]) for n in names], **hyper} for names, hyper in self.groups]
        if lr is not None:
            for group, share in zip(groups, rate_shares(groups), strict=True):
                group["lr"] = scale(lr * share, group.get("lr_factor", 1.0))
                group.pop("initial_lr", None)
        if not any(group.get("lr", 1.0) for group in groups):  # of a schedule that ended at 0, as the Trainer's does
            first = groups[0]
            began = f"{float(first['initial_lr']) / first.get('lr_factor', 1.0):g}" if "initial_lr" in first else "1e-4"
            warn(
                f"{self.path} was saved with a learning rate of 0, at the end of its schedule. Give a learning rate in "
                f"the small model's units (lr={began}), or let a new run's scheduler set it, as the Trainer's does"
            )
        construct: Callable[[Any], Optimizer] = optimizer_class
        optimizer = construct(groups)
        content = optimizer.state_dict()
        numbers = [name for group in content["param_groups"] for name in group["param_names"]]
        content["state"] = {number: self.states[name] for number, name in enumerate(numbers) if name in self.states}
        optimizer.load_state_dict(content)
        for p, state in optimizer.state.items():
            whole = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
            state.update({key: laid_out_like(value, p) for key, value in whole.items()})
        return optimizer


def read_optimizer(path: Path, model: nn.Module, *, mmap: bool = False) -> SavedOptimizer:
    """The optimizer of this model (a sketch will do) that torch.save wrote; mmap: tensors are mapped, not read.

    Which parameter is which: by the names in the groups, or else by the model's own order, or else by the Trainer's
    two groups, with and without weight decay; always checked against the shapes of the state.
    """
    return name_parameters(_load(path, mmap), path, model)


def name_parameters(content: Mapping[str, Any], path: Path, model: nn.Module) -> SavedOptimizer:
    """As `read_optimizer`, of a state dict; path: where it was read from, for errors."""
    keys = [list(group["params"]) for group in content["param_groups"]]
    hypers = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in content["param_groups"]]
    shapes = {name: tuple(p.shape) for name, p in naming.parameters(model).items()}
    states = content["state"]
    for names in _candidates(path, content["param_groups"], model):
        if [len({*n}) for n in names] == [len(k) for k in keys]:
            flat = dict(zip((n for group in names for n in group), (k for group in keys for k in group), strict=True))
            if all(_fits(states.get(key, {}), shapes[name]) for name, key in flat.items()):
                by_name = {name: states[key] for name, key in flat.items() if states.get(key)}
                return SavedOptimizer(path, list(zip(names, hypers, strict=True)), by_name)
    with_decay, without = (len(group["params"]) for group in decay_groups(model, 0.0))
    raise MupscaleError(
        f"{path} holds {' + '.join(str(len(k)) for k in keys)} parameters, which are neither the model's {len(shapes)} "
        f"in order nor the Trainer's {with_decay} with and {without} without weight decay, or their shapes differ: it "
        "belongs to a different model, or its optimizer must be built from model.named_parameters(), which stores "
        "names"
    )


def _load(path: Path, mmap: bool) -> dict[str, Any]:
    with path.open("rb") as file:
        if not file.read(2).startswith((b"PK", b"\x80")):  # a zip file, or a pickle of earlier versions of torch
            raise MupscaleError(f"{path} was not written by torch.save. Give the optimizer.pt beside the weights")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever is wrong with the file
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(".")
        raise MupscaleError(f"{path} cannot be loaded safely, as tensors and numbers alone: {reason}") from None
    try:
        groups, states = list(content["param_groups"]), list(content["state"].values())
        keys = [key for group in groups for key in (*group["params"], *(group.get("param_names") or ()))]
        good = bool(groups) and all(isinstance(key, int | str) for key in keys)
        good = good and all(isinstance(state, dict) for state in states)
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise MupscaleError(
            f"{path} is not an optimizer's state_dict(), which has 'state' and 'param_groups'. Save "
            "optimizer.state_dict()"
        )
    return content


def _candidates(path: Path, groups: list[dict[str, Any]], model: nn.Module) -> list[list[list[str]]]:
    """Names of the model's parameters, group by group, as the saved groups may hold them."""
    named = [group.get("param_names") or [k for k in group["params"] if isinstance(k, str)] for group in groups]
    if not any(named):
        return [[list(naming.parameters(model))], [group["params"] for group in decay_groups(model, 0.0)]]
    tied = naming.aliases(naming.unwrap(model).named_parameters(remove_duplicate=False))
    own = {name: names[0] for names in tied for name in names}
    named = [[str(name) for name in names] for names in named]
    found = naming.without_ddp((n for names in named for n in names), own)
    canonical = {stored: name for name, stored in found.items()}
    if strangers := [n for n in canonical.values() if n not in own]:
        raise MupscaleError(
            f"{path} holds '{strangers[0]}', which the model does not have: it belongs to a different model"
        )
    return [[[own[canonical[n]] for n in names] for names in named]]


def _fits(state: State, shape: Shape) -> bool:
    """Whether the state can be of a parameter of this shape: of the same one, reduced along an axis, or a number."""
    tensors = [value.shape for value in state.values() if isinstance(value, Tensor) and value.numel() != 1]
    return all(len(t) == len(shape) and all(a in (1, b) for a, b in zip(t, shape, strict=True)) for t in tensors)
