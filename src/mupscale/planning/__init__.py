"""How a plan is found: which axes of each parameter grow, and what they are to it.

from_modules   two models side by side, and the plan between them
role_registry  the roles of torch's modules, and those that users add
attention      heads, recognised from a module's own attributes
tied_readouts  the norm that takes the 1/k of a readout tied to the embedding
growth_checks  what copies and fresh units ask of an axis
norms          norms over a growing axis
initial        standard deviations and means of a fresh initialisation
"""

from mupscale.planning.from_modules import GrowsBy, build_plan, plan
from mupscale.planning.growth_checks import How
from mupscale.planning.initial import initial_means, initial_std, mean_of, means_of, with_initial
from mupscale.planning.norms import kind_of_norm
from mupscale.planning.role_registry import register_roles

__all__ = [
    "GrowsBy",
    "How",
    "build_plan",
    "initial_means",
    "initial_std",
    "kind_of_norm",
    "mean_of",
    "means_of",
    "plan",
    "register_roles",
    "with_initial",
]
