"""Whether a config.json and the tensors beside it belong together, as far as that shows before anything is built."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from mupscale.core import Shape
from mupscale.hf.describe.building import sketch_model
from mupscale.hf.describe.config_fields import FIELDS, HEAD_DIM
from mupscale.hf.describe.file_names import names_in_model
from mupscale.hf.describe.miniatures import LAYERS
from mupscale.system import MupscaleError, show_short

_COUNTED = (
    *(name for names in FIELDS.values() for name in names),
    *HEAD_DIM,
    *("vocab_size", "type_vocab_size", "num_experts", "num_local_experts", "n_routed_experts"),
    *("num_labels", "num_channels"),
)
_LONG = ("max_position_embeddings", "n_positions", "n_ctx", "image_size", "patch_size")
_LONGEST = 1 << 24
_DEEPEST = 4


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, Shape], folder: object, depth: int = 0) -> None:
    """Refuse sizes that the tensors of the files cannot have; those of a part (text_config) are looked at, too."""
    tensors, numbers = len(shapes), sum(map(math.prod, shapes.values()))
    limits = {
        **dict.fromkeys(_COUNTED, (numbers, f"{numbers:,} numbers in all")),
        **dict.fromkeys(LAYERS, (tensors, f"{tensors:,} tensors in all")),
        **dict.fromkeys(_LONG, (max(_LONGEST, numbers), f"at most {max(_LONGEST, numbers):,} would be taken")),
    }
    for name, value in config.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            check_sizes(value, shapes, folder, depth + 1)
        elif name in limits and isinstance(value, int) and value > limits[name][0]:
            raise MupscaleError(
                f"config.json in {folder} says {name} is {show_short(value)}, and the files hold {limits[name][1]}: "
                f"they do not belong together"
            )


def check_nothing_missing(config: Mapping[str, Any], names: Collection[str], folder: object) -> None:
    """Refuse files that lack a parameter of the model that transformers builds from the config."""
    model = sketch_model(config)
    held = names_in_model(model, names)
    if held is None:  # by this version of transformers
        return
    given = {name for tensor in held.values() for name in tensor.names}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)  # tied ones are in the files once
    missing = [
        group[0]
        for group in groups.values()
        if not {*group} & given and not any(pattern.search(group[0]) for pattern in ignored)
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MupscaleError(f"{folder} lacks '{min(missing)}'{more}: the files and config.json do not belong together")
