"""What the machine gives and no model knows.

errors    the one error of the library
files     files and folders that are whole or absent
locks     one process at a time
seeds     random streams by name
memory    how much memory is free
cores     how many cores there are
terminal  progress, as a bar, lines or nothing
tables    tables and sentences that fit the terminal, and tables for notebooks
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
from mupscale.system.tables import (
    html_table,
    name_of_group,
    pattern_of_name,
    shorten_middle,
    terminal_width,
    text_table,
    wrap_text,
)
from mupscale.system.terminal import Display, open_display, print_at_once, set_loudness
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
    "html_table",
    "load_torch",
    "name_of_group",
    "open_display",
    "pattern_of_name",
    "print_at_once",
    "replace_text",
    "replacing",
    "require",
    "seeded",
    "set_loudness",
    "shorten_middle",
    "terminal_width",
    "text_table",
    "usable_cores",
    "wrap_text",
    "write_json",
]
