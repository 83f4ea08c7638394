"""Does the wide model compute what it should? Equivalence over training steps, and sizes of activations by width."""

from mupscale.checks.coordinates import CoordCheck, Row, coord_check
from mupscale.checks.equivalence import Difference, first_module, relative_difference, verify
from mupscale.checks.recorder import Recorder

__all__ = [
    "CoordCheck",
    "Difference",
    "Recorder",
    "Row",
    "coord_check",
    "first_module",
    "relative_difference",
    "verify",
]
