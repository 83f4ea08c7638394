"""Checkpoints on disk: read from one folder, written into another, never whole in memory.

source: a checkpoint's folder, where its tensors lie, GGUF files. stream: the wide files, laid out and filled piece by
piece. record: mupscale.json beside a wide checkpoint. output_folder: its place, and what lies beside the weights.
"""

from mupscale.hf.files.output_folder import (
    CARD_FILE,
    OPTIMIZER_FILE,
    bytes_bar,
    check_place,
    check_space,
    copy_companions,
    dtype_of_output,
    failure_of_writing,
    sizes_in_words,
    write_companions,
    write_model_card,
    write_size_card,
)
from mupscale.hf.files.record import RECORD_FILE, GrowthStep, Record, count_from_first, plan_growth, then_parts
from mupscale.hf.files.source import Source, StoredTensor, is_gguf, open_source, read_config, read_gguf, read_into
from mupscale.hf.files.stream import (
    WeightShard,
    arrange_shards,
    plan_name,
    plan_names,
    shorten_number,
    size_in_words,
    write_shards,
)

__all__ = [
    "CARD_FILE",
    "OPTIMIZER_FILE",
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
