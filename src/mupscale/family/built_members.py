"""The members of a family as their author builds them, with memory or without, and which width each was built for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mupscale.core import PlainWidth, Role, Width, WidthLike, naming
from mupscale.system import MupscaleError, seeded


class BuiltMembers:
    """One architecture at every width, in the standard parametrisation; what `Family` adds is μP.

    build: from a width to a model. base, roles, inputs: as `Family` has them.

    >>> BuiltMembers(lambda width: nn.Linear(3, width), 8).sketch(16).weight.is_meta
    True
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        base: WidthLike,
        roles: Mapping[str, Role] | None = None,
        inputs: Any = None,
    ) -> None:
        self.build_function, self.roles, self.inputs = build, roles, inputs
        self._base = Width.of(base, "base")
        self._built: WeakKeyDictionary[nn.Module, Width] = WeakKeyDictionary()

    @property
    def base(self) -> PlainWidth:
        """The width at which every factor is 1."""
        return self._base.plain

    def build(self, width: WidthLike) -> nn.Module:
        """The model as its author initialises it: the standard parametrisation."""
        width = Width.of(width)
        self._check_names(width)
        model = width.pass_to(self.build_function)
        if not isinstance(model, nn.Module):
            raise MupscaleError(
                f"the family's build function gave {type(model).__name__} for width {width.plain}, no nn.Module"
            )
        self._built[model] = width
        return model

    def drawn(self, width: WidthLike, seed: int) -> nn.Module:
        """The same with the numbers that follow from this seed."""
        with seeded(seed):
            return self.build(width)

    def _check_names(self, width: Width) -> None:
        """An error where one of the base's several sizes is missing; a default of the author's would not be one."""
        names = self._base.sizes.keys()
        if len(names) > 1 and not names <= width.sizes.keys():
            *others, last = names
            raise MupscaleError(
                f"the sizes of this family are {', '.join(others)} and {last}, and {width.plain} does not name them; "
                f"say them all, as in {self._base.times(2).plain}"
            )

    def sketch(self, width: WidthLike) -> nn.Module:
        """The model without memory, on the meta device; a real one where its author's code needs values."""
        try:
            with torch.device("meta"):
                return self.build(width)
        except Exception as error:  # whatever it is: a mistake of its author's shows again
            if "overflow" in str(error):  # a tensor with more entries than can be counted
                raise MupscaleError(f"a model of width {Width.of(width)} is too large: {error}") from None
            with torch.random.fork_rng(devices=[]):
                return self.build(width)

    def width_of(self, member: WidthLike | nn.Module) -> Width | None:
        """None for a model that somebody else built, whose sizes need not show in its shapes (a number of heads).

        >>> import mupscale as mu
        >>> family = mu.Family(lambda width: nn.Linear(3, width), 8)
        >>> family.width_of(family.init(16)).plain
        16
        """
        return self._built.get(naming.unwrap(member)) if isinstance(member, nn.Module) else Width.of(member)
