"""The members of a family as their author builds them, with memory or without, and which width each was built for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mupscale.core import PlainWidth, Role, Width, WidthLike, naming
from mupscale.system import MupscaleError, seeded

_MOST_WIDTHS = 64  # that a model of somebody else's is compared with


class BuiltMembers:
    """One architecture at every width, in the standard parametrisation; what `Family` adds is μP.

    build: from a width to a model. base, roles, inputs: as `Family` has them.
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
        self.depth_size: str | None = None  # the size that is a number of residual blocks
        self._built: WeakKeyDictionary[nn.Module, Width] = WeakKeyDictionary()

    @property
    def base(self) -> PlainWidth:
        """The width at which every factor is 1."""
        return self._base.plain

    def build(self, width: WidthLike) -> nn.Module:
        """The model as its author initialises it: the standard parametrisation."""
        width, names = Width.of(width), self._base.sizes.keys()
        if len(names) > 1 and not names <= width.sizes.keys():  # a default of the author's would not be one
            *others, last = names
            raise MupscaleError(
                f"the sizes of this family are {', '.join(others)} and {last}, but {width.plain} does not name them "
                f"all. Write {self._base.times(2, [name for name in names if name != self.depth_size]).plain}"
            )
        model = self.build_function(width.plain) if width.is_plain else self.build_function(**width.sizes)
        if not isinstance(model, nn.Module):
            raise MupscaleError(
                f"the family's build function returned {type(model).__name__} for width {width.plain}, not an nn.Module"
            )
        self._built[model] = width
        return model

    def drawn(self, width: WidthLike, seed: int) -> nn.Module:
        """The same with the numbers that follow from this seed."""
        with seeded(seed):
            return self.build(width)

    def drawn_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """What `drawn` gives, with values for the parameters that are named alone: the others share one's memory.

        So a model that is larger than memory can be made part by part.
        """
        largest = max((p.numel() for p in self.sketch(width).parameters()), default=0)
        shared: dict[torch.dtype, Tensor] = {}

        def share(p: nn.Parameter) -> Tensor:
            memory = shared.setdefault(p.dtype, torch.empty(largest, dtype=p.dtype))
            return memory[: p.numel()].view(p.shape)

        return self._drawn_in_part(width, seed, part, share)

    def drawn_alone(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """A model with values for the parameters that are named alone; others have no memory, and cost no time.

        Its values are no other call's: it is for what is measured. Where its author's code needs the others, they are
        there.

        >>> family = BuiltMembers(lambda width: nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2)), 8)
        >>> [p.is_meta for p in family.drawn_alone(16, 0, {"1.weight"}).parameters()]
        [True, True, False, True]
        """
        with suppress(Exception):  # whatever an author's code says to parameters without values
            model = self._drawn_in_part(width, seed, part, lambda p: p.detach().to("meta"))
            parameters = naming.parameters(model)
            if not any(parameters[name].is_meta for name in part):
                return model
        return self.drawn(width, seed)

    def _drawn_in_part(
        self, width: WidthLike, seed: int, part: Collection[str], other: Callable[[nn.Parameter], Tensor]
    ) -> nn.Module:
        """What `drawn` gives, with something else in the place of all parameters that are not named."""
        sketched: list[nn.Parameter] = []
        with _registering(sketched.append):
            sketch = naming.parameters(self.sketch(width))
        numbers = {id(p): number for number, p in enumerate(sketched)}
        kept, registered = {numbers[id(sketch[name])] for name in part}, itertools.count()

        def place(p: nn.Parameter) -> nn.Parameter | None:
            if next(registered) in kept:
                return None
            placed = nn.Parameter(other(p), p.requires_grad)
            vars(placed).update(vars(p))
            return placed

        with _registering(place):
            return self.drawn(width, seed)

    def sketch(self, width: WidthLike) -> nn.Module:
        """The model without memory, on the meta device; a real one where its author's code needs values."""
        try:
            with torch.device("meta"):
                return self.build(width)
        except Exception as error:  # whatever it is: a mistake of its author's shows again
            if "overflow" in str(error):  # a tensor with more entries than can be counted
                raise MupscaleError(f"a model of {Width.of(width).phrase} is too large: {error}") from None
            with torch.random.fork_rng(devices=[]):
                return self.build(width)

    def width_of(self, member: WidthLike | nn.Module) -> Width | None:
        """The width that a model was built for; of somebody else's, the one that its shapes and modules' numbers show.

        None where they show none, or where one of the sizes shows in neither.

        >>> import mupscale as mu
        >>> family = mu.Family(lambda width: nn.Linear(3, width), 8)
        >>> family.width_of(family.init(16)).plain
        16
        """
        if not isinstance(member, nn.Module):
            return Width.of(member)
        model = naming.unwrap(member)
        if model not in self._built and (width := self._width_by_shapes(model)) is not None:
            self._built[model] = width
        return self._built.get(model)

    def _width_by_shapes(self, model: nn.Module) -> Width | None:
        """Of the widths by whose ratios to the base some axis grew, the one that has all of the model's numbers."""
        if self.depth_size is not None:
            return None
        own, base, sizes = _numbers(model), _numbers(self.sketch(self._base)), self._base.sizes
        if own.keys() != base.keys() or any(len(own[name]) != len(base[name]) for name in base):
            return None
        pairs = {pair for name in base for pair in zip(own[name], base[name], strict=True)}
        ratios = sorted({Fraction(1), *(Fraction(n, m) for n, m in pairs if m and n / m > 0)})
        each = [[int(size * r) for r in ratios if size * r == int(size * r)] for size in sizes.values()]
        widths = [Width(dict(zip(sizes, some, strict=True)), self._base.is_plain) for some in itertools.product(*each)]
        if any(self._has(self._base.times(2, [name]), base) for name in sizes):  # a size that does not show
            return None
        found = [width for width in widths[:_MOST_WIDTHS] if self._has(width, own)]
        return found[0] if len(found) == 1 else None

    def _has(self, width: Width, numbers: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a model of this width has these numbers."""
        try:
            return _numbers(self.sketch(width)) == numbers
        except Exception:  # whatever the author's code says to sizes that do not go together
            return False


@contextmanager
def _registering(place: Callable[[nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """While models are built, every parameter is shown once, when a module takes it, and may be exchanged."""
    seen: dict[int, nn.Parameter] = {}

    def hook(module: nn.Module, name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        if p is None or id(p) in seen:  # a tied one, which has been placed
            return None
        placed = place(p)
        seen.update({id(one): one for one in (p, placed) if one is not None})
        return placed

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _numbers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, and the whole numbers that its modules keep (of heads, for example)."""
    numbers = {name: tuple(p.shape) for name, p in naming.parameters(model).items()}
    for path, module in naming.modules(model).items():
        kept = {k: v for k, v in vars(module).items() if type(v) is int and not k.startswith("_")}
        numbers[f"{path}()"] = tuple(kept[name] for name in sorted(kept))
    return numbers
