"""Does the wide model compute what it should? Equivalence over training steps, and sizes of activations by width."""

from mupscale.checks.coordinates import CoordCheck, Measurement, coord_check
from mupscale.checks.equivalence import Difference, first_differing_module, relative_difference, verify
from mupscale.checks.recorder import Recorder

__all__ = [
    "CoordCheck",
    "Difference",
    "Measurement",
    "Recorder",
    "coord_check",
    "first_differing_module",
    "relative_difference",
    "verify",
]
