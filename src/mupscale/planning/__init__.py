"""How a plan is found: which axes of each parameter grow, and what they are to it.

making_plans   the plan between two models: from their modules, or by running them
from_modules   two models side by side: what their types and names say
from_run       two models side by side: what they compute, searched and checked
  tracing        a run as a list of tensor operations
  model_calls    a model called on a batch, and what is said where it does not run
  precision      float64 that stays float64
  memory_layouts copies in memory left out, where only one of the models makes them
  following      one pass over both runs: every wide tensor has to be copies of the narrow one
  both_runs      the tensors of the two runs: weights, constants, data
  back_through   one operation backwards
  copied_values  in which order, and by which factor, one tensor is copies of another
  guesses        what is assumed and what is found
  better_guesses what to assume instead where a pass got stuck
  source_units   which units of a weight the units of a tensor come from
  output_gradients
                 outputs of both models, and gradients of one loss
  recorder       the outputs of all modules while a model runs
  module_differences
                 the first module that differs, and what usually causes it
trials         what a plan is tried on: the batch, and a stronger one where that leaves something unseen
  unseen_units   which units of growing parameters change no output on a batch
  stronger_batches
                 other numbers, random tokens, more rows and positions
learnt_roles   roles that a run shows, beside those that were given; for all widths of a family
certain_outputs
               bare parameters that certainly are outputs; others are refused unless a batch shows what they are
kept_constants what the weights of old units are multiplied by beside fresh ones
resized_models two models at a third size: what differs between them is a size
miniature_pairs
               small models that are to each other what two large ones are, and what they show of those
full_size      a plan checked on large models as they are, with the weights of one block at a time
silent_changes outputs that grow, and losses that modules keep: said, where a plan stands its check
silent_units   the wide model with the old units alone: whether and where it differs
parted_models  where such a model parts from the narrow one, and blocks that help
past_norms     which parameters write units that no norm reads, or read units past the norms
role_registry  the roles of torch's modules, and those that users add
attention      heads, recognised from a module's own attributes
tied_readouts  the norm that takes the 1/k of a readout tied to the embedding
growth_checks  what copies and fresh units ask of an axis
norms          norms over a growing axis
initial        standard deviations and means of a fresh initialisation
block_lists    the blocks that a deep model has more of
block_runs     a run with the blocks marked
residual_branches
               which parameters of a block write into the residual stream
width_dims     which dimensions are widths, and which size is a number of blocks
"""

from mupscale.planning.block_lists import BlockList, find_block_lists
from mupscale.planning.from_modules import build_plan
from mupscale.planning.from_run import check_plan_by_running
from mupscale.planning.full_size import is_large
from mupscale.planning.growth_checks import How, find_uneven
from mupscale.planning.initial import (
    count_draws,
    initial_means,
    initial_std,
    mean_of,
    means_of,
    rescale_spread,
    with_initial,
)
from mupscale.planning.kept_constants import with_keeps
from mupscale.planning.learnt_roles import learn_roles, roles_for_any_width
from mupscale.planning.making_plans import GrowsBy, plan, with_initial_of, with_initial_of_wide
from mupscale.planning.miniature_pairs import Miniature, roles_of
from mupscale.planning.model_calls import call_arguments, check_takes, run_on_batch
from mupscale.planning.module_differences import ROUNDING, Difference, first_differing_module, relative_difference
from mupscale.planning.norms import bare_norms, kind_of_norm
from mupscale.planning.output_gradients import has_length_one
from mupscale.planning.past_norms import find_past_norms
from mupscale.planning.precision import KeepDouble, in_double
from mupscale.planning.recorder import Recorder
from mupscale.planning.residual_branches import Writers, find_writers, silence
from mupscale.planning.resized_models import Resizing
from mupscale.planning.role_registry import register_roles
from mupscale.planning.silent_changes import warn_of_growing_outputs
from mupscale.planning.silent_units import check_silent_units, keeps_outputs
from mupscale.planning.stronger_batches import check_not_empty
from mupscale.planning.tracing import (
    computed_tensors,
    in_float64,
    run_in_float64,
    runs_norms,
    silence_dropout,
    take_modes,
    tensors_in,
)
from mupscale.planning.trials import Trials
from mupscale.planning.width_dims import all_tensors, default_init_at, find_depth_size, find_width_dims

__all__ = [
    "ROUNDING",
    "BlockList",
    "Difference",
    "GrowsBy",
    "How",
    "KeepDouble",
    "Miniature",
    "Recorder",
    "Resizing",
    "Trials",
    "Writers",
    "all_tensors",
    "bare_norms",
    "build_plan",
    "call_arguments",
    "check_not_empty",
    "check_plan_by_running",
    "check_silent_units",
    "check_takes",
    "computed_tensors",
    "count_draws",
    "default_init_at",
    "find_block_lists",
    "find_depth_size",
    "find_past_norms",
    "find_uneven",
    "find_width_dims",
    "find_writers",
    "first_differing_module",
    "has_length_one",
    "in_double",
    "in_float64",
    "initial_means",
    "initial_std",
    "is_large",
    "keeps_outputs",
    "kind_of_norm",
    "learn_roles",
    "mean_of",
    "means_of",
    "plan",
    "register_roles",
    "relative_difference",
    "rescale_spread",
    "roles_for_any_width",
    "roles_of",
    "run_in_float64",
    "run_on_batch",
    "runs_norms",
    "silence",
    "silence_dropout",
    "take_modes",
    "tensors_in",
    "warn_of_growing_outputs",
    "with_initial",
    "with_initial_of",
    "with_initial_of_wide",
    "with_keeps",
]
