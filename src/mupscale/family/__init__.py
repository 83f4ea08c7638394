"""One architecture at every size: built, initialised, planned, given an optimizer and upscaled under μP.

built_members   the models as their author builds them
tried_members   small ones run on a batch: roles learnt, plans checked
initial_values  what they start with under μP
grown_members   a member grown into a larger one
depths          the same at several depths: at each a family of widths, and rates that follow the depth
width_family    a member at every width
"""

from mupscale.family.built_members import BuiltMembers
from mupscale.family.width_family import Family

__all__ = ["BuiltMembers", "Family"]
