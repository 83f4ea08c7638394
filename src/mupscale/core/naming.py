"""One name per parameter, whatever the model is wrapped in: DDP, torch.compile, FSDP, activation checkpointing.

And copies of models whose parameters keep what others have put on them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPED = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


def canonical(name: str) -> str:
    """The name without the parts that wrappers put in."""
    return _WRAPPED.sub("", name).rstrip(".")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path in order of registration; of a wrapper inside the model, what it wraps.

    >>> list(modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    ['', '0', '1']
    """
    return {canonical(path): module for path, module in unwrap(model).named_modules(remove_duplicate=False)}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by canonical name; a tied one under its first name only.

    >>> list(parameters(DataParallel(nn.Linear(2, 2))))
    ['weight', 'bias']
    """
    return {canonical(name): p for name, p in unwrap(model).named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by canonical name, the non-persistent ones included.

    >>> list(buffers(nn.BatchNorm1d(2)))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return {canonical(name): b for name, b in unwrap(model).named_buffers()}


def plain_tensors_without_memory(model: nn.Module) -> list[str]:
    """Tensors on the meta device that modules keep as plain attributes, where no state dict shows them."""
    names = []
    for path, module in modules(model).items():
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else value
            parts = values if isinstance(value, dict | list | tuple) else (value,)
            plain = (part for part in parts if isinstance(part, Tensor) and not isinstance(part, nn.Parameter))
            if name != "_buffers" and any(part.is_meta for part in plain):
                names.append(f"{path}.{name}" if path else name)
    return names


def aliases(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, ...]]:
    """All canonical names of each tensor, from pairs that repeat tied ones; the first name leads.

    >>> model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "readout": nn.Linear(2, 5, bias=False)})
    >>> model["readout"].weight = model["embedding"].weight
    >>> list(aliases(model.named_parameters(remove_duplicate=False)))
    [('embedding.weight', 'readout.weight')]
    """
    by_identity: dict[int, list[str]] = {}
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(canonical(name))
    for names in by_identity.values():
        yield tuple(dict.fromkeys(names))


def without_ddp(names: Iterable[str], own: Container[str]) -> dict[str, str]:
    """From canonical names to the names in a file, where DDP shows as a `module.` before every one of them.

    own: the model's canonical names, so that a child of its own called `module` keeps its name.
    """
    originals = {canonical(name): name for name in names}
    if originals and all(name.startswith("module.") and name not in own for name in originals):
        originals = {name.removeprefix("module."): original for name, original in originals.items()}
    return originals


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; memo: as for copy.deepcopy."""
    copied = copy.deepcopy(model, memo)
    keep_attributes(model, copied)
    return copied


def why_not_a_copy(model: nn.Module, used: Iterable[Tensor]) -> str:
    """Why a copy of the model that uses these tensors when it runs cannot stand for it; nothing where it can."""
    originals = {id(p): name for name, p in parameters(model).items()}
    if kept := [originals[id(tensor)] for tensor in used if id(tensor) in originals]:
        return (
            f"a copy of the model still uses '{kept[0]}' of the original: a function in the model refers to the model "
            "itself, and copy.deepcopy does not see that"
        )
    return ""


def keep_attributes(model: nn.Module, copied: nn.Module) -> None:
    """Give a copy's parameters the attributes of the model's, which torch's deepcopy leaves out."""
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        vars(new).update(vars(old))
