"""The infinite-width laboratory: training with upscaling as a tensor program, run at any width and at infinity."""

from mupscale.theory import pictures, study
from mupscale.theory.conditions import conditions
from mupscale.theory.estimate import Estimate, finite, limit
from mupscale.theory.examples import Settings
from mupscale.theory.kets import Limit
from mupscale.theory.network import MLP, Activation, Network, Run, Stage, run
from mupscale.theory.noise_sweep import sweep_limit
from mupscale.theory.optimizers import Adam, Entrywise, Sign
from mupscale.theory.pictures import gallery
from mupscale.theory.program import Diverged, Matrix, Program
from mupscale.theory.real import Finite
from mupscale.theory.study import Experiment, gaussian_batch, save

__all__ = [
    "MLP",
    "Activation",
    "Adam",
    "Diverged",
    "Entrywise",
    "Estimate",
    "Experiment",
    "Finite",
    "Limit",
    "Matrix",
    "Network",
    "Program",
    "Run",
    "Settings",
    "Sign",
    "Stage",
    "conditions",
    "finite",
    "gallery",
    "gaussian_batch",
    "limit",
    "pictures",
    "run",
    "save",
    "study",
    "sweep_limit",
]
