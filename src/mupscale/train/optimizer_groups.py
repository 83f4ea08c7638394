"""The optimizer's parameter groups that a recipe asks for: what has no weight decay, and Muon's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mupscale.core import Plan, naming
from mupscale.optim import MuonAdamW, muon_groups
from mupscale.system import MupscaleError


def recipe_groups(
    model: nn.Module, plan: Plan, optimizer: type[Optimizer], no_decay: Sequence[str]
) -> list[dict[str, Any]] | None:
    """Groups by parameter names, for `make_optimizer`; None where all parameters are one.

    no_decay: bias, norm (everything in a module that normalises), or patterns of names, such as *.wte.weight.

    >>> import torch
    >>> import mupscale as mu
    >>> model, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 1)) for n in (4, 8))
    >>> groups = recipe_groups(model, mu.plan(model, wide), torch.optim.AdamW, ["bias", "norm"])
    >>> [(group["params"], group.get("weight_decay")) for group in groups]
    [(['0.weight', '2.weight'], None), (['0.bias', '1.weight', '1.bias', '2.bias'], 0.0)]
    """
    groups: list[dict[str, Any]] = [{"params": list(plan.parameters)}]
    if issubclass(optimizer, MuonAdamW):
        groups = muon_groups(plan)
    elif not no_decay:
        return None
    spared = names_without_decay(model, plan, no_decay)
    parts = []
    for group in groups:
        decayed = [name for name in group["params"] if name not in spared]
        rest = [name for name in group["params"] if name in spared]
        parts += [{**group, "params": decayed}, {**group, "params": rest, "weight_decay": 0.0}]
    return [part for part in parts if part["params"]]


def names_without_decay(model: nn.Module, plan: Plan, words: Sequence[str]) -> set[str]:
    """The parameters that words like bias, norm or *.wte.weight mean; a word that means none is an error.

    >>> import mupscale as mu
    >>> model = nn.Linear(3, 4)
    >>> names_without_decay(model, mu.plan(model, nn.Linear(3, 8)), ["bias"])
    {'bias'}
    """
    norms = {path for path, module in naming.modules(model).items() if "norm" in type(module).__name__.lower()}
    spared = set[str]()
    for word in words:
        matching = {name for name in plan.parameters if _is_meant(name, word, norms)}
        if not matching:
            raise MupscaleError(f"no_decay: {word} matches no parameter: give bias, norm, or a pattern such as *.bias")
        spared |= matching
    return spared


def _is_meant(name: str, word: str, norms: set[str]) -> bool:
    path, _, last = name.rpartition(".")
    if word == "bias":
        return last.startswith("bias") or last.endswith("bias")
    if word == "norm":
        return path in norms
    return fnmatchcase(name, word)
