"""What the machine gives and no model knows.

errors    the one error of the library
files     files and folders that are whole or absent
writing   the one door for writing and deleting: no link is followed below a folder that a person named
json_files  values of a bounded size from files that somebody else may have written
typed_records  such values into dataclasses, field by field
environment  numbers that a launcher sets
locks     one process at a time
run_locks one training in a folder, and which
machines  which machine this is, and which processes run
seeds     random streams by name
memory    how much memory is free
cores     how many cores there are
terminal  the one place that prints: results, and progress as a bar, lines or nothing
unpacking  gzip files, up to a size
tensor_files  tensors as safetensors, with checksums
tables    tables and sentences that fit the terminal, and tables for notebooks
torch_files  tensors that torch.save wrote, never code
extras    optional packages, and how to install them
callers   how whoever asked says a thing, in Python or to a command, and on which line
user_key  a key of this user's, to recognise what was written here
doors     what public functions are given, checked by their type hints
checkpoint_arguments  a checkpoint, a place and multipliers as a person names them, looked at before torch is imported
"""

from mupscale.system.callers import as_asked, asked_by_command, not_advising, recipe_entry, setting, warn, ways_out
from mupscale.system.checkpoint_arguments import check_has_config, is_taken, parse_multipliers
from mupscale.system.cores import usable_cores
from mupscale.system.doors import check_argument, checks_arguments
from mupscale.system.environment import number_in_environment
from mupscale.system.errors import Diverged, Interrupted, MupscaleError, PlanError, ReplicaWarning, UncheckedPlan
from mupscale.system.extras import EXTRAS, check_installed, require
from mupscale.system.files import (
    appearing,
    clear_leftovers,
    fingerprint_files,
    replace_text,
    replacing,
    write_json,
)
from mupscale.system.json_files import parse_json, read_json, read_regular
from mupscale.system.locks import exclusive_lock
from mupscale.system.machines import is_process_alive, machine_name
from mupscale.system.memory import available_memory, describe_shortage, is_out_of_memory, pausing_garbage_collection
from mupscale.system.run_locks import RunLock
from mupscale.system.seeds import derive, generator, seeded
from mupscale.system.tables import (
    html_table,
    name_of_group,
    pattern_of_name,
    shorten_middle,
    shorten_name,
    terminal_width,
    text_table,
    wrap_text,
)
from mupscale.system.tensor_files import check_tensors, checksum, write_tensors
from mupscale.system.terminal import (
    Display,
    open_display,
    print_at_once,
    printable,
    rough_time,
    set_loudness,
    show,
    show_foreign_errors,
    show_table,
)
from mupscale.system.torch_files import load_torch
from mupscale.system.typed_records import NOT_EMPTY, Finite, Must, NotNegative, Positive, parse_record, show_short
from mupscale.system.unpacking import open_gzip
from mupscale.system.user_key import is_signed, sign
from mupscale.system.version import VERSION
from mupscale.system.writing import (
    check_links,
    make_folder,
    move,
    open_file,
    remove,
    sync_folder,
    writes_into,
    writing_into,
)

__all__ = [
    "EXTRAS",
    "NOT_EMPTY",
    "VERSION",
    "Display",
    "Diverged",
    "Finite",
    "Interrupted",
    "MupscaleError",
    "Must",
    "NotNegative",
    "PlanError",
    "Positive",
    "ReplicaWarning",
    "RunLock",
    "UncheckedPlan",
    "appearing",
    "as_asked",
    "asked_by_command",
    "available_memory",
    "check_argument",
    "check_has_config",
    "check_installed",
    "check_links",
    "check_tensors",
    "checks_arguments",
    "checksum",
    "clear_leftovers",
    "derive",
    "describe_shortage",
    "exclusive_lock",
    "fingerprint_files",
    "generator",
    "html_table",
    "is_out_of_memory",
    "is_process_alive",
    "is_signed",
    "is_taken",
    "load_torch",
    "machine_name",
    "make_folder",
    "move",
    "name_of_group",
    "not_advising",
    "number_in_environment",
    "open_display",
    "open_file",
    "open_gzip",
    "parse_json",
    "parse_multipliers",
    "parse_record",
    "pattern_of_name",
    "pausing_garbage_collection",
    "print_at_once",
    "printable",
    "read_json",
    "read_regular",
    "recipe_entry",
    "remove",
    "replace_text",
    "replacing",
    "require",
    "rough_time",
    "seeded",
    "set_loudness",
    "setting",
    "shorten_middle",
    "shorten_name",
    "show",
    "show_foreign_errors",
    "show_short",
    "show_table",
    "sign",
    "sync_folder",
    "terminal_width",
    "text_table",
    "usable_cores",
    "warn",
    "ways_out",
    "wrap_text",
    "write_json",
    "write_tensors",
    "writes_into",
    "writing_into",
]
