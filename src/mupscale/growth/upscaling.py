"""Growth in one call: the wide model and its optimizer. Steps 1–3 of Meta-algorithm 'Upscaling procedure'."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale import planning
from mupscale.core import Plan, RuleSet, gather_whole, is_sharded, naming
from mupscale.growth import depth_plans
from mupscale.growth.copies import Copies, Noise, is_replica, replica_in_words
from mupscale.growth.depth_plans import DepthOperator, check_silent_blocks, with_more_blocks
from mupscale.growth.experts import Experts, find_experts, plan_experts
from mupscale.growth.fresh import Fresh
from mupscale.growth.lossless import difference_of_outputs, warn_of_loss, with_past_norms
from mupscale.growth.operator_pairs import Grow, choose_operator, refuse_idle_operator, split_operators
from mupscale.growth.operators import Operator, check_operator
from mupscale.growth.optimizer_state import constructor_arguments, widen_optimizer
from mupscale.growth.writing import prepare_growth, whole_or_void, write_grown
from mupscale.optim import following_rules, grown_groups, watch_first_steps, widen_scheduler
from mupscale.system import MupscaleError, NotNegative, ReplicaWarning, UncheckedPlan, checks_arguments, warn, words

UNCHECKED = (
    "this growth has not been tried: its plan follows from module types and names. Pass inputs= (a small batch, as "
    "the model is called) to check it first, or make the plan with plan(narrow, wide, inputs=…)"
)


@overload
def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    *,
    scheduler: None = None,
    noise: Noise | None = None,
    grow: Grow | None = None,
    exact: bool = False,
    lr: NotNegative | None = None,
    seed: int = 0,
    inputs: Any = None,
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
    rules: RuleSet | None = None,
) -> tuple[nn.Module, Optimizer | None]: ...


@overload
def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler,
    noise: Noise | None = None,
    grow: Grow | None = None,
    exact: bool = False,
    lr: NotNegative | None = None,
    seed: int = 0,
    inputs: Any = None,
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
    rules: RuleSet | None = None,
) -> tuple[nn.Module, Optimizer, LRScheduler]: ...


@checks_arguments
def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
    noise: Noise | None = None,
    grow: Grow | None = None,
    exact: bool = False,
    lr: NotNegative | None = None,
    seed: int = 0,
    inputs: Any = None,
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
    rules: RuleSet | None = None,
) -> tuple[nn.Module, Optimizer | None] | tuple[nn.Module, Optimizer, LRScheduler]:
    """The wide model and its optimizer, ready to train on; with a scheduler that too, as the third.

    `wide` has more units than `narrow`, more blocks, whose values it was built with, or both; or experts in
    place of its feed-forward parts, or more experts (`plan_experts`).
    plan: from one to the other; without one it is made here, as `plan(narrow, wide, inputs=…, fresh=…, grow=…)` would.
    grow: how the wide model is filled. `Fresh()`, the default, keeps the trained units and draws new ones beside them;
    `Copies(noise)`, for which `noise=` is short, copies every unit; or an Operator of your own. For more blocks:
    `Identity()`, the default, or `Stack()`. For both: a pair, such as (Fresh(), Stack()). For experts: `Experts()`,
    copies, which `noise=` makes differ. exact: copy without noise, so that the wide model goes on exactly as the narrow
    one would, for ever: for verification.
    A plan that you give says what it was made for, fresh units or copies.
    The wide optimizer has the narrow one's class, hyperparameters (as they are now) and state, all rescaled.
    scheduler: of the optimizer; the same schedule at the same point, for the wide one (`widen_scheduler`).
    lr: another learning rate from now on, in the units of a group with lr_factor 1. It is the first group's; groups
    with rates of their own keep their ratio to it. With a scheduler it takes the place of the rate at this moment, not
    of the peak, and the schedule goes on from there with all its rates in that ratio.
    inputs: a small batch, as in `plan`. Copies by this plan are then checked on it before anything is changed: outputs
    and gradients in float64, with generic weights. So is a plan for fresh units: outputs, with the new units silent.
    `Fresh(lossless=True)` is measured on it and warns if outputs differ. Without a batch that was tried, it warns.
    fresh: a freshly built narrow model, or the function that builds it, which new units and noise are measured by.
    Without it the wide model's own values are taken for its author's initialisation.
    rules: by which weight decay grows, and rates with more blocks; see `RuleSet`.

    >>> import torch, mupscale as mu
    >>> from mupscale.models import MLP
    >>> narrow, batch = MLP(3, 8, 2), torch.randn(4, 3)
    >>> optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> wide, wide_optimizer, wide_scheduler = mu.upscale(
    ...     narrow, MLP(3, 32, 2), optimizer=optimizer, scheduler=scheduler, inputs=batch
    ... )
    >>> wide.layers[1].weight.shape, {group["lr"] for group in wide_optimizer.param_groups} == {0.01, 0.0025}
    (torch.Size([32, 32]), True)
    """
    planning.check_not_empty(inputs)
    if lr is not None and optimizer is None:
        raise MupscaleError(
            "lr= needs an optimizer. Give optimizer= (the narrow model's), or make one for the wide model "
            "(mupscale.make_optimizer, or family.optimizer) with that rate"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise MupscaleError("scheduler= goes with the optimizer that it was made for. Give that one as optimizer=")
    rules, made_here = rules or RuleSet(), plan is None
    wider, deeper = split_operators(grow, noise, exact=exact, plan=plan)
    is_default, said = grow is None and noise is None, None if exact else grow
    if plan is not None:
        _refuse_what_a_plan_says(plan, said, fresh, rules)
    elif (experts := _said_of_experts(grow, narrow, wide, exact=exact)) is not None:
        plan = plan_experts(narrow, wide, inputs=inputs, grow=experts)
        wider = wider if isinstance(wider, Copies) else Copies()
    elif _has_more_blocks(narrow, wide):
        plan = _plan_of_blocks(narrow, wide, wider, deeper, said, noise, inputs, fresh, rules)
        wider = wider if _grows(plan) else choose_operator(None, plan=plan)
    else:
        refuse_idle_operator(said, noise, wider=True, deeper=False)
        try:
            plan = _plan_of_widths(narrow, wide, wider, inputs, fresh)
        except MupscaleError as error:
            if is_default and fresh is None and not wider.needs_multiples and _can_copy(narrow, wide, inputs):
                raise type(error)(f"{error}. Units can be copied here: grow=mupscale.Copies(noise=1.0)") from error
            raise
    plan = _checked(plan, wide, wider)
    if not exact and _grows(plan) and is_replica(wider):
        warn(replica_in_words(), ReplicaWarning)
    _try(plan, narrow, wide, wider, inputs, made_here=made_here)
    is_lossless = isinstance(wider, Fresh) and wider.lossless
    if is_lossless:
        plan = with_past_norms(plan, narrow, wide, inputs)
    with following_rules(optimizer, rules):
        _, grown = upscale_untried(narrow, wide, plan, optimizer, grow=wider, lr=lr, seed=seed)
    if is_lossless:
        warn_of_loss(narrow, wide, plan, inputs)
    is_changed = any(source.value or source.kind == "copy" for source in plan.sources.values())
    if inputs is not None and _copies_blocks(plan) and (is_changed or not (plan.checked and is_replica(wider))):
        _, share = difference_of_outputs(narrow, wide, inputs)
        are_experts = any(source.kind == "expert" for source in plan.sources.values())
        what = "what is new in experts changes" if are_experts else "copied blocks change"
        warn(f"{what} the function: outputs differ by {words.format_share(share)} on the batch")
    if grown is not None:
        watch_first_steps(grown)
    return (wide, grown) if scheduler is None or grown is None else (wide, grown, widen_scheduler(scheduler, grown))


def _has_more_blocks(narrow: nn.Module, wide: nn.Module) -> bool:
    same_names = naming.parameters(narrow).keys() == naming.parameters(wide).keys()
    return not same_names and bool(depth_plans.longer_lists(narrow, wide))


def _said_of_experts(grow: Grow | None, narrow: nn.Module, wide: nn.Module, *, exact: bool) -> Experts | None:
    """How experts start, where the larger model has them; None where there are none."""
    if not (isinstance(grow, Experts) or find_experts(narrow, wide)):
        return None
    if grow is None or isinstance(grow, Experts):
        return grow or Experts(router="silent" if exact else "drawn")
    raise MupscaleError(
        f"the larger model has experts that the smaller one lacks, and grow={grow!r} is not for them. Use "
        "grow=mupscale.Experts(), and noise= for copies that differ"
    )


def _grows(plan: Plan) -> bool:
    entries = (*plan.parameters.values(), *plan.buffers.values())
    return any(entry.stacked.narrow != entry.wide for entry in entries if entry.source.is_taken)


def _refuse_what_a_plan_says(plan: Plan, grow: Grow | None, fresh: object, rules: RuleSet) -> None:
    if plan.has_new_parts and rules.depth != "none":
        raise MupscaleError(
            f"rules.depth={rules.depth} has no effect on a finished plan. Pass it to plan_depth(…, rules=…), or "
            "leave the plan out"
        )
    if isinstance(grow, DepthOperator | Experts):
        what, maker = ("experts", "plan_experts") if isinstance(grow, Experts) else ("new blocks", "plan_depth")
        raise MupscaleError(
            f"this plan says what {what} are, and so does grow={grow!r}: leave out grow=, or make the plan with "
            f"{maker}(…, grow={grow!r})"
        )
    if fresh is not None:
        raise MupscaleError(
            "fresh= has no effect on a finished plan. Pass it to plan(…, fresh=…), or leave the plan out"
        )


def _plan_of_blocks(
    narrow: nn.Module,
    wide: nn.Module,
    wider: Operator,
    deeper: DepthOperator,
    grow: Grow | None,
    noise: Noise | None,
    inputs: Any,
    fresh: nn.Module | Callable[[], nn.Module] | None,
    rules: RuleSet,
) -> Plan:
    """The plan for more blocks, and for more units in them if the two models differ in that, too.

    Depth comes first, on a copy of the narrow model; the plan for widths goes from there to the wide model.
    """
    ours, theirs = naming.parameters(narrow), naming.parameters(wide)
    odd = [name for name in ours.keys() & theirs.keys() if ours[name].shape != theirs[name].shape]
    # a name may have another shape because other blocks stand there: at the end of a stage, say
    misfit = depth_plans.why_not_depth_alone(narrow, wide, deeper) if odd else None
    refuse_idle_operator(grow, noise, wider=misfit is not None, deeper=True)
    if misfit is None:
        return depth_plans.plan_depth(narrow, wide, grow=deeper, inputs=inputs, rules=rules)

    middle = with_more_blocks(narrow, wide, deeper)
    try:
        depth = depth_plans.plan_depth(narrow, middle, grow=deeper, inputs=inputs, rules=rules)
        if inputs is not None and not deeper.copies:
            check_silent_blocks(narrow, middle, depth, inputs)
    except MupscaleError as error:
        raise (error if inputs is None or _runs(middle, inputs) else misfit) from error
    if fresh is not None:
        fresh = with_more_blocks(fresh if isinstance(fresh, nn.Module) else fresh(), wide, deeper)
    width = _plan_of_widths(middle, wide, wider, inputs, fresh)
    return replace(depth.then(width), mup=width.mup, tried_by=width.tried_by)


def _runs(model: nn.Module, inputs: Any) -> bool:
    with suppress(MupscaleError), torch.no_grad():
        planning.run_on_batch(model, inputs)
        return True
    return False


def _plan_of_widths(
    narrow: nn.Module,
    wide: nn.Module,
    operator: Operator,
    inputs: Any,
    fresh: nn.Module | Callable[[], nn.Module] | None,
) -> Plan:
    made = planning.plan(narrow, wide, inputs=inputs, fresh=fresh, grow=operator)
    if not _grows(made):
        raise MupscaleError(
            "nothing would grow: all parameters and buffers of the wide model have the narrow one's shapes. Build "
            "it wider"
        )
    return _checked(made, wide, operator)


def _checked(plan: Plan, wide: nn.Module, operator: Operator) -> Plan:
    """The plan, with initial values if the operator needs them, if the operator can carry it out."""
    if plan.fresh is None and not is_replica(operator) and not plan.has_new_parts:
        values = {name: gather_whole(p.detach()) for name, p in naming.parameters(wide).items()}
        if all(not value.is_meta and bool(value.isfinite().all()) for value in values.values()):
            draw = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
            plan = with_measured_initial(plan, [draw], as_built=True)
    check_operator(operator, plan)
    return plan


def with_measured_initial(plan: Plan, draws: list[dict[str, nn.Parameter]], *, as_built: bool = False) -> Plan:
    """The plan with the laws of the wide model's own values.

    as_built: that model is at hand, so that what follows no single law is taken as it has it.
    """
    stds = planning.initial_std(draws)
    laws = planning.measure_laws(draws, stds, lambda name: plan[name].axes, as_built=as_built)
    return plan.with_laws(laws)


def _can_copy(narrow: nn.Module, wide: nn.Module, inputs: Any) -> bool:
    with suppress(MupscaleError), warnings.catch_warnings(action="ignore"):
        return any(e.narrow != e.wide for e in planning.plan(narrow, wide, inputs=inputs).parameters.values())
    return False


def upscale_untried(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    grow: Operator,
    lr: NotNegative | None = None,
    seed: int = 0,
) -> tuple[nn.Module, Optimizer | None]:
    """What `upscale` does, without a word about what was not tried: for those who know the plan, or compare models."""
    check_operator(grow, plan)
    has_memory = not any(p.is_meta for p in wide.parameters())
    with nullcontext() if has_memory else whole_or_void(wide):
        sources = prepare_growth(narrow, wide, plan)
        grown = None if optimizer is None else grow_optimizer(optimizer, narrow, wide, plan, lr, grow)
    return write_grown(sources, wide, plan, grow, seed), grown


def _copies_blocks(plan: Plan) -> bool:
    return any(source.is_new and source.is_taken for source in plan.sources.values())


def _try(plan: Plan, narrow: nn.Module, wide: nn.Module, operator: Operator, inputs: Any, *, made_here: bool) -> None:
    """An error where the batch refutes the plan; a warning where nothing was tried.

    made_here: from this batch, on which copies by the plan were compared then.
    """
    if plan.has_new_parts:
        if not _grows(plan) and inputs is not None and not _copies_blocks(plan):
            check_silent_blocks(narrow, wide, plan, inputs)
        elif not plan.checked and (_grows(plan) or any(e.constants.depth != 1 for e in plan.parameters.values())):
            warn(UNCHECKED, UncheckedPlan)
    elif operator.needs_multiples and inputs is not None and not made_here:
        planning.check_plan_by_running(narrow, wide, plan, inputs)
    elif not plan.checked and (why := _why_untried(narrow, wide, plan, operator, inputs)):
        warn(why, UncheckedPlan)


def _why_untried(narrow: nn.Module, wide: nn.Module, plan: Plan, operator: Operator, inputs: Any) -> str:
    """Why nothing shows that fresh units by this plan leave the old ones as they are; an error where they do not."""
    if inputs is None:
        return UNCHECKED
    planning.check_takes(narrow, inputs)
    tensors = [*narrow.parameters(), *wide.parameters(), *wide.buffers()]
    why = "models that are sharded, or on the meta device, are not run on the batch"
    if not any(t.is_meta or is_sharded(t) for t in tensors):
        trials = planning.Trials(inputs)
        try:
            keeps = planning.keeps_outputs(narrow, wide, plan, trials)
        except Exception as error:  # whatever a model raises; it need not run here to grow
            why = str(error)
        else:
            if not keeps:
                planning.check_silent_units(narrow, wide, plan, trials)
            trials.warn()
            return ""
    return "" if isinstance(operator, Fresh) and operator.lossless else f"this growth has not been tried: {why}"


def grow_optimizer(
    optimizer: Optimizer,
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    lr: NotNegative | None = None,
    grow: Operator | None = None,
) -> Optimizer:
    """An optimizer of the same class for the wide model, with rescaled hyperparameters and state."""
    copies = not plan.mup if grow is None else grow.needs_multiples
    groups = grown_groups(optimizer, narrow, wide, plan, lr, copies=copies)
    grown = type(optimizer)(groups, **constructor_arguments(optimizer))
    return widen_optimizer(optimizer, grown, plan, narrow=narrow, wide=wide, grow=grow)
