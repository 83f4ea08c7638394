"""What the machine gives and no model knows: errors, files that are whole or absent, random streams by name."""

from mupscale.system.errors import Interrupted, MupscaleError
from mupscale.system.files import appearing, replace_text, replacing
from mupscale.system.seeds import derive, generator

__all__ = [
    "Interrupted",
    "MupscaleError",
    "appearing",
    "derive",
    "generator",
    "replace_text",
    "replacing",
]
