"""What is done with a plan: weights, buffers and optimizer state of the wide model, by copies or by fresh units.

operators        the contract of an operator
copies           the paper's: every unit copied, with noise
fresh            the other: new units drawn beside the old ones
fresh_tensor     a tensor with such units, whole or in pieces
lossless         what fresh units start at where the function is to stay
sources          the narrow model's tensors, and memory for the wide ones
wide_models      what a wide model takes from the narrow one besides weights
writing          weights and buffers
optimizer_state  what an optimizer holds for each parameter
statistics       running statistics of new channels, measured on batches
net2net          random copies, for comparison
noise            what makes copies differ from each other
spectral         the size of a weight that noise may be relative to
upscaling        all of it in one call
"""

from mupscale.growth.copies import Copies, NaiveCopies
from mupscale.growth.fresh import Fresh
from mupscale.growth.fresh_tensor import FreshTensor, FreshValues, Region
from mupscale.growth.lossless import difference_of_outputs, obstacles
from mupscale.growth.net2net import Net2Net
from mupscale.growth.noise import (
    GaussianNoise,
    Noise,
    SignalNoise,
    Unit,
    check_noise,
    draw_normal,
    perturb,
    standard_normal,
    unit_std,
)
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.growth.optimizer_state import axes_of_state, initial_state, is_scalar, state_factor, widen_optimizer
from mupscale.growth.sources import keep_base_shape, refuse_nonfinite
from mupscale.growth.statistics import measure_statistics
from mupscale.growth.upscaling import choose_operator, grow_optimizer, upscale
from mupscale.growth.wide_models import dress_like, has_unsaved_widths
from mupscale.growth.writing import widen

__all__ = [
    "Copies",
    "Fresh",
    "FreshTensor",
    "FreshValues",
    "GaussianNoise",
    "NaiveCopies",
    "Net2Net",
    "Noise",
    "Operator",
    "Part",
    "Region",
    "SignalNoise",
    "StatePart",
    "Unit",
    "axes_of_state",
    "check_noise",
    "choose_operator",
    "difference_of_outputs",
    "draw_normal",
    "dress_like",
    "grow_optimizer",
    "has_unsaved_widths",
    "initial_state",
    "is_scalar",
    "keep_base_shape",
    "measure_statistics",
    "obstacles",
    "perturb",
    "refuse_nonfinite",
    "standard_normal",
    "state_factor",
    "unit_std",
    "upscale",
    "widen",
    "widen_optimizer",
]
