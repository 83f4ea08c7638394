"""Does the wide model compute what it should? Equivalence over training steps, and sizes of activations by width.

equivalence       both models trained side by side
differences       parameters and buffers that are not what they should be, and what usually causes it
coordinates       how large activations and their changes are at each width, or depth
coordinate_verdicts  a power of the width for each layer, whether it is flat, and a picture
failed_training   a loss that rises, or is not finite, at one width
power_laws        an exponent with its error
same_depth        which layers of a shallow and a deep model correspond
before_and_after  a model and what it grew into, side by side: size, memory, loss, speed, rates
rounding          models in float64, and models that differ in their last bits
"""

from mupscale.checks.before_and_after import GrowthTable, growth_table
from mupscale.checks.coordinate_verdicts import CoordCheck, Measurement
from mupscale.checks.coordinates import coord_check
from mupscale.checks.equivalence import Report, verify

__all__ = [
    "CoordCheck",
    "GrowthTable",
    "Measurement",
    "Report",
    "coord_check",
    "growth_table",
    "verify",
]
