"""How a learning rate goes over a run; and a scheduler carried over to a wide optimizer in the middle of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.optim.groups import FROM_GROUP, RATE_CHANGE
from mupscale.optim.optimizer_traits import scale
from mupscale.system import MupscaleError, checks_arguments, warn

_RATES = ("min_lrs", "max_lrs")  # absolute rates, one per group
_PER_GROUP = ("lr_lambdas", "base_momentums", "max_momentums")
_FAR = 4.0  # so many times the schedule's rate, and lr= was probably meant as another one


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes over the run, as a multiple of the optimizer's lr.

    Args:
        kind: constant; cosine (falls to floor after the warm-up); or wsd (warm-up, stable, then linear decay)
        warmup: steps of linear warm-up
        decay: steps of the decay at the end (wsd only)
        floor: final learning rate, as a fraction of lr (cosine and wsd)
        before: where a run is a part of a longer one, steps that came before it; the schedule is that of the whole
        after: steps that come after it

    Example:
        >>> [Schedule("wsd", warmup=2, decay=3).at(step, 10) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
        >>> Schedule("cosine", before=3, after=2).at(1, 5) == Schedule("cosine").at(4, 10)
        True
    """

    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0
    before: int = 0
    after: int = 0

    def at(self, step: int, steps: int) -> float:
        """The multiple for the step after `step` ones, of `steps`; a function of these alone, so without a state."""
        step, steps = self.before + step, self.before + steps + self.after
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "cosine":
            done = (step - self.warmup) / max(1, steps - self.warmup)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "wsd" and step >= steps - self.decay:
            return self.floor + (1 - self.floor) * max(0, steps - step) / (self.decay + 1)
        return 1.0


class _FloorPerGroup(LRScheduler):
    """A cosine schedule whose `eta_min` is a list: each group has its own floor, as it has its own learning rate."""

    eta_min: Any

    def __reduce__(self) -> tuple[Any, ...]:  # its class is made on the fly
        return _blank, (type(self).__bases__[1],), vars(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "eta_min": list(state_dict["eta_min"])})


def _with_floors(kind: type[LRScheduler]) -> type[LRScheduler]:
    """The class of schedulers of this kind with a floor per group."""

    def group_by_group(rates_of: Callable[[LRScheduler], list[Any]]) -> Callable[[_FloorPerGroup], list[Any]]:
        def rates(self: _FloorPerGroup) -> list[Any]:
            floors, found = self.eta_min, []
            try:
                for number, self.eta_min in enumerate(floors):
                    found.append(rates_of(self)[number])
            finally:
                self.eta_min = floors
            return found

        return rates

    names = [name for name in ("get_lr", "_get_closed_form_lr") if hasattr(kind, name)]
    return type(kind.__name__, (_FloorPerGroup, kind), {name: group_by_group(getattr(kind, name)) for name in names})


def _blank(kind: type[LRScheduler]) -> LRScheduler:
    made = _with_floors(kind)
    return made.__new__(made)


class _SavedFloors(list[float]):
    """The floors of a saved schedule: a scheduler of torch's own that computes with them says how they are loaded."""

    def __rsub__(self, rate: object) -> Any:
        raise MupscaleError(
            "this schedule has an eta_min for each group, which load_state_dict of torch's schedulers does not take. "
            "Load it with mupscale.load(path, model, optimizer, scheduler)"
        )


def saved_schedule(state: Any) -> Any:
    """A state dict out of a file, in which floors per group are marked: no scheduler takes them for something else."""
    if isinstance(state, list):
        return [saved_schedule(inner) for inner in state]
    if not isinstance(state, dict):
        return state
    marked = {key: saved_schedule(value) for key, value in state.items()}
    if isinstance(state.get("eta_min"), list):
        marked["eta_min"] = _SavedFloors(state["eta_min"])
    return marked


def load_schedule(state: dict[str, Any], scheduler: LRScheduler) -> None:
    """As scheduler.load_state_dict, for the groups of the saved optimizer, however many the scheduler was made for.

    A floor for each group, where the saved schedule has them, makes it such a one. Functions of steps, which no file
    holds, are the scheduler's own.

    >>> import torch
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    >>> load_schedule({**scheduler.state_dict(), "eta_min": [0.02]}, scheduler)
    >>> scheduler.eta_min
    [0.02]
    """
    for inner, saved in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=False):
        load_schedule(saved, inner)
    if isinstance(state.get("eta_min"), list) and not isinstance(scheduler, _FloorPerGroup):
        scheduler.__class__ = _with_floors(type(scheduler))
    functions, count = getattr(scheduler, "lr_lambdas", ()), len(state.get("lr_lambdas", ()))
    if functions and len(functions) != count:
        if any(function is not functions[0] for function in functions):
            raise MupscaleError(
                f"the saved schedule is for {count} groups, and this scheduler has different functions for "
                f"{len(functions)}. Load the model and the optimizer, then make the scheduler for the groups that the "
                "optimizer then has, and load once more with scheduler="
            )
        scheduler.lr_lambdas = list(functions[:1]) * count  # type: ignore[attr-defined]
    scheduler.load_state_dict(state)


@checks_arguments
def widen_scheduler(scheduler: LRScheduler, wide_optimizer: Optimizer) -> LRScheduler:
    """The same schedule at the same point, for the optimizer that `upscale` made from this scheduler's own.

    (Loading its state dict would bring the narrow rates along, one per narrow group.) Where `upscale` was given another
    learning rate, that is the rate at this point: the schedule goes on from there, with all its rates in that ratio. It
    warns where that is more than four times the rate that the schedule has here.

    >>> import torch
    >>> import mupscale as mu
    >>> narrow, wide = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(32, 32, bias=False)
    >>> optimizer = torch.optim.Adam(narrow.parameters(), lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    >>> wide, wide_optimizer = mu.upscale(narrow, wide, mu.plan(narrow, wide), optimizer, exact=True)
    >>> mu.widen_scheduler(scheduler, wide_optimizer).get_last_lr()
    [0.025]
    """
    widened = _carried_over(scheduler, wide_optimizer)
    group = max(wide_optimizer.param_groups, key=lambda group: float(group.get(RATE_CHANGE, 1.0)))
    times = float(group.get(RATE_CHANGE, 1.0))
    if times > _FAR:  # as the peak of a schedule is in the middle of it
        now = float(group["lr"]) / group.get("lr_factor", 1.0) / times
        warn(
            f"lr is {times:.3g} times the schedule's current learning rate, {now:.3g}. All later rates of the schedule "
            f"become {times:.3g} times as large. For half of the current rate, give lr={now / 2:.3g}"
        )
    return widened


def _carried_over(scheduler: LRScheduler, wide_optimizer: Optimizer) -> LRScheduler:
    groups = wide_optimizer.param_groups
    if not all(FROM_GROUP in group for group in groups):
        raise MupscaleError("widen_scheduler takes the wide optimizer that upscale made from the scheduler's own")
    narrow = scheduler.optimizer.param_groups
    origin = [int(group[FROM_GROUP]) for group in groups]
    if any(math.isinf(group.get(RATE_CHANGE, 1.0)) for group in groups):
        raise MupscaleError(
            "the schedule is at a learning rate of 0, so it cannot continue from the lr that you gave. Leave lr out, "
            "or make a new scheduler for the wide optimizer"
        )
    growth = [  # by what the rates of a group are multiplied
        float(group.get("lr_factor", 1.0) / narrow[i].get("lr_factor", 1.0) * group.get(RATE_CHANGE, 1.0))
        for group, i in zip(groups, origin, strict=True)
    ]
    widened = copy.copy(scheduler)
    widened.optimizer = wide_optimizer
    for name, value in vars(scheduler).items():
        wide_value: Any = copy.copy(value) if isinstance(value, list | dict) else value
        if name == "_schedulers":  # SequentialLR, ChainedScheduler
            wide_value = [_carried_over(inner, wide_optimizer) for inner in value]
        elif name == "base_lrs":
            for group, i, factor in zip(groups, origin, growth, strict=True):
                group.setdefault("initial_lr", scale(value[i], factor))
            wide_value = [group["initial_lr"] for group in groups]
        elif name == "_last_lr":
            wide_value = [group["lr"] for group in groups]
        elif name == "_step_count":  # at 1 torch warns of an optimizer whose step it has not wrapped itself
            wide_value = max(value, 2)
        elif name in _RATES:
            wide_value = [scale(value[i], factor) for i, factor in zip(origin, growth, strict=True)]
        elif name in _PER_GROUP:
            wide_value = [value[i] for i in origin]
        elif name == "eta_min" and value:
            floors = value if isinstance(value, list) else [value] * len(narrow)
            wide_value = [scale(floors[i], factor) for i, factor in zip(origin, growth, strict=True)]
            if len(set(wide_value)) == 1 and not isinstance(value, list):
                wide_value = wide_value[0]
            elif not isinstance(value, list):  # one number in torch, which every group would end at
                widened.__class__ = _with_floors(type(scheduler))
        elif name == "optimizer":
            wide_value = wide_optimizer
        setattr(widened, name, wide_value)
    return widened
