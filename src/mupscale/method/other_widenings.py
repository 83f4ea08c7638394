"""Other ways to make a trained network wider, for comparison on request: Net2Net, and copying naively.

Each writes a wide model into a file, from which an ordinary training run starts.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mupscale.core import WholeWidth
from mupscale.growth import Net2Net
from mupscale.method.protocol import Protocol
from mupscale.system import MupscaleError, derive
from mupscale.train import (
    NoiseLevel,
    Recipe,
    build_noise,
    check_copies,
    find_checkpoint,
    read_snapshot,
    save_model_at,
)


def load_trained(recipe: Recipe) -> nn.Module:
    """The model of a recipe whose run is finished, with its trained weights."""
    model = recipe.family().build(recipe.width).to(recipe.dtype())
    read_snapshot(find_checkpoint(str(recipe.out))).restore_model(model)
    return model


def write_naive_start(base: Recipe, protocol: Protocol, noise: NoiseLevel, path: Path) -> None:
    """A base model widened and perturbed as the protocol has it, but without its optimizer's state."""
    unit = "theory" if isinstance(noise, dict) else protocol.growth.unit
    seed = derive(base.seeds.noise, "start")
    family = base.family()
    check_copies(family, protocol.data, base.width, protocol.wide)
    wide, _ = family.upscale(load_trained(base), width=protocol.wide, noise=build_noise(noise, unit), seed=seed)
    save_model_at(path, wide, protocol.wide)


def write_net2net_start(base: Recipe, width: WholeWidth, path: Path) -> None:
    """A base model widened by Net2WiderNet, with its random copies."""
    wide, _ = base.family().upscale(load_trained(base), width=width, grow=Net2Net(), seed=base.seeds.noise)
    save_model_at(path, wide, width)


def check_random_copies(recipe: Recipe, width: WholeWidth) -> None:
    """That Net2Net keeps the function of the recipe's model, before anything is trained; needs no memory."""
    try:
        Net2Net().check(recipe.family().widening(recipe.width, width))
    except MupscaleError as error:
        raise MupscaleError(f"{error}: leave net2net out of method.baselines") from None
