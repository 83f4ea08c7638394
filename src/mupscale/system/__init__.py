"""What the machine gives and no model knows. Other packages may use all that is imported here.

errors    the errors and warnings of the library, how whoever asked says a thing, and optional packages that are missing
files     files and folders that are whole or absent: the one door for writing and deleting, locks, and what is read
machine   cores, memory, and numbers that a launcher sets
seeds     random streams by name
terminal  the one place that prints: results, tables and sentences that fit, progress as a bar, lines or nothing
tensor_files  tensors as safetensors, with checksums; tensors that torch.save wrote, never code
words     numbers as people read them
user_key  a key of this user's, to recognise what was written here
typed_values  arguments of public functions, and such values that become dataclasses, by their type hints
checkpoint_arguments  a checkpoint, a place and multipliers as a person names them, looked at before torch is imported
"""

from mupscale.system import words
from mupscale.system.checkpoint_arguments import (
    check_has_config,
    is_dcp_folder,
    is_taken,
    parse_multipliers,
    place_for,
)
from mupscale.system.errors import (
    EXTRAS,
    Diverged,
    Interrupted,
    MupscaleError,
    PlanError,
    ReplicaWarning,
    UncheckedPlan,
    as_asked,
    asked_by_command,
    check_installed,
    did_you_mean,
    not_advising,
    recipe_entry,
    require,
    setting,
    warn,
    ways_out,
)
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
    most_unpacked,
    move,
    open_below,
    open_file,
    open_gzip,
    parse_json,
    read_json,
    read_regular,
    remove,
    replace_folder,
    replace_text,
    replacing,
    sha256_of,
    too_much_unpacked,
    write_json,
    writing_into,
)
from mupscale.system.machine import (
    available_memory,
    describe_shortage,
    is_out_of_memory,
    number_in_environment,
    pausing_garbage_collection,
    usable_cores,
)
from mupscale.system.seeds import derive, generator, seeded
from mupscale.system.tensor_files import (
    DTYPES,
    check_tensors,
    load_torch,
    make_header,
    open_tensors,
    raw_bytes,
    write_tensors,
)
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
