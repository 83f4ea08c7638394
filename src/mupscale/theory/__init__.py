"""Training with upscaling as a tensor program, run at any width and at infinity.

program     the language of the paper: vectors, matrices, averages; real, kets: its two backends, finite and infinite
implicit    Gaussian matrices that are never formed
network     an MLP, trained and upscaled, as a program; weights, optimizers: what it is made of
estimates   a program's numbers with error bars
study       finite networks beside the limit; noise_sweep: noise × learning rate there; drawings: pictures
examples    the paper's worked examples in closed form; conditions: when noise leaves their limit unchanged
"""

from mupscale.theory import drawings, study
from mupscale.theory.conditions import ConditionCheck, measure_conditions
from mupscale.theory.estimates import Estimate, finite, limit
from mupscale.theory.examples import Settings
from mupscale.theory.kets import Limit
from mupscale.theory.network import Activation, MLPSetup, Network, Run, Stage, run
from mupscale.theory.noise_sweep import sweep_limit
from mupscale.theory.optimizers import Adam, Entrywise, Sign
from mupscale.theory.program import Diverged, Matrix, Program
from mupscale.theory.real import Finite
from mupscale.theory.study import Experiment, LimitComparison, WorkedExample, gaussian_batch

__all__ = [
    "Activation",
    "Adam",
    "ConditionCheck",
    "Diverged",
    "Entrywise",
    "Estimate",
    "Experiment",
    "Finite",
    "Limit",
    "LimitComparison",
    "MLPSetup",
    "Matrix",
    "Network",
    "Program",
    "Run",
    "Settings",
    "Sign",
    "Stage",
    "WorkedExample",
    "drawings",
    "finite",
    "gaussian_batch",
    "limit",
    "measure_conditions",
    "run",
    "study",
    "sweep_limit",
]
