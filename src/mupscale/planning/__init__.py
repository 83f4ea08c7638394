"""How a plan is found: which axes of each parameter grow, and what they are to it.

making_plans       the plan between two models: from modules or by running them
initial_values     the law by which parameters start, of all entries or of parts, as freshly built models show it
from_modules       two models side by side: what their types and names say, of heads, bare parameters and norms too
tracing            a model run on a batch: in float64, as a list of operations
following          one pass over both runs: every wide tensor has to be copies of the narrow one; better guesses
comparing          two models with generic weights: whether they compute the same
trials             what a plan is tried on: the batch, and a stronger one where that leaves something unseen
silent_units       the wide model with the old units alone: where it differs, and what that shows for fresh units
miniatures         small models in place of large ones, and models at sizes between two others
"""

from mupscale.planning.comparing import find_parting, is_large, relative_difference
from mupscale.planning.from_modules import How, bare_norms, build_plan, find_uneven, joins_what_stays, register_roles
from mupscale.planning.initial_values import (
    CentralDraws,
    count_draws,
    initial_std,
    law_at_width,
    lie_about,
    measure_laws,
    with_laws,
)
from mupscale.planning.making_plans import (
    check_plan_by_running,
    learn_roles,
    plan,
    roles_for_any_width,
    warn_of_growing_outputs,
    warn_of_staying_inputs,
)
from mupscale.planning.miniatures import Miniature, Resizing, roles_of
from mupscale.planning.silent_units import (
    check_silent_units,
    find_past_norms,
    keeps_outputs,
    with_keeps,
)
from mupscale.planning.tracing import (
    Call,
    KeepDouble,
    Operation,
    RecordedRun,
    Recorder,
    Ref,
    all_tensors,
    call_arguments,
    check_takes,
    computed_tensors,
    has_length_one,
    in_double,
    in_float64,
    record_run,
    run_in_float64,
    run_on_batch,
    runs_norms,
    silence_dropout,
    take_modes,
    tensors_in,
    use_plain_kernels,
)
from mupscale.planning.trials import Trials, check_not_empty
