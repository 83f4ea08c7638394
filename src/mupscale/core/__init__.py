"""Three numbers per parameter, and what they are kept in.

widths   a width: one number, or several by name
rules    the three numbers, and the factors they imply
rule_sets  what practice chooses otherwise, by name
axes     which narrow unit each wide unit copies, or where the old units lie beside new ones
roles    what the dimensions of a parameter are to it
entries  what a plan says of one parameter, and the formula of widening
plans    an entry for every parameter, and its table
naming   one name per parameter, whatever the model is wrapped in; copies of models
dtensor  tensors that are sharded over processes
"""

from mupscale.core import naming
from mupscale.core.axes import (
    Axis,
    expand,
    index_of_old,
    index_of_units,
    is_new,
    multiplier,
    places,
    whole_blocks,
    widened_shape,
)
from mupscale.core.dtensor import copy_into, gather_whole, is_sharded, laid_out_like, local_part, plain_type
from mupscale.core.entries import Constants, Entry, Initial, Shape, TensorSource, part_of_units
from mupscale.core.naming import copy_model, keep_attributes, without_ddp
from mupscale.core.plans import Plan, check_dtype, check_same_names, shapes_in_words
from mupscale.core.roles import Role
from mupscale.core.rule_sets import DEPTH_POWERS, DecayRule, DepthRule, RuleSet, decay_change
from mupscale.core.rules import Number, Rule, tidy
from mupscale.core.widths import PlainWidth, WholeWidth, Width, WidthLike
