"""A deeper model from a shallow one: its weights, its buffers, and its optimizer with what that has learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, copy_into, gather_whole, is_sharded, laid_out_like, naming
from mupscale.growth.depth_operators import DepthOperator
from mupscale.growth.depth_plans import DepthPlan, plan_depth
from mupscale.growth.lossless import difference_of_outputs
from mupscale.growth.optimizer_state import constructor_arguments, is_scalar, state_factor
from mupscale.growth.sources import refuse_nonfinite
from mupscale.optim import deepened_groups, scale, traits_of
from mupscale.planning import check_not_empty, in_float64, run_in_float64, tensors_in
from mupscale.system import MupscaleError, NotNegative, checks_arguments, warn

_SAME = 1e-9  # of the size of outputs, in float64


@checks_arguments
@torch.no_grad()
def deepen(
    shallow: nn.Module,
    deep: nn.Module,
    plan: DepthPlan | None = None,
    *,
    grow: DepthOperator | None = None,
    inputs: Any = None,
) -> nn.Module:
    """Write the shallow model into the deep one, in place, and return that; the two differ in their number of blocks.

    deep: a freshly initialised model, whose new blocks keep their initial values. plan: made by `plan_depth` if it is
    not given. grow: `Identity()`, with which the function stays, or `Stack()`, with which it does not; a plan that is
    given says which it was made for. inputs: a small batch, as in `plan_depth`. On it the two models are compared, as
    copies in float64: with `Identity()` another output is an error, with `Stack()` a warning says by how much it
    changes.

    >>> import mupscale as mu
    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n).double() for n in (2, 4))
    >>> tokens = torch.randint(0, 11, (2, 8))
    >>> torch.equal(mu.deepen(shallow, deep, inputs=tokens)(tokens), shallow(tokens))
    True
    """
    check_not_empty(inputs)
    plan = plan_depth(shallow, deep, grow=grow, inputs=inputs) if plan is None else plan
    _refuse_another_operator(plan, grow)
    checked = inputs is not None and not plan.grow.copies
    before = [(tensor, tensor.detach().clone()) for tensor in (*deep.parameters(), *deep.buffers()) if checked]
    _write(shallow, deep, plan)
    if checked:
        try:
            _check_same_function(shallow, deep, plan, inputs)
        except MupscaleError:
            for tensor, values in before:  # what is refused leaves the model as it was
                tensor.copy_(values)
            raise
    if inputs is not None and plan.grow.copies:
        difference, _ = difference_of_outputs(shallow, deep, inputs)
        said = f"copied blocks change the function: outputs differ by {difference:.2g} of their size"
        warn(said)
    return deep


def _refuse_another_operator(plan: DepthPlan, grow: DepthOperator | None) -> None:
    if grow is not None and grow != plan.grow:
        raise MupscaleError(
            f"this depth plan is for {plan.grow!r}, but grow= is {grow!r}: leave out grow=, or make the plan with "
            f"plan_depth(…, grow={grow!r})"
        )


def _write(shallow: nn.Module, deep: nn.Module, plan: DepthPlan) -> None:
    """Old blocks as they are, new ones silent or copied."""
    sources = {**naming.parameters(shallow), **naming.buffers(shallow)}
    targets = {**naming.parameters(deep), **naming.buffers(deep)}
    if plan.origins.keys() != targets.keys():
        raise MupscaleError("this depth plan is for a different model: make it for these two with plan_depth")
    if empty := [name for name, tensor in targets.items() if tensor.is_meta]:
        raise MupscaleError(
            f"'{empty[0]}' of the deep model is on the meta device, but new blocks keep the values that the model is "
            "built with. Build it on a real device"
        )
    refuse_nonfinite({name: tensor for name, tensor in sources.items() if tensor.is_floating_point()})
    for name, origin in plan.origins.items():
        if name in plan.silent:
            targets[name].fill_(plan.silent[name])
        elif plan.grow.copies or not origin.is_new:
            whole = gather_whole(sources[origin.name].detach())
            if plan.grow.copies and name in plan.rules.parameters:
                whole = plan.rules.parameters[name].widened(whole)
            copy_into(targets[name], whole)


def _check_same_function(shallow: nn.Module, deep: nn.Module, plan: DepthPlan, inputs: Any) -> None:
    """An error where the deep model computes something else although its new blocks write nothing."""

    def outputs(model: nn.Module, seed: int) -> list[Tensor]:
        copied, batch = in_float64(model, inputs)
        if model is deep:
            _take_modes_of_shallow(copied, shallow, plan)
        return [t for t in tensors_in(run_in_float64(copied, batch, seed)) if t.is_floating_point()]

    tensors = [*shallow.parameters(), *deep.parameters()]
    if len({t.device for t in tensors}) > 1 or any(t.is_meta or is_sharded(t) for t in tensors):
        return  # which cannot be copied and run on one batch
    before, after = outputs(shallow, 0), outputs(deep, 0)
    if len(before) != len(after):  # what there is of each block, such as a cache, beside the output
        before, after = before[:1], after[:1]
    if max(map(_far, before, after), default=0.0) <= _SAME or max(map(_far, before, outputs(shallow, 1))) > _SAME:
        return  # what draws random numbers while it runs cannot be compared
    far = max(map(_far, before, after))
    raise MupscaleError(
        f"the deep model's outputs differ by {far:.1g}, although its new blocks write nothing into the residual "
        "stream. Something depends on the number of blocks, or on what a block computes besides its output. Grow by "
        "Stack(), which copies blocks and changes the function"
        if math.isfinite(far)
        else "the deep model's outputs are not finite: it divides by the norm of a weight that is zero in new blocks. "
        "Grow by Stack(), which copies blocks and changes the function"
    )


def _far(before: Tensor, after: Tensor) -> float:
    """How far two tensors lie apart, by the size of the first."""
    if before.shape != after.shape:
        return math.inf
    return float((after - before).abs().max()) / (1 + float(before.abs().max())) if before.numel() else 0.0


@checks_arguments
def deepen_optimizer(
    optimizer: Optimizer,
    shallow: nn.Module,
    deep: nn.Module,
    plan: DepthPlan,
    *,
    grow: DepthOperator | None = None,
    lr: NotNegative | None = None,
) -> Optimizer:
    """An optimizer of the same class for the deep model.

    Old blocks keep their state. New ones start as with a fresh optimizer, or, if they are copies, with the state of
    what they copy, as the plan has it. They are in the groups of the block that they come from. grow: need not be said,
    and where it is, must be what the plan was made for. lr: as in `upscale`.

    >>> import mupscale as mu
    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n) for n in (2, 4))
    >>> tokens = torch.randint(0, 11, (2, 8))
    >>> plan = mu.plan_depth(shallow, deep, inputs=tokens)
    >>> optimizer = torch.optim.AdamW(shallow.parameters(), lr=0.1)
    >>> deep = mu.deepen(shallow, deep, plan)
    >>> len(mu.deepen_optimizer(optimizer, shallow, deep, plan).param_groups[0]["params"])
    52
    """
    _refuse_another_operator(plan, grow)
    names = {name: origin.name for name, origin in plan.origins.items() if name in plan.rules.parameters}
    groups = deepened_groups(optimizer, shallow, deep, plan.rules, names, lr)
    deeper = type(optimizer)(groups, **constructor_arguments(optimizer))
    old = naming.parameters(shallow)
    for name, p, group in _named_parameters(deeper, deep):
        origin = plan.origins[name]
        state = optimizer.state.get(old[origin.name])
        if state and (plan.grow.copies or not origin.is_new):
            entry = plan.rules.parameters[name]
            deeper.state[p] = {
                key: _carried(key, value, name, entry, p, group, optimizer, plan.grow) for key, value in state.items()
            }
    return deeper


def _named_parameters(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    names = {id(p): name for name, p in naming.parameters(model).items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield names[id(p)], p, group


def _carried(
    key: str,
    value: Any,
    name: str,
    entry: Entry,
    p: Tensor,
    group: dict[str, Any],
    optimizer: Optimizer,
    operator: DepthOperator,
) -> Any:
    """What the deep optimizer keeps under this key: gradients of copies are shared, those of old blocks stay."""
    traits = traits_of(type(optimizer))
    factor = state_factor(name, key, entry, group, traits)
    if not operator.copies and key not in traits.rates:
        factor = 1.0
    if not isinstance(value, Tensor):
        return scale(value, factor) if isinstance(value, float) else value
    whole = gather_whole(value.detach())
    refuse_nonfinite({f"{name}/{key}": whole})
    if is_scalar(whole, entry):
        on_device = group.get("capturable") or group.get("fused")
        return scale(whole, factor).to(p.device if on_device else "cpu", copy=True)
    carried = scale(whole, factor).to(p.device, copy=True)
    return laid_out_like(carried, p) if carried.shape == p.shape else carried


def dress_deep(deep: nn.Module, shallow: nn.Module, plan: DepthPlan) -> None:
    """Give the deep model the shallow one's device, dtypes, frozen parameters and train or eval mode.

    New blocks are as those that they come from.

    >>> from mupscale.models import GPT2
    >>> shallow, deep = (GPT2(11, 8, width=8, head_dim=4, layers=n) for n in (2, 4))
    >>> plan = plan_depth(shallow, deep, inputs=torch.zeros(1, 8, dtype=torch.int64))
    >>> dress_deep(deep, shallow.double().eval(), plan)
    >>> deep.h[3].ln_1.weight.dtype, deep.h[3].training
    (torch.float64, False)
    """
    for named in (naming.parameters, naming.buffers):
        ours: dict[str, Any] = named(shallow)
        for name, tensor in named(deep).items():
            source = ours[plan.origins[name].name]
            tensor.data = tensor.data.to(source.device, source.dtype)
            tensor.requires_grad_(source.requires_grad)
    _take_modes_of_shallow(deep, shallow, plan)


def _take_modes_of_shallow(deep: nn.Module, shallow: nn.Module, plan: DepthPlan) -> None:
    """Put every module of the deep model into the mode of the one that it comes from."""
    modules, modes = naming.modules(deep), naming.modules(shallow)
    moved = {path: one.shallow[0] for one in plan.lists for path in one.deep} | {
        path: source for one in plan.lists for path, source in one.moved.items()
    }
    for path, module in modules.items():
        block = next((b for b in moved if path == b or path.startswith(f"{b}.")), None)
        source_path = path if block is None else moved[block] + path.removeprefix(block)
        if source_path in modes:
            module.training = modes[source_path].training
