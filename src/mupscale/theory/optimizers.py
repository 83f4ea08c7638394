"""Optimizers that act on every entry of a weight by itself, in units in which nothing depends on the width.

The gradient they are given is n times that of an input or hidden weight, and the readout's own where it is stored with
its 1/n: what μP's rates and epsilons amount to (Proposition 'Dynamic equivalence of MLPs … general optimizers').
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from mupscale.system import MupscaleError

State = dict[str, Tensor]
"""What an optimizer remembers of a weight, of its shape."""


class Entrywise(ABC):
    """From a gradient, and what was remembered of earlier ones, to what is subtracted, times the learning rate."""

    def __call__(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """The update, if it is one for every entry."""
        update = self.update(gradient, state, step)
        if update.shape != gradient.shape:
            raise MupscaleError(
                f"the optimizer returned shape {tuple(update.shape)} for a gradient of {tuple(gradient.shape)}; it "
                f"must act entry by entry"
            )
        return update

    @abstractmethod
    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """Entry by entry; `state` is empty at step 1 and may be written to."""

    degrees: ClassVar[Mapping[str, int]] = {}
    """With which power of the gradient each part of the state goes."""

    def grow(self, state: State, times: float, zeros: tuple[int, ...]) -> State:
        """The state beside fresh units: that of old entries stays what it is in a gradient's own units, others are 0.

        times: by how much more the gradient is multiplied from now on. zeros: as for torch's pad.
        """
        if unknown := state.keys() - self.degrees.keys():
            raise MupscaleError(
                f"'{min(unknown)}' of {type(self).__name__} cannot be grown: say in its class variable `degrees` with "
                f"which power of the gradient it goes"
            )
        return {key: pad(times ** self.degrees[key] * value, zeros) for key, value in state.items()}


@dataclass(frozen=True)
class Momentum(Entrywise):
    """v ← momentum · v + g, and the update is `of` v: itself (SGD), or any function of one number."""

    degrees: ClassVar = {"velocity": 1}
    momentum: float = 0.0
    of: Callable[[Tensor], Tensor] | None = None

    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """SGD as torch has it, without dampening."""
        if self.momentum:
            gradient = state["velocity"] = gradient + self.momentum * state["velocity"] if state else gradient
        if self.of is None:
            return gradient
        return self.of(gradient.clone() if self.momentum else gradient)  # which may work in place


@dataclass(frozen=True)
class Sign:
    """g / (|g| + ε), the sign made Lipschitz."""

    eps: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self.eps)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The function itself."""
        return gradient / (gradient.abs() + self.eps)


@dataclass(frozen=True)
class Adam(Entrywise):
    """Adam, running averages and bias correction included; ε, in units of n · gradient, keeps it Lipschitz."""

    degrees: ClassVar = {"first": 1, "second": 2}
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self.eps)

    def update(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """As torch.optim.Adam."""
        first, second = state.get("first"), state.get("second")
        new, square = (1 - self.beta1) * gradient, (1 - self.beta2) * gradient * gradient
        state["first"] = first = new if first is None else new.add_(first, alpha=self.beta1)
        state["second"] = second = square if second is None else square.add_(second, alpha=self.beta2)
        size = (second / (1 - self.beta2**step)).sqrt_().add_(self.eps)
        return first / size / (1 - self.beta1**step)


def _check_positive(eps: float) -> None:
    if not eps > 0:
        raise MupscaleError(f"ε must be above 0, not {eps}: without it the update is no pseudo-Lipschitz function")
