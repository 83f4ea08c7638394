"""What is done with a plan: weights, buffers and optimizer state of the wide model, by copies or by fresh units.

operators        the contract of an operator
operator_pairs   what grow= says: an operator for width, one for depth, or both; the default
settings         how a model grows as one value, made of the words that recipes, commands and records have
copies           the paper's: every unit copied, with noise that makes copies differ; and random copies, for comparison
fresh            the other: new units drawn beside the old ones, whole or in pieces
lossless         what fresh units start at where the function is to stay
writing          weights, buffers and noise, once all is checked; memory for a wide model; BatchNorms' statistics
optimizer_state  what an optimizer holds for each parameter
draws            normal numbers that follow from a seed and a name
upscaling        all of it in one call
experts          which tensor each expert of a mixture is a copy of, and what its router is
residual_branches  what in a block writes into the residual stream
depth_plans      which blocks a deep model has more of, what new ones are, and which tensor each is made of
"""

from mupscale.growth.copies import (
    Copies,
    GaussianNoise,
    Net2Net,
    Noise,
    NoiseLevel,
    SignalNoise,
    as_noise,
    check_spread,
    is_replica,
    replica_in_words,
    unit_std,
)
from mupscale.growth.depth_plans import (
    BlockList,
    DepthOperator,
    Identity,
    Place,
    Stack,
    cannot_be_identity,
    find_block_lists,
    plan_depth,
    with_depth,
)
from mupscale.growth.draws import NewTensor, draw_normal
from mupscale.growth.experts import Experts, plan_experts
from mupscale.growth.fresh import Fresh, FreshTensor, Region, no_pattern
from mupscale.growth.lossless import EPS, gain_factor, obstacles, silent_start, without_gains
from mupscale.growth.operator_pairs import (
    Grow,
    choose_operator,
    refuse_idle_operator,
    split_operators,
)
from mupscale.growth.operators import Operator, Part, check_operator
from mupscale.growth.optimizer_state import (
    grow_state,
    initial_state,
    is_scalar,
    shape_of_state,
    state_factor,
    what_is_foreign,
    widen_optimizer,
)
from mupscale.growth.residual_branches import Writers, find_writers
from mupscale.growth.settings import (
    DEPTH_OPERATORS,
    OPERATORS,
    Deepen,
    GrowthSettings,
    OperatorWord,
    usual_how,
    word_in_table,
    word_of_operator,
    words_that_take,
)
from mupscale.growth.upscaling import grow_optimizer, upscale, upscale_untried, with_measured_initial
from mupscale.growth.writing import check_written, materialize, measure_statistics, perturb, refuse_nonfinite, widen

__all__ = ["OPERATORS", "Net2Net"]
