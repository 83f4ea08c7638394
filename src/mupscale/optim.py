"""What each optimizer is, as data; parameter groups that carry μP and widening; width-invariant clipping.

An optimizer qualifies if its update is homogeneous in the gradient (Definition 'Entrywise optimizer' and what
follows it): scaling gradients, eps and lr by the factors of a Rule then scales the update by exactly what the
wide weights need. No optimizer is subclassed: everything is said in ordinary torch parameter groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale import names as naming
from mupscale.errors import MupscaleError
from mupscale.plan import Entry, Plan
from mupscale.sharded import full

Hyper = Mapping[str, Any]
Factor = Callable[[Entry, Hyper], Any]
"""From a parameter's entry and its group's hyperparameters to the factor of some quantity (a tuple for a tuple)."""


@dataclass(frozen=True)
class Traits:
    """How an optimizer's hyperparameters and state scale; see the constructors below for the usual cases."""

    hyper: Mapping[str, Factor]
    state: Mapping[str, Factor]
    check: Callable[[Hyper], str] = lambda hyper: ""
    implicit: Callable[[Hyper, Tensor], Hyper] = lambda hyper, parameter: hyper
    as_is: frozenset[str] = frozenset({"step", "mu_product", "mu"})
    matrices_only: bool = False


def _gradient(degree: int) -> Factor:
    return lambda entry, hyper: entry.rule.gradient(degree)


def _weight(entry: Entry, hyper: Hyper) -> float:
    return entry.rule.weight


def _one(entry: Entry, hyper: Hyper) -> float:
    return 1.0


def _entrywise(
    degree: int,
    *,
    decoupled: bool | str = False,
    eps: Iterable[str] = ("eps",),
    state: Mapping[str, int] | None = None,
    **more: Any,
) -> Traits:
    """An entrywise optimizer of degree m; `decoupled` may name the flag that decides it."""

    def lr(entry: Entry, hyper: Hyper) -> float:
        return entry.rule.lr(degree)

    def decay(entry: Entry, hyper: Hyper) -> float:
        on = bool(hyper.get(decoupled, False)) if isinstance(decoupled, str) else decoupled
        return entry.rule.decoupled_decay(degree) if on else entry.rule.coupled_decay

    scaled: dict[str, Factor] = {"lr": lr, "weight_decay": decay}
    scaled.update({name: lambda entry, hyper: entry.rule.eps for name in eps})
    states: dict[str, Factor] = {name: _gradient(d) for name, d in (state or {}).items()}
    return Traits({**scaled, **more.pop("hyper", {})}, {**states, **more.pop("more_state", {})}, **more)


def _adafactor_eps(entry: Entry, hyper: Hyper) -> tuple[float, float]:
    """eps1 floors a second moment for matrices and the root of one for vectors; eps2 floors the weight's rms.

    torch also floors single second moments of matrices at eps1², of another degree: equivalence is exact as long as
    that second floor does not bind (at the default it is 1e-14).
    """
    return entry.rule.gradient(1 if len(entry.narrow) < 2 else 2), entry.rule.weight


def _adafactor_implicit(hyper: Hyper, parameter: Tensor) -> Hyper:
    eps1, eps2 = hyper["eps"]
    return {**hyper, "eps": (torch.finfo(parameter.dtype).eps if eps1 is None else eps1, eps2)}


def _muon_lr(entry: Entry, hyper: Hyper) -> float:
    """Muon multiplies lr by a function of the shape itself; that change must be taken back."""
    return entry.rule.spectral_lr * _muon_adjustment(entry.narrow, hyper) / _muon_adjustment(entry.wide, hyper)


def _muon_adjustment(shape: tuple[int, ...], hyper: Hyper) -> float:
    rows, columns = shape[:2]
    if hyper.get("adjust_lr_fn") == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


_MUON = Traits(
    hyper={
        "lr": _muon_lr,
        "weight_decay": lambda entry, hyper: 1 / _muon_lr(entry, hyper),
        # a floor under the Frobenius norm, which copying multiplies by √(out·in_)
        "eps": lambda entry, hyper: entry.rule.gradient() * math.sqrt(entry.rule.out * entry.rule.in_),
    },
    state={"momentum_buffer": _gradient(1)},
    matrices_only=True,
)


def _adagrad_check(hyper: Hyper) -> str:
    if hyper.get("initial_accumulator_value", 0):
        return "Adagrad's initial_accumulator_value is one number for all parameters and cannot follow the width; use 0"
    return ""


_ADAM = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_DEGREE_ONE_LR: Factor = lambda entry, hyper: entry.rule.lr(1)  # noqa: E731
_DEGREE_ZERO_LR: Factor = lambda entry, hyper: entry.rule.lr(0)  # noqa: E731

_TRAITS: dict[type[Optimizer], Traits] = {
    torch.optim.SGD: _entrywise(1, eps=(), state={"momentum_buffer": 1}),
    torch.optim.Adam: _entrywise(0, decoupled="decoupled_weight_decay", state=_ADAM),
    torch.optim.AdamW: _entrywise(0, decoupled=True, state=_ADAM),
    torch.optim.NAdam: _entrywise(0, decoupled="decoupled_weight_decay", state=_ADAM),
    torch.optim.SparseAdam: _entrywise(0, state=_ADAM),
    torch.optim.Adamax: _entrywise(0, state={"exp_avg": 1, "exp_inf": 1}),
    torch.optim.Adagrad: _entrywise(0, state={"sum": 2}, check=_adagrad_check),
    # RMSprop's momentum averages updates, which have degree 0
    torch.optim.RMSprop: _entrywise(0, state={"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0}),
    # Adadelta's eps sits under both roots: with eps of degree 2, its update has degree 1
    torch.optim.Adadelta: _entrywise(1, eps=(), state={"square_avg": 2, "acc_delta": 2}, hyper={"eps": _gradient(2)}),
    # Rprop's update is sign(g)·step_size: step sizes, and their bounds, are learning rates
    torch.optim.Rprop: _entrywise(
        0,
        eps=(),
        state={"prev": 1},
        more_state={"step_size": _DEGREE_ZERO_LR},
        hyper={"step_sizes": _DEGREE_ZERO_LR},
    ),
    # ASGD's eta is a learning rate, lambd a decoupled decay, ax an average of weights
    torch.optim.ASGD: _entrywise(
        1,
        eps=(),
        more_state={"eta": _DEGREE_ONE_LR, "ax": _weight},
        hyper={"lambd": lambda entry, hyper: entry.rule.decoupled_decay(1)},
    ),
    # Adafactor's step is relative to the weight's rms, so lr and decay stay
    torch.optim.Adafactor: Traits(
        hyper={"lr": _one, "weight_decay": _one, "eps": _adafactor_eps},
        state={"row_var": _gradient(2), "col_var": _gradient(2), "variance": _gradient(2)},
        implicit=_adafactor_implicit,
    ),
    torch.optim.Muon: _MUON,
}

_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.RAdam: "its first steps are linear in the gradient and later ones are not, so no one learning rate "
    "is right for both; use AdamW with a warm-up",
    torch.optim.LBFGS: "it mixes all parameters in one inner product and has no per-parameter learning rates; use "
    "SGD or AdamW",
}


def register_optimizer(
    optimizer: type[Optimizer],
    *,
    degree: int = 0,
    decoupled: bool = True,
    eps: Iterable[str] = ("eps",),
    state: Mapping[str, int] | None = None,
    like: type[Optimizer] | None = None,
) -> None:
    """Teach the library an optimizer whose update is entrywise and homogeneous of `degree` in the gradient.

    decoupled: whether weight decay shrinks the weight by lr·λ instead of being added to the gradient.
    eps: names of hyperparameters that are added to quantities of degree 1. state: degree of each state tensor.
    like: an optimizer known already, where this one has the same hyperparameters and state.
    """
    _TRAITS[optimizer] = (
        traits(like) if like is not None else _entrywise(degree, decoupled=decoupled, eps=tuple(eps), state=state)
    )


def traits(optimizer: type[Optimizer]) -> Traits:
    """The traits of an optimizer class, or of a base class whose `step` it keeps; refused with the reason."""
    known = next((cls for cls in optimizer.__mro__ if cls in _TRAITS or cls in _REFUSED), None)
    # torch wraps the step of every class it instantiates; another one below the wrappers is another algorithm
    if known is not None and inspect.unwrap(optimizer.step) is inspect.unwrap(known.step):
        if known in _TRAITS:
            return _TRAITS[known]
        raise MupscaleError(f"{optimizer.__name__} cannot follow the width: {_REFUSED[known]}")
    raise MupscaleError(
        f"unknown optimizer {optimizer.__name__}; if its update is entrywise and homogeneous of degree m in the "
        f"gradient, write mupscale.register_optimizer({optimizer.__name__}, degree=m, decoupled=…, eps=(…), "
        f"state={{'NAME': DEGREE}})"
    )


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
    known = traits(optimizer)
    found = plan.check(model)
    owned = {id(p): name for name, p in found.items()}
    defaults = _defaults(optimizer, hyper)
    made = _Groups(known)
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
    made = _Groups(known)
    for group in optimizer.param_groups:
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
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


class _Groups:
    """Collects parameters into groups with equal hyperparameters."""

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
        complete = self.known.implicit(complete, p)
        factors = {n: factor(entry, complete) for n, factor in self.known.hyper.items() if n in complete}
        follow = {n: factors["lr"] for n in self._FOLLOW_LR if n in shown}
        before = {n: v for n, v in shown.items() if not n.endswith("_factor")}
        if "eps" in before:
            before["eps"] = complete["eps"]
        values = tuple((n, v if _hashable(v) else id(v)) for n, v in sorted(before.items()))
        kept = {f"{n}_factor": shown.get(f"{n}_factor", 1.0) for n in ("lr", "weight_decay", "eps") if n in factors}
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


def _defaults(optimizer: type[Optimizer], hyper: Hyper) -> dict[str, Any]:
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
    found = plan.check(model)
    by_weight: dict[float, list[Tensor]] = {}
    for name, p in found.items():
        if p.grad is not None:
            by_weight.setdefault(plan.parameters[name].rule.norm(norm_type), []).append(p.grad)
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
