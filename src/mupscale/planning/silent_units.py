"""A wide model with the old units alone: whether it computes what the narrow one does, and where it does not.

This is how a plan for fresh units is tried at a width that has no copies to follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mupscale.core import Plan, copy_model, index_of_old, is_new, naming
from mupscale.planning.copied_values import are_close
from mupscale.planning.full_size import Streamed, generic_weights, in_single, is_large
from mupscale.planning.growth_checks import find_uneven
from mupscale.planning.parted_models import Parting, find_parting
from mupscale.planning.tracing import in_float64, run_in_float64, saved_tensors, take_modes, tensors_in, why_random
from mupscale.planning.trials import Trials
from mupscale.system import MupscaleError, ways_out


@torch.no_grad()
def keeps_outputs(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> bool:
    """Whether a wide model with the old units in their places and zeros elsewhere gives the narrow one's outputs.

    plan: for fresh units. Norms over an axis that grows are taken over the old units alone.

    >>> import mupscale as mu
    >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 2)) for n in (8, 12))
    >>> keeps_outputs(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()), torch.ones(4, 3))
    True
    """
    return _parted_pair(narrow, wide, plan, Trials.of(inputs)) is None


@torch.no_grad()
def check_silent_units(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> None:
    """An error where `keeps_outputs` says no, with the layers between which the two models part.

    >>> import mupscale as mu
    >>> layers = lambda n: (nn.Conv1d(3, n, 1), nn.Flatten(), nn.Linear(4 * n, 2))
    >>> narrow, wide = (nn.Sequential(*layers(n)) for n in (8, 12))
    >>> check_silent_units(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()), torch.ones(1, 3, 4))
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: with its old units alone, the wide model does not compute what the ...
    """
    trials = Trials.of(inputs)
    pair = _parted_pair(narrow, wide, plan, trials)
    if pair is None:
        if trials is not inputs:
            trials.warn()
        return
    small, large, batch = pair
    if not _compared(small, large, batch, plan):
        raise MupscaleError(
            "every output of the model grows, to a size that no layer has, so a batch cannot test fresh units. Build "
            "the wide model with the narrow one's output size, or grow to a multiple of the width"
        )
    if random := why_random(small, batch):
        raise MupscaleError(
            f"{random}, so a batch cannot test fresh "
            f"units{ways_out(off='switch that off to plan', no_inputs='leave out inputs=')}"
        )
    parting = None if is_large(narrow, wide) else find_parting(small, large, batch, plan)
    raise MupscaleError(
        "with its old units alone, the wide model does not compute what the narrow one does on the "
        f"batch{'' if parting is None else f': {parting}'}. {_remedies(parting, _why_no_run(narrow, wide))}"
    )


def _why_no_run(narrow: nn.Module, wide: nn.Module) -> str:
    """Why no run could find the blocks and constants, and what lets one find them."""
    uneven, theirs = find_uneven(narrow, wide), naming.parameters(wide)
    pairs = [(p.shape, theirs[name].shape) for name, p in naming.parameters(narrow).items()]
    if uneven and any(m > n and m % n == 0 for few, many in pairs for n, m in zip(few, many, strict=True) if n):
        family = (
            "use mupscale.Family(build, base, inputs=…) with a base at which it is not rounded (it may differ from "
            "this model's width), and grow with family.upscale"
        )
        return (
            f"A run finds the blocks and constants only if all sizes grow by whole multiples, and {uneven} does not: "
            f"is it rounded? Build that size as a multiple of the width{ways_out(', or ', no_inputs=family)}"
        )
    family = "use mupscale.Family(build, base, inputs=…), which learns them for every width"
    found = "At a whole multiple of the width a run may find the blocks and constants: grow to that"
    return f"{found}{ways_out('. Or ', no_inputs=family)}"


def _remedies(parting: Parting | None, found: str) -> str:
    if parting is not None and parting.helpful:
        block = next(iter(parting.helpful.values()))
        return (
            f"Its inputs lie in blocks of {block} units, as after a flatten or in heads, and the modules do not show "
            f"that{ways_out('; with them it agrees: ', roles=f'plan=mupscale.plan(…, roles={parting.roles})')}. {found}"
        )
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
        "three: out_sections, such as ((32, 16), (16, 8), (16, 8)) for heads of 8 in pairs (docs/extending.md)"
    )
    return (
        "Either units lie in blocks that the modules do not show, as after a flatten or in heads; or a norm was not "
        f"recognised; or a constant depends on the width. {found}{ways_out('. Or ', roles=blocks)}"
    )


def _parted_pair(
    narrow: nn.Module, wide: nn.Module, plan: Plan, trials: Trials
) -> tuple[nn.Module, nn.Module, Any] | None:
    """The two models, and the first of the batches on which they part; None where they do on none."""
    pairs = (_silent_pair(narrow, wide, plan, batch) for batch in trials.look(narrow, wide).batches)
    return next((pair for pair in pairs if not _agree(_compared(*pair, plan))), None)


def _silent_pair(narrow: nn.Module, wide: nn.Module, plan: Plan, inputs: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Both models in float64 with generic weights, those of the narrow one in the wide one's places; and the batch.

    Large ones are in float32, and have the weights of one block at a time.
    """
    if is_large(narrow, wide):
        return *_streamed_pair(narrow, wide, plan), in_single(inputs)
    small, batch = in_float64(narrow, inputs, generic=1)
    large, _ = in_float64(wide, inputs, like=narrow)
    kept, theirs = copy_model(small), saved_tensors(large)
    for name, weight in saved_tensors(kept).items():
        entry = plan[name]
        if name in plan.parameters and entry.keep != 1:
            weight.mul_(float(entry.keep)).add_(float(entry.offset) * (float(entry.keep) - 1))
        theirs[name].zero_()
        theirs[name][index_of_old(entry.narrow, entry.axes)] = weight
    look_at_old_units_alone(kept, large, plan)
    return small, large, batch


def _streamed_pair(narrow: nn.Module, wide: nn.Module, plan: Plan) -> tuple[nn.Module, nn.Module]:
    drawn = generic_weights(narrow)

    def kept(name: str) -> Tensor:
        entry, weight = plan[name], drawn(name)
        return weight.mul_(float(entry.keep)).add_(float(entry.offset) * (float(entry.keep) - 1))

    def placed(name: str) -> Tensor:
        entry, weight = plan[name], kept(name)
        target = torch.zeros(entry.wide, device=weight.device)
        target[index_of_old(entry.narrow, entry.axes)] = weight
        return target

    small, norms, large = Streamed(narrow, drawn), Streamed(narrow, kept, in_blocks=False), Streamed(wide, placed)
    ours, theirs = naming.buffers(small.model), naming.buffers(large.model)
    for name, entry in plan.buffers.items():
        if name in ours and name in theirs and entry.axes:
            theirs[name].zero_()[index_of_old(entry.narrow, entry.axes)] = ours[name]
    take_modes(large.model, narrow)
    for streamed in (small, large):
        streamed.fill()
    norms.fill(p for name, p in naming.parameters(norms.model).items() if name in plan.norms)
    look_at_old_units_alone(norms.model, large.model, plan)
    return small.model, large.model


def _compared(small: nn.Module, large: nn.Module, batch: Any, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """The outputs of both; of those that grow the old units, where some parameter has their size and tells which."""
    ours, theirs = (
        [t for t in tensors_in(run_in_float64(model, batch)) if t.is_floating_point()] for model in (small, large)
    )
    known = {
        (entry.narrow[d], entry.wide[d]): entry.axes[d]
        for side in ("in_", "out")
        for entry in plan.parameters.values()
        for d in getattr(entry, side)
    }
    pairs = []
    for a, b in zip(ours, theirs, strict=True):
        grown = {d: sizes for d, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if sizes[0] != sizes[1]}
        if a.dim() == b.dim() and all(sizes in known for sizes in grown.values()):
            axes = {d: known[sizes] for d, sizes in grown.items()}
            pairs.append((a, b[index_of_old(tuple(a.shape), axes)] if axes else b))
    return pairs


def _agree(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return bool(pairs) and all(bool(a.isfinite().all()) and are_close(a, b, loosened=100) for a, b in pairs)


def look_at_old_units_alone(
    kept: nn.Module, large: nn.Module, plan: Plan, new_units: list[Tensor] | None = None
) -> None:
    """Let the norms of the wide model do to the old units what the narrow one's do, and give zeros for new ones.

    new_units: a list that what the norms are given for new units is put into as they are called. With it GroupNorms,
    which mix old and new units whatever these start at, are left as they are.

    >>> import mupscale as mu
    >>> narrow, wide = nn.LayerNorm(2), nn.LayerNorm(4)
    >>> look_at_old_units_alone(narrow, wide, mu.plan(narrow, wide, grow=mu.Fresh()))
    >>> wide(torch.tensor([1.0, 5.0, 3.0, 5.0])).round()
    tensor([-1.,  0.,  1.,  0.], grad_fn=...)
    """
    ours, theirs = naming.modules(kept), naming.modules(large)
    for name, kind in plan.norms.items():
        path, entry = name.rpartition(".")[0], plan[name]
        if kind in ("layer", "rms") or (kind == "group" and new_units is None):
            index = index_of_old(entry.narrow, entry.axes)[0]
            new = is_new(entry.axes[0], entry.narrow[0]).nonzero()[:, 0]

            def old_units_alone(
                x: Tensor,
                norm: nn.Module = ours[path],
                index: Any = index,
                new: Tensor = new,
                is_group: bool = kind == "group",
                count: int = entry.wide[0],
            ) -> Tensor:
                dim = 1 if is_group or x.shape[-1] != count else -1  # some LayerNorms are of channels before positions
                units = x.movedim(dim, -1)
                if new_units is not None:
                    new_units.append(units[..., new])
                out = torch.zeros_like(units)
                out[..., index] = norm(units[..., index].movedim(-1, dim)).movedim(dim, -1)
                return out.movedim(-1, dim)

            theirs[path].forward = old_units_alone
