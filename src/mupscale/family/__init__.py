"""One architecture at every size: built, initialised, planned, given an optimizer and upscaled under μP.

built_members   the models as their author builds them
depth_members   those of one depth: small ones run on a batch, initial values under μP, and plans
width_family    a member at every width and depth, and rates that follow the depth
"""

from mupscale.family.built_members import BuiltMembers
from mupscale.family.width_family import Family

__all__ = ["BuiltMembers", "Family"]
