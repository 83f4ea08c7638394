"""Parameter groups that carry μP and widening, and clipping that does not depend on the width.

No optimizer is subclassed: everything is said in ordinary torch parameter groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, Plan, full, naming
from mupscale.optim.known import Hyper, Traits, traits
from mupscale.system import MupscaleError


def param_groups(
    model: nn.Module,
    plan: Plan,
    optimizer: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    **hyper: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for `optimizer` at the plan's wide width; hyperparameters are those of the narrow one.

    groups: the user's own groups, as for torch (`[{"params": decay, "weight_decay": 0.1}, {"params": rest}]`), where
    a parameter may also be given by name. Every group comes back with `lr_factor`, `weight_decay_factor` and
    `eps_factor`, for code that sets absolute values.
    """
    known = traits(optimizer).at(plan)
    found = plan.check(model)
    owned = {id(p): name for name, p in found.items()}
    defaults = default_hyper(optimizer, hyper)
    made = Groups(known)
    for group in groups if groups is not None else [{"params": list(found)}]:
        given = {**hyper, **{k: v for k, v in group.items() if k not in ("params", "param_names")}}
        complete = {**defaults, **given}
        if why := known.check(complete):
            raise MupscaleError(why)
        missing = [n for n in known.hyper if n in defaults and complete[n] is inspect.Parameter.empty]
        if missing:
            raise MupscaleError(f"{optimizer.__name__} needs {', '.join(missing)}: pass {missing[0]}=…")
        for name in _names_of(group["params"], plan, found, owned):
            shown = {k: complete[k] for k in complete if k in given or k in known.hyper}
            made.add(name, found[name], plan.parameters[name], shown, complete)
    return made.groups()


def make_optimizer(
    model: nn.Module,
    plan: Plan,
    optimizer: type[Optimizer],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    **hyper: Any,
) -> Optimizer:
    """The optimizer itself, built from param_groups."""
    made = param_groups(model, plan, optimizer, groups=groups, **hyper)
    return optimizer(made, **hyper)


def widened_groups(
    optimizer: Optimizer, narrow: nn.Module, wide: nn.Module, plan: Plan, lr: float | None = None
) -> list[dict[str, Any]]:
    """The narrow optimizer's groups as they are now, for the wide model; `lr` (at lr_factor 1) replaces the rate."""
    known = traits(type(optimizer))
    found, owned = plan.check(wide), {id(p): n for n, p in plan.check(narrow, "narrow").items()}
    made = Groups(known)
    for number, group in enumerate(optimizer.param_groups):
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")} | {FROM_GROUP: number}
        for p in group["params"]:
            if id(p) not in owned:
                raise MupscaleError("the optimizer holds a parameter that is not the narrow model's")
            made.add(owned[id(p)], found[owned[id(p)]], plan.parameters[owned[id(p)]], hyper, hyper)
    grown = made.groups()
    if lr is not None:
        for group in grown:
            group["lr"] = scale(lr, group["lr_factor"])
            group.pop("initial_lr", None)
    return grown


FROM_GROUP = "from_group"
"""Key of a widened group that says which of the narrow optimizer's groups it comes from."""


def per_group(optimizer: Optimizer, lr: float) -> list[float]:
    """A learning rate at lr_factor 1 as one absolute rate per group, for schedulers that take lists of rates."""
    return [lr * group.get("lr_factor", 1.0) for group in optimizer.param_groups]


def scale(value: Any, factor: Any) -> Any:
    """A hyperparameter times its factor, never in place; tuples entry by entry, None stays None."""
    if value is None:
        return None
    if isinstance(value, tuple | list):
        factors = factor if isinstance(factor, tuple) else (factor,) * len(value)
        return type(value)(scale(v, f) for v, f in zip(value, factors, strict=True))
    if isinstance(value, Tensor):
        return value.detach().clone() * factor if factor != 1 else value.detach().clone()
    return value if factor == 1 else value * factor


class Groups:
    """Collects parameters into groups with equal hyperparameters."""

    _FACTORS = ("lr", "weight_decay", "eps")  # whose factors a group shows
    _FOLLOW_LR = ("initial_lr", "max_lr", "min_lr", "swa_lr")  # what torch's schedulers leave in a group

    def __init__(self, known: Traits) -> None:
        self.known = known
        self.by_key: dict[Any, dict[str, Any]] = {}

    def add(self, name: str, p: nn.Parameter, entry: Entry, shown: Hyper, complete: Hyper) -> None:
        """Put the parameter into its group: hyperparameters `shown`, scaled as the `complete` ones tell."""
        if self.known.matrices_only and len(entry.narrow) != 2:
            raise MupscaleError(
                f"Muon is for matrices, and '{name}' has shape {entry.wide}; give it another optimizer (groups=)"
            )
        if entry.shift and complete.get("weight_decay"):
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, so that weight decay pulls "
                f"the wide model's elsewhere than the narrow one's; give it a group with weight_decay=0 (groups=; "
                f"mupscale.hf.decay_groups makes such groups of a Hugging Face model)"
            )
        if entry.shift and self.known.by_size:
            raise MupscaleError(
                f"'{name}' is stored without the {entry.offset} that the model adds to it, and this optimizer goes by "
                f"the size of what is stored, which the wide model's does not share; use AdamW"
            )
        complete = self.known.implicit(complete, p)
        factors = {n: factor(entry, complete) for n, factor in self.known.hyper.items() if n in complete}
        follow = {n: factors["lr"] for n in self._FOLLOW_LR if n in shown}
        ours = {f"{n}_factor" for n in self._FACTORS}
        before = {n: v for n, v in shown.items() if n not in ours}
        if "eps" in before:
            before["eps"] = complete["eps"]
        values = tuple((n, v if _hashable(v) else id(v)) for n, v in sorted(before.items()))
        kept = {f"{n}_factor": shown.get(f"{n}_factor", 1.0) for n in self._FACTORS if n in factors}
        total = {k: scale(factors[k.removesuffix("_factor")], v) for k, v in kept.items()}
        key = (values, tuple(sorted(factors.items())), tuple(total.items()))
        if key not in self.by_key:
            scaled = {n: scale(v, {**factors, **follow}.get(n, 1.0)) for n, v in before.items()}
            self.by_key[key] = {"params": [], **scaled, **total}
        self.by_key[key]["params"].append((name, p))

    def groups(self) -> list[dict[str, Any]]:
        return list(self.by_key.values())


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return not isinstance(value, Tensor)


def default_hyper(optimizer: type[Optimizer], hyper: Hyper) -> dict[str, Any]:
    """What the class would fill in: its signature's defaults, and what its constructor makes of them."""
    parameters = inspect.signature(optimizer.__init__).parameters.values()
    signature = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        made = optimizer([nn.Parameter(torch.zeros(1, 1))], **hyper).defaults
    except Exception:  # it will say so itself when the user makes it
        made = {}
    return {n: v for n, v in {**signature, **made}.items() if n not in ("self", "params")}


def _names_of(params: Any, plan: Plan, found: Mapping[str, nn.Parameter], owned: Mapping[int, str]) -> list[str]:
    """The names of a group's parameters, given as tensors, (name, tensor) pairs or names."""
    names = []
    for item in [params] if isinstance(params, Tensor | str) else params:
        tensor = item[1] if isinstance(item, tuple) else item
        name = plan.names.get(naming.canonical(tensor)) if isinstance(tensor, str) else owned.get(id(tensor))
        if name is None or name not in found:
            raise MupscaleError(
                f"groups: {tensor if isinstance(tensor, str) else 'a tensor'} is no parameter of the model"
            )
        names.append(name)
    return names


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    plan: Plan,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch's clip_grad_norm_ with every gradient weighted so that the norm is what the narrow model's would be.

    Plain clipping breaks equivalence: copied gradients have another norm. Returns the invariant norm.
    """
    found, weights = plan.check(model), plan.norm_weights(norm_type)
    by_weight: dict[float, list[Tensor]] = {}
    for name, p in found.items():
        if p.grad is not None:
            by_weight.setdefault(weights[name], []).append(p.grad)
    if not by_weight:
        return torch.tensor(0.0)
    norms = {w: full(nn.utils.get_total_norm(g, norm_type, False, foreach)) for w, g in by_weight.items()}
    device = next(iter(norms.values())).device
    if math.isinf(norm_type):
        total = torch.stack([norm.to(device) * w for w, norm in norms.items()]).max()
    else:
        parts = [norm.to(device).pow(norm_type) * w for w, norm in norms.items()]
        total = torch.stack(parts).sum().pow(1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise MupscaleError(f"the gradients' total norm is {float(total)}, so they cannot be clipped")
    nn.utils.clip_grads_with_norm_(found.values(), max_norm, total, foreach)
    return total
