"""Three numbers per parameter: rules, axes, plans, and the names of parameters whatever a model is wrapped in."""

from mupscale.core import dtensor, naming
from mupscale.core.axes import Axis, expand, multiplier
from mupscale.core.dtensor import full, held, plain_type
from mupscale.core.naming import without_ddp
from mupscale.core.plans import Entry, Plan, Shape, check_dtype, same_names, tidy
from mupscale.core.rules import Number, Rule

__all__ = [
    "Axis",
    "Entry",
    "Number",
    "Plan",
    "Rule",
    "Shape",
    "check_dtype",
    "dtensor",
    "expand",
    "full",
    "held",
    "multiplier",
    "naming",
    "plain_type",
    "same_names",
    "tidy",
    "without_ddp",
]
