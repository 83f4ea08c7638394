"""A family with a depth: at each number of blocks a family of widths, and what carries over from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mupscale.core import DepthRule, Plan, RuleSet, Width, WidthLike, check_same_names, naming
from mupscale.family.built_members import BuiltMembers
from mupscale.family.grown_members import grow_member
from mupscale.growth import (
    DepthOperator,
    Grow,
    Operator,
    is_replica,
    plan_depth,
    refuse_idle_operator,
    split_operators,
    warn_of_replica,
    with_depth,
)
from mupscale.planning import BlockList, Writers, find_block_lists, find_writers
from mupscale.system import MupscaleError


class Depths:
    """The members of a family by their number of blocks.

    family: the family of all of them. name: the size that is the number of blocks. make: from a function that builds
    models of one depth, and a width, to the family of these models.
    """

    def __init__(
        self,
        family: BuiltMembers,
        name: str,
        base: Width,
        init_at: Width | None,
        rule: DepthRule,
        make: Callable[..., Any],
    ) -> None:
        self.family, self.name, self.rule, self._make = family, name, rule, make
        self.base, self._widths = int(base.sizes[name]), self._without(base)
        self._init_at = None if init_at is None else self._without(init_at)
        self.init_at = self.base if init_at is None else int(init_at.sizes[name])
        self._members: dict[int, Any] = {}
        self._as_built: dict[int, Any] = {}
        self._factors: dict[int, dict[str, tuple[float, float]]] = {}
        self._writers_in_base: tuple[dict[str, Writers], dict[str, str]] | None = None

    # ------------------------------------------------------------------------------------------- members

    def _without(self, width: Width) -> Width:
        return Width.of({name: size for name, size in width.sizes.items() if name != self.name})

    def split(self, width: WidthLike) -> tuple[int, Width]:
        """The number of blocks, and the other sizes."""
        width = Width.of(width)
        if self.name not in width.sizes:
            raise MupscaleError(f"a width of this family must name its depth, {self.name}, but {width.plain} does not")
        self._check_sizes(width)
        return int(width.sizes[self.name]), self._without(width)

    def _check_sizes(self, width: Width) -> None:
        """An error unless the width names this family's sizes; the depth may be left out."""
        if width.is_plain or width.sizes.keys() - {self.name} != self._widths.sizes.keys():
            ratio = width.size / next(iter(self._widths.sizes.values()))
            wider = self._widths.times(int(ratio) if ratio > 1 and ratio == int(ratio) else 2)
            raise MupscaleError(
                f"the sizes of this family are {', '.join(self._widths.sizes)} and {self.name}, but a width of "
                f"{width.plain} does not name them. Write width={wider.plain}, and add {self.name} if the depth grows, "
                "too"
            )

    def join(self, depth: int, widths: Width) -> Width:
        """The width that has so many blocks and these other sizes."""
        return Width.of({**widths.sizes, self.name: depth})

    def at(self, depth: int) -> Any:
        """The family of all widths at this depth."""
        if depth not in self._members:
            at_base = self._members.get(self.base)
            learnt = at_base is None or at_base.roles != self.family.roles
            member = self._make(
                lambda **sizes: self._build(depth, sizes),
                self._widths.plain,
                init_at=None if self._init_at is None else self._init_at.plain,
                roles=self.family.roles,
                inputs=self.family.inputs if learnt else None,
            )
            if at_base is not None and not learnt:
                member.tried = at_base.tried
            self._members[depth] = member
        return self._members[depth]

    def _build(self, depth: int, sizes: dict[str, Any]) -> nn.Module:
        """The author's model, initialised as the depth rule says."""
        model = self.family.build({**sizes, self.name: depth})
        if self.rule == "none" or depth == self.init_at or any(p.is_meta for p in model.parameters()):
            return model
        with torch.no_grad():
            for name, p in naming.parameters(model).items():
                factor, offset = self._initial_factors(depth).get(name, (1.0, 0.0))
                if factor != 1:
                    p.add_(offset).mul_(factor).sub_(offset)
        return model

    def _initial_factors(self, depth: int) -> dict[str, tuple[float, float]]:
        """What the author's initial values of blocks are multiplied by, to be those at `init_at` times fold.

        An author's own dependence on the depth is taken back; what writes into the stream gets 1/L instead.
        """
        if depth not in self._factors:
            ours, theirs = (self._built_as_is(d).initial_std() for d in (self.init_at, depth))
            one_lists = self._lists(self.init_at, depth)
            plan = with_depth(
                self._built_as_is(depth).plan(self._widths), one_lists, self._writers(one_lists), self.rule
            )
            factors = {}
            for one in one_lists:
                for number, path in enumerate(one.deep):
                    source = one.shallow[number * len(one.shallow) // len(one.deep)]
                    for name in (name for name in theirs if name.startswith(f"{path}.")):
                        before = ours[source + name.removeprefix(path)]
                        factor = before / theirs[name] if before and theirs[name] else 1.0
                        entry = plan[name]
                        factors[name] = factor * float(entry.fold * entry.constants.undo), float(entry.offset)
            self._factors[depth] = factors
        return self._factors[depth]

    def _built_as_is(self, depth: int) -> Any:
        """The family at this depth with its author's own initial values."""
        if depth not in self._as_built:
            at = None if self._init_at is None else self._init_at.plain
            self._as_built[depth] = self._make(
                lambda **sizes: self.family.build({**sizes, self.name: depth}),
                self._widths.plain,
                init_at=at,
                roles=self.family.roles,
                inputs=self.family.inputs,
            )
        return self._as_built[depth]

    def depth_of(self, model: nn.Module) -> int:
        """How many blocks a model has, in the units of the family's size."""
        width = self.family.width_of(model)
        if width is not None:
            return int(width.sizes[self.name])
        (first, *_) = self._lists(self.base, 2 * self.base)
        expression = first.path.replace("*", "")
        paths = [p for p in naming.modules(model) if p.startswith(expression) and p.removeprefix(expression).isdigit()]
        depth = len(paths) * self.base // len(first.shallow)
        if depth < 1:
            base = naming.modules(self.family.sketch(self.join(self.base, self._widths)))
            advice = "pass a model of the class that the family builds"
            check_same_names("this model", naming.modules(model), "the family's base model", base, advice, "module")
        return depth

    def _lists(self, shallow: int, deep: int) -> list[BlockList]:
        """The blocks at one depth beside those at another, which may be smaller or the same."""
        few, many = (self.family.sketch(self.join(depth, self._widths)) for depth in (shallow, deep))
        if shallow == deep:
            more = self.family.sketch(self.join(2 * deep, self._widths))
            return [replace(one, deep=one.shallow, moved={}) for one in find_block_lists(few, more)]
        if shallow < deep:
            return find_block_lists(few, many)
        return [replace(one, shallow=one.deep, deep=one.shallow, moved={}) for one in find_block_lists(many, few)]

    def _writers(self, lists: list[BlockList], side: str = "deep", inputs: Any = None) -> dict[str, Writers]:
        """What writes into the stream, in each block of one side, as a run of the base model shows."""
        writers, reasons = self._base_writers(inputs)
        base = {one.path: one.shallow for one in self._lists(self.base, self.base)}
        written = {}
        for one in lists:
            paths = getattr(one, side)
            for number, path in enumerate(paths):
                source = base[one.path][number * len(base[one.path]) // len(paths)]
                if source in writers:
                    written[path] = writers[source]
                elif self.rule != "none":
                    raise MupscaleError(
                        f"rates cannot follow the depth: of '{source}', {reasons[source]}. Use RuleSet(depth='none')"
                    )
            if not any(path in written for path in paths):
                source, reason = next((path, reasons[path]) for path in base[one.path])
                raise MupscaleError(
                    f"'{source}' cannot start as identity: {reason}. Grow by Stack(), which copies blocks and changes "
                    "the function, or widen the model instead"
                )
        return written

    def _base_writers(self, inputs: Any) -> tuple[dict[str, Writers], dict[str, str]]:
        """Run the base model once, on the CPU."""
        if self._writers_in_base is None:
            sample = self.family.inputs if inputs is None else inputs
            if sample is None:
                raise MupscaleError(
                    "the library runs a small model to find what writes into the residual stream. Pass inputs= to the "
                    "Family: a small batch, as its models are called"
                )
            with torch.random.fork_rng(devices=[]):
                model = self.family.build(self.join(self.base, self._widths))
            paths = [path for one in self._lists(self.base, self.base) for path in one.deep]
            batch = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, sample)
            self._writers_in_base = find_writers(model, paths, batch)
        return self._writers_in_base

    # ------------------------------------------------------------------------------------------- plans and growth

    def plan(self, width: WidthLike | nn.Module) -> Plan:
        """μP at this width and depth, relative to the base."""
        if isinstance(width, nn.Module):
            depth = self.depth_of(width)
            plan: Plan = self.at(depth).plan(width)
        else:
            depth, widths = self.split(width)
            plan = self.at(depth).plan(widths)
        if self.rule == "none":
            return plan
        lists = self._lists(self.base, depth)
        return with_depth(plan, lists, self._writers(lists), self.rule)

    def widening(
        self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module, *, grow: Operator | None = None
    ) -> Plan:
        """The plan for growing in width; both members have one depth."""
        members, depths = list[Any](), list[int]()
        for member in (narrow, wide):
            is_model = isinstance(member, nn.Module)
            depth, rest = (self.depth_of(member), member) if is_model else self.split(member)  # type: ignore[arg-type]
            depths.append(depth)
            members.append(rest)
        if depths[0] != depths[1]:
            raise MupscaleError(
                f"a plan for widening is between models of one depth, not of {depths[0]} and {depths[1]}: use "
                "plan_depth for the depth, or upscale(…, depth=…) for both"
            )
        plan: Plan = self.at(depths[0]).widening(members[0], members[1], grow=grow)
        return plan

    def growth_plan(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> Plan:
        """The plan for growing in width, and then in depth."""
        (few, narrow_widths), (many, widths) = self.split(narrow), self.split(wide)
        wider, deeper = split_operators(grow)
        plan: Plan = self.at(few).growth_plan(narrow_widths, widths, wider)
        if many == few:
            return plan
        shallow, deep = (self.family.sketch(self.join(depth, widths)) for depth in (few, many))
        writers = None
        if not deeper.copies or self.rule == "complete":
            writers = self._writers(find_block_lists(shallow, deep), "shallow")
        blocks = plan_depth(shallow, deep, grow=deeper, rules=RuleSet(depth=self.rule), writers=writers)
        plan = replace(plan.then(blocks), tried_by=plan.tried_by)
        if deeper.copies and is_replica(wider):  # nothing is drawn
            return plan
        return replace(plan, initial=self.at(many).widening(widths, widths, grow=wider).initial)

    def check_growth(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> None:
        """An error where one member cannot grow into the other in this way; no model is built with memory."""
        (few, narrow_widths), (many, wide_widths) = self.split(narrow), self.split(wide)
        wider, deeper = split_operators(grow)
        wider.check(self.at(few).widening(narrow_widths, wide_widths, grow=wider))
        if many < few:
            raise MupscaleError(f"the model has depth {few} and cannot grow to depth {many}. Choose a larger depth")
        if many > few and not deeper.copies:
            self._writers(self._lists(few, many), "shallow")
        if many > few:
            deeper.places(few, many)

    def has_tried(self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> bool:
        """Whether small members at the base's depth have grown as these two differ in width."""
        members = [m if isinstance(m, nn.Module) else self.split(m)[1] for m in (narrow, wide)]
        tried: bool = self.at(self.base).has_tried(*members)
        return tried

    def init_untried(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """A model under μP at this width and depth."""
        depth, widths = self.split(width)
        model: nn.Module = self.at(depth).init_untried(widths, seed)
        return model

    def init_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """The same, with values for the parameters that are named alone."""
        depth, widths = self.split(width)
        model: nn.Module = self.at(depth).init_part(widths, seed, part)
        return model

    def check(self, inputs: Any, sizes: Iterable[str] | None = None) -> None:
        """An error unless small members widen exactly, as `Family.check` says."""
        self.at(self.base).check(inputs, None if sizes is None else [size for size in sizes if size != self.name])

    def _grown(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        width: WidthLike | None,
        depth: int | None,
        grow: Grow | None,
        lr: float | None,
        seed: int,
        place: Callable[[nn.Module], nn.Module] | None,
        inputs: Any,
        *,
        exact: bool,
    ) -> tuple[nn.Module, Optimizer | None]:
        """The model wider, deeper, or both."""
        depth, widths = self._target(width, depth)
        before = self.depth_of(model)
        wider, deeper = split_operators(grow)
        after = before if depth is None else depth
        if after < before or (after == before and widths is None):
            raise MupscaleError(f"the model has depth {before} and cannot grow to depth {after}. Choose a larger depth")
        has_width = self.family.width_of(model)
        current = None if has_width is None else self._without(has_width)
        widens = widths is not None and (widths != current or after == before)
        refuse_idle_operator(grow, wider=widens, deeper=after != before)
        if widens and not exact:
            warn_of_replica(wider)
        at = widths if widths is not None else current
        if at is None:
            raise MupscaleError("this model was not built by the family. Give width= as well as depth=")
        deepen = partial(self._deepened, target=self.join(after, at), grow=deeper, seed=seed, inputs=inputs)
        target, more = widths if widens else None, deepen if after != before else None
        return grow_member(self.at(before), model, optimizer, target, more, wider, lr, seed, place, inputs)

    def _target(self, width: WidthLike | None, depth: int | None) -> tuple[int | None, Width | None]:
        """The depth and the other sizes that a model is to grow to, as far as they are said."""
        if width is None:
            if depth is None:
                raise MupscaleError("give the size to grow to: width=, depth=, or both")
            return depth, None
        given = Width.of(width)
        if given.is_plain and len(self._widths.sizes) == 1:  # there is no other size that it could be
            given = Width.of(dict.fromkeys(self._widths.sizes, given.size))
        if given.sizes.keys() == {self.name}:
            widths = None
        else:
            self._check_sizes(given)
            widths = self._without(given)
        if self.name in given.sizes:
            if depth not in (None, given.sizes[self.name]):
                raise MupscaleError(
                    f"width= names depth {given.sizes[self.name]}, but depth= is {depth}: give one of them"
                )
            depth = int(given.sizes[self.name])
        return depth, widths

    def _deepened(
        self, shallow: nn.Module, *, target: Width, grow: DepthOperator, seed: int, inputs: Any
    ) -> tuple[nn.Module, Plan]:
        """The model with more blocks, as it is initialised, and what each of its tensors is made of."""
        deep, writers = self.init_untried(target, seed), None
        if not grow.copies or self.rule != "none":
            writers = self._writers(find_block_lists(shallow, deep), "shallow", inputs)
        return deep, plan_depth(shallow, deep, grow=grow, rules=RuleSet(depth=self.rule), writers=writers)
