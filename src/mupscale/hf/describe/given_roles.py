"""Roles that a user gives: of tensors that files hold beside their model, or of a model that does not run."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from mupscale.core import Axis, Constants, Entry, Role, Shape
from mupscale.system import MupscaleError, checks_arguments

GIVEN: dict[str, dict[str, Role]] = {}
"""By model_type, and by name pattern."""


@checks_arguments
def register(model_type: str, roles: Mapping[str, Role]) -> None:
    """Say what tensors of an architecture are, by name pattern, where no run of it can show that.

    Those are tensors that the files hold and the model of transformers lacks, and all tensors of a model that does not
    run on random inputs. Patterns given here go before those that were given earlier.

    >>> from mupscale import Role
    >>> register("llama", {"probe.weight": Role(in_=1)})  # it reads hidden units
    >>> GIVEN.pop("llama")["probe.weight"].in_
    (1,)
    """
    GIVEN[model_type] = {**roles, **{p: r for p, r in GIVEN.get(model_type, {}).items() if p not in roles}}


def entry_given(model_type: str, name: str, shape: Shape, grown: Mapping[int, int]) -> Entry | None:
    """The entry of a tensor in a file by the role that was given for it; None where none was.

    grown: what sizes become.
    """
    role = next((role for p, role in GIVEN.get(model_type, {}).items() if fnmatchcase(name, p)), None)
    if role is None:
        return None
    out, in_ = role.dims(len(shape))
    if unknown := [shape[d] for d in (*out, *in_) if shape[d] not in grown]:
        raise MupscaleError(
            f"'{name}' has shape {shape}, and {unknown[0]} is no size of the model that grows: correct the role that "
            f"was given for it (mupscale.hf.register)"
        )
    blocks = {d: role.out_block if d in out else role.in_block for d in (*out, *in_)}
    axes = {
        d: Axis(grown[shape[d]] // shape[d], block, side="out" if d in out else "in")
        for d, block in sorted(blocks.items())
    }
    wide = tuple(grown[n] if d in axes else n for d, n in enumerate(shape))
    return Entry(shape, wide, axes, Constants(offset=role.offset), (name,))
