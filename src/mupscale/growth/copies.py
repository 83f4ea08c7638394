"""The paper's operator: every unit copied, exactly, with noise that makes the copies differ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mupscale.core import Plan
from mupscale.growth.noise import GaussianNoise, Noise, SignalNoise, add_noise, as_noise, check_noise
from mupscale.growth.operators import Operator, Part, StatePart
from mupscale.system import checks_arguments


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
        if isinstance(self.noise, SignalNoise):
            self.noise.effective = None

    def parameter(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies, each 1/in_ of the weight, and their noise."""
        part.entry.widened(narrow, out)
        self.make_differ(out, part)

    def make_differ(self, out: Tensor, part: Part) -> None:
        """Make the copies in `out` differ."""
        noise = as_noise(self.noise)
        level = add_noise(out, part.name, part.plan, noise, part.seed, paired=self.paired)
        if isinstance(noise, SignalNoise) and level is not None:
            earlier = {} if noise.effective is None else noise.effective.std
            assert not isinstance(earlier, float)
            noise.effective = GaussianNoise({**earlier, part.name: level}, "theory")

    def buffer(self, out: Tensor, narrow: Tensor, part: Part) -> None:
        """The copies; of one that is summed over its inputs, as a fixed projection is, each 1/in_ of it."""
        part.entry.widened(narrow, out, factor=part.entry.rule.weight)

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """The copies, rescaled as the gradient is."""
        part.entry.widened(narrow, out, factor=part.factor(part.entry), axes=part.axes)


class NaiveCopies(Copies):
    """Copies whose optimizer starts afresh, for comparison: what people do who copy the weights alone.

    >>> import torch, mupscale as mu
    >>> narrow, wide = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(4, 4, bias=False)
    >>> optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1, momentum=0.9)
    >>> narrow.weight.grad = torch.ones(2, 2)
    >>> optimizer.step()
    >>> _, grown = mu.upscale(narrow, wide, mu.plan(narrow, wide), optimizer, grow=NaiveCopies())
    >>> grown.state[wide.weight]["momentum_buffer"].abs().sum().item()
    0.0
    """

    def state(self, out: Tensor, narrow: Tensor, part: StatePart) -> None:
        """What a fresh optimizer starts with."""
        out.fill_(part.initial)
