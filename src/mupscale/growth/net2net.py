"""Net2WiderNet (Chen, Goodfellow and Shlens 2016): new units are copies of units chosen at random.

What reads a unit is shared by its copies, so that the function stays; training does not, which is why it is here for
comparison only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mupscale.core import Axis, Entry, Plan, naming
from mupscale.system import MupscaleError, generator


@torch.no_grad()
def widen_net2net(narrow: nn.Module, wide: nn.Module, plan: Plan, seed: int) -> nn.Module:
    """Fill the wide model with random copies of the narrow one's units, in place, and return it.

    >>> import torch, mupscale as mu
    >>> narrow = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    >>> wide = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2)).double()
    >>> wide = widen_net2net(narrow, wide, mu.plan(narrow, wide), seed=0)
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.allclose(wide(x), narrow(x))
    True
    """
    check_net2net(narrow, plan)
    sources, targets = naming.parameters(narrow), naming.parameters(wide)
    for name, entry in plan.parameters.items():
        targets[name].copy_(_copy_randomly(sources[name].detach(), entry, seed))
    return wide


def check_net2net(narrow: nn.Module, plan: Plan) -> None:
    """Refuse a model whose function random copies do not keep: one with norms over the width, or packed projections.

    The model may be on the meta device.

    >>> import torch, mupscale as mu
    >>> narrow, wide = (torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.LayerNorm(n), torch.nn.Linear(n, 2))
    ...                 for n in (4, 8))
    >>> check_net2net(narrow, mu.plan(narrow, wide))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: Net2Net's random copies change what a norm over the width computes ('1...
    """
    normed = [
        name for name, e in plan.parameters.items() if e.fold != 1 or (len(e.wide) == 1 and _is_gain(narrow, name))
    ]
    if normed:
        raise MupscaleError(
            f"Net2Net's random copies change what a norm over the width computes ('{normed[0]}'), so it cannot widen "
            f"this model without changing its function"
        )
    if any(axis.sections for entry in plan.parameters.values() for axis in entry.axes.values()):
        raise MupscaleError("Net2Net is not written for packed projections")


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


def _is_gain(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return "norm" in type(owner).__name__.lower()
