"""The models of a run: made where they train, initialised, and grown there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import WholeWidth, Width, WidthLike, copy_into, naming
from mupscale.data import Data
from mupscale.family import Family
from mupscale.growth import Grow, is_replica, materialize, measure_statistics, split_operators
from mupscale.system import MupscaleError
from mupscale.train.objective import cast_input
from mupscale.train.processes import Processes, divide_by_size
from mupscale.train.recipe import Recipe
from mupscale.train.recipe_families import few_examples

_ROUNDS = 4  # in which a sharded model is made: in each, a process holds a fourth of its share beside its shards
_BATCHES = 8  # on which statistics of new channels are measured


def place_member(family: Family, width: WholeWidth, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The model of this width where it trains, for parameters that are read from somewhere; its buffers have values."""
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.build(width).to(dtype))
    model = processes.place(family.sketch(width).to(dtype))
    materialize(model, processes.device)
    _fill_buffers(model, family.drawn_part(width, 0, ()))
    return model


def init_member(family: Family, width: WholeWidth, seed: int, processes: Processes, dtype: torch.dtype) -> nn.Module:
    """The freshly initialised model of this width where it trains; the same for any number of processes."""
    if not (processes.sharded and family.can_draw_parts):
        return processes.place(family.init_untried(width, seed=seed).to(dtype))
    sketch = family.sketch(width)
    sizes = {name: p.numel() * p.element_size() for name, p in naming.parameters(sketch).items()}
    shapes = {name: (p.shape, p.dtype) for name, p in naming.parameters(sketch).items()}
    model = processes.place(sketch.to(dtype))
    materialize(model, processes.device)
    targets, parts = naming.parameters(model), divide_by_size(sizes, _ROUNDS * processes.world)
    for number in range(0, len(parts), processes.world):
        ours = parts[number + processes.rank]
        member = family.init_part(width, seed, ours)
        _fill_buffers(model, member)
        made = {name: naming.parameters(member)[name].detach() for name in ours}
        del member  # and with it the memory that all others share
        for owner, part in enumerate(parts[number : number + processes.world]):
            for name in part:
                shape, kind = shapes[name]
                whole = made.pop(name) if owner == processes.rank else torch.empty(shape, dtype=kind)
                whole = whole.to(processes.device)
                dist.broadcast(whole, owner)
                copy_into(targets[name], whole)
                del whole
    return model


@torch.no_grad()
def _fill_buffers(model: nn.Module, built: nn.Module) -> None:
    theirs: Mapping[str, Tensor] = naming.buffers(built)
    for name, buffer in naming.buffers(model).items():
        buffer.copy_(theirs[name])


def grow_model(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    before: WholeWidth,
    width: WholeWidth,
    grow: Grow,
    seed: int,
    family: Family,
    processes: Processes,
    data: Data | None,
    batches: Iterable[Tensor] = (),
) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer at the new width, which may say a depth; `before` is the one that it has.

    data: on which copies are tried, unless that has been done. They show where units lie, for fresh ones as well.
    batches: inputs on which the running statistics of new channels and blocks are measured; copies have the old ones'.
    """
    wider, _ = split_operators(grow)
    if data is not None:
        # sizes that grow by fresh units alone have no copies to try; then the growth warns that it is not tried
        with nullcontext() if wider.needs_multiples else suppress(MupscaleError):
            check_copies(family, data, before, width)
    exact = is_replica(wider)  # the line about the growth tells of it
    wide, grown = family.upscale(
        model, optimizer, width=width, grow=grow, exact=exact, seed=seed, place=processes.place
    )
    assert grown is not None
    if any(isinstance(m, nn.modules.batchnorm._NormBase) for m in wide.modules()):
        plan = family.growth_plan(before, width, grow)
        if not wider.needs_multiples or plan.has_new_parts:
            measure_statistics(wide, batches, plan)
            processes.reshard(wide)
    return wide, grown


def check_copies(family: Family, data: Data, narrow: WidthLike, wide: WidthLike) -> None:
    """Try once, on small members of the family and a few examples, whether copies are exact; an error where not.

    narrow, wide: from which width to which a model is to grow, since only some of its sizes may.
    """
    growing = Width.of(narrow).growing(Width.of(wide))
    if growing and not family.has_tried(narrow, wide):
        family.check(few_examples(data), growing)


def coming_batches(recipe: Recipe, data: Data, step: int) -> Iterable[Tensor]:
    """The inputs of the next steps, all of them in every process, as the model takes them."""
    for number in range(step, step + _BATCHES):
        x, _ = data.batch(recipe.seeds.data, number * recipe.batch, recipe.batch)
        yield cast_input(x, recipe)
