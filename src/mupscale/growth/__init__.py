"""What is done with a plan: copies of weights, buffers and optimizer state, noise, and all of it at once.

copying          weights and buffers
optimizer_state  what an optimizer holds for each parameter
net2net          random copies, for comparison
noise            what makes copies differ from each other
spectral         the size of a weight that noise may be relative to
upscaling        all of it in one call
"""

from mupscale.growth.copying import keep_base_shape, refuse_nonfinite, widen
from mupscale.growth.net2net import check_net2net, widen_net2net
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
from mupscale.growth.optimizer_state import axes_of_state, is_scalar, state_factor, widen_optimizer
from mupscale.growth.upscaling import grow_optimizer, upscale

__all__ = [
    "GaussianNoise",
    "Noise",
    "SignalNoise",
    "Unit",
    "axes_of_state",
    "check_net2net",
    "check_noise",
    "draw_normal",
    "grow_optimizer",
    "is_scalar",
    "keep_base_shape",
    "perturb",
    "refuse_nonfinite",
    "standard_normal",
    "state_factor",
    "unit_std",
    "upscale",
    "widen",
    "widen_net2net",
    "widen_optimizer",
]
