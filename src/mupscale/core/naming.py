"""One name per parameter, whatever the model is wrapped in: DDP, torch.compile, FSDP, activation checkpointing."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

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
    """Modules by canonical path in order of registration; of a wrapper inside the model, what it wraps."""
    return {canonical(path): module for path, module in unwrap(model).named_modules(remove_duplicate=False)}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by canonical name; a tied one under its first name only."""
    return {canonical(name): p for name, p in unwrap(model).named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by canonical name, the non-persistent ones included."""
    return {canonical(name): b for name, b in unwrap(model).named_buffers()}


def aliases(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, ...]]:
    """All canonical names of each tensor, from pairs that repeat tied ones; the first name leads."""
    by_identity: dict[int, list[str]] = {}
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(canonical(name))
    for names in by_identity.values():
        yield tuple(dict.fromkeys(names))


def without_ddp(names: Iterable[str], known: Container[str]) -> dict[str, str]:
    """Canonical → given, for names read from a file, where DDP shows as a `module.` before every one of them.

    known: the model's own canonical names, so that a child of its own called `module` keeps its name.
    """
    given = {canonical(name): name for name in names}
    if given and all(name.startswith("module.") and name not in known for name in given):
        given = {name.removeprefix("module."): original for name, original in given.items()}
    return given
