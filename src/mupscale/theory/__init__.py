"""The infinite-width laboratory: training with upscaling as a tensor program, run at any width and at infinity."""

from mupscale.theory.estimate import Estimate, finite, limit
from mupscale.theory.kets import Limit
from mupscale.theory.network import MLP, Activation, Network, Run, Stage, run
from mupscale.theory.optimizers import Adam, Entrywise, Sign
from mupscale.theory.program import Diverged, Matrix, Program
from mupscale.theory.real import Finite

__all__ = [
    "MLP",
    "Activation",
    "Adam",
    "Diverged",
    "Entrywise",
    "Estimate",
    "Finite",
    "Limit",
    "Matrix",
    "Network",
    "Program",
    "Run",
    "Sign",
    "Stage",
    "finite",
    "limit",
    "run",
]
