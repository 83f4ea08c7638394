"""How a plan is found: which axes of each parameter grow, and what they are to it."""

from mupscale.planning.modules import build_plan, initial_std, plan
from mupscale.planning.registry import Role, register_roles

__all__ = [
    "Role",
    "build_plan",
    "initial_std",
    "plan",
    "register_roles",
]
