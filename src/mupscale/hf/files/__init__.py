"""Checkpoints on disk: read from one folder, written into another, never whole in memory.

safetensors_format: where tensors lie in a file. source: a checkpoint's folder and what is in it. gguf_files: a GGUF
file as such a folder. shards: which wide tensor goes into which file. stream: the files filled piece by piece. record:
mupscale.json beside a wide checkpoint. output_folder: its place, and what lies beside the weights. model_card:
README.md there. initial_values: what new units of a model that has grown before are drawn from.
"""

from mupscale.hf.files.gguf_files import read_gguf
from mupscale.hf.files.initial_values import count_from_first, plan_growth
from mupscale.hf.files.model_card import CARD_FILE, sizes_in_words, write_model_card, write_size_card
from mupscale.hf.files.output_folder import (
    bytes_bar,
    check_place,
    check_space,
    copy_companions,
    dtype_of_output,
    failure_of_writing,
    write_companions,
)
from mupscale.hf.files.record import RECORD_FILE, GrowthStep, Record, then_parts
from mupscale.hf.files.safetensors_format import StoredTensor, read_into
from mupscale.hf.files.shards import (
    WeightShard,
    arrange_shards,
    plan_name,
    plan_names,
    shorten_number,
    size_in_words,
)
from mupscale.hf.files.source import Source, is_gguf, open_source, read_config
from mupscale.hf.files.stream import write_shards

__all__ = [
    "CARD_FILE",
    "RECORD_FILE",
    "GrowthStep",
    "Record",
    "Source",
    "StoredTensor",
    "WeightShard",
    "arrange_shards",
    "bytes_bar",
    "check_place",
    "check_space",
    "copy_companions",
    "count_from_first",
    "dtype_of_output",
    "failure_of_writing",
    "is_gguf",
    "open_source",
    "plan_growth",
    "plan_name",
    "plan_names",
    "read_config",
    "read_gguf",
    "read_into",
    "shorten_number",
    "size_in_words",
    "sizes_in_words",
    "then_parts",
    "write_companions",
    "write_model_card",
    "write_shards",
    "write_size_card",
]
