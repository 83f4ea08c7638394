"""The architectures that are described, one file each: a new file here is all that a new architecture needs."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from mupscale.hf.architecture import KNOWN, Architecture, register
from mupscale.hf.wires import Layout
from mupscale.system import MupscaleError

__all__ = ["extend", "known"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)


def known(model_type: object) -> Architecture | None:
    """The description of a model_type; None where there is none."""
    return KNOWN.get(str(model_type))


def extend(model_type: str, tensors: Mapping[str, Layout]) -> Architecture:
    """Tell of tensors that a description lacks, as of a head of one's own; patterns given here go first."""
    found = known(model_type)
    if found is None:
        raise MupscaleError(f"'{model_type}' is not described yet: {', '.join(sorted(KNOWN))} are; register it whole")
    others = {pattern: layout for pattern, layout in found.tensors.items() if pattern not in tensors}
    return register(replace(found, tensors={**tensors, **others}))
