"""A family: one architecture at every width and depth, initialised and trained under μP with its own modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from mupscale import growth
from mupscale.core import PlainWidth, Plan, Role, RuleSet, Width, WidthLike, check_same_names, naming
from mupscale.family.members import BuiltMembers, DepthMembers
from mupscale.growth import BlockList, DepthOperator, Grow, Noise, Operator, Writers
from mupscale.optim import make_optimizer, param_groups
from mupscale.planning import all_tensors, call_arguments, check_not_empty, take_modes
from mupscale.system import MupscaleError, NotNegative, UncheckedPlan, checks_arguments, warn


@checks_arguments
class Family(BuiltMembers):
    """`Family(lambda width: MLP(54, width, 7), base=64)`: a model for every width, or for every dict of widths.

    base: at this width every factor is 1, so lr, weight decay and eps mean what they mean in plain PyTorch.
    inputs: a small batch, as the models are called with it. Small members of the family are run on it, and where module
    types and names mislead, roles are read off what they compute. Without it `init`, `optimizer` and `upscale` warn.
    init_at: the width at which the model's own initialisation is taken as it is (default: the base, or its smallest
    multiple at which all matrices are 64 wide).
    roles: name patterns for what the modules cannot tell, as in `plan`.
    One of the sizes of a base such as {"width": 64, "depth": 4} may be a number of residual blocks; it is recognised by
    what it does. rules: what rates and decay follow, by name: `RuleSet(depth='complete')`, or 'sqrt', if initial values
    and learning rates are to follow the depth, which needs `inputs`.

    >>> import torch, mupscale as mu
    >>> from mupscale.models import MLP
    >>> x = torch.randn(5, 54)
    >>> family = mu.Family(lambda width: MLP(54, width, 7), base=64, inputs=x)
    >>> model = family.init(128, seed=0)
    >>> optimizer = family.optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> wide, wide_optimizer = family.upscale(model, optimizer, width=192)  # new units beside the trained ones
    >>> exact, _ = family.upscale(model, width=256, exact=True)  # copies, to see that it is the same model
    >>> torch.allclose(model(x), exact(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        base: WidthLike,
        *,
        init_at: WidthLike | None = None,
        roles: Mapping[str, Role] | None = None,
        inputs: Any = None,
        rules: RuleSet | None = None,
    ) -> None:
        super().__init__(build, base, roles, inputs)
        self.rules, self.depth_size = rules or RuleSet(), self._find_depth_size()
        if self.depth_size is None and self.rules.depth != "none":
            raise MupscaleError(
                f"the rule for depth is {self.rules.depth}, but no size in base {self.base} is a number of blocks"
            )
        self._members: dict[tuple[int, bool], DepthMembers] = {}
        self._factors: dict[int, dict[str, tuple[float, float]]] = {}
        self._writers_in_base: tuple[dict[str, Writers], dict[str, str]] | None = None
        self._depth, self._widths = self._split(self._base)
        self._init_depth, init_widths = self._split(self._base if init_at is None else Width.of(init_at, "init_at"))
        self._init_widths = None if init_at is None else init_widths
        self._init_at = self._join(self._init_depth, self.at(self._depth).init_at)

    def __repr__(self) -> str:
        rules = "" if self.rules == RuleSet() else f", rules={str(self.rules)!r}"
        return f"Family({', '.join(self._base.sizes)}, base={self.base}, init_at={self.init_at}{rules})"

    @property
    def init_at(self) -> PlainWidth:
        """The width at which the model's own initialisation is taken as it is."""
        return self._init_at.plain

    # ------------------------------------------------------------------------------------------- members by depth

    def at(self, depth: int, *, as_built: bool = False) -> DepthMembers:
        """The members of all widths at this depth; a family without one has them at 0.

        as_built: with their author's own initial values, whatever the rule for depth says.
        """
        if (depth, as_built) not in self._members:
            first = self._members.get((self._depth, False))
            tried = first.tried if first is not None and first.roles == self.roles else None  # modules told it all
            self._members[depth, as_built] = DepthMembers(
                partial(self._build, depth, as_built),
                self._widths,
                self._init_widths,
                self.roles,
                self.inputs if tried is None else None,
                tried,
            )
        return self._members[depth, as_built]

    def _build(self, depth: int, as_built: bool, *plain: float, **sizes: float) -> nn.Module:
        """The author's model, initialised as the rule for depth says."""
        model = self.build(self._join(depth, Width.of(plain[0] if plain else sizes)))
        is_meant = as_built or self.rules.depth == "none" or depth == self._init_depth
        if is_meant or all(p.is_meta for p in model.parameters()):
            return model
        with torch.no_grad():
            for name, p in naming.parameters(model).items():
                factor, offset = self._initial_factors(depth).get(name, (1.0, 0.0))
                if factor != 1:
                    p.add_(offset).mul_(factor).sub_(offset)
        return model

    def _initial_factors(self, depth: int) -> dict[str, tuple[float, float]]:
        """What the author's initial values of blocks are multiplied by, to be those at `init_at` times fold."""
        if depth not in self._factors:
            ours, theirs = (self.at(d, as_built=True).initial_std() for d in (self._init_depth, depth))
            lists, factors = self._lists(self._init_depth, depth), dict[str, tuple[float, float]]()
            plan = self.at(depth, as_built=True).plan(self._widths)
            plan = growth.with_depth(plan, lists, self._writers(lists), self.rules.depth)
            for one in lists:
                for number, path in enumerate(one.deep):
                    source = one.shallow[number * len(one.shallow) // len(one.deep)]
                    for name in (name for name in theirs if name.startswith(f"{path}.")):
                        before, entry = ours[source + name.removeprefix(path)], plan[name]
                        factor = before / theirs[name] if before and theirs[name] else 1.0
                        factors[name] = factor * float(entry.fold * entry.constants.undo), float(entry.offset)
            self._factors[depth] = factors
        return self._factors[depth]

    def _find_depth_size(self) -> str | None:
        """The one of the base's sizes that is a number of blocks: with twice as much there are more parameters."""
        if self._base.is_plain or len(self._base.sizes) < 2 or not self._base.is_whole:
            return None
        depths, small = [], all_tensors(self.sketch(self._base)).keys()
        for name in self._base.sizes:
            with suppress(Exception):  # a size alone may not be buildable
                if all_tensors(self.sketch(self._base.times(2, [name]))).keys() - small:
                    depths.append(name)
        if len(depths) > 1:
            raise MupscaleError(
                f"both {depths[0]} and {depths[1]} change the number of parameters, but only one size may do that"
            )
        return depths[0] if depths else None

    def _split(self, width: WidthLike) -> tuple[int, Width]:
        width, name = Width.of(width), self.depth_size
        if name is None:
            return 0, width
        if name not in width.sizes:
            raise MupscaleError(f"a width of this family must name its depth, {name}, but {width.plain} does not")
        return int(width.sizes[name]), self._without_depth(width)

    def _without_depth(self, width: Width) -> Width:
        widths = {name: size for name, size in width.sizes.items() if name != self.depth_size}
        if width.is_plain or widths.keys() != self._base.sizes.keys() - {self.depth_size}:
            ratio = width.size / next(iter(self._widths.sizes.values()))
            wider = self._widths.times(int(ratio) if ratio > 1 and ratio == int(ratio) else 2)
            raise MupscaleError(
                f"the sizes of this family are {', '.join(self._widths.sizes)} and {self.depth_size}, but a width of "
                f"{width.plain} does not name them. Write width={wider.plain}, and add {self.depth_size} if the depth "
                "grows, too"
            )
        return Width.of(widths)

    def _join(self, depth: int, widths: Width) -> Width:
        return widths if self.depth_size is None else Width.of({**widths.sizes, self.depth_size: depth})

    def _find(self, member: WidthLike | nn.Module) -> tuple[int, Width | nn.Module]:
        """The depth of a member, and the member as those of its depth know it."""
        return (self.depth_of(member), member) if isinstance(member, nn.Module) else self._split(member)

    def depth_of(self, model: nn.Module) -> int:
        """How many blocks a model has, in the units of the family's size; 0 in a family without one."""
        if self.depth_size is None:
            return 0
        if (width := self.width_of(model)) is not None:
            return int(width.sizes[self.depth_size])
        (first, *_) = self._lists(self._depth, 2 * self._depth)
        start = first.path.replace("*", "")
        paths = [p for p in naming.modules(model) if p.startswith(start) and p.removeprefix(start).isdigit()]
        depth = len(paths) * self._depth // len(first.shallow)
        if depth < 1:
            base = naming.modules(self.sketch(self._base))
            advice = "pass a model of the class that the family builds"
            check_same_names("this model", naming.modules(model), "the family's base model", base, advice, "module")
        return depth

    def _lists(self, shallow: int, deep: int) -> list[BlockList]:
        """The blocks at one depth beside those at another, which may be smaller or the same."""
        few, many = (self.sketch(self._join(depth, self._widths)) for depth in (shallow, deep))
        if shallow == deep:
            more = self.sketch(self._join(2 * deep, self._widths))
            return [replace(one, deep=one.shallow, moved={}) for one in growth.find_block_lists(few, more)]
        if shallow < deep:
            return growth.find_block_lists(few, many)
        lists = growth.find_block_lists(many, few)
        return [replace(one, shallow=one.deep, deep=one.shallow, moved={}) for one in lists]

    def _writers(self, lists: list[BlockList], side: str = "deep", inputs: Any = None) -> dict[str, Writers]:
        """What writes into the stream, in each block of one side, as a run of the base model shows."""
        if self._writers_in_base is None:  # once, on the CPU
            sample = self.inputs if inputs is None else inputs
            if sample is None:
                raise MupscaleError(
                    "the library runs a small model to find what writes into the residual stream. Pass inputs= to the "
                    "Family: a small batch, as its models are called"
                )
            with torch.random.fork_rng(devices=[]):
                model = self.build(self._base)
            all_blocks = [path for one in self._lists(self._depth, self._depth) for path in one.deep]
            self._writers_in_base = growth.find_writers(model, all_blocks, tree_map_only(Tensor, Tensor.cpu, sample))
        writers, reasons = self._writers_in_base
        base = {one.path: one.shallow for one in self._lists(self._depth, self._depth)}
        written = {}
        for one in lists:
            paths = getattr(one, side)
            for number, path in enumerate(paths):
                source = base[one.path][number * len(base[one.path]) // len(paths)]
                if source in writers:
                    written[path] = writers[source]
                elif self.rules.depth != "none":
                    raise MupscaleError(
                        f"rates cannot follow the depth: of '{source}', {reasons[source]}. Use RuleSet(depth='none')"
                    )
            if not any(path in written for path in paths):
                source, reason = next((path, reasons[path]) for path in base[one.path])
                raise growth.cannot_be_identity(source, reason)
        return written

    # ------------------------------------------------------------------------------------------- plans

    def plan(self, width: WidthLike | nn.Module) -> Plan:
        """μP at this width (or for this model): every factor relative to the base. Made once for each width.

        With a batch (`inputs`, or `check`) it says that small members have been tried.
        """
        depth, widths = self._find(width)
        plan = self.at(depth).plan(widths)
        if self.rules.depth == "none":
            return plan
        lists = self._lists(self._depth, depth)
        return growth.with_depth(plan, lists, self._writers(lists), self.rules.depth)

    def widening(
        self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module, *, grow: Operator | None = None
    ) -> Plan:
        """The plan for growing one member of the family into another of the same depth, by copies or as `grow` does it.

        It knows the family's initial values, which are the unit of noise and what fresh units are drawn from.
        """
        (few, smaller), (many, larger) = self._find(narrow), self._find(wide)
        if few != many:
            raise MupscaleError(
                f"a plan for widening is between models of one depth, not of {few} and {many}: use plan_depth for the "
                "depth, or upscale(…, depth=…) for both"
            )
        return self.at(few).widening(smaller, larger, grow=grow)

    def growth_plan(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> Plan:
        """The plan for growing one member into another, in width and in depth, for which neither needs memory.

        What is drawn in new blocks is to be drawn from the plan's own initial values.
        """
        (few, narrow_widths), (many, widths) = self._split(narrow), self._split(wide)
        wider, deeper = growth.split_operators(grow)
        plan = self.at(few).growth_plan(narrow_widths, widths, wider)
        if many == few:
            return plan
        shallow, deep = (self.sketch(self._join(depth, widths)) for depth in (few, many))
        plan = replace(plan.then(self._plan_of_blocks(shallow, deep, deeper)), tried_by=plan.tried_by)
        if deeper.copies and growth.is_replica(wider):  # nothing is drawn
            return plan
        return replace(plan, initial=self.at(many).widening(widths, widths, grow=wider).initial)

    def _plan_of_blocks(self, shallow: nn.Module, deep: nn.Module, grow: DepthOperator, inputs: Any = None) -> Plan:
        writers = None
        if not grow.copies or self.rules.depth != "none":
            writers = self._writers(growth.find_block_lists(shallow, deep), "shallow", inputs)
        return growth.plan_depth(shallow, deep, grow=grow, rules=self.rules, writers=writers)

    def check_growth(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> None:
        """An error where one member of the family cannot grow into the other in this way, before any is built."""
        (few, narrow_widths), (many, widths) = self._split(narrow), self._split(wide)
        wider, deeper = growth.split_operators(grow)
        wider.check(self.at(few).widening(narrow_widths, widths, grow=wider))
        if many < few:
            raise _shallower(few, many)
        if many > few:
            deeper.places(few, many)
            if not deeper.copies:
                self._writers(self._lists(few, many), "shallow")

    def has_tried(self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> bool:
        """Whether small members, at the base's depth, have grown as these two differ, on a batch."""
        return self.at(self._depth).has_tried(*(self._find(member)[1] for member in (narrow, wide)))

    def check(self, inputs: Any, sizes: Iterable[str] | None = None) -> None:
        """An error unless the family's models, small ones, widen exactly: outputs and gradients on this batch.

        sizes: which sizes of a width with several of them grow; all if not given.

        >>> import torch
        >>> family = Family(lambda width: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), 64)
        >>> family.check(torch.randn(5, 3))
        """
        widths = None if sizes is None else [size for size in sizes if size != self.depth_size]
        self.at(self._depth).check_widths(inputs, widths)

    # ------------------------------------------------------------------------------------------- models

    def init(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """A model under μP: the author's own draw, each random parameter rescaled to its μP standard deviation.

        That is the std the author's init has at `init_at`, times Rule.init; constant parameters are multiplied by
        fold alone, and random ones without a width are drawn at `init_at`. Same seed, same weights.
        Without a batch that was tried, it warns.
        """
        if Width.of(width) != self._init_at and not self.has_tried(self._init_at, width):
            _warn_untried("initial values follow")
        return self.init_untried(width, seed)

    def init_untried(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """What `init` does, without a word about what was not tried: for callers that try it, or have."""
        depth, widths = self._split(width)
        return self.at(depth).init_untried(widths, seed)

    def init_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """What `init_untried` gives, with values for the parameters that are named alone."""
        depth, widths = self._split(width)
        return self.at(depth).init_part(widths, seed, part)

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What members are called with, as `inputs` says it: in order, and by name."""
        return call_arguments(self.inputs)

    @property
    def can_draw_parts(self) -> bool:
        """Whether parts have the values of the whole, as a small member shows."""
        return self.at(self._depth).can_draw_parts

    def param_groups(
        self,
        model: nn.Module,
        optimizer: type[Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        **hyper: Any,
    ) -> list[dict[str, Any]]:
        """Groups for the model under μP; lr, weight decay and eps are given at the base width."""
        plan = self._plan_of_rates(model)
        return param_groups(model, plan, optimizer, groups=groups, rules=self.rules, **hyper)

    def optimizer(
        self,
        model: nn.Module,
        optimizer: type[Optimizer],
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        **hyper: Any,
    ) -> Optimizer:
        """The optimizer for the model under μP; lr, weight decay and eps are given at the base width.

        groups: your own parameter groups, as torch takes them, such as one with decay and one without.
        Without a batch that was tried, it warns.
        """
        plan = self._plan_of_rates(model)
        return make_optimizer(model, plan, optimizer, groups=groups, rules=self.rules, **hyper)

    def _plan_of_rates(self, model: nn.Module) -> Plan:
        plan = self.plan(model)
        if not plan.checked and any(entry.narrow != entry.wide for entry in plan.parameters.values()):
            _warn_untried("learning rates follow")
        return plan

    @overload
    def upscale(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: None = None,
        width: WidthLike | None = None,
        depth: int | None = None,
        noise: Noise | None = None,
        grow: Grow | None = None,
        exact: bool = False,
        lr: NotNegative | None = None,
        seed: int = 0,
        place: Callable[[nn.Module], nn.Module] | None = None,
        inputs: Any = None,
    ) -> tuple[nn.Module, Optimizer | None]: ...

    @overload
    def upscale(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: LRScheduler,
        width: WidthLike | None = None,
        depth: int | None = None,
        noise: Noise | None = None,
        grow: Grow | None = None,
        exact: bool = False,
        lr: NotNegative | None = None,
        seed: int = 0,
        place: Callable[[nn.Module], nn.Module] | None = None,
        inputs: Any = None,
    ) -> tuple[nn.Module, Optimizer, LRScheduler]: ...

    def upscale(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: LRScheduler | None = None,
        width: WidthLike | None = None,
        depth: int | None = None,
        noise: Noise | None = None,
        grow: Grow | None = None,
        exact: bool = False,
        lr: NotNegative | None = None,
        seed: int = 0,
        place: Callable[[nn.Module], nn.Module] | None = None,
        inputs: Any = None,
    ) -> tuple[nn.Module, Optimizer | None] | tuple[nn.Module, Optimizer, LRScheduler]:
        """The model and its optimizer at a larger width, or depth; the family need not have made them.

        lr: another learning rate from now on: at the base width, or, of an optimizer that the family did not make, at
        the model's own width. It is the first group's; groups with rates of their own keep their ratio to it.
        scheduler: of the optimizer; the same schedule at the same point comes back as the third, as from `upscale`.
        grow: how new units are filled: `Fresh()`, the default, or `Copies(noise)`, for which `noise=` is short; what
        new blocks are: `Identity()`, the default, or `Stack()`; or a pair, (Fresh(), Stack()), where both grow.
        exact: copy every unit without noise, for verification: the wide model stays a replica of the narrow one.
        place: what is done to the wide model before it is written, which may be without memory then: fully_shard.
        inputs: a batch on which the growth is checked, as in `upscale`.

        >>> import mupscale as mu
        >>> family = mu.Family(lambda width: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), 64)
        >>> wide, _ = family.upscale(family.init(64), width=96)
        >>> wide[2].weight.shape
        torch.Size([2, 96])
        """
        to, widths = self._target(width, depth)
        few = self.depth_of(model)
        many = few if to is None else to
        if many < few or (many == few and widths is None):
            raise _shallower(few, many)
        current = None if (has := self.width_of(model)) is None else self._split(has)[1]
        widens = widths is not None and (widths != current or many == few)
        wider, deeper = growth.split_operators(grow, noise, exact=exact)
        growth.refuse_idle_operator(None if exact else grow, noise, wider=widens, deeper=many != few)
        if (at := widths or current) is None:
            raise MupscaleError("this model was not built by the family. Give width= as well as depth=")
        check_not_empty(inputs)

        narrow, members, plan = naming.unwrap(model), self.at(few), None
        large, schedule = narrow, cast(Any, scheduler)
        if widens:
            large, plan = members.wider(model, at, wider, inputs)
            if many == few:
                large = members.init_untried(at, seed) if plan.mup and plan.patterned else large
                tried = wider.needs_multiples  # copies have been tried on the batch
                inputs = None if tried else members.inputs if inputs is None else inputs
        if many != few:  # the width comes first, so that new blocks are drawn at the new one
            deep = self.init_untried(self._join(many, at), seed)
            blocks = self._plan_of_blocks(large, deep, deeper, inputs)
            wider = wider if widens else growth.choose_operator(None, plan=blocks)
            large, plan = deep, blocks if plan is None else replace(plan.then(blocks), tried_by=plan.tried_by)
        assert plan is not None
        _take_over(large, narrow, None if many == few else plan)
        large = large if place is None else place(large)
        given: dict[str, Any] = {"grow": wider, "exact": exact and widens, "lr": lr, "seed": seed, "inputs": inputs}
        rules = replace(self.rules, depth="none")  # which the plan has
        return growth.upscale(narrow, large, plan, optimizer, scheduler=schedule, rules=rules, **given)

    def _target(self, width: WidthLike | None, depth: int | None) -> tuple[int | None, Width | None]:
        """The depth and the other sizes that a model is to grow to, as far as they are said."""
        name, given = self.depth_size, None if width is None else Width.of(width)
        if name is None and (given is None or depth is not None):
            wider, both = self._base.times(2).plain, {**self._base.sizes, "layers": 4}
            raise MupscaleError(
                f"give width={wider} or the like; depth= needs a base that names it as build does, for example {both}"
            )
        if given is None and depth is None:
            raise MupscaleError("give the size to grow to: width=, depth=, or both")
        if name is None or given is None:
            return depth, given
        if given.is_plain and len(self._widths.sizes) == 1:  # there is no other size that it could be
            given = Width.of(dict.fromkeys(self._widths.sizes, given.size))
        if depth not in (None, said := given.sizes.get(name, depth)):
            raise MupscaleError(f"width= names depth {said}, but depth= is {depth}: give one of them")
        widths = None if given.sizes.keys() == {name} else self._without_depth(given)
        return None if said is None else int(said), widths


def _shallower(before: int, after: int) -> MupscaleError:
    return MupscaleError(f"the model has depth {before} and cannot grow to depth {after}. Choose a larger depth")


def _take_over(large: nn.Module, narrow: nn.Module, plan: Plan | None) -> None:
    """Give the larger model the narrow one's device, dtypes, frozen parameters and train or eval mode, part by part.

    plan: from one to the other, where new parts are as those that they come from.
    """
    for named in (naming.parameters, naming.buffers):
        ours: Mapping[str, Tensor] = named(narrow)
        for name, tensor in named(large).items():
            origin = name if plan is None or name not in plan.sources else plan.sources[name].name
            if (source := ours.get(origin)) is not None:
                device = tensor.device if tensor.is_meta else source.device
                tensor.data = tensor.data.to(device, source.dtype)
                tensor.requires_grad_(source.requires_grad)
    take_modes(large, narrow, plan)


def _warn_untried(what: str) -> None:
    warn(
        f"this family has not been tried: its {what} from module types and names. Pass inputs= to Family (a small "
        "batch, as the models are called) to try small members first",
        UncheckedPlan,
    )
