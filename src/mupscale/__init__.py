"""mupscale: widen a trained network exactly, perturb it, and train on; μP for any PyTorch model.

Widths → axes and roles → rules → plan → everything else. See `Family` for training at any width and `plan`,
`widen`, `param_groups` for a bare pair of modules.
"""

from mupscale.axes import Axis, expand
from mupscale.checkpoint import load, load_torch, save
from mupscale.coords import coord_check
from mupscale.errors import MupscaleError
from mupscale.family import Family
from mupscale.noise import GaussianNoise, SignalNoise, perturb
from mupscale.optim import clip_grad_norm_, make_optimizer, param_groups, per_group
from mupscale.plan import Entry, Plan
from mupscale.roles import Role, register_roles
from mupscale.rules import Rule
from mupscale.schedule import widen_scheduler
from mupscale.traits import register_optimizer
from mupscale.upscale import upscale
from mupscale.verify import verify
from mupscale.walk import plan
from mupscale.widen import widen, widen_optimizer

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Entry",
    "Family",
    "GaussianNoise",
    "MupscaleError",
    "Plan",
    "Role",
    "Rule",
    "SignalNoise",
    "clip_grad_norm_",
    "coord_check",
    "expand",
    "load",
    "load_torch",
    "make_optimizer",
    "param_groups",
    "per_group",
    "perturb",
    "plan",
    "register_optimizer",
    "register_roles",
    "save",
    "upscale",
    "verify",
    "widen",
    "widen_optimizer",
    "widen_scheduler",
]
