"""A wide model with the old units alone: whether it computes what the narrow one does, where it does not, and why.

This is how a plan for fresh units is tried at a width that has no copies to follow. It shows more: what old weights are
multiplied by where constants depend on the width, and which parameters write units that no norm reads, or read units
past the norms.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Entry, Plan, Role, index_of_old, is_new, naming, places
from mupscale.planning import comparing, tracing
from mupscale.planning.from_modules import build_plan, find_role, find_uneven
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, ways_out

_MOST_TRIALS = 64


def keeps_outputs(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> bool:
    """Whether a wide model with the old units in their places and zeros elsewhere gives the narrow one's outputs.

    plan: for fresh units. Norms over an axis that grows are taken over the old units alone.
    """
    return _find_parted(narrow, wide, plan, Trials.of(inputs)) is None


def check_silent_units(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error where `keeps_outputs` says no, with the layers between which the two models part."""
    trials = Trials.of(inputs)
    pair = _find_parted(narrow, wide, plan, trials)
    if pair is None:
        if trials is not inputs:
            trials.warn()
        return
    if not _compared(pair):
        raise MupscaleError(
            "every output of the model grows, to a size that no layer has, so a batch cannot test fresh units. Build "
            "the wide model with the narrow one's output size, or grow to a multiple of the width"
        )
    if random := tracing.why_random(pair.models[0], pair.batch):
        raise MupscaleError(
            f"{random}, so a batch cannot test fresh "
            f"units{ways_out(off='switch that off to plan', no_inputs='leave out inputs=')}"
        )
    parting = None if pair.is_large else comparing.find_parting(*pair.models, pair.batch, plan)
    raise MupscaleError(
        "with its old units alone, the wide model does not compute what the narrow one does on the "
        f"batch{'' if parting is None else f': {parting}'}. {_remedies(parting, narrow, wide)}"
    )


def _remedies(parting: comparing.Parting | None, narrow: nn.Module, wide: nn.Module) -> str:
    """What may be behind it, why no run could find the blocks and constants, and what lets one find them."""
    uneven, theirs = find_uneven(narrow, wide), naming.parameters(wide)
    pairs = [(p.shape, theirs[name].shape) for name, p in naming.parameters(narrow).items()]
    if uneven and any(m > n and m % n == 0 for few, many in pairs for n, m in zip(few, many, strict=True) if n):
        family = (
            "use mupscale.Family(build, base, inputs=…) with a base at which it is not rounded (it may differ from "
            "this model's width), and grow with family.upscale"
        )
        found = (
            f"A run finds the blocks and constants only if all sizes grow by whole multiples, and {uneven} does not: "
            f"is it rounded? Build that size as a multiple of the width{ways_out(', or ', no_inputs=family)}"
        )
    else:
        family = "use mupscale.Family(build, base, inputs=…), which learns them for every width"
        found = "At a whole multiple of the width a run may find the blocks and constants: grow to that"
        found += ways_out(". Or ", no_inputs=family)
    grows = parting is not None and any(entry.narrow != entry.wide for entry in parting.weights.values())
    if parting is not None and grows and parting.matrix is None:
        why = "it is a norm that was not recognised, or a constant in it or before it depends on the width"
        return f"Either {why}. {found}"
    name = "NAME.weight" if parting is None or parting.matrix is None else parting.matrix
    blocks = (
        f"give the blocks: plan=mupscale.plan(…, roles={{'{name}': mupscale.Role(out=0, in_=1, in_block=…)}}), with "
        "in_block=H*W after a flatten to C·H·W. For heads: in_block=head_dim in the output projection, and "
        "out_block=head_dim in query, key and value and their biases. If key and value heads each serve several "
        "queries, multiply head_dim by that number for queries and the output projection. If one weight holds all "
        "three: out_block, such as ((32, 16), (16, 8), (16, 8)) for heads of 8 in pairs (docs/extending.md)"
    )
    return (
        "Either a constant depends on the width (a table over units, as of sinusoids, is to be a buffer: "
        "register_buffer, and not computed in forward); "
        "or units lie in blocks that the modules do not show, as after a flatten or in heads; or a norm was not "
        f"recognised. {found}{ways_out('. Or ', roles=blocks)}"
    )


@torch.no_grad()
def _find_parted(narrow: nn.Module, wide: nn.Module, plan: Plan, trials: Trials) -> comparing.GenericPair | None:
    """The two models on the first of the batches on which they part, with the old units alone; None for none."""
    for batch in trials.look(narrow, wide).batches:
        pair = comparing.GenericPair(narrow, wide, plan, batch, silent=True)
        outputs = _compared(pair)
        if not outputs or not all(
            bool(a.isfinite().all()) and comparing.are_close(a, b, loosened=100) for a, b in outputs
        ):
            return pair
    return None


@torch.no_grad()
def _compared(pair: comparing.GenericPair) -> list[tuple[Tensor, Tensor]]:
    """The outputs of both; of those that grow the old units, where some parameter has their size and tells which."""
    known = {
        (entry.narrow[d], entry.wide[d]): entry.axes[d]
        for side in ("in_", "out")
        for entry in pair.plan.parameters.values()
        for d in getattr(entry, side)
    }
    pairs = []
    for a, b in zip(*pair.outputs(), strict=True):
        grown = {d: sizes for d, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if sizes[0] != sizes[1]}
        if a.dim() == b.dim() and all(sizes in known for sizes in grown.values()):
            axes = {d: known[sizes] for d, sizes in grown.items()}
            pairs.append((a, b[index_of_old(tuple(a.shape), axes)] if axes else b))
    return pairs


_SUMS = (1, 0, 2, -1, 0.5, -0.5)
"""Over how many growing axes the copies are summed beside the weight itself; half of one where a length is taken, as by
F.normalize, weight_norm and DoRA, since zeros beside old units make no vector longer."""


def with_keeps(narrow: nn.Module, wide: nn.Module, roles: Mapping[str, Role], inputs: Any) -> dict[str, Role]:
    """The roles, by pattern, with `keep` for each constant whose share a run shows; others as they are."""
    trials = Trials.of(inputs)
    with suppress(MupscaleError):  # it cannot grow by fresh units, which is said where that is asked for
        plan = build_plan(narrow, wide, roles=roles, assume=True)
        folded = {name: entry.names for name, entry in plan.parameters.items() if entry.fold != 1}
        told = {n: {a: role for a in names if (role := find_role(roles, a))} for n, names in folded.items()}
        lacking = {n: own for n, own in told.items() if own and all(role.keep is None for role in own.values())}
        folds = {name: float(plan[name].fold) for name in lacking}
        axes = [axis for entry in plan.parameters.values() for axis in entry.axes.values()]
        times = max((float(axis.times) for axis in axes), default=1.0)
        # the sums' share of each constant: equal ones in layers that are alike, or one by one
        kinds: dict[str, Any] = {name: (fold, re.sub(r"\d+", "#", name)) for name, fold in folds.items()}
        for groups in (folds, kinds) if folds else ():
            keys = sorted({*groups.values()})
            for sums in itertools.islice(itertools.product(_SUMS, repeat=len(keys)), _MOST_TRIALS):
                share = dict(zip(keys, sums, strict=True))
                keeps = {name: _near_one(fold * times ** share[groups[name]]) for name, fold in folds.items()}
                kept = {escape(a): replace(role, keep=k) for n, k in keeps.items() for a, role in lacking[n].items()}
                trial = kept | {pattern: role for pattern, role in roles.items() if pattern not in kept}
                if keeps_outputs(narrow, wide, build_plan(narrow, wide, roles=trial, how="fresh", assume=True), trials):
                    return trial
    return dict(roles)


_ROUNDING = 1e-12


def _near_one(constant: float) -> float:
    """The constant, or 1 where it is that but for rounding."""
    return 1.0 if math.isclose(constant, 1.0, rel_tol=_ROUNDING) else constant


def find_past_norms(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> dict[str, tuple[int, ...]] | None:
    """By parameter, the growing dimensions whose units no norm reads (outputs) or made (inputs); None if it is unclear.

    plan: for fresh units. Units that are zero where they are read count as made by a norm.
    """
    norms = [name for name, kind in plan.norms.items() if kind in ("layer", "rms")]
    new_units: list[Tensor] = []  # that norms are given
    with suppress(MupscaleError), comparing.in_full_precision():  # what does not run in float64 can grow all the same
        pair = comparing.GenericPair(narrow, wide, plan, inputs, silent=True, new_units=new_units)
        large = pair.models[1].requires_grad_(True)
        _draw_new_units(pair, norms, ())

        def run() -> list[Tensor]:
            new_units.clear()
            large.zero_grad()
            return tracing.outputs_in_float64(large, pair.batch)

        def found_writers() -> set[str] | None:
            run()
            return None if len(new_units) < len(norms) else _with_gradient(pair, new_units, "out")[1]

        writers = tracing.differentiated(found_writers, [large])
        if writers is None:  # a norm was not called as a module
            return None
        _draw_new_units(pair, norms, writers)
        used, direct = tracing.differentiated(lambda: _with_gradient(pair, run(), "in_"), [large])
        past = {
            name: (
                *(_growing(entry, entry.out) if name not in writers else ()),
                *(_growing(entry, entry.in_) if name in direct else ()),
            )
            for name, entry in plan.parameters.items()
            if name in used and name not in plan.norms
        }
        return {name: dims for name, dims in past.items() if dims}
    return None


def _with_gradient(pair: comparing.GenericPair, results: list[Tensor], side: str) -> tuple[set[str], set[str]]:
    """The wide parameters that are used, and those whose new units, on this side, change the results.

    Of outputs it is new ones from old inputs (out), and old ones from new inputs (in_).
    """
    gradients = tracing.gradients_of(pair.models[1], tracing.gradient_loss(results))
    level = _ROUNDING * max(map(comparing.largest_number, gradients.values()), default=0.0)
    changing = set[str]()
    for name, gradient in gradients.items():
        entry = pair.plan.parameters[name]
        ours, others = (entry.out, entry.in_) if side == "out" else (entry.in_, entry.out)
        where = torch.zeros((1,) * gradient.dim(), dtype=torch.bool)
        for d in _growing(entry, ours):
            where = where | _new(entry, d)
        for d in _growing(entry, others):
            where = where & ~_new(entry, d)
        if comparing.largest_number(gradient * where.to(gradient)) > level:
            changing.add(name)
    return set(gradients), changing


@torch.no_grad()
def _draw_new_units(pair: comparing.GenericPair, norms: Collection[str], writers: Collection[str]) -> None:
    """Draw what new units have; new inputs weigh nothing, and writers give what a lossless growth begins with.

    That is zero where RMSNorms read it, and the mean of the old units where LayerNorms do.
    """
    generator, buffers = torch.Generator().manual_seed(2), naming.buffers(pair.models[1])
    for name, entry in pair.plan.buffers.items():  # a table has new columns of its own, which no norm made
        old = buffers[name][index := index_of_old(entry.narrow, entry.axes)].clone()
        buffers[name].copy_(torch.rand(entry.wide, generator=generator) + 0.5)[index] = old
    for name, target in naming.parameters(pair.models[1]).items():
        entry = pair.plan.parameters[name]
        index = index_of_old(entry.narrow, entry.axes)
        weight = target[index].clone()
        target.copy_(torch.randn(target.shape, generator=generator, dtype=torch.float64) * tracing.size_of(weight))
        for d in _growing(entry, entry.in_):
            target.masked_fill_(_new(entry, d).to(target.device), 0.0)
        target[index] = weight
        if name in writers and len(entry.out) == 1:
            (dim,) = entry.out
            sizes = entry.narrow[dim], entry.wide[dim]
            read_by = {pair.plan.norms[n] for n in norms if (pair.plan[n].narrow[0], pair.plan[n].wide[0]) == sizes}
            new = _new(entry, dim).to(target.device)
            if read_by == {"rms"}:
                target.masked_fill_(new, 0.0)
            elif read_by:
                old = places(entry.axes[dim], entry.narrow[dim]).to(target.device)
                target.copy_(torch.where(new, target.index_select(dim, old).mean(dim, keepdim=True), target))


def _growing(entry: Entry, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in dims if entry.axes[d].times != 1)


def _new(entry: Entry, dim: int) -> Tensor:
    """Which units along a dimension are new, to be broadcast over the others."""
    new = is_new(entry.axes[dim], entry.narrow[dim])
    return new.reshape([-1 if d == dim else 1 for d in range(len(entry.wide))])
