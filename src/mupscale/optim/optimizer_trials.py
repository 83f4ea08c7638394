"""What an optimizer does, found by taking steps with it: how it can be registered, and what its options do.

A tiny parameter is trained as it is and copied along its axes, with the hyperparameters that a registration gives. The
two agree after a few steps if the registration is right, whatever the optimizer's code looks like.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.core import Axis, Constants, Entry
from mupscale.optim.optimizer_traits import Traits, default_hyper, entrywise_traits, scale, states_by_degree
from mupscale.system import MupscaleError, warn

# powers of 2 so that rounding does not show, and no two factors of one kind are the same
_MATRIX = Entry((3, 4), (6, 16), {0: Axis(2, side="out"), 1: Axis(4, side="in")}, Constants(fold=2))
_LARGE = Entry((160, 144), (160, 144))  # factored and preconditioned optimizers treat small matrices otherwise
_BIAS = Entry((3,), (6,), {0: Axis(2, side="out")}, Constants(fold=2))
_STEPS = 12  # more than RAdam takes before its steps become those of Adam
_AGREE = 1e-4  # of a step: some optimizers compute in single precision, and what is wrong is wrong by a factor

_RATE, _DECAY, _EPS = 0.01, 0.3, 0.05  # large enough to be seen within a few steps
_DECAY_NAMES = ("weight_decay", "wd", "decay", "weight_decay_rate", "lambd")
_DEGREES_OF_STATE = (1, 2, 0)

# options of torch's optimizers and their kin that are shares, numbers of steps, or ways to compute the same
_FREE = {"betas", "beta1", "beta2", "beta3", "momentum", "nesterov", "dampening", "centered", "alpha", "rho", "etas"}
_FREE |= {"lr_decay", "beta2_decay", "momentum_decay", "ns_coefficients", "ns_steps", "adjust_lr_fn", "amsgrad"}
_FREE |= {"foreach", "fused", "capturable", "differentiable", "maximize"}


class NoSteps(Exception):
    """The optimizer took no steps here, or not the same ones twice."""


def check_registration(optimizer: type[Optimizer], traits: Traits, unscaled: Collection[str]) -> None:
    """Ask about options that may change with the width, and warn where steps are not those of this registration."""
    options = _options(optimizer)
    known = {*traits.hyper, *unscaled, *_FREE}
    unknown = [name for name in options if name not in known and not _is_flag_of_decay(name, options, traits)]
    if strangers := [name for name in unscaled if name not in options]:
        raise MupscaleError(
            f"unscaled=: {optimizer.__name__} has no option '{strangers[0]}'. It has {_listed(options)}"
        )
    try:
        culprits = [name for name in unknown if _matters(optimizer, traits, name, options[name])]
        wrong = "" if culprits else _what_differs(optimizer, traits, {})
    except NoSteps:  # it needs a device, a closure or arguments: then only names can be asked about
        culprits, wrong = unknown, ""
    if culprits:
        raise MupscaleError(_question(optimizer, culprits))
    if wrong:
        warn(
            f"{optimizer.__name__} was registered, but with this registration a copied parameter does not train as the "
            f"original: {wrong}. {found_in_words(optimizer)}"
        )


def _options(optimizer: type[Optimizer]) -> dict[str, Any]:
    """What the constructor takes, with its defaults."""
    parameters = inspect.signature(optimizer.__init__).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = {one.name: one.default for one in parameters if one.kind not in fixed}
    return {name: value for name, value in taken.items() if name not in ("self", "params", "defaults")}


def _is_flag_of_decay(name: str, options: Mapping[str, Any], traits: Traits) -> bool:
    """Whether this option is the one by which the traits tell decoupled from coupled decay."""
    return isinstance(options[name], bool) and traits.decoupled({name: True}) != traits.decoupled({name: False})


def _question(optimizer: type[Optimizer], culprits: Sequence[str]) -> str:
    first, several = culprits[0], len(culprits) > 1
    return (
        f"{optimizer.__name__} has the option{'s' * several} {_listed(culprits)}, and this registration does not say "
        f"how {'they change' if several else 'it changes'} with the width. If '{first}' is the weight decay, write "
        f"decay='{first}'. If it is added to quantities of degree 1 in the gradient, name it in eps=. If it is the "
        f"flag that makes weight decay decoupled, write decoupled='{first}'. If no width changes it, or you leave it "
        f"at its default, write unscaled={tuple(culprits)}"
    )


def found_in_words(optimizer: type[Optimizer]) -> str:
    """What steps with an optimizer that is not registered show of it, and how to register it if it can be."""
    name = optimizer.__name__
    by_hand = f"mupscale.register_optimizer({name}, degree=m, decoupled=…, eps=(…), state={{'NAME': DEGREE}})"
    try:
        # small first: a preconditioner of a large matrix takes its time
        entries = [_MATRIX] if is_quantised(optimizer) else [_MATRIX, _LARGE]
        if not all(_is_entrywise(optimizer, entry) for entry in entries):
            return (
                f"Steps with {name} show that it is not entrywise: the step of one entry depends on the others, as "
                "where a step is divided by a norm. Use torch.optim.AdamW, or torch.optim.Muon for matrices"
            )
        arguments = _fitting_arguments(optimizer)
    except NoSteps as error:
        return (
            f"{name} took no steps on a small CPU tensor ({error}), so its update could not be examined. If its update "
            f"is entrywise and homogeneous of degree m in the gradient, write {by_hand}"
        )
    if arguments is None:
        return (
            f"Steps with {name} show that it is entrywise but not homogeneous: no learning rate, weight decay and eps "
            "make a copied parameter train as the original. Use torch.optim.AdamW"
        )
    not_understood = _state_besides(optimizer, arguments["state"])
    if is_quantised(optimizer):
        arguments["state"], not_understood = {}, ["in 8 bits or fewer"]
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    told = (
        f"Steps with {name} show that its update is entrywise and homogeneous of degree {arguments['degree']}. "
        f"Write mupscale.register_optimizer({name}, {listed})"
    )
    if not_understood:
        what = f"state ({', '.join(not_understood)})"
        told += f". Its {what} cannot be rescaled: grow without optimizer=, and start the wide one without state"
    return told


def is_quantised(optimizer: type[Optimizer]) -> bool:
    """Whether an optimizer keeps its state in few bits; on small tensors these packages use 32 of them."""
    package = optimizer.__module__.partition(".")[0]
    return package in ("bitsandbytes", "torchao") and any(
        bits in optimizer.__name__ for bits in ("8bit", "4bit", "Fp8")
    )


# ---------------------------------------------------------------------------------------------- taking steps


def _take_steps(
    optimizer: type[Optimizer],
    weight: Tensor,
    gradients: Sequence[Tensor],
    hyper: Mapping[str, Any],
    of_group: Mapping[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The weight and the state after steps with these gradients; of_group: what its group has instead of defaults."""
    accepted = inspect.signature(optimizer.__init__).parameters
    arguments = {name: value for name, value in hyper.items() if name in accepted}
    for dtype in (torch.float64, torch.float32):  # some are written for the latter alone
        p = nn.Parameter(weight.to(dtype, copy=True))
        try:
            with _quietly():
                made = optimizer([{"params": [p], **hyper, **(of_group or {})}], **arguments)
                for gradient in gradients:
                    p.grad = gradient.to(dtype, copy=True)
                    made.step()
            return p.detach().double(), dict(made.state.get(p, {}))
        except Exception as error:  # whatever an optimizer raises
            reason = (str(error).splitlines() or [""])[0]
            failure = NoSteps(f"{type(error).__name__}: {reason}".rstrip(": "))
    raise failure


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Steps of one's own print nothing, compile nothing and draw nothing from the user's random numbers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        if "torch._dynamo" in sys.modules:  # whoever compiles a step has imported it, which takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _start(entry: Entry) -> tuple[Tensor, list[Tensor]]:
    """A weight of the entry's narrow shape, and gradients for each step."""
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(entry.narrow, generator=generator, dtype=torch.float64) for _ in range(_STEPS + 1)]
    return draws[0], draws[1:]


def _visible(optimizer: type[Optimizer], traits: Traits, more: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the hyperparameters that scale with which an error in any of them shows, and other options."""
    options, values = default_hyper(optimizer, {}), dict[str, Any]()
    for name in traits.hyper:
        default = options.get(name)
        if name not in options or isinstance(default, tuple | list | str | bool):
            continue
        values[name] = _RATE if name == "lr" else _DECAY if name == traits.decay else _EPS
    return {**values, **more}


def _what_differs(optimizer: type[Optimizer], traits: Traits, more: Mapping[str, Any]) -> str:
    """What of a copied parameter is not as the original's after a few steps, in words; nothing if all of it is."""
    hyper = _visible(optimizer, traits, more)
    complete = {**default_hyper(optimizer, {}), **hyper}
    for entry in (_MATRIX,) if traits.matrices_only else (_MATRIX, _BIAS):
        weight, gradients = _start(entry)
        wide_hyper = {
            name: scale(complete[name], factor(entry, complete))
            for name, factor in traits.hyper.items()
            if name in complete and (name in hyper or isinstance(complete[name], tuple))
        }
        wide_gradients = [entry.widened(gradient, factor=entry.rule.gradient()) for gradient in gradients]
        after, state = _take_steps(optimizer, weight, gradients, hyper)
        wide_after, wide_state = _take_steps(optimizer, entry.widened(weight), wide_gradients, hyper, wide_hyper)
        expected = entry.widened(after - weight)
        if not _agree(wide_after - entry.widened(weight), expected):
            return "its weights differ after a few steps"
        for key, factor in traits.state.items():
            if key in state and not _grows_by(state[key], wide_state[key], entry, float(factor(entry, complete))):
                return f"its state '{key}' differs after a few steps"
    return ""


def _agree(value: Tensor, expected: Tensor) -> bool:
    size = float(expected.abs().max())
    return bool((value - expected).abs().max() <= _AGREE * size) and math.isfinite(size)


def _grows_by(state: Any, wide_state: Any, entry: Entry, factor: float) -> bool:
    """Whether a state is copied and multiplied by a factor; other shapes are not looked at."""
    if not isinstance(state, Tensor) or tuple(state.shape) != entry.narrow or tuple(wide_state.shape) != entry.wide:
        return True
    return _agree(wide_state.double(), entry.widened(state.double(), factor=factor))


def _is_entrywise(optimizer: type[Optimizer], entry: Entry) -> bool:
    """Whether the steps of one entry stay the same where all others have other weights and gradients."""
    weight, gradients = _start(entry)
    hyper = {"lr": _RATE} if "lr" in default_hyper(optimizer, {}) else {}
    after, _ = _take_steps(optimizer, weight, gradients, hyper)
    again, _ = _take_steps(optimizer, weight, gradients, hyper)
    if not torch.equal(after, again):
        raise NoSteps("two runs of the same steps differ")
    others = []
    for values in (weight, *gradients):
        mixed = 3 * values.flip(0, 1) + values.roll(1, 0)
        mixed[0, 0] = values[0, 0]
        others.append(mixed)
    beside_others, _ = _take_steps(optimizer, others[0], others[1:], hyper)
    difference = float(beside_others[0, 0] - after[0, 0])
    step = float(after[0, 0] - weight[0, 0])
    return abs(difference) <= _AGREE * abs(step)


def _matters(optimizer: type[Optimizer], traits: Traits, name: str, default: Any) -> bool:
    """Whether some value of an option keeps copies from training as the original, and another does not."""
    holds = []
    for value in _values_to_try(default):
        try:
            holds.append(not _what_differs(optimizer, traits, {name: value}))
        except NoSteps:
            if value is default:
                raise
    if len(holds) < 2:
        return isinstance(default, bool | int | float | tuple | list)  # others are names and objects
    return any(holds) and not all(holds)


def _values_to_try(default: Any) -> list[Any]:
    """The default of an option and others of its kind."""
    if isinstance(default, bool):
        return [default, not default]
    if isinstance(default, int):
        return [default, 0, default + 1]
    if isinstance(default, float):
        return [default, 0.0, max(2 * default, 0.05)]
    if isinstance(default, tuple | list):
        return [default, type(default)(value / 2 if isinstance(value, float) else value for value in default)]
    return [default, 0.3, True] if default is None else [default]


def _fitting_arguments(optimizer: type[Optimizer]) -> dict[str, Any] | None:
    """With which arguments a registration is right, as steps show; None if with none."""
    options = default_hyper(optimizer, {})
    eps_names = tuple(name for name in options if "eps" in name and isinstance(options[name], float))
    decays = [name for name in _DECAY_NAMES if name in options] or ["weight_decay"]
    for degree, decoupled, eps, decay in product((0, 1), (True, False), dict.fromkeys([eps_names, ()]), decays):
        traits = entrywise_traits(degree, decoupled=decoupled, eps=eps, decay=decay)
        if _what_differs(optimizer, traits, {}):
            continue
        arguments: dict[str, Any] = {"degree": degree, "decoupled": decoupled, "eps": eps}
        unknown = [name for name in _options(optimizer) if name not in {*traits.hyper, *_FREE}]
        culprits = [name for name in unknown if _matters(optimizer, traits, name, options[name])]
        for name in culprits:
            flag = entrywise_traits(degree, decoupled=name, eps=eps, decay=decay)
            if isinstance(options[name], bool) and not _what_differs(optimizer, flag, {name: not options[name]}):
                arguments["decoupled"] = name
        if decay != "weight_decay":
            arguments["decay"] = decay
        if left := tuple(name for name in culprits if name != arguments["decoupled"]):
            arguments["unscaled"] = left
        return {**arguments, "state": _degrees_of_state(optimizer, traits)}
    return None


def _degrees_of_state(optimizer: type[Optimizer], traits: Traits) -> dict[str, int]:
    """The degree of each state tensor of the parameter's shape."""
    weight, gradients = _start(_MATRIX)
    _, state = _take_steps(optimizer, weight, gradients, _visible(optimizer, traits, {}))
    degrees: dict[str, int] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            continue
        for degree in _DEGREES_OF_STATE:
            if not _what_differs(optimizer, replace(traits, state=states_by_degree({key: degree})), {}):
                degrees[key] = degree
                break
    return degrees


def _state_besides(optimizer: type[Optimizer], known: Collection[str]) -> list[str]:
    """Keys of state that is neither a number nor known, so that nothing says how it grows."""
    weight, gradients = _start(_MATRIX)
    _, state = _take_steps(optimizer, weight, gradients, {"lr": _RATE} if "lr" in default_hyper(optimizer, {}) else {})
    besides = []
    for key, value in state.items():
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if key not in known and not is_number and value is not None:
            besides.append(f"'{key}'")
    return besides


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
