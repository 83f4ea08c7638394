"""What is known of an architecture before any weight is read: its config, its wires, the plan of its tensors.

multipliers: by how much each part grows. sizes: what the parts become. asked_growth: what is meant by these. initial:
what fresh units start with. wires: the axes that tensors share. architecture: a description made of these.
architectures/: one file for each architecture that is described. building: the model that a config.json names, built
by transformers. trusted_code: code of a checkpoint's own, if it may run. batches: what a model can be run on.
completeness: whether config.json and the tensors belong together. depths: models with more layers. memory: whether
there is enough. planned: what others ask of an architecture, answered by described where it has a description and by
from_modules where it has none. config_fields: what grows in a config that is not described, configs of several parts
included. config_family: roles that miniatures of a config show. registry: the descriptions, and which of the two
answers.
"""

from mupscale.hf.describe import architectures, memory
from mupscale.hf.describe.architecture import CAUSAL, Architecture, Config, Tied
from mupscale.hf.describe.asked_growth import AskedGrowth, Size, check_fresh_plan, settle_growth
from mupscale.hf.describe.batches import Batch, make_batches
from mupscale.hf.describe.building import (
    build_model,
    in_one_line,
    model_class,
    quiet_transformers,
    require_transformers,
    sketch_model,
    transformers_config,
)
from mupscale.hf.describe.completeness import check_layers, check_nothing_missing, check_sizes
from mupscale.hf.describe.depth_checks import check_depth, check_wider_and_deeper
from mupscale.hf.describe.depths import (
    POST_NORM,
    PRE_NORM_IF,
    WRITERS,
    HowDeep,
    LayerOrigin,
    LayerTensor,
    deep_config,
    depth_operator,
    layer_origins,
    layers_of,
    plan_layers,
    writers_of,
)
from mupscale.hf.describe.multipliers import Ratios, Times, grown, times_from_json
from mupscale.hf.describe.planned import PlannedArchitecture
from mupscale.hf.describe.registry import DESCRIPTIONS, architecture_of, extend, register
from mupscale.hf.describe.sizes import PARTS
from mupscale.hf.describe.trusted_code import runs_trusted_code
from mupscale.hf.describe.wires import Layout, Wire, column, conv1d, linear, patches, readout, same, table, vector

__all__ = [
    "CAUSAL",
    "DESCRIPTIONS",
    "PARTS",
    "POST_NORM",
    "PRE_NORM_IF",
    "WRITERS",
    "Architecture",
    "AskedGrowth",
    "Batch",
    "Config",
    "HowDeep",
    "LayerOrigin",
    "LayerTensor",
    "Layout",
    "PlannedArchitecture",
    "Ratios",
    "Size",
    "Tied",
    "Times",
    "Wire",
    "architecture_of",
    "architectures",
    "build_model",
    "check_depth",
    "check_fresh_plan",
    "check_layers",
    "check_nothing_missing",
    "check_sizes",
    "check_wider_and_deeper",
    "column",
    "conv1d",
    "deep_config",
    "depth_operator",
    "extend",
    "grown",
    "in_one_line",
    "layer_origins",
    "layers_of",
    "linear",
    "make_batches",
    "memory",
    "model_class",
    "patches",
    "plan_layers",
    "quiet_transformers",
    "readout",
    "register",
    "require_transformers",
    "runs_trusted_code",
    "same",
    "settle_growth",
    "sketch_model",
    "table",
    "times_from_json",
    "transformers_config",
    "vector",
    "writers_of",
]
