"""What others do with a trained network to make it wider, for comparison on request: Net2Net, and copying naively."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mupscale import checkpoint
from mupscale.core import Axis, Entry, Plan, naming
from mupscale.family import Family
from mupscale.system import MupscaleError, derive, generator
from mupscale.train import Growth, NoiseLevel, Recipe, RunState, Width, build_noise, find_checkpoint, read_snapshot


def load_model(recipe: Recipe, run: str) -> nn.Module:
    """The model of a finished run, at the recipe's width."""
    model = recipe.family().build(recipe.width).to(recipe.dtype())
    read_snapshot(find_checkpoint(run)).restore_model(model)
    return model


def naive_start(base: Recipe, growth: Growth, noise: NoiseLevel, path: Path) -> None:
    """A base model widened and perturbed as ever, but without its optimizer's state."""
    unit = "theory" if isinstance(noise, dict) else growth.unit
    seed = derive(base.seeds.noise, "start")
    model = load_model(base, str(base.out))
    wide, _ = base.family().upscale(model, width=growth.width, noise=build_noise(noise, unit), seed=seed)
    _write(wide, growth.width, path)


def net2net_start(base: Recipe, width: Width, path: Path) -> None:
    """Net2WiderNet: new units are copies of units chosen at random, and what reads a unit is shared by its copies."""
    _write(net2net(load_model(base, str(base.out)), base.family(), width, base.seeds.noise), width, path)


@torch.no_grad()
def net2net(narrow: nn.Module, family: Family, width: Width, seed: int) -> nn.Module:
    """The wide model with random copies; only for models whose function that keeps (no norms over the width)."""
    wide = family.build(width).to(next(narrow.parameters()).dtype)
    plan = family.widening(narrow, wide)
    check_net2net(narrow, plan)
    sources, targets = naming.parameters(narrow), naming.parameters(wide)
    for name, entry in plan.parameters.items():
        targets[name].copy_(_copied(sources[name].detach(), entry, seed))
    return wide


def check_net2net(narrow: nn.Module, plan: Plan) -> None:
    """That random copies keep this model's function; it may be one without memory."""
    normed = [
        name for name, e in plan.parameters.items() if e.fold != 1 or (len(e.wide) == 1 and _is_gain(narrow, name))
    ]
    if normed:
        raise MupscaleError(
            f"Net2Net's random copies change what a norm over the width computes ('{normed[0]}'), so it cannot widen "
            f"this model without changing its function: leave net2net out of method.baselines"
        )
    if any(axis.sections for entry in plan.parameters.values() for axis in entry.axes.values()):
        raise MupscaleError("Net2Net is not written for packed projections: leave net2net out of method.baselines")


def _copied(weight: Tensor, entry: Entry, seed: int) -> Tensor:
    for dim, axis in entry.axes.items():
        if axis.copies == 1:
            continue
        chosen = random_copies(weight.shape[dim], axis, seed)
        if dim in entry.in_:
            counts = torch.bincount(chosen, minlength=weight.shape[dim]).to(weight)
            shape = [-1 if d == dim else 1 for d in range(weight.dim())]
            weight = weight / counts.view(shape)
        weight = weight.index_select(dim, chosen)
    return weight


def random_copies(n: int, axis: Axis, seed: int) -> Tensor:
    """The narrow unit of each wide one: all of them once, then some at random; whole blocks, one map for each size."""
    blocks = n // axis.block
    more = torch.randint(blocks, (blocks * (axis.copies - 1),), generator=generator(seed, "net2net", n, axis.block))
    chosen = torch.cat([torch.arange(blocks), more])
    return (chosen[:, None] * axis.block + torch.arange(axis.block)).flatten()


def _is_gain(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return "norm" in type(owner).__name__.lower()


def _write(model: nn.Module, width: Width, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, model, run=RunState(width=width).to_json())
