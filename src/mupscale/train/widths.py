"""Widths as a recipe gives them: one number, or several arguments of the model by name."""

from __future__ import annotations

from mupscale.system import MupscaleError

Width = int | dict[str, int]


def check_width_multiple(narrow: Width, wide: Width, what: str) -> None:
    """Every width must be a whole multiple of the one before; names must be the same."""
    ours, theirs = (w if isinstance(w, dict) else {"width": w} for w in (narrow, wide))
    if ours.keys() != theirs.keys():
        raise MupscaleError(f"{what}: width {wide} does not name the same arguments as {narrow}")
    for name, size in ours.items():
        if theirs[name] < size or theirs[name] % size:
            below, above = theirs[name] // size * size, (theirs[name] // size + 1) * size
            near = f"{above}" if below == 0 else f"{below} or {above}"
            raise MupscaleError(f"{what}: {name} {theirs[name]} is not a multiple of {size}; take {near}")


def format_width(width: Width) -> str:
    """A width in a sentence: 64, or head_dim 16, heads 4."""
    return ", ".join(f"{n} {w}" for n, w in width.items()) if isinstance(width, dict) else str(width)
