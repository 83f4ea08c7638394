"""Training with upscaling as a tensor program, run at any width and at infinity.

program            the language of the paper: vectors, matrices, averages; on real networks, with matrices or without,
                   and at infinite width (the paper's kets); its numbers with error bars
mlp_training       an MLP with its activation, its weights and optimizers, trained and upscaled, as a program
limit_study        finite networks beside the limit, noise × learning rate there, ways to grow; limit_pictures
worked_examples    the paper's two, in closed form, and when noise leaves their limit unchanged
"""

from mupscale.system import Diverged
from mupscale.theory import limit_pictures, limit_study
from mupscale.theory.limit_study import (
    Draws,
    Experiment,
    LimitComparison,
    WayToGrow,
    WorkedExample,
    best_way,
    compare_ways_to_grow,
    gaussian_batch,
    list_ways,
    sweep_limit,
)
from mupscale.theory.mlp_training import Adam, Entrywise, MLPSetup, Network, Run, Sign, Stage, run
from mupscale.theory.program import Estimate, FewSamples, Finite, Limit, Matrix, Program, finite, limit
from mupscale.theory.worked_examples import Settings, measure_conditions

__all__ = [
    "Adam",
    "Diverged",
    "Draws",
    "Entrywise",
    "Estimate",
    "Experiment",
    "FewSamples",
    "Finite",
    "Limit",
    "MLPSetup",
    "Program",
    "Settings",
    "Sign",
    "Stage",
    "best_way",
    "compare_ways_to_grow",
    "finite",
    "gaussian_batch",
    "limit",
    "run",
    "sweep_limit",
]
