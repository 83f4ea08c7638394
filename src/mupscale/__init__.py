"""mupscale: widen a trained network exactly, perturb it, and train on; μP for any PyTorch model.

Widths → axes and roles → rules → plan → everything else. See `Family` for training at any width and `plan`,
`widen`, `param_groups` for a bare pair of modules. docs/where-things-are.md tells what lives in which folder.
"""

from mupscale.checkpoint import load, save
from mupscale.checks import coord_check, verify
from mupscale.core import Axis, Entry, Plan, Role, Rule, expand, index_of_old
from mupscale.family import Family
from mupscale.growth import (
    Copies,
    DepthPlan,
    Fresh,
    GaussianNoise,
    Identity,
    Operator,
    SignalNoise,
    Stack,
    deepen,
    deepen_optimizer,
    measure_statistics,
    perturb,
    plan_depth,
    upscale,
    widen,
    widen_optimizer,
)
from mupscale.optim import clip_grad_norm_, make_optimizer, param_groups, per_group, register_optimizer, widen_scheduler
from mupscale.planning import plan, register_roles
from mupscale.system import VERSION, MupscaleError, PlanError, UncheckedPlan, load_torch

__version__ = VERSION

# fmt: off
__all__ = [
    "Axis", "Copies", "DepthPlan", "Entry", "Family", "Fresh", "GaussianNoise", "Identity", "MupscaleError", "Operator",
    "Plan", "PlanError", "Role", "Rule", "SignalNoise", "Stack", "UncheckedPlan", "clip_grad_norm_", "coord_check",
    "deepen", "deepen_optimizer", "expand", "index_of_old", "load", "load_torch", "make_optimizer",
    "measure_statistics", "param_groups", "per_group", "perturb", "plan", "plan_depth", "register_optimizer",
    "register_roles", "save", "upscale", "verify", "widen", "widen_optimizer", "widen_scheduler",
]
# fmt: on
