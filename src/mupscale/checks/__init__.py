"""Does the wide model compute what it should? Equivalence over training steps, and sizes of activations by width.

equivalence       both models trained side by side
differences       where they begin to differ, and what usually causes it
coordinates       how large activations and their changes are at each width
rounding          models in float64, and models that differ in their last bits
recorder          the outputs of all modules while a model runs
"""

from mupscale.checks.coordinates import CoordCheck, Measurement, coord_check
from mupscale.checks.differences import Difference, first_differing_module, relative_difference
from mupscale.checks.equivalence import Report, verify
from mupscale.checks.recorder import Recorder

__all__ = [
    "CoordCheck",
    "Difference",
    "Measurement",
    "Recorder",
    "Report",
    "coord_check",
    "first_differing_module",
    "relative_difference",
    "verify",
]
