"""Three numbers per parameter: rules, axes, plans, and the names of parameters whatever a model is wrapped in."""

from mupscale.core import dtensor, naming
from mupscale.core.axes import Axis, expand, multiplier, widened_shape
from mupscale.core.dtensor import full, held, plain_type
from mupscale.core.naming import without_ddp
from mupscale.core.plans import Entry, Plan, Shape, check_dtype, same_names
from mupscale.core.rules import Number, Rule, tidy
from mupscale.core.widths import PlainWidth, Size, Width, WidthLike

__all__ = [
    "Axis",
    "Entry",
    "Number",
    "PlainWidth",
    "Plan",
    "Rule",
    "Shape",
    "Size",
    "Width",
    "WidthLike",
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
    "widened_shape",
    "without_ddp",
]
