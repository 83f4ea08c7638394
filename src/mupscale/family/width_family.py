"""A family: one architecture at every width, initialised and trained under μP with its own unmodified modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.core import PlainWidth, Plan, Role, RuleSet, Width, WidthLike, naming
from mupscale.family.depths import Depths
from mupscale.family.grown_members import grow_member
from mupscale.family.initial_values import rescale_to_mup
from mupscale.family.tried_members import TriedMembers
from mupscale.growth import (
    Grow,
    Noise,
    Operator,
    check_goes_with,
    is_replica,
    refuse_idle_operator,
    split_operators,
    warn_of_replica,
    with_scheduler,
)
from mupscale.optim import following_rules, make_optimizer, param_groups
from mupscale.planning import (
    count_draws,
    default_init_at,
    find_depth_size,
    find_width_dims,
    initial_means,
    initial_std,
    is_large,
    warn_of_growing_outputs,
    with_initial,
)
from mupscale.system import MupscaleError, NotNegative, checks_arguments

_DRAWS = 4  # freshly built models that the initialisation is measured on; of large ones two will do
_PARTS = 8  # in which large ones are built for it


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _by_depth(method: _Method) -> _Method:
    """A method that, of a family with a depth, `Depths` answers: it has one of the same name."""

    @wraps(method)
    def asked(family: Family, *args: Any, **kwargs: Any) -> Any:
        depths = family._depths
        return method(family, *args, **kwargs) if depths is None else getattr(depths, method.__name__)(*args, **kwargs)

    return cast(_Method, asked)


@checks_arguments
class Family(TriedMembers):
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
        self.rules = rules or RuleSet()
        self._init_at = self._base if init_at is None else Width.of(init_at, "init_at")
        self._depths: Depths | None = None
        if (depth := find_depth_size(self.sketch, self._base)) is not None:
            at = None if init_at is None else self._init_at
            self._depths = Depths(self, depth, self._base, at, self.rules.depth, Family)
            self._init_at = self._depths.join(self._depths.init_at, self._depths.at(self._depths.base)._init_at)
            return
        if self.rules.depth != "none":
            raise MupscaleError(
                f"the rule for depth is {self.rules.depth}, but no size in base {self.base} is a number of blocks"
            )
        self._base_model = self.sketch(base)
        self._width_dims = find_width_dims(self.sketch, self._base)
        if init_at is None:
            self._init_at = default_init_at(self._base, self._base_model, self._width_dims)
        self._plans: dict[tuple[Width, int], Plan] = {}  # by width, and how much had been tried then
        self._measured: dict[str, float] | None = None
        self._means: dict[str, tuple[float, ...]] = {}
        if inputs is not None:
            self.learn(inputs)
            probes = self._probes(inputs)
            told = probes.given(roles or {})
            plan = self._between_probes(probes, "copies")
            warn_of_growing_outputs(probes.narrow, probes.wide, plan, probes.inputs, told)
            self._pairs.clear()

    def __repr__(self) -> str:
        rules = "" if self.rules == RuleSet() else f", rules={str(self.rules)!r}"
        return f"Family({', '.join(self._base.sizes)}, base={self.base}, init_at={self.init_at}{rules})"

    @property
    def depth_size(self) -> str | None:
        """The name of the size that is a number of residual blocks; None where none is."""
        return None if self._depths is None else self._depths.name

    @property
    def init_at(self) -> PlainWidth:
        """The width at which the model's own initialisation is taken as it is."""
        return self._init_at.plain

    @_by_depth
    def plan(self, width: WidthLike | nn.Module) -> Plan:
        """μP at this width (or for this model): every factor relative to the base. Made once for each width.

        With a batch (`inputs`, or `check`) it says that small members have been tried.
        """
        if isinstance(width, nn.Module):
            return self._noting_trial(self.between(self._base_model, width, how="mup"), self._base, width)
        width, trials = Width.of(width), len(self.tried)
        if (width, trials) not in self._plans:
            plan = self.between(self._base_model, self.sketch(width), how="mup")
            self._plans[width, trials] = self._noting_trial(plan, self._base, width)
        return self._plans[width, trials]

    @_by_depth
    def widening(
        self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module, *, grow: Operator | None = None
    ) -> Plan:
        """The plan for growing one member of the family into another, by copies or as `grow` does it.

        It knows the family's initial values, which are the unit of noise and what fresh units are drawn from.
        """
        wide_model = self._at(wide)
        copies = grow is None or grow.needs_multiples
        plan = self.between(self._at(narrow), wide_model, how="copies" if copies else "fresh")
        entries = self.between(self.sketch(self._init_at), wide_model, how="mup").parameters
        past_norms = self.past_norms if plan.norms else None
        plan = with_initial(plan, entries, self.initial_std(), self._means)
        return self._noting_trial(plan.with_initial("past_norms", past_norms), narrow, wide)

    @_by_depth
    def growth_plan(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> Plan:
        """The plan for growing one member into another, in width and in depth, for which neither needs memory.

        What is drawn in new blocks is to be drawn from the plan's own initial values.
        """
        wider = split_operators(grow)[0]
        if is_replica(wider):  # for which initial values are not needed, and so not measured
            return self._noting_trial(self.between(self._at(narrow), self._at(wide), how="copies"), narrow, wide)
        return self.widening(narrow, wide, grow=wider)

    @_by_depth
    def check_growth(self, narrow: WidthLike, wide: WidthLike, grow: Grow | None = None) -> None:
        """An error where one member of the family cannot grow into the other in this way, before any is built."""
        operator = split_operators(grow)[0]
        operator.check(self.widening(narrow, wide, grow=operator))

    @_by_depth
    def has_tried(self, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> bool:
        """Whether small members have grown as these two differ, on a batch (`inputs`, or `check`)."""
        return super().has_tried(narrow, wide)

    def _noting_trial(self, plan: Plan, narrow: WidthLike | nn.Module, wide: WidthLike | nn.Module) -> Plan:
        return replace(plan, tried_by="small members" if self.has_tried(narrow, wide) else None)

    def init(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """A model under μP: the author's own draw, each random parameter rescaled to its μP standard deviation.

        That is the std the author's init has at `init_at`, times Rule.init; constant parameters are multiplied by
        fold alone, and random ones without a width are drawn at `init_at`. Same seed, same weights.
        Without a batch that was tried, it warns.
        """
        if Width.of(width) != self._init_at and not self.has_tried(self._init_at, width):
            self.warn_untried("initial values follow")
        return self.init_untried(width, seed)

    @_by_depth
    def init_untried(self, width: WidthLike, seed: int = 0) -> nn.Module:
        """What `init` does, without a word about what was not tried: for callers that try it, or have."""
        model = self.drawn(width, seed)
        self._rescale(naming.parameters(model), width, seed)
        return model

    @_by_depth
    def init_part(self, width: WidthLike, seed: int, part: Collection[str]) -> nn.Module:
        """What `init_untried` gives, with values for the parameters that are named alone."""
        model = self.drawn_part(width, seed, part)
        parameters = naming.parameters(model)
        self._rescale({name: parameters[name] for name in part}, width, seed)
        return model

    def _rescale(self, parameters: Mapping[str, nn.Parameter], width: WidthLike, seed: int) -> None:
        """From the author's initial values to those under μP, in place."""
        if Width.of(width) == self._init_at:
            return
        entries = self.between(self.sketch(self._init_at), self.sketch(width), how="mup").parameters
        measured = self.initial_std()
        reference: dict[str, nn.Parameter] = {}
        if any(std > 0 and not entries[name].axes for name, std in measured.items()):
            reference = naming.parameters(self.drawn(self._init_at, seed))
        rescale_to_mup(parameters, entries, measured, self._means, reference)

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
            self.warn_untried("learning rates follow")
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
        the model's own width.
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
        check_goes_with(optimizer, scheduler, lr)
        wider, deeper = split_operators(grow, noise, exact=exact)
        if noise is not None or exact:
            grow = wider if grow is None and not is_replica(wider) else (wider, deeper)
        with following_rules(optimizer, self.rules):
            grown = self._grown(model, optimizer, width, depth, grow, lr, seed, place, inputs, exact=exact)
        return with_scheduler(*grown, scheduler)

    @_by_depth
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
        """What `upscale` does, once noise is part of grow=."""
        if depth is not None or width is None:
            raise MupscaleError("give width=; depth= needs a base that names it, such as {'width': 64, 'depth': 4}")
        refuse_idle_operator(grow, wider=True, deeper=False)
        wider = split_operators(grow)[0]
        if not exact:
            warn_of_replica(wider)
        return grow_member(self, model, optimizer, width, None, wider, lr, seed, place, inputs)

    @_by_depth
    def check(self, inputs: Any, sizes: Iterable[str] | None = None) -> None:
        """An error unless the family's models, small ones, widen exactly: outputs and gradients on this batch.

        sizes: which sizes of a width with several of them grow; all if not given.

        >>> import torch
        >>> family = Family(lambda width: nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), 64)
        >>> family.check(torch.randn(5, 3))
        """
        self.check_widths(inputs, sizes)

    def _at(self, width: WidthLike | nn.Module) -> nn.Module:
        return width if isinstance(width, nn.Module) else self.sketch(width)

    def initial_std(self) -> dict[str, float]:
        """Std of the author's initialisation at `init_at`, over a few draws; 0 for what is not random."""
        if self._measured is None and is_large(sketch := self.sketch(self._init_at)) and self.can_draw_parts:
            self._measured = {}
            names = list(naming.parameters(sketch))
            for part in (names[start::_PARTS] for start in range(min(_PARTS, len(names)))):
                models = (naming.parameters(self.drawn_part(self._init_at, seed, part)) for seed in range(2))
                draws = [{name: parameters[name] for name in part} for parameters in models]
                measured = initial_std(draws)
                self._measured |= measured
                self._means |= initial_means(draws, measured)
        elif self._measured is None:
            draws = self._draws(range(_DRAWS))
            draws += self._draws(range(_DRAWS, count_draws(draws, self._width_dims)))
            self._measured = initial_std(draws)
            self._means = initial_means(draws, self._measured)
        return self._measured

    def _draws(self, seeds: Iterable[int]) -> list[dict[str, nn.Parameter]]:
        return [naming.parameters(self.drawn(self._init_at, seed)) for seed in seeds]
