"""What the machine gives and no model knows.

errors    the one error of the library
files     files and folders that are whole or absent
locks     one process at a time
run_locks one training in a folder, and which
machines  which machine this is, and which processes run
seeds     random streams by name
memory    how much memory is free
cores     how many cores there are
terminal  progress, as a bar, lines or nothing
tensor_files  tensors as safetensors, with checksums
torch_files  tensors that torch.save wrote, never code
extras    optional packages, and how to install them
"""

from mupscale.system.cores import usable_cores
from mupscale.system.errors import Interrupted, MupscaleError, PlanError, UncheckedPlan
from mupscale.system.extras import require
from mupscale.system.files import appearing, clear_leftovers, replace_text, replacing, sync_folder
from mupscale.system.locks import exclusive_lock
from mupscale.system.machines import is_process_alive, machine_name
from mupscale.system.memory import available_memory
from mupscale.system.run_locks import RunLock
from mupscale.system.seeds import derive, generator, seeded
from mupscale.system.tensor_files import check_tensors, checksum, write_tensors
from mupscale.system.terminal import Display, open_display
from mupscale.system.torch_files import load_torch
from mupscale.system.version import VERSION

__all__ = [
    "VERSION",
    "Display",
    "Interrupted",
    "MupscaleError",
    "PlanError",
    "RunLock",
    "UncheckedPlan",
    "appearing",
    "available_memory",
    "check_tensors",
    "checksum",
    "clear_leftovers",
    "derive",
    "exclusive_lock",
    "generator",
    "is_process_alive",
    "load_torch",
    "machine_name",
    "open_display",
    "replace_text",
    "replacing",
    "require",
    "seeded",
    "sync_folder",
    "usable_cores",
    "write_tensors",
]
