"""What fresh units of a described model are drawn from, and which of its tensors are norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mupscale.core import Entry, Plan
from mupscale.hf.describe.wires import Layout
from mupscale.planning import with_initial
from mupscale.system import MupscaleError

_LIKE_A_NORM = re.compile(r"norm|(^|[._])ln(_|[0-9.])", re.I)


def plan_fresh(
    entries: Mapping[str, Entry],
    layouts: Mapping[str, Layout],
    stds: Mapping[str, float] | None,
    start: Mapping[str, float] | None = None,
) -> Plan:
    """The plan for a growth by fresh units: initial values at the wide width, and the norms that grow.

    stds: of an initialisation at the narrow width; None where it is not known. Gains start at 1, all else at 0
    or where `start` says.

    >>> from mupscale.hf.describe.wires import Wire, vector
    >>> layout = vector("hidden").in_norm("rms")
    >>> plan = plan_fresh({"norm": layout.entry("norm", (4,), {"hidden": Wire(4, 2)})}, {"norm": layout}, {"norm": 0.0})
    >>> plan.means, plan.norms
    ({'norm': (1.0,)}, {'norm': 'rms'})
    """
    growing = [name for name, entry in entries.items() if any(axis.times != 1 for axis in entry.axes.values())]
    for name in growing:
        if len(entries[name].narrow) == 1 and not layouts[name].norm and _LIKE_A_NORM.search(name):
            raise MupscaleError(
                f"'{name}' seems to belong to a norm, but its description does not say what its new units start with. "
                "Describe it with vector('hidden').in_norm('rms'), 'layer' or 'bias'"
            )
    norms = {name: layouts[name].norm for name in growing if layouts[name].norm not in ("", "head")}
    plan = Plan(entries, mup=True, norms=norms)
    if stds is None:
        return plan
    gains = {name for name in entries if layouts[name].norm in ("rms", "layer", "head")}
    means = {name: (1.0 - float(entry.offset) if name in gains else 0.0,) for name, entry in entries.items()}
    means |= {name: (value,) for name, value in (start or {}).items()}
    return replace(with_initial(plan, entries, stds, means), norms=norms)
