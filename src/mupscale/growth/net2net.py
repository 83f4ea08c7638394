"""Net2WiderNet (Chen, Goodfellow and Shlens 2016): new units are copies of units chosen at random.

What reads a unit is shared by its copies, so that the function stays; training does not, which is why it is here for
comparison only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mupscale.core import Axis, Entry, Plan
from mupscale.growth.copies import NaiveCopies
from mupscale.growth.operators import Part
from mupscale.system import MupscaleError, generator


class Net2Net(NaiveCopies):
    """Copies of units chosen at random, with noise, and an optimizer that starts afresh.

    Refused where random copies do not keep the function: with norms over the width, or packed projections.

    >>> import torch, mupscale as mu
    >>> narrow = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> wide = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> wide, _ = mu.upscale(narrow, wide, mu.plan(narrow, wide, inputs=x), grow=Net2Net())
    >>> torch.allclose(wide(x), narrow(x))
    True
    """

    def check(self, plan: Plan) -> None:
        """Refuse a model whose function random copies do not keep, and noise that cannot be given."""
        super().check(plan)
        if self.paired:
            raise MupscaleError("Net2Net copies units different numbers of times, so their noise cannot be paired")
        normed = [name for name, entry in plan.parameters.items() if entry.fold != 1 or name in plan.norms]
        if normed:
            raise MupscaleError(
                f"Net2Net's random copies change what a norm over the width computes ('{normed[0]}'), so it cannot "
                f"widen this model without changing its function"
            )
        if any(axis.sections for entry in plan.parameters.values() for axis in entry.axes.values()):
            raise MupscaleError("Net2Net does not support packed projections")

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """Random copies, what reads them divided by how many there are of each, and their noise."""
        out.copy_(_copy_randomly(narrow, part.entry, part.seed))
        self.make_differ(out, part)

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The same random copies."""
        out.copy_(_copy_randomly(narrow, part.entry, part.seed))


def random_copies(n: int, axis: Axis, seed: int) -> Tensor:
    """The narrow unit of each wide one: all of them once, then some at random; whole blocks, one map for each size."""
    blocks = n // axis.block
    more = torch.randint(blocks, (blocks * (axis.copies - 1),), generator=generator(seed, "net2net", n, axis.block))
    chosen = torch.cat([torch.arange(blocks), more])
    return (chosen[:, None] * axis.block + torch.arange(axis.block)).flatten()


def _copy_randomly(weight: Tensor, entry: Entry, seed: int) -> Tensor:
    for dim, axis in entry.axes.items():
        if axis.copies == 1:
            continue
        chosen = random_copies(weight.shape[dim], axis, seed)
        if dim in entry.in_:
            counts = torch.bincount(chosen, minlength=weight.shape[dim]).to(weight)
            shape = [-1 if d == dim else 1 for d in range(weight.dim())]
            weight = weight / counts.view(shape)
        weight = weight.index_select(dim, chosen)
    return weight
