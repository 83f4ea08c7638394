"""One architecture at every size: built, initialised, planned, given an optimizer and upscaled under μP.

built_members   the models as their author builds them
tried_members   small ones run on a batch: roles learnt, plans checked
width_members   those of one depth: initial values under μP, and plans
grown_members   a member grown into a larger one
width_family    a member at every width and depth, and rates that follow the depth
"""

from mupscale.family.built_members import BuiltMembers
from mupscale.family.width_family import Family

__all__ = ["BuiltMembers", "Family"]
