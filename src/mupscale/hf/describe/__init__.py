"""What is known of a checkpoint before any weight is read: its config, and the plan of its tensors.

multipliers: by how much each part grows. sizes: what the parts become. asked_growth: what is meant by these.
config_fields: what grows in a config, configs of several parts included. building: the model that a config.json names,
built by transformers. trusted_code: code of a checkpoint's own, if it may run. batches: what a model can be run on.
miniatures: small models of the config's kind, and the roles that a run of them shows. initial: what fresh units start
with, by the law that they show. given_roles: what a user says of tensors. config_family: the plan of a checkpoint by
all of these. file_names: the same by the names in files. completeness: whether config.json and the tensors belong
together. depths: models with more layers; depth_checks: which cannot have them. experts: mixtures of experts. memory:
whether there is enough.
"""

from mupscale.hf.describe import memory
from mupscale.hf.describe.asked_growth import AskedGrowth, Size, check_drawn, settle_growth
from mupscale.hf.describe.batches import Batch, make_batches
from mupscale.hf.describe.building import (
    Config,
    build_model,
    in_one_line,
    model_class,
    quiet_transformers,
    require_transformers,
    sketch_model,
    transformers_config,
)
from mupscale.hf.describe.completeness import check_nothing_missing, check_sizes
from mupscale.hf.describe.config_family import ConfigFamily, family_of_config
from mupscale.hf.describe.depth_checks import check_depth
from mupscale.hf.describe.depths import (
    deep_config,
    depth_operator,
    layer_origins,
    layers_of,
    plan_layers,
    with_layers,
    writers_of,
)
from mupscale.hf.describe.experts import (
    ExpertCounts,
    experts_config,
    experts_of,
    plan_experts_files,
    plan_mixture,
    settle_experts,
)
from mupscale.hf.describe.file_names import names_in_model
from mupscale.hf.describe.given_roles import GIVEN, register
from mupscale.hf.describe.multipliers import Ratios, Times, grown, times_from_json
from mupscale.hf.describe.sizes import PARTS
from mupscale.hf.describe.trusted_code import runs_trusted_code

__all__ = [
    "GIVEN",
    "PARTS",
    "AskedGrowth",
    "Batch",
    "Config",
    "ConfigFamily",
    "ExpertCounts",
    "Ratios",
    "Size",
    "Times",
    "build_model",
    "check_depth",
    "check_drawn",
    "check_nothing_missing",
    "check_sizes",
    "deep_config",
    "depth_operator",
    "experts_config",
    "experts_of",
    "family_of_config",
    "grown",
    "in_one_line",
    "layer_origins",
    "layers_of",
    "make_batches",
    "memory",
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
    "times_from_json",
    "transformers_config",
    "with_layers",
    "writers_of",
]
