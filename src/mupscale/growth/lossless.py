"""Growth that keeps the function: which new weights start at zero, which at a mean, and which gains shrink.

An axis that no norm reads: new units have fresh incoming weights and none towards old units, so nothing sees them yet.
An axis that an RMSNorm reads: new units start at 0, with fresh outgoing weights. The mean square over N units is n/N of
what it was, so that gains are multiplied by √(n/N); that is exact up to the norm's eps.
An axis that a LayerNorm reads: new units start at the mean of the old ones, which leaves the mean where it is and
makes the variance n/N of what it was; the normalised new units are 0, and gains are multiplied by √(n/N). What reads
them past the norm, as a head that reads the residual stream itself, has no weights from them at first.

Which parameters write what a norm reads, and which read past it, a run shows (Initial.past_norms); without one, all
axes of a norm's sizes are taken for its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mupscale import planning
from mupscale.core import Entry, Plan, gather_whole, is_sharded, naming
from mupscale.planning import runs_norms, tensors_in
from mupscale.system import MupscaleError, UncheckedPlan, warn, words

UNTRIED = (
    "this growth has not been tried: shapes alone tell which weights of new units keep the function. Pass inputs= (a "
    "small batch, as the model is called) to measure the difference"
)
_BY_NORMS = (
    "a norm inside the residual stream or behind an activation; a layer that mixes positions channel by channel (token "
    "mixing, a depthwise convolution) and writes what a norm reads; or a norm that was not recognised (write it as a "
    "module that holds only its gain and at most a bias)"
)
_BY_OTHERS = "something reads new units without weights of its own, such as a mean"
EPS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps")
"""What norms call their eps."""
_GROWN = 1e-4  # what weights that were grown in float32 may differ by, of their size
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3}  # a norm's eps leaves a trace, too


def normed_axes(plan: Plan) -> dict[tuple[int, int], set[str]]:
    """The axes that norms are over, by their narrow and wide sizes, and what these norms do."""
    axes: dict[tuple[int, int], set[str]] = {}
    for name, kind in plan.norms.items():
        entry = plan.parameters[name]
        if kind in ("layer", "rms") and entry.axes[0].block == 1:
            axes.setdefault((entry.narrow[0], entry.wide[0]), set()).add(kind)
    return axes


def gain_factor(name: str, plan: Plan) -> float:
    """What a norm's old gains are multiplied by; 1 for every other parameter."""
    if plan.norms.get(name) not in ("layer", "rms"):
        return 1.0
    entry = plan.parameters[name]
    return math.sqrt(entry.narrow[0] / entry.wide[0])


def _kinds(name: str, entry: Entry, dims: tuple[int, ...], plan: Plan) -> set[str]:
    """What the norms do that read this parameter's outputs, or make its inputs."""
    normed = normed_axes(plan)
    if len(dims) != 1 or dims[0] not in entry.axes or dims[0] in (plan.past_norms or {}).get(name, ()):
        return set()
    axis = entry.axes[dims[0]]
    plain = axis.times != 1 and axis.block == 1 and not axis.sections
    return normed.get((entry.narrow[dims[0]], entry.wide[dims[0]]), set()) if plain else set()


def silent_start(name: str, entry: Entry, plan: Plan) -> tuple[float, Literal["drawn", "zero", "mean"]]:
    """What new units start at so that the function stays: their weights' share towards old units, and new outputs.

    New inputs that a norm made are zero at first, so that their weights may be fresh. Outputs that an RMSNorm reads
    start at zero, and those that a LayerNorm reads at the mean of the old ones.
    """
    read_by = set() if name in plan.norms else _kinds(name, entry, entry.out, plan)
    outgoing = 1.0 if _kinds(name, entry, entry.in_, plan) else 0.0
    return outgoing, "mean" if "layer" in read_by else "zero" if read_by == {"rms"} else "drawn"


def obstacles(narrow: nn.Module, plan: Plan, wide: nn.Module | None = None) -> list[str]:
    """Why a lossless growth is not exact, as far as the modules tell; a batch tells the rest.

    wide: the larger model, where there is one: a norm without gains that is the same there does not grow.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Conv1d(3, n, 1), nn.GroupNorm(2, n)) for n in (8, 12))
    >>> obstacles(narrow, mu.plan(narrow, wide, grow=mu.Fresh()))
    ["the GroupNorm of '1.weight' mixes old and new units"]
    """
    reasons = []
    for name, kind in plan.norms.items():
        if kind == "group":
            reasons.append(f"the GroupNorm of '{name}' mixes old and new units")
        elif plan.parameters[name].axes[0].block != 1:
            reasons.append(f"the norm of '{name}' is over heads, old and new together")
    for sizes, kinds in normed_axes(plan).items():
        if len(kinds) > 1:
            reasons.append(f"LayerNorms and RMSNorms read the same axis of {sizes[0]} units")
    unsettled = []  # norms read new outputs of these that can only be drawn: a GRU's, or those in blocks
    for name, entry in plan.parameters.items() if plan.past_norms is not None else ():
        settled = name in plan.norms or bool(_kinds(name, entry, entry.out, plan))
        growing = {d for d in entry.out if entry.axes[d].times != 1}
        if not settled and growing - {*(plan.past_norms or {}).get(name, ())}:
            unsettled.append(name)
    if unsettled:
        more = f" (and {len(unsettled) - 1} more)" if len(unsettled) > 1 else ""
        reasons.append(
            f"new units of '{unsettled[0]}'{more} are random, and a norm reads what they cause, as behind a gate: a "
            "product of units"
        )
    widths = {e.narrow[d] for e in plan.parameters.values() for d, axis in e.axes.items() if axis.times != 1}
    grown = naming.modules(narrow)
    if wide is not None:
        theirs = naming.modules(wide)
        grown = {path: one for path, one in grown.items() if path not in theirs or str(one) != str(theirs[path])}
    return [*reasons, *without_gains(grown, widths)]


def without_gains(modules: Mapping[str, nn.Module], widths: Collection[int]) -> list[str]:
    """That norms over units of these numbers have no gains, in words, as an obstacle to a lossless growth."""
    bare = planning.bare_norms(modules, widths)
    return [f"the norm '{path}' has no gain that could be rescaled ({kind})" for path, kind in bare.items()]


def with_past_norms(plan: Plan, narrow: Any, wide: nn.Module, inputs: Any) -> Plan:
    """The plan with what a run of both models on a batch shows of its norms, if it has any and does not know it yet."""
    runs = isinstance(narrow, nn.Module) and not any(is_sharded(p) for p in (*narrow.parameters(), *wide.parameters()))
    if inputs is None or plan.past_norms is not None or not plan.norms or not runs:
        return plan
    return plan.with_initial("past_norms", planning.find_past_norms(narrow, wide, plan, inputs))


def warn_of_loss(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any = None) -> None:
    """Warn where a lossless growth has changed the function: by how much on a batch, and why if that is known."""
    reasons = obstacles(narrow, plan, wide)
    if inputs is None:
        if reasons:
            warn(f"the growth is not lossless: {'; '.join(reasons)}")
        elif plan.norms and plan.past_norms is None and plan.checked:  # else that has been said of the whole plan
            warn(UNTRIED, UncheckedPlan)
        return
    try:
        largest, share = difference_of_outputs(narrow, wide, inputs)
    except Exception as error:  # the models have grown already, and need not run here
        warn(f"this growth has not been tried: {error}", UncheckedPlan)
        return
    if largest > 1:
        why = "; ".join(reasons) or _why_by_eps(narrow, wide, plan, inputs)
        warn(f"the growth is not lossless: outputs differ by {words.format_share(share)} on the batch. {why}")


def _why_by_eps(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> str:
    """In words, why outputs differ: by the eps of norms alone, found by a run with the eps that is exact, or not."""
    modules, before = naming.modules(wide), dict[tuple[str, str], float]()
    for name, kind in plan.norms.items():
        path = name.rpartition(".")[0]
        for key in EPS:
            if kind in ("layer", "rms") and isinstance(eps := getattr(modules[path], key, None), float):
                before[path, key] = eps
                setattr(modules[path], key, eps * gain_factor(name, plan) ** 2)
    try:
        largest = difference_of_outputs(narrow, wide, inputs)[0] if before else math.inf
        exact = [(path, key, getattr(modules[path], key)) for path, key in before]
        if largest > 1:
            return _possible_reasons(narrow, wide, plan, inputs)
    finally:
        for (path, key), eps in before.items():
            setattr(modules[path], key, eps)
    path, key, eps = exact[0]
    more = f" (and in {len(exact) - 1} more)" if len(exact) > 1 else ""
    return (
        f"activations are small compared with the norms' eps: {key}={eps:.3g} in '{path}'{more} of the wide model is "
        "exact"
    )


def _possible_reasons(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> str:
    """What may be behind a difference; norms are named where one is the first to differ, or nothing shows it."""
    parting = None
    with suppress(Exception):  # what cannot be run in float64, or has no memory
        small, batch = planning.in_float64(narrow, inputs)
        parting = planning.find_parting(small, planning.in_float64(wide, inputs, like=small)[0], batch, plan, _GROWN)
    likely, where = [_BY_NORMS, _BY_OTHERS], ""
    if parting is not None:
        where = str(parting) if parting.path else f"they agree up to '{parting.last}', and the model's outputs differ"
        where = f"At old units {where}. "
    if parting is not None and any(name in plan.norms for name in parting.weights):
        likely = [_BY_NORMS]
    elif (parting is not None and (plan.norms or not parting.path)) or not (plan.norms or runs_norms(narrow, inputs)):
        likely = [_BY_OTHERS]  # no norm is the first to differ, or there is none
    return f"{where}Likely: {'; or '.join(likely)}. docs/growth.md lists causes"


@torch.no_grad()
def difference_of_outputs(narrow: nn.Module, wide: nn.Module, batch: Any) -> tuple[float, float]:
    """How much the outputs of two models differ: at most, in units of what rounding and eps may explain; and in norm.

    The norm of the difference is given as a share of the norm of the narrow model's outputs.
    The batch is taken to the device of each model, and to its precision if that is one for all parameters.
    """
    outputs: list[Tensor] = []
    for model in (narrow, wide):
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            output = planning.run_on_batch(model, _as_model_takes_it(model, batch))
        finally:
            for module, training in modes.items():
                module.training = training
        outputs += tensors_in(output)[:1]
        if not outputs:
            raise MupscaleError(f"the model returns {type(output).__name__}, which holds no tensor to compare")
    before, after = (gather_whole(output).double() for output in outputs)
    size = float(before.square().mean().sqrt()) or 1.0
    off = after - before
    largest = float(off.abs().max()) / size / _ROUNDING.get(outputs[0].dtype, 0.05)
    return largest, float(off.square().mean().sqrt()) / size


def _as_model_takes_it(model: nn.Module, batch: Any) -> Any:
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    dtypes = {p.dtype for p in parameters}

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.to(parameters[0].device)
        return there.to(parameters[0].dtype) if tensor.is_floating_point() and len(dtypes) == 1 else there

    return tree_map_only(Tensor, moved, batch) if parameters else batch
