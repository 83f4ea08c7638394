"""What each optimizer is, as data: how its hyperparameters and its state scale with a parameter's Rule.

An optimizer qualifies if its update is homogeneous in the gradient (Definition 'Entrywise optimizer' and what
follows it): scaling gradients, eps and lr by the factors of a Rule then scales the update by exactly what the
wide weights need. What is not homogeneous is refused, with the reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Entry, Plan
from mupscale.system import MupscaleError

Hyper = Mapping[str, Any]
Factor = Callable[[Entry, Hyper], Any]
"""From a parameter's entry and its group's hyperparameters to the factor of some quantity (a tuple for a tuple)."""


@dataclass(frozen=True)
class Traits:
    """How an optimizer's hyperparameters and state scale; see the constructors below for the usual cases.

    check: raises an error where hyperparameters cannot follow the width. implicit: hyperparameters with the values that
    the optimizer takes where they are None. as_is: state that does not scale. rates: state that is a learning rate.
    begins_at_mean: state in which new units start at the mean of old ones, since it is shared with old units' steps.
    decoupled: whether weight decay shrinks the weight by lr·λ, given a group's hyperparameters.
    decay: the name of the hyperparameter that is the weight decay.
    by_size: whether steps or state follow the stored weight itself, which is not what scales where there is an offset.
    """

    hyper: Mapping[str, Factor]
    state: Mapping[str, Factor]
    check: Callable[[Hyper], None] = lambda hyper: None
    implicit: Callable[[Hyper, Tensor], Hyper] = lambda hyper, parameter: hyper
    as_is: frozenset[str] = frozenset({"step", "mu_product", "mu"})
    rates: frozenset[str] = frozenset()
    begins_at_mean: frozenset[str] = frozenset()
    matrices_only: bool = False
    decay: str = "weight_decay"
    by_size: bool = False
    decoupled: Callable[[Hyper], bool] = lambda hyper: True
    mup_hyper: Mapping[str, Factor] = field(default_factory=dict)

    def at(self, plan: Plan) -> Traits:
        """These traits for a plan: hyperparameters that scale otherwise where the wide model starts afresh (μP)."""
        return replace(self, hyper={**self.hyper, **self.mup_hyper}) if plan.mup else self


def _gradient(degree: int) -> Factor:
    return lambda entry, hyper: entry.rule.gradient(degree)


def _lr(degree: int) -> Factor:
    return lambda entry, hyper: entry.rule.lr(degree)


def _weight(entry: Entry, hyper: Hyper) -> float:
    return entry.rule.weight


def _one(entry: Entry, hyper: Hyper) -> float:
    return 1.0


def _relative_lr(entry: Entry, hyper: Hyper) -> float:
    """A step relative to a fresh weight's own size, which μP scales otherwise than the step it wants."""
    return entry.rule.lr(0) / entry.init


def entrywise_traits(
    degree: int,
    *,
    decoupled: bool | str = False,
    eps: Iterable[str] = ("eps",),
    state: Mapping[str, int] | None = None,
    decay: str = "weight_decay",
    **more: Any,
) -> Traits:
    """An entrywise optimizer of degree m; `decoupled` may name the flag that decides it."""

    def is_decoupled(hyper: Hyper) -> bool:
        return bool(hyper.get(decoupled, False)) if isinstance(decoupled, str) else decoupled

    def of_decay(entry: Entry, hyper: Hyper) -> float:
        return entry.rule.decoupled_decay(degree) if is_decoupled(hyper) else entry.rule.coupled_decay

    scaled: dict[str, Factor] = {"lr": _lr(degree), decay: of_decay}
    scaled.update({name: lambda entry, hyper: entry.rule.eps for name in eps})
    states = states_by_degree(state or {})
    own = {**scaled, **more.pop("hyper", {})}, {**states, **more.pop("more_state", {})}
    return Traits(*own, decoupled=is_decoupled, decay=decay, **more)


def states_by_degree(state: Mapping[str, int]) -> dict[str, Factor]:
    """Factors of state tensors by their degrees in the gradient."""
    return {name: _gradient(degree) for name, degree in state.items()}


def _adafactor_eps(entry: Entry, hyper: Hyper) -> tuple[float, float]:
    """eps1 floors a second moment for matrices and the root of one for vectors; eps2 floors the weight's rms.

    torch also floors single second moments of matrices at eps1², of another degree: equivalence is exact as long as
    that second floor does not bind (at the default it is 1e-14).
    """
    return entry.rule.gradient(1 if len(entry.narrow) < 2 else 2), entry.rule.weight


def _muon_lr(entry: Entry, hyper: Hyper) -> float:
    """Muon multiplies lr by a function of the shape itself; that change must be taken back."""
    return entry.rule.spectral_lr * _muon_adjustment(entry.narrow, hyper) / _muon_adjustment(entry.wide, hyper)


def _muon_adjustment(shape: tuple[int, ...], hyper: Hyper) -> float:
    rows, columns = shape[:2]
    if hyper.get("adjust_lr_fn") == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def scale(value: Any, factor: Any) -> Any:
    """A hyperparameter times its factor, never in place; tuples entry by entry, None stays None.

    >>> scale(0.5, 4.0), scale((0.9, 0.5), (1.0, 4.0)), scale(None, 4.0)
    (2.0, (0.9, 2.0), None)
    """
    if value is None:
        return None
    if isinstance(value, tuple | list):
        factors = factor if isinstance(factor, tuple) else (factor,) * len(value)
        return type(value)(scale(v, f) for v, f in zip(value, factors, strict=True))
    if isinstance(value, Tensor):
        return value.detach().clone() * factor if factor != 1 else value.detach().clone()
    return value if factor == 1 else value * factor


def default_hyper(optimizer: type[Optimizer], hyper: Hyper) -> dict[str, Any]:
    """What the class would fill in: its signature's defaults, and what its constructor makes of them."""
    parameters = inspect.signature(optimizer.__init__).parameters.values()
    signature = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        constructed = optimizer([nn.Parameter(torch.zeros(1, 1))], **hyper).defaults
    except Exception:  # it will say so itself when the user makes it
        constructed = {}
    return {n: v for n, v in {**signature, **constructed}.items() if n not in ("self", "params")}


# Adafactor's step is relative to the weight's rms: copies have the right one, so lr and decay stay
_ADAFACTOR = Traits(
    hyper={"lr": _one, "weight_decay": _one, "eps": _adafactor_eps},
    state={"row_var": _gradient(2), "col_var": _gradient(2), "variance": _gradient(2)},
    implicit=lambda hyper, p: {
        **hyper,
        "eps": (torch.finfo(p.dtype).eps if hyper["eps"][0] is None else hyper["eps"][0], hyper["eps"][1]),
    },
    by_size=True,
    # a step is divided by means over a whole axis and by its own rms: zeros of new units would change old units' steps
    begins_at_mean=frozenset({"row_var", "col_var", "variance"}),
    mup_hyper={
        "lr": _relative_lr,
        "weight_decay": lambda entry, hyper: 1 / _relative_lr(entry, hyper),
        "eps": lambda entry, hyper: (_adafactor_eps(entry, hyper)[0], entry.init),
    },
)

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


def _check_adagrad(hyper: Hyper) -> None:
    if hyper.get("initial_accumulator_value", 0):
        raise MupscaleError(
            "Adagrad's initial_accumulator_value is one number for all parameters, so it cannot follow the width. Use 0"
        )


_ADAM = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}

TRAITS: dict[type[Optimizer], Traits] = {
    torch.optim.SGD: entrywise_traits(1, eps=(), state={"momentum_buffer": 1}),
    torch.optim.Adam: entrywise_traits(0, decoupled="decoupled_weight_decay", state=_ADAM),
    torch.optim.AdamW: entrywise_traits(0, decoupled=True, state=_ADAM),
    torch.optim.NAdam: entrywise_traits(0, decoupled="decoupled_weight_decay", state=_ADAM),
    torch.optim.SparseAdam: entrywise_traits(0, state=_ADAM),
    torch.optim.Adamax: entrywise_traits(0, state={"exp_avg": 1, "exp_inf": 1}),
    torch.optim.Adagrad: entrywise_traits(0, state={"sum": 2}, check=_check_adagrad),
    # RMSprop's momentum averages updates, which have degree 0
    torch.optim.RMSprop: entrywise_traits(0, state={"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0}),
    # Adadelta's eps sits under both roots: with eps of degree 2, its update has degree 1
    torch.optim.Adadelta: entrywise_traits(
        1, eps=(), state={"square_avg": 2, "acc_delta": 2}, hyper={"eps": _gradient(2)}
    ),
    # Rprop's update is sign(g)·step_size: step sizes, and their bounds, are learning rates
    torch.optim.Rprop: entrywise_traits(
        0,
        eps=(),
        state={"prev": 1},
        more_state={"step_size": _lr(0)},
        rates=frozenset({"step_size"}),
        hyper={"step_sizes": _lr(0)},
    ),
    # ASGD's eta is a learning rate, lambd a decoupled decay, ax an average of weights
    torch.optim.ASGD: entrywise_traits(
        1,
        eps=(),
        more_state={"eta": _lr(1), "ax": _weight},
        hyper={"lambd": lambda entry, hyper: entry.rule.decoupled_decay(1)},
        by_size=True,
    ),
    torch.optim.Adafactor: _ADAFACTOR,
    torch.optim.Muon: _MUON,
}


class MuonAdamW(Optimizer):
    """torch's Muon in groups with `muon=True` and torch's AdamW in the others; `muon_groups` makes them of a plan.

    The learning rate and weight decay are shared, as Moonlight does it (adjust_lr_fn="match_rms_adamw"); AdamW takes
    `adam_scale` times the rate.

    >>> weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4))
    >>> optimizer = MuonAdamW([{"params": [weight], "muon": True}, {"params": [bias]}], lr=0.1)
    >>> weight.grad, bias.grad = torch.eye(4), torch.ones(4)
    >>> optimizer.step()
    >>> sorted(optimizer.state[weight]), sorted(optimizer.state[bias])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adam_scale: float = 1.0,
        muon: bool = False,
    ) -> None:
        dummy = [nn.Parameter(torch.zeros(1, 1))]
        self._muon = torch.optim.Muon(dummy, ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn)
        self._adamw = torch.optim.AdamW(dummy, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients)}
        own |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "adam_scale": adam_scale, "muon": muon}
        super().__init__(params, {**self._adamw.defaults, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each on its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_muon, of_adamw = [], []
        for group in self.param_groups:
            if group["muon"]:
                of_muon.append(_known_to(self._muon, group))
            else:
                own = _known_to(self._adamw, group)
                of_adamw.append({**own, "lr": group["lr"] * group["adam_scale"]})
        self._muon.param_groups, self._adamw.param_groups = of_muon, of_adamw
        self._muon.state = self._adamw.state = self.state
        self._muon.step()
        self._adamw.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}


def _known_to(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group is this optimizer's: it is the outer one that a growth has made."""
    return {key: group[key] for key in ("params", *optimizer.defaults) if key in group}


def muon_groups(plan: Plan) -> list[dict[str, Any]]:
    """Groups by name for MuonAdamW: hidden matrices, whose both axes are widths, and everything else."""
    hidden = [name for name, e in plan.parameters.items() if e.out and e.in_ and len(e.narrow) == 2]
    rest = [name for name in plan.parameters if name not in set(hidden)]
    groups = [{"params": hidden, "muon": True}, {"params": rest, "muon": False}]
    return [group for group in groups if group["params"]]


def _of_either(name: str) -> Factor:
    adamw = TRAITS[torch.optim.AdamW]
    return lambda entry, hyper: (_MUON if hyper.get("muon") else adamw).hyper[name](entry, hyper)


TRAITS[MuonAdamW] = Traits(
    hyper={name: _of_either(name) for name in ("lr", "weight_decay", "eps")},
    state={**_MUON.state, **TRAITS[torch.optim.AdamW].state},
)

_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.RAdam: "its first steps are linear in the gradient and later ones are not, so no single learning rate "
    "is right for both. Use AdamW with a warm-up",
    torch.optim.LBFGS: "it mixes all parameters in one inner product and has no per-parameter learning rates. Use SGD "
    "or AdamW",
}


def known_traits(optimizer: type[Optimizer]) -> Traits | None:
    """The traits of an optimizer class, as `traits_of`; None where there are none."""
    base = _known_base(optimizer)
    return None if base is None else TRAITS.get(base)


def why_refused(optimizer: type[Optimizer]) -> str | None:
    """Why an optimizer class, or a base class whose `step` it keeps, cannot follow the width; None where it may."""
    base = _known_base(optimizer)
    return None if base is None else _REFUSED.get(base)


def _known_base(optimizer: type[Optimizer]) -> type[Optimizer] | None:
    """The class itself or a base class whose `step` it keeps, of those that something is known of."""
    base = next((cls for cls in optimizer.__mro__ if cls in TRAITS or cls in _REFUSED), None)
    # torch wraps the step of every class it instantiates; another one below the wrappers is another algorithm
    keeps = base is not None and inspect.unwrap(optimizer.step) is inspect.unwrap(base.step)
    return base if keeps else None
