"""How a plan is found: which axes of each parameter grow, and what they are to it.

from_modules   two models side by side, and the plan between them
registry       the roles of torch's modules, and those that users add
attention      heads, recognised from a module's own attributes
tied_readouts  the norm that takes the 1/k of a readout tied to the embedding
initial        standard deviations of a fresh initialisation
"""

from mupscale.planning.from_modules import build_plan, plan
from mupscale.planning.initial import initial_std
from mupscale.planning.role_registry import register_roles

__all__ = ["build_plan", "initial_std", "plan", "register_roles"]
