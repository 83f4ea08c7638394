"""What the machine gives and no model knows.

errors    the one error of the library
files     files and folders that are whole or absent: the one door for writing and deleting, and locks
json_files  values of a bounded size from files that somebody else may have written, packed or not
machine   cores, memory, and numbers that a launcher sets
seeds     random streams by name
terminal  the one place that prints: results, tables and sentences that fit, progress as a bar, lines or nothing
tensor_files  tensors as safetensors, with checksums; tensors that torch.save wrote, never code
extras    optional packages, and how to install them
callers   how whoever asked says a thing, in Python or to a command, and on which line
words     numbers as people read them
user_key  a key of this user's, to recognise what was written here
typed_values  arguments of public functions, and such values that become dataclasses, by their type hints
checkpoint_arguments  a checkpoint, a place and multipliers as a person names them, looked at before torch is imported
"""

from mupscale.system import words
from mupscale.system.callers import as_asked, asked_by_command, not_advising, recipe_entry, setting, warn, ways_out
from mupscale.system.checkpoint_arguments import check_has_config, is_dcp_folder, is_taken, parse_multipliers
from mupscale.system.errors import Diverged, Interrupted, MupscaleError, PlanError, ReplicaWarning, UncheckedPlan
from mupscale.system.extras import EXTRAS, check_installed, require
from mupscale.system.files import (
    RunLock,
    appearing,
    check_links,
    clear_leftovers,
    exclusive_lock,
    fingerprint_files,
    is_process_alive,
    machine_name,
    make_folder,
    move,
    open_file,
    remove,
    replace_text,
    replacing,
    write_json,
    writes_into,
    writing_into,
)
from mupscale.system.json_files import open_gzip, parse_json, read_json, read_regular
from mupscale.system.machine import (
    available_memory,
    describe_shortage,
    is_out_of_memory,
    number_in_environment,
    pausing_garbage_collection,
    usable_cores,
)
from mupscale.system.seeds import derive, generator, seeded
from mupscale.system.tensor_files import check_tensors, load_torch, write_tensors
from mupscale.system.terminal import (
    Display,
    at_loudness,
    html_table,
    name_of_group,
    pattern_of_name,
    print_at_once,
    printable,
    rough_time,
    show,
    show_foreign_errors,
    terminal_width,
    text_table,
    wrap_text,
)
from mupscale.system.typed_values import (
    NOT_EMPTY,
    Finite,
    Must,
    NotNegative,
    Positive,
    Typed,
    check_argument,
    checks_arguments,
    parse_given,
    parse_record,
    show_short,
    told_fields,
)
from mupscale.system.user_key import is_signed, sign
from mupscale.system.version import VERSION

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
    "Typed",
    "UncheckedPlan",
    "appearing",
    "as_asked",
    "asked_by_command",
    "at_loudness",
    "available_memory",
    "check_argument",
    "check_has_config",
    "check_installed",
    "check_links",
    "check_tensors",
    "checks_arguments",
    "clear_leftovers",
    "derive",
    "describe_shortage",
    "exclusive_lock",
    "fingerprint_files",
    "generator",
    "html_table",
    "is_dcp_folder",
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
    "open_file",
    "open_gzip",
    "parse_given",
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
    "setting",
    "show",
    "show_foreign_errors",
    "show_short",
    "sign",
    "terminal_width",
    "text_table",
    "told_fields",
    "usable_cores",
    "warn",
    "ways_out",
    "words",
    "wrap_text",
    "write_json",
    "write_tensors",
    "writes_into",
    "writing_into",
]
