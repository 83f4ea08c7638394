"""One architecture at every size: built, initialised, planned, given an optimizer and upscaled under μP.

members         the models as their author builds them; those of one depth: small ones run on a batch, and plans
width_family    a member at every width and depth, and rates that follow the depth
"""

from mupscale.family.members import BuiltMembers
from mupscale.family.width_family import Family
