"""The growth of a training run's model: its weights, its optimizer, and the running statistics of new channels."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import WholeWidth, Width, WidthLike
from mupscale.data import Data
from mupscale.family import Family
from mupscale.growth import Grow, is_replica, measure_statistics, split_operators
from mupscale.system import MupscaleError
from mupscale.train.numeric_precision import cast_input
from mupscale.train.processes import Processes
from mupscale.train.recipe import Recipe
from mupscale.train.recipe_families import few_examples

_BATCHES = 8  # on which statistics of new channels are measured


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

    >>> from mupscale.data import CoverTypeSample
    >>> from mupscale.models import MLP
    >>> family = Family(lambda width: MLP(54, width, 7), base=8)
    >>> check_copies(family, CoverTypeSample(), 8, 16)
    """
    growing = Width.of(narrow).growing(Width.of(wide))
    if growing and not family.has_tried(narrow, wide):
        family.check(few_examples(data), growing)


def coming_batches(recipe: Recipe, data: Data, step: int) -> Iterable[Tensor]:
    """The inputs of the next steps, all of them in every process, as the model takes them."""
    for number in range(step, step + _BATCHES):
        x, _ = data.batch(recipe.seeds.data, number * recipe.batch, recipe.batch)
        yield cast_input(x, recipe)
