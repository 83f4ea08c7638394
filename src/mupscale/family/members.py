"""The members of a family: as their author builds them; and those of one depth, run on a batch, with their plans.

Members are built with memory or without, and it is known which width each was built for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook

from mupscale import planning
from mupscale.core import Axis, Entry, Initial, PlainWidth, Plan, Role, Width, WidthLike, naming, part_of_units
from mupscale.growth import Operator, is_replica
from mupscale.planning import How, Miniature, Resizing, Trials, all_tensors, find_uneven
from mupscale.system import MupscaleError, not_advising, seeded

_MOST_WIDTHS = 64  # that a model of somebody else's is compared with
_PROBE_WIDTH = 8  # the least width of the models that are run to learn or check roles
_WIDE_ENOUGH = 64  # below this width an initialisation says little about wide ones
_PIECE = 1 << 20  # numbers that are measured in double precision at a time
_BY_CHANCE = 6.0  # standard errors by which a spread may be another
_DRAWS = 4  # freshly built models that the initialisation is measured on; of large ones two will do
_MOST_NUMBERS = 1 << 22  # of a model that is not large


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
        """What `drawn` gives, with values for the parameters that are named alone: the others share one's memory."""
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


class DepthMembers(BuiltMembers):
    """The members of a family that have one depth; arguments are those of `Family`."""

    def __init__(
        self,
        build: Callable[..., nn.Module],
        base: Width,
        init_at: Width | None = None,
        roles: Mapping[str, Role] | None = None,
        inputs: Any = None,
        tried: set[frozenset[str]] | None = None,
    ) -> None:
        super().__init__(build, base, roles, inputs)
        self.tried: set[frozenset[str]] = set() if tried is None else tried
        self._trials: Trials | None = None
        self._pairs: dict[tuple[Width, Width], tuple[nn.Module, nn.Module]] = {}  # while they are learnt from
        self._base_model = self.sketch(base)
        self._width_dims = self._find_width_dims()
        self.init_at = init_at or self._default_init_at()
        self._plans: dict[tuple[Width, Width, int], Plan] = {}  # by both widths, and how much had been tried then
        self._measured: dict[str, float] | None = None
        self._laws: dict[str, Initial] = {}
        self._known_centres: set[str] = set()  # of patterns, those that draws lie about
        if tried is None and inputs is not None:
            self._learn(inputs)
            probes = self._probes(inputs)
            plan = self._between_probes(probes, "copies")
            planning.warn_of_growing_outputs(probes.narrow, probes.wide, plan, probes.inputs, probes.given(roles or {}))
            planning.warn_of_staying_inputs(plan)
            self._pairs.clear()

    def _find_width_dims(self) -> dict[str, set[int]]:
        """By parameter and buffer, the dimensions that change when the widths double, together or one at a time."""
        names = list(self._base.sizes)
        probes = [None] if len(names) == 1 else [None, *([name] for name in names)]
        small = all_tensors(self._base_model)
        width_dims: dict[str, set[int]] = {}
        for sizes in probes:
            with nullcontext() if sizes is None else suppress(Exception):  # a width alone may not be buildable
                for name, tensor in all_tensors(self.sketch(self._base.times(2, sizes))).items():
                    if name in small and small[name].dim() == tensor.dim():
                        grown = {d for d in range(tensor.dim()) if tensor.shape[d] != small[name].shape[d]}
                        width_dims.setdefault(name, set()).update(grown)
        if not any(width_dims.values()):
            raise MupscaleError(
                f"no parameter changes when the width doubles from {self.base}: does build use its argument?"
            )
        return width_dims

    def _default_init_at(self) -> Width:
        """The base, or its smallest multiple at which every matrix is 64 wide: a base of 2 may be 2 heads of 32."""
        tensors, dims = all_tensors(self._base_model), self._width_dims
        widths = [tensors[name].shape[d] for name in dims if tensors[name].dim() > 1 for d in dims[name]]
        size = max(self._base.size, min(widths, default=0))
        return self._base.times(max(1, math.ceil(_WIDE_ENOUGH / size))) if self._base.is_whole else self._base

    # ------------------------------------------------------------------------------------------- small members, run

    def has_tried(self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> bool:
        """Whether small members have grown as these two differ: of a width with several sizes, in the same ones."""
        few, many = (self.width_of(member) for member in (narrow, wide))
        if not self.tried or len(self._base.sizes) == 1:
            return bool(self.tried)
        differing = None if few is None or many is None else {n for n, k in many.ratio_to(few).items() if k != 1}
        return differing is not None and (not differing or frozenset(differing) in self.tried)

    def check_widths(self, inputs: Any, sizes: Iterable[str] | None = None) -> None:
        """An error unless small members of these sizes widen exactly on a batch, or a stronger one of its kind."""
        growing = frozenset(self._base.sizes if sizes is None else sizes)
        if not growing:
            return
        trials = inputs if isinstance(inputs, Trials) else Trials(self._probes(inputs, sizes=growing).inputs)
        self._check_at(1, trials, growing)
        self.tried.add(growing)
        if trials is not inputs:
            trials.warn(self.roles)
            self._pairs.clear()

    @not_advising("inputs")  # which are given
    def _check_at(self, times: int, trials: Trials, sizes: Iterable[str] | None = None) -> None:
        probes = self._probes(trials.given, times, sizes)
        planning.check_plan_by_running(probes.narrow, probes.wide, self._between_probes(probes, "copies"), trials)

    def _probes(self, inputs: Any, times: int = 1, sizes: Iterable[str] | None = None) -> Miniature:
        """Two small members of the family, one twice as wide as the other; with few blocks if they are large."""
        small = self._smaller(self._base.times(max(1, math.ceil(_PROBE_WIDTH / self._base.size)))).times(times)
        wide = small.times(2, sizes)
        if (small, wide) not in self._pairs:
            self._pairs[small, wide] = self._with_memory(small), self._with_memory(wide)
        return Miniature.of(*self._pairs[small, wide], inputs)

    def _smaller(self, width: Width) -> Width:
        """This width, or, where members are large, the least part of it at which everything is so much smaller."""
        whole = self.sketch(width)
        for divisor in (128, 64, 32, 16, 8, 4, 2) if planning.is_large(whole) else ():
            with suppress(Exception):  # no model can be built at this width
                small = Width.of(width.times(Fraction(1, divisor)).plain, whole=True)
                if small.size >= _PROBE_WIDTH:
                    pair = Resizing(self.sketch(small), whole)
                    if pair.ratio == divisor and pair.is_uniform:
                        return small
        return width

    @cached_property
    def can_draw_parts(self) -> bool:
        """Whether parts have the values of the whole, as a small member shows.

        Each parameter is made alone, while all others write into the memory that they share: whoever starts as
        another's values finds them lost, if they can be lost in any part.
        """
        with suppress(Exception):  # whatever an author's code says to parameters that share their memory
            small = self._smaller(self._base)
            whole = naming.parameters(self.drawn(small, 0))
            for name, p in whole.items():
                made = naming.parameters(self.drawn_part(small, 0, (name,)))
                if made.keys() != whole.keys() or not torch.equal(made[name], p):
                    return False
            return not naming.plain_tensors_without_memory(self.sketch(small))
        return False

    def _learn(self, inputs: Any) -> None:
        """Where module types and names mislead, take the roles from runs of small members of the family."""
        probes = self._probes(inputs)
        given, trials = self.roles, Trials(probes.inputs)
        self._trials = trials
        with suppress(Exception):  # whatever the modules mislead to; the run may tell
            self.check_widths(trials)
        if not self.tried:
            narrow, wide = probes.narrow, probes.wide
            uneven = find_uneven(narrow, wide)
            if uneven and not planning.joins_what_stays(narrow, wide):
                raise self._rounded_size_error(uneven)
            try:
                learnt = planning.learn_roles(narrow, wide, trials, probes.given(self.roles or {}))
            except MupscaleError as error:
                if uneven:  # nothing is joined that stays: the size is rounded, and that is what to mend
                    raise self._rounded_size_error(uneven) from error
                raise
            any_width = planning.roles_for_any_width(narrow, wide, planning.with_keeps(narrow, wide, learnt, trials))
            self.roles = probes.patterns(any_width, self.roles or {})
            self._check_at(2, trials)  # at another width, too, since roles are for all of them
            self.check_widths(trials)
        trials.renamed(probes.originals).warn(given)

    def _rounded_size_error(self, uneven: str) -> MupscaleError:
        """The error for a size that does not double with the width, with other bases at which all sizes do."""
        even_bases = list[str]()
        for base in (self._base.times(factor) for factor in (Fraction(3, 2), 2, 3, 4, 6, 8)):
            with suppress(Exception):  # no model can be built at this width
                members = [self.sketch(Width.of(base, whole=True).times(k)) for k in (1, 2, 4)]
                if not any(find_uneven(*pair) for pair in pairwise(members)):
                    even_bases.append(str(base))
        such = f", such as {' or '.join(even_bases[:2])}" if even_bases else ""
        return MupscaleError(
            f"{uneven} does not grow by a whole multiple. If a size is rounded up, build it as a multiple of the "
            f"width, or use a base at which it is not rounded{such}. The base may differ from the width of the model "
            "that grows"
        )

    @cached_property
    def _past_norms(self) -> Mapping[str, tuple[int, ...]] | None:
        """What a run of two small members shows; None without a batch."""
        if self._trials is None:
            return None
        probes = self._probes(self._trials.given)
        plan = self._between_probes(probes, "fresh")
        past = planning.find_past_norms(probes.narrow, probes.wide, plan, self._trials.best)
        return None if past is None else probes.by_original(past)

    # ------------------------------------------------------------------------------------------- plans

    def between(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        *,
        how: How,
        tried: bool = False,
        roles: Mapping[str, Role] | None = None,
    ) -> Plan:
        tried = tried or self.inputs is not None or bool(self.tried)
        roles, dims = self.roles if roles is None else roles, self._width_dims
        is_width = lambda name, dim: dim in dims.get(name, ())  # noqa: E731
        return planning.build_plan(narrow, wide, roles=roles, how=how, is_width=is_width, assume=tried)

    def _between_probes(self, probes: Miniature, how: How) -> Plan:
        return self.between(probes.narrow, probes.wide, how=how, tried=True, roles=probes.given(self.roles or {}))

    def plan(self, width: WidthLike | nn.Module) -> Plan:
        if isinstance(width, nn.Module):
            return self._noting_trial(self.between(self._base_model, width, how="mup"), self._base, width)
        return self._mup(self._base, Width.of(width))

    def _mup(self, start: Width, width: Width) -> Plan:
        """Every factor at a width relative to another; made once, as every draw at a width needs it."""
        key = start, width, len(self.tried)
        if key not in self._plans:
            first = self._base_model if start == self._base else self.sketch(start)
            self._plans[key] = self._noting_trial(self.between(first, self.sketch(width), how="mup"), start, width)
        return self._plans[key]

    def widening(
        self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module, *, grow: Operator | None = None
    ) -> Plan:
        wide_model = self._at(wide)
        copies = grow is None or grow.needs_multiples
        plan = self.between(self._at(narrow), wide_model, how="copies" if copies else "fresh")
        entries = self.between(self.sketch(self.init_at), wide_model, how="mup").parameters
        past_norms = self._past_norms if plan.norms else None
        plan = planning.with_laws(plan, entries, self.initial_laws())
        return self._noting_trial(plan.with_initial("past_norms", past_norms), narrow, wide)

    def growth_plan(self, narrow: WidthLike, wide: WidthLike, grow: Operator) -> Plan:
        """The plan of a growth by this operator, for which neither member needs memory."""
        if is_replica(grow):  # for which initial values are not needed, and so not measured
            return self._noting_trial(self.between(self._at(narrow), self._at(wide), how="copies"), narrow, wide)
        return self.widening(narrow, wide, grow=grow)

    def _noting_trial(self, plan: Plan, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> Plan:
        return replace(plan, tried_by="small members" if self.has_tried(narrow, wide) else None)

    def _at(self, width: WidthLike | nn.Module) -> nn.Module:
        return width if isinstance(width, nn.Module) else self.sketch(width)

    # ------------------------------------------------------------------------------------------- initial values

    def init_untried(self, width: WidthLike, seed: int = 0) -> nn.Module:
        model = self.drawn(width, seed)
        self._rescale(naming.parameters(model), width, seed)
        return model

    def init_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        model = self.drawn_part(width, seed, part)
        parameters = naming.parameters(model)
        self._rescale({name: parameters[name] for name in part}, width, seed)
        return model

    @torch.no_grad()
    def _rescale(self, parameters: Mapping[str, nn.Parameter], width: WidthLike, seed: int) -> None:
        """From the author's initial values to those under μP, in place.

        What is random and has no width is that of a draw at `init_at`; a std of 0 is a constant. Parts of a tensor
        that start differently are rescaled each by its own law, and of a pattern with noise the noise alone.
        """
        if Width.of(width) == self.init_at:
            return
        entries = self._mup(self.init_at, Width.of(width)).parameters
        laws = self.initial_laws()
        reference: dict[str, nn.Parameter] = {}
        if any(law.std and not entries[name].axes for name, law in laws.items()):
            reference = naming.parameters(self.drawn(self.init_at, seed))
        centres: dict[str, nn.Parameter] = {}
        if not self._known_centres.isdisjoint(parameters):
            centres = self._centres(width, self._known_centres.intersection(parameters))
        for name, p in parameters.items():
            entry, law = entries[name], laws[name]
            if not law.std:
                _scale_with_offset(p, entry)
            elif not entry.axes:
                p.copy_(reference[name])
            elif name in centres:
                _rescale_about(p, centres[name], law, entry)
            else:
                _rescale_parts(p, planning.law_at_width(law, entry), entry)

    def _centres(self, width: WidthLike, names: Collection[str]) -> dict[str, nn.Parameter]:
        """What these parameters of a model start as, but for what is random in it."""
        with planning.CentralDraws():
            parameters = naming.parameters(self.drawn_alone(width, 0, names))
        return {name: parameters[name] for name in names}

    def initial_std(self) -> dict[str, float]:
        """Std of the author's initialisation at `init_at`, over a few draws; 0 for what is not random."""
        if self._measured is not None:
            return self._measured
        self._measured = {}
        sizes = {name: p.numel() for name, p in naming.parameters(self.sketch(self.init_at)).items()}
        if sum(sizes.values()) <= _MOST_NUMBERS:
            draws = [naming.parameters(self.drawn(self.init_at, seed)) for seed in range(_DRAWS)]
            more = range(_DRAWS, planning.count_draws(draws, self._width_dims))
            self._measure([*draws, *(naming.parameters(self.drawn(self.init_at, seed)) for seed in more)])
            return self._measured
        for part in _parts(sizes):
            models = (naming.parameters(self.drawn_alone(self.init_at, seed, part)) for seed in range(2))
            self._measure([{name: parameters[name] for name in part} for parameters in models])
        return self._measured

    def initial_laws(self) -> Mapping[str, Initial]:
        """The law of each parameter of the author's initialisation at `init_at`, over a few draws."""
        self.initial_std()
        return self._laws

    def _measure(self, draws: list[dict[str, nn.Parameter]]) -> None:
        stds = planning.initial_std(draws)
        self._measured = {**(self._measured or {}), **stds}
        laws = planning.measure_laws(draws, stds, self._axes_at_init)
        self._laws |= laws
        patterns = [name for name, law in laws.items() if law.std and law.means == ()]
        with suppress(Exception):  # whatever an author's code says to numbers that are all the same
            centres = self._centres(self.init_at, patterns) if patterns else {}
            for name, centre in centres.items():
                if planning.lie_about([draw[name].detach() for draw in draws], centre.detach()):
                    self._known_centres.add(name)

    def _axes_at_init(self, name: str) -> Mapping[int, Axis]:
        """The width axes of a parameter of the model at `init_at`, with the blocks in which they grow."""
        with suppress(MupscaleError):  # this size may not be buildable, or not be divisible
            return self._mup(self.init_at, self.init_at.times(2)).parameters[name].axes
        return {d: Axis() for d in sorted(self._width_dims.get(name, ()))}

    # ------------------------------------------------------------------------------------------- growth

    def wider(self, model: nn.Module, width: WidthLike, grow: Operator, inputs: Any) -> tuple[nn.Module, Plan]:
        """A member for this one to grow into, without memory if that will do, and the plan, tried on a batch if any."""
        wide = self.sketch(width)
        if _lacks_values(wide, model, fresh=not grow.needs_multiples):
            wide = self._with_memory(width)
        plan = self.widening(model, wide, grow=grow)
        if inputs is not None and (grow.needs_multiples or not plan.checked):
            has_memory = not any(tensor.is_meta for tensor in all_tensors(wide).values())
            check = planning.check_plan_by_running if grow.needs_multiples else planning.check_silent_units
            check(model, wide if has_memory else self._with_memory(width), plan, inputs)
            plan = replace(plan, tried_by="copies" if grow.needs_multiples else "silent units")
        return wide, plan

    def _with_memory(self, width: WidthLike) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return self.build(width)


def _scale_with_offset(p: Tensor, entry: Entry) -> None:
    """Multiply what the model uses, which is the tensor and its offset, by the entry's fold."""
    fold, offset = float(entry.fold), float(entry.offset)
    p.mul_(fold).add_(offset * (fold - 1))


def _rescale_about(p: Tensor, centre: Tensor, law: Initial, entry: Entry) -> None:
    """Give what is random in the tensor, all but its centre, the spread that it has under μP."""
    noise = p - centre
    spread = math.sqrt(float(noise.double().square().mean()))
    p.copy_(centre)
    _scale_with_offset(p, entry)
    p.add_(noise, alpha=(law.std or 0.0) * entry.init / spread if spread else 1.0)


def _rescale_parts(p: Tensor, law: Initial, entry: Entry) -> None:
    """Give each part of the tensor the standard deviation that the law has; parts of one law are one.

    Of what follows no law nothing tells what is constant in it, so it is left alone where its spread may be right.
    """
    if law.means == () and entry.fold == 1 and _has_spread(p, law.std or 0.0):
        return
    if len(law.means or ()) < 2:
        _rescale_spread(p, law.std or 0.0, entry, centred=law.means != (0.0,))
        return
    units = p.shape[law.dim]
    parts = part_of_units(units, len(law.means or ()), law.run)
    laws = list(zip(law.means or (), law.stds, strict=True))
    for mean, std in dict.fromkeys(laws):
        alike = torch.tensor([one == (mean, std) for one in laws])
        index = torch.nonzero(alike[parts]).flatten().to(p.device)
        rows = p.index_select(law.dim, index)
        _rescale_spread(rows, std, entry, centred=mean != 0)
        p.index_copy_(law.dim, index, rows)


def _has_spread(p: Tensor, std: float) -> bool:
    """Whether the tensor may have this standard deviation, as far as its numbers tell."""
    spread = float(p.detach().double().std(correction=0))
    return abs(spread - std) <= std * _BY_CHANCE / math.sqrt(p.numel())


def _rescale_spread(p: Tensor, std: float, entry: Entry, *, centred: bool) -> None:
    """Give the tensor this standard deviation, about 0, or about its own mean, which is kept, times fold."""
    pieces, count = p.detach().reshape(-1).split(_PIECE), max(1, p.numel())  # a large tensor is not copied whole
    center = sum(float(piece.double().sum()) for piece in pieces) / count if centred else 0.0
    spread = math.sqrt(sum(float((piece.double() - center).square().sum()) for piece in pieces) / count)
    if spread == 0 or std == 0:
        _scale_with_offset(p, entry)
    else:
        fold, offset = float(entry.fold), float(entry.offset)
        p.sub_(center).mul_(std / spread)
        p.add_(center * fold + offset * (fold - 1) if centred else 0.0)


def _parts(sizes: Mapping[str, int]) -> list[list[str]]:
    """Parameters in parts that have no more numbers than the largest of them, or than a small model."""
    most, parts, held = max(*sizes.values(), _MOST_NUMBERS // _DRAWS), list[list[str]](), math.inf
    for name, size in sizes.items():
        if held + size > most:
            parts, held = [*parts, []], 0
        parts[-1].append(name)
        held += size
    return parts


def _lacks_values(wide: nn.Module, narrow: nn.Module, *, fresh: bool) -> bool:
    """Whether a wide model without memory lacks values that neither a plan nor the narrow model has.

    Plain tensors; buffers that no state dict holds and that may depend on the width; and, beside fresh units, buffers
    that grow, but for statistics, which start anew.
    """
    ours, modules = naming.buffers(narrow), naming.modules(wide)
    for name, buffer in naming.buffers(wide).items():
        path, _, local = name.rpartition(".")
        if buffer.is_meta and name in ours:
            grows, is_unsaved = buffer.shape != ours[name].shape, local in modules[path]._non_persistent_buffers_set
            if is_unsaved and (grows or buffer.numel() == 1):
                return True
            if fresh and grows and not isinstance(modules[path], _NormBase):
                return True
    return bool(naming.plain_tensors_without_memory(wide))
