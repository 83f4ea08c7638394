"""Training: a recipe, the run with growth in the middle of it, exact resume, one process or many.

recipe (with class_paths, growth_events): what a run is, as plain values.
training_run: a recipe run: where it begins and goes on, its steps, how they fail, how it ends.
run_models: the models it begins with, where they train, and grown there.
loss_functions, objective, metrics, nonfinite: parts of a step. model_checks: what is looked at before the first one.
processes: DDP and FSDP. run_folder, snapshot: what a run leaves on disk. stored_recipes: whose code is loaded from
there, and paths in a folder that may be moved.
run_curves: pictures of runs. callbacks: who is told of a run. dcp_folders: checkpoints of torch.distributed.
dcp_growth: one grown into another. lightning_callback: growth in Lightning's Trainer.
"""

from mupscale.models import count_flops
from mupscale.optim import Schedule
from mupscale.train.callbacks import Callback, JsonLines, TensorBoard, WeightsAndBiases
from mupscale.train.class_paths import Spec, import_path, load_of_kind
from mupscale.train.dcp_folders import DcpFolder, load_dcp, load_dcp_model, save_dcp
from mupscale.train.dcp_growth import compare_dcp, describe_dcp_growth, upscale_dcp, what_grows
from mupscale.train.growth_events import Filling, Growth, NoiseLevel, build_noise, sizes_like
from mupscale.train.lightning_callback import lightning_growth
from mupscale.train.loss_functions import count_correct, cross_entropy
from mupscale.train.metrics import exact_mean
from mupscale.train.model_checks import check_data, cost_per_example, data_fingerprint
from mupscale.train.nonfinite import MOST_IN_A_ROW
from mupscale.train.objective import cast_input, compile_quietly, matmul_precision, scores_of
from mupscale.train.processes import Processes, join_processes
from mupscale.train.recipe import (
    MAY_CHANGE,
    Checkpoints,
    Evaluation,
    Recipe,
    Seeds,
    TunedAt,
    check_growing_sizes,
)
from mupscale.train.run_curves import draw_curves
from mupscale.train.run_folder import RunFolder, find_checkpoint, step_of
from mupscale.train.run_models import (
    check_copies,
    copy_checkpoint,
    describe_start,
    fingerprint_checkpoint,
    grow_model,
    init_member,
    load_trained,
    starting_point,
)
from mupscale.train.snapshot import RunState, read_snapshot, save_model_at, save_snapshot
from mupscale.train.stored_recipes import StoredRecipe, packages_to_trust, seen_from, sign_run, stored_values, values_in
from mupscale.train.training_run import Result, StopRequest, TrainingRun, catch_stop_signals, run_recipe

__all__ = [
    "MAY_CHANGE",
    "MOST_IN_A_ROW",
    "Callback",
    "Checkpoints",
    "DcpFolder",
    "Evaluation",
    "Filling",
    "Growth",
    "JsonLines",
    "NoiseLevel",
    "Processes",
    "Recipe",
    "Result",
    "RunFolder",
    "RunState",
    "Schedule",
    "Seeds",
    "Spec",
    "StopRequest",
    "StoredRecipe",
    "TensorBoard",
    "TrainingRun",
    "TunedAt",
    "WeightsAndBiases",
    "build_noise",
    "cast_input",
    "catch_stop_signals",
    "check_copies",
    "check_data",
    "check_growing_sizes",
    "compare_dcp",
    "compile_quietly",
    "copy_checkpoint",
    "cost_per_example",
    "count_correct",
    "count_flops",
    "cross_entropy",
    "data_fingerprint",
    "describe_dcp_growth",
    "describe_start",
    "draw_curves",
    "exact_mean",
    "find_checkpoint",
    "fingerprint_checkpoint",
    "grow_model",
    "import_path",
    "init_member",
    "join_processes",
    "lightning_growth",
    "load_dcp",
    "load_dcp_model",
    "load_of_kind",
    "load_trained",
    "matmul_precision",
    "packages_to_trust",
    "read_snapshot",
    "run_recipe",
    "save_dcp",
    "save_model_at",
    "save_snapshot",
    "scores_of",
    "seen_from",
    "sign_run",
    "sizes_like",
    "starting_point",
    "step_of",
    "stored_values",
    "upscale_dcp",
    "values_in",
    "what_grows",
]
