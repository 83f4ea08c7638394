"""Does the wide model compute what it should? Equivalence over training steps, and sizes of activations by width.

equivalence       both models trained side by side, and what is not as it should be
coordinates       how large activations and their changes are at each width, or depth, as powers with verdicts
before_and_after  a model and what it grew into, side by side: size, memory, loss, speed, rates
"""

from mupscale.checks.before_and_after import GrowthTable, growth_table
from mupscale.checks.coordinates import CoordCheck, Measurement, coord_check
from mupscale.checks.equivalence import Difference, Report, first_differing_module, verify
