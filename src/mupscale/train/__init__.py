"""Training: a recipe, the run with growth in the middle of it, exact resume, one process or many.

recipe: what a run is, as plain values: classes by import path, growth, and all else.
training_run: a recipe run: where it begins and goes on, its steps, how they fail, how it ends.
run_models: the models it begins with, where they train, grown there, and looked at before the first step.
objective: what a step computes, and what is done where that is not finite. processes: DDP and FSDP.
run_folder: what a run leaves on disk. stored_recipes: whose code is loaded from there.
callbacks: lines of metrics, and who is told of a run. run_curves: pictures of runs.
dcp: checkpoints of torch.distributed, and one grown into another. lightning_callback: growth in Lightning's Trainer.
"""

from mupscale.models import count_flops
from mupscale.optim import Schedule
from mupscale.train.callbacks import Callback, JsonLines, TensorBoard, WeightsAndBiases, read_record
from mupscale.train.dcp import (
    DcpFolder,
    compare_dcp,
    describe_dcp_growth,
    load_dcp,
    load_dcp_model,
    save_dcp,
    upscale_dcp,
    what_grows,
)
from mupscale.train.lightning_callback import lightning_growth
from mupscale.train.objective import (
    MOST_IN_A_ROW,
    cast_input,
    compile_quietly,
    count_correct,
    cross_entropy,
    exact_mean,
    matmul_precision,
    scores_of,
)
from mupscale.train.processes import Processes, join_processes
from mupscale.train.recipe import (
    MAY_CHANGE,
    Checkpoints,
    Evaluation,
    Growth,
    Recipe,
    Seeds,
    Spec,
    TunedAt,
    check_growing_sizes,
    import_path,
    load_of_kind,
    sizes_like,
    with_absent_data_replaced,
)
from mupscale.train.run_curves import draw_curves
from mupscale.train.run_folder import (
    RunFolder,
    RunState,
    find_checkpoint,
    read_snapshot,
    save_model_at,
    save_snapshot,
    step_of,
)
from mupscale.train.run_models import (
    check_copies,
    check_data,
    copy_checkpoint,
    cost_per_example,
    data_fingerprint,
    describe_start,
    fingerprint_checkpoint,
    grow_model,
    load_trained,
    starting_point,
)
from mupscale.train.stored_recipes import StoredRecipe, seen_from, sign_run, stored_values, values_in
from mupscale.train.training_run import Result, StopRequest, TrainingRun, catch_stop_signals, run_recipe

__all__ = [
    "Callback",
    "Checkpoints",
    "Evaluation",
    "Growth",
    "JsonLines",
    "Recipe",
    "Result",
    "Schedule",
    "Seeds",
    "Spec",
    "StoredRecipe",
    "TensorBoard",
    "TunedAt",
    "WeightsAndBiases",
    "compare_dcp",
    "count_flops",
    "cross_entropy",
    "draw_curves",
    "find_checkpoint",
    "lightning_growth",
    "load_dcp",
    "load_dcp_model",
    "load_trained",
    "run_recipe",
    "save_dcp",
    "starting_point",
    "upscale_dcp",
]
