"""Training: a recipe, the run with growth in the middle of it, exact resume, one process or many.

recipe (with class_paths, recipe_families, growth_events): what a run is, as plain values.
recipe_runner: runs a recipe. training_run: its steps, how they fail and how a run ends.
run_position, start, resuming, placed_members: where they begin.
nonfinite: where they go wrong. model_checks: what they need, and what variations of a recipe share.
processes: DDP and FSDP. run_folder, snapshot: what a run leaves on disk. stored_recipes: whose code is loaded from
there, and paths in a folder that may be moved.
loss_functions, numeric_precision, metrics, evaluation, progress: parts of a step.
run_curves: pictures of runs. callbacks: who else is told of a run. dcp_folders: checkpoints of
torch.distributed. dcp_growth: one grown into another. lightning_callback: growth in Lightning's Trainer.
"""

from mupscale.train.callbacks import Callback, JsonLines, TensorBoard, TensorBoardWriter, WeightsAndBiases
from mupscale.train.class_paths import Spec, import_path
from mupscale.train.dcp_folders import DcpFolder, load_dcp, load_dcp_model, save_dcp
from mupscale.train.dcp_growth import (
    DcpComparison,
    DcpUpscaled,
    compare_dcp,
    describe_dcp_growth,
    upscale_dcp,
    what_grows,
)
from mupscale.train.growing import check_copies, grow_model
from mupscale.train.growth_events import Filling, Growth, NoiseLevel, build_noise, sizes_like
from mupscale.train.lightning_callback import lightning_growth
from mupscale.train.loss_functions import count_correct, cross_entropy
from mupscale.train.model_checks import LoadedRecipe, check_data, cost_per_example, data_fingerprint
from mupscale.train.nonfinite import MOST_IN_A_ROW
from mupscale.train.numeric_precision import cast_input, compile_quietly, matmul_precision
from mupscale.train.placed_members import init_member
from mupscale.train.processes import Processes, join_processes
from mupscale.train.progress import Silence, make_progress
from mupscale.train.recipe import (
    MAY_CHANGE,
    Checkpoints,
    Evaluation,
    Recipe,
    Schedule,
    Seeds,
    TunedAt,
    check_growing_sizes,
)
from mupscale.train.recipe_runner import run_recipe
from mupscale.train.run_curves import draw_curves
from mupscale.train.run_folder import RunFolder, find_checkpoint, step_of
from mupscale.train.snapshot import RunState, read_snapshot, save_model_at
from mupscale.train.start import (
    StartingModel,
    copy_checkpoint,
    describe_start,
    fingerprint_checkpoint,
    starting_point,
)
from mupscale.train.stored_recipes import StoredRecipe, packages_to_trust, seen_from, sign_run, stored_values, values_in
from mupscale.train.training_run import Result, StopRequest, TrainingRun, catch_stop_signals

__all__ = [
    "MAY_CHANGE",
    "MOST_IN_A_ROW",
    "Callback",
    "Checkpoints",
    "DcpComparison",
    "DcpFolder",
    "DcpUpscaled",
    "Evaluation",
    "Filling",
    "Growth",
    "JsonLines",
    "LoadedRecipe",
    "NoiseLevel",
    "Processes",
    "Recipe",
    "Result",
    "RunFolder",
    "RunState",
    "Schedule",
    "Seeds",
    "Silence",
    "Spec",
    "StartingModel",
    "StopRequest",
    "StoredRecipe",
    "TensorBoard",
    "TensorBoardWriter",
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
    "cross_entropy",
    "data_fingerprint",
    "describe_dcp_growth",
    "describe_start",
    "draw_curves",
    "find_checkpoint",
    "fingerprint_checkpoint",
    "grow_model",
    "import_path",
    "init_member",
    "join_processes",
    "lightning_growth",
    "load_dcp",
    "load_dcp_model",
    "make_progress",
    "matmul_precision",
    "packages_to_trust",
    "read_snapshot",
    "run_recipe",
    "save_dcp",
    "save_model_at",
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
