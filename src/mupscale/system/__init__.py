"""What the machine gives and no model knows.

errors    the one error of the library
files     files and folders that are whole or absent
locks     one process at a time
seeds     random streams by name
memory    how much memory is free
cores     how many cores there are
terminal  progress, as a bar, lines or nothing
torch_files  tensors that torch.save wrote, never code
extras    optional packages, and how to install them
"""

from mupscale.system.cores import usable_cores
from mupscale.system.errors import Interrupted, MupscaleError, PlanError, UncheckedPlan
from mupscale.system.extras import require
from mupscale.system.files import appearing, replace_text, replacing, write_json
from mupscale.system.locks import exclusive_lock
from mupscale.system.memory import available_memory
from mupscale.system.seeds import derive, generator, seeded
from mupscale.system.terminal import Display, open_display, print_at_once
from mupscale.system.torch_files import load_torch
from mupscale.system.version import VERSION

__all__ = [
    "VERSION",
    "Display",
    "Interrupted",
    "MupscaleError",
    "PlanError",
    "UncheckedPlan",
    "appearing",
    "available_memory",
    "derive",
    "exclusive_lock",
    "generator",
    "load_torch",
    "open_display",
    "print_at_once",
    "replace_text",
    "replacing",
    "require",
    "seeded",
    "usable_cores",
    "write_json",
]
