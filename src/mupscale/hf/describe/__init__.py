"""What is known of a checkpoint before any weight is read: its config, and the plan of its tensors.

multipliers: by how much each part grows, and to which sizes. building: the model that a config.json names, built by
transformers, and what it can be run on. config_fields: what grows in a config, and what is asked for. miniatures: small
models of the config's kind, the roles that a run of them shows, and what fresh units start with. config_family: the
plan of a checkpoint by all of these, and by the names in files. depths: models with more layers, or with experts.
"""

from mupscale.hf.describe.building import (
    Batch,
    Config,
    build_model,
    in_one_line,
    make_batches,
    memory_shortage,
    model_class,
    quiet_transformers,
    require_transformers,
    runs_trusted_code,
    sketch_model,
    transformers_config,
)
from mupscale.hf.describe.config_family import (
    GIVEN,
    ConfigFamily,
    check_nothing_missing,
    check_sizes,
    names_in_model,
    register,
)
from mupscale.hf.describe.config_fields import AskedGrowth, Size, settle_growth
from mupscale.hf.describe.depths import (
    ExpertCounts,
    check_depth,
    deep_config,
    depth_operator,
    experts_config,
    experts_of,
    layer_origins,
    layers_of,
    plan_experts_files,
    plan_layers,
    plan_mixture,
    settle_experts,
    with_layers,
    writers_of,
)
from mupscale.hf.describe.multipliers import PARTS, Times, grown

__all__ = [
    "GIVEN",
    "PARTS",
    "AskedGrowth",
    "Batch",
    "Config",
    "ConfigFamily",
    "ExpertCounts",
    "Size",
    "Times",
    "build_model",
    "check_depth",
    "check_nothing_missing",
    "check_sizes",
    "deep_config",
    "depth_operator",
    "experts_config",
    "experts_of",
    "grown",
    "in_one_line",
    "layer_origins",
    "layers_of",
    "make_batches",
    "memory_shortage",
    "model_class",
    "names_in_model",
    "plan_experts_files",
    "plan_layers",
    "plan_mixture",
    "quiet_transformers",
    "register",
    "require_transformers",
    "runs_trusted_code",
    "settle_experts",
    "settle_growth",
    "sketch_model",
    "transformers_config",
    "with_layers",
    "writers_of",
]
