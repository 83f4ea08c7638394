"""mupscale: widen a trained network exactly, perturb it, and train on; μP for any PyTorch model.

Widths → axes and roles → rules → plan → everything else. See `Family` for training at any width and `plan`,
`widen`, `param_groups` for a bare pair of modules. docs/where-things-are.md tells what lives in which folder.

A name is imported when it is first used, so `import mupscale` and `mupscale --help` do not wait for torch.
"""

import os
import sys

if sys.argv[:1] == ["-m"] and "mupscale" in sys.orig_argv:  # files of the current folder must not stand in for others
    sys.path[:1] = [entry for entry in sys.path[:1] if entry != os.getcwd()]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mupscale.system import VERSION, MupscaleError, PlanError, ReplicaWarning, UncheckedPlan, load_torch

if TYPE_CHECKING:
    from mupscale.checkpoint import load, load_optimizer, save
    from mupscale.checks import coord_check, growth_table, verify
    from mupscale.core import Axis, Entry, Plan, Role, Rule, RuleSet, expand, index_of_old
    from mupscale.family import Family
    from mupscale.growth import (
        Copies,
        Experts,
        Fresh,
        GaussianNoise,
        Identity,
        Operator,
        SignalNoise,
        Stack,
        measure_statistics,
        perturb,
        plan_depth,
        plan_experts,
        upscale,
        widen,
        widen_optimizer,
    )
    from mupscale.optim import (
        clip_grad_norm_,
        make_optimizer,
        param_groups,
        per_group,
        register_optimizer,
        widen_scheduler,
    )
    from mupscale.planning import plan, register_roles

__version__ = VERSION

# fmt: off
__all__ = [
    "Axis", "Copies", "Entry", "Experts", "Family", "Fresh", "GaussianNoise", "Identity", "MupscaleError", "Operator",
    "Plan", "PlanError", "ReplicaWarning", "Role", "Rule", "RuleSet", "SignalNoise", "Stack", "UncheckedPlan",
    "clip_grad_norm_", "coord_check", "expand", "growth_table", "index_of_old", "load", "load_optimizer",
    "load_torch", "make_optimizer", "measure_statistics", "param_groups", "per_group", "perturb", "plan", "plan_depth",
    "plan_experts", "register_optimizer", "register_roles", "save", "upscale", "verify", "widen", "widen_optimizer",
    "widen_scheduler",
]
# fmt: on
_HOMES = ("core", "planning", "optim", "growth", "checkpoint", "checks", "family")
_PACKAGES = {*_HOMES, "cli", "study", "data", "engine", "hf", "models", "plots", "report", "system", "theory", "train"}


def __getattr__(name: str) -> Any:
    """A public name, or a package below this one, imported now (PEP 562)."""
    if name in __all__:  # those of one home need none of the next
        homes = (import_module(f"mupscale.{home}") for home in _HOMES)
        value = next(getattr(home, name) for home in homes if hasattr(home, name))
    elif name in _PACKAGES:
        value = import_module(f"mupscale.{name}")
    else:
        raise AttributeError(f"module 'mupscale' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
