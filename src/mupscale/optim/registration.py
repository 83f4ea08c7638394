"""Teaching the library an optimizer, and asking what it knows of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch.optim import Optimizer

from mupscale.optim.optimizer_traits import (
    TRAITS,
    Traits,
    entrywise_traits,
    known_traits,
    states_by_degree,
    why_refused,
)
from mupscale.optim.optimizer_trials import check_registration, found_in_words
from mupscale.system import MupscaleError, checks_arguments


@checks_arguments
def register_optimizer(
    optimizer: type[Optimizer],
    *,
    degree: int | None = None,
    decoupled: bool | str | None = None,
    eps: Iterable[str] | None = None,
    state: Mapping[str, int] | None = None,
    like: type[Optimizer] | None = None,
    decay: str = "weight_decay",
    unscaled: Iterable[str] = (),
) -> None:
    """Teach the library an optimizer whose update is entrywise and homogeneous of `degree` in the gradient.

    degree: 0 if not said. decoupled: whether weight decay shrinks the weight by lr·λ instead of being added to the
    gradient, or the name of the option that says so; True if not said. eps: names of hyperparameters that are added to
    quantities of degree 1; ("eps",) if not said. state: degree of each state tensor. decay: the name of the weight
    decay. unscaled: options that the width does not change, or that you leave at their defaults. like: an optimizer
    known already, whose hyperparameters and state this one has, up to the name of the decay, and more state.

    A few steps on a tiny parameter, as it is and copied, try the registration. Options that change what copies do are
    asked about, and a wrong degree is told with what the steps show.

    >>> import torch, mupscale as mu
    >>> class Lion(torch.optim.Optimizer):  # steps by the sign of a momentum: degree 0
    ...     def step(self, closure=None): ...
    >>> mu.register_optimizer(Lion, degree=0, decoupled=True, eps=(), state={"exp_avg": 1})
    >>> mu.register_optimizer(type("MyAdam", (torch.optim.Optimizer,), {}), like=torch.optim.Adam)
    """
    if like is None:
        names = ("eps",) if eps is None else tuple(eps)
        is_decoupled = True if decoupled is None else decoupled
        traits = entrywise_traits(degree or 0, decoupled=is_decoupled, eps=names, state=state, decay=decay)
    else:
        said = {"degree=": degree, "decoupled=": decoupled, "eps=": eps}
        if both := [name for name, value in said.items() if value is not None]:
            raise MupscaleError(
                f"like={like.__name__} says how {optimizer.__name__} scales, and so does "
                f"{both[0]} Leave out one of them"
            )
        traits = _with_decay(traits_of(like), decay)
        traits = replace(traits, state={**traits.state, **states_by_degree(state or {})})
    check_registration(optimizer, traits, tuple(unscaled))
    TRAITS[optimizer] = traits


def _with_decay(traits: Traits, decay: str) -> Traits:
    """The traits of an optimizer that calls its weight decay so."""
    scaled, under_mup = (
        {decay if name == traits.decay else name: factor for name, factor in factors.items()}
        for factors in (traits.hyper, traits.mup_hyper)
    )
    return replace(traits, hyper=scaled, mup_hyper=under_mup, decay=decay)


def traits_of(optimizer: type[Optimizer]) -> Traits:
    """The traits of an optimizer class, or of a base class whose `step` it keeps; refused with the reason."""
    if (traits := known_traits(optimizer)) is not None:
        return traits
    if (reason := why_refused(optimizer)) is not None:
        raise MupscaleError(f"{optimizer.__name__} cannot follow the width: {reason}")
    raise MupscaleError(f"unknown optimizer {optimizer.__name__}. {found_in_words(optimizer)}")
