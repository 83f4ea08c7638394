"""The paper's operator: every unit copied, exactly, with noise that makes the copies differ; and Net2Net's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mupscale.core import Axis, Plan
from mupscale.growth.noise import Noise, add_noise, as_noise, check_noise
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.system import MupscaleError, as_asked, checks_arguments, generator


@checks_arguments
@dataclass(frozen=True)
class Copies(Operator):
    """Every unit copied a whole number of times; without noise, the wide model trains exactly as the narrow one would.

    noise: how much the copies are made to differ, as in `perturb`. paired: noise that sums to 0 over the copies of each
    input (+ε on one and −ε on the other), so that the function stays; parameters that no copies feed get none.

    >>> import torch, mupscale as mu
    >>> narrow, wide = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(4, 1, bias=False)
    >>> plan = mu.plan(narrow, wide, fresh=narrow)
    >>> _ = mu.upscale(narrow, wide, plan, grow=mu.Copies(noise=0.5, paired=True))
    >>> torch.allclose(wide.weight[0, ::2] + wide.weight[0, 1::2], narrow.weight[0])
    True
    """

    noise: Noise = 0.0
    paired: bool = False

    def check(self, plan: Plan) -> None:
        """Refuse noise that the model cannot be given."""
        check_noise(self.noise, plan)

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies, each 1/in_ of the weight, and their noise."""
        part.entry.widened(narrow, out)
        add_noise(out, part.name, part.plan, as_noise(self.noise), part.seed, paired=self.paired)

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies; of one that is summed over its inputs, as a fixed projection is, each 1/in_ of it."""
        part.entry.widened(narrow, out, factor=part.entry.rule.weight)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """The copies, rescaled as the gradient is."""
        part.entry.widened(narrow, out, factor=part.factor(part.entry), axes=part.axes)


def is_replica(operator: Operator) -> bool:
    """Whether the wide model would be copies without noise; what is there for comparison alone says nothing."""
    return type(operator) is Copies and as_noise(operator.noise).is_none


def replica_in_words() -> str:
    """What copies without noise come to, and what to ask for."""
    fresh = as_asked("leave out grow= and noise=", "leave out --how and --noise")
    noise = as_asked("grow=mupscale.Copies(noise=1.0)", "--how copies --noise 1")
    return (
        "copies without noise stay equal forever, so the wide model stays a replica of the narrow one, at several "
        f"times its cost. For fresh units, {fresh}; for copies that differ, {noise}; for a replica on purpose, "
        f"{as_asked('exact=True', '--exact')}"
    )


class NaiveCopies(Copies):
    """Copies whose optimizer starts afresh, for comparison: what people do who copy the weights alone."""

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """What a fresh optimizer starts with."""
        out.fill_(part.initial)


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
        self.buffer(out, narrow, part)
        add_noise(out, part.name, part.plan, as_noise(self.noise), part.seed)

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The same random copies."""
        for dim, axis in part.entry.axes.items():
            if axis.copies != 1:
                chosen = random_copies(narrow.shape[dim], axis, part.seed)
                if dim in part.entry.in_:
                    counts = torch.bincount(chosen).to(narrow)
                    narrow = narrow / counts.view([-1 if d == dim else 1 for d in range(narrow.dim())])
                narrow = narrow.index_select(dim, chosen)
        out.copy_(narrow)


def random_copies(n: int, axis: Axis, seed: int) -> Tensor:
    """The narrow unit of each wide one: all of them once, then some at random; whole blocks, one map for each size."""
    blocks = n // axis.block
    more = torch.randint(blocks, (blocks * (axis.copies - 1),), generator=generator(seed, "net2net", n, axis.block))
    chosen = torch.cat([torch.arange(blocks), more])
    return (chosen[:, None] * axis.block + torch.arange(axis.block)).flatten()
