"""One architecture at every size: built, initialised, planned, given an optimizer and upscaled under μP.

width_family  a member at every width
depths        the same at several depths: at each a family of widths, and rates that follow the depth
"""

from mupscale.family.depths import Grow, split_operators
from mupscale.family.width_family import Family

__all__ = ["Family", "Grow", "split_operators"]
