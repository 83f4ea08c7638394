"""Training with upscaling as a tensor program, run at any width and at infinity.

program            the language of the paper: vectors, matrices, averages
finite_backend     a program on real networks; limit_backend: at infinite width (the paper's kets)
implicit_matrices  Gaussian matrices that are never formed
mlp_training       an MLP with its activation, trained and upscaled, as a program; weights, optimizers: its parts
estimates          a program's numbers with error bars
limit_study        finite networks beside the limit; noise_sweep: noise × learning rate there; limit_pictures
growth_study       copies with noise beside fresh units, at several rates
worked_examples    the paper's two, in closed form; noise_conditions: when noise leaves their limit unchanged
"""

from mupscale.system import Diverged
from mupscale.theory import limit_pictures, limit_study
from mupscale.theory.estimates import Estimate, FewSamples, finite, limit
from mupscale.theory.finite_backend import Finite
from mupscale.theory.growth_study import WayToGrow, best_way, compare_ways_to_grow, list_ways
from mupscale.theory.limit_backend import Limit
from mupscale.theory.limit_study import Experiment, LimitComparison, WorkedExample, gaussian_batch
from mupscale.theory.mlp_training import Activation, MLPSetup, Network, Run, Stage, run
from mupscale.theory.noise_conditions import ConditionCheck, measure_conditions
from mupscale.theory.noise_sweep import sweep_limit
from mupscale.theory.optimizers import Adam, Entrywise, Sign
from mupscale.theory.program import Matrix, Program
from mupscale.theory.worked_examples import Settings

__all__ = [
    "Activation",
    "Adam",
    "ConditionCheck",
    "Diverged",
    "Entrywise",
    "Estimate",
    "Experiment",
    "FewSamples",
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
    "WayToGrow",
    "WorkedExample",
    "best_way",
    "compare_ways_to_grow",
    "finite",
    "gaussian_batch",
    "limit",
    "limit_pictures",
    "limit_study",
    "list_ways",
    "measure_conditions",
    "run",
    "sweep_limit",
]
