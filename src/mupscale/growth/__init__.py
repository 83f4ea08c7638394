"""What is done with a plan: copies of weights, buffers and optimizer state, noise, and all of it at once."""

from mupscale.growth.copying import (
    axes_of_state,
    is_scalar,
    keep_base_shape,
    refuse_nonfinite,
    state_factor,
    widen,
    widen_optimizer,
)
from mupscale.growth.net2net import check_net2net, widen_net2net
from mupscale.growth.noise import (
    GaussianNoise,
    Noise,
    SignalNoise,
    Unit,
    checked,
    draw_normal,
    perturb,
    standard_normal,
    unit_std,
)
from mupscale.growth.upscaling import grow_optimizer, upscale

__all__ = [
    "GaussianNoise",
    "Noise",
    "SignalNoise",
    "Unit",
    "axes_of_state",
    "check_net2net",
    "checked",
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
