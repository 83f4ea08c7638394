"""The doors of the API: what a public function is given is checked against its own type hints before it runs.

One table has the words for what is wanted, and the remedy for what people give instead.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mupscale.system.callers import as_asked
from mupscale.system.errors import MupscaleError
from mupscale.system.typed_records import show_short

_Public = TypeVar("_Public", bound=Callable[..., Any])


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "text",
    "NoneType": "None",
    "Path": "a path",
    "Mapping": "a dict",
    "Sequence": "a list",
    "Iterable": "a list",
    "tuple": "a tuple of these",
    "Module": "a model (an nn.Module)",
    "Optimizer": "an optimizer of torch",
    "LRScheduler": "a scheduler of torch",
    "Plan": "a plan (mupscale.plan or mupscale.plan_depth makes it)",
    "Operator": "an operator of width (mupscale.Copies() or mupscale.Fresh())",
    "GrowsBy": "an operator of width (mupscale.Copies() or mupscale.Fresh())",
    "DepthOperator": "an operator of depth (mupscale.Identity() or mupscale.Stack())",
    "Role": "a mupscale.Role",
    "Axis": "a mupscale.Axis",
    "GaussianNoise": "mupscale.GaussianNoise(…)",
    "SignalNoise": "mupscale.SignalNoise(…)",
    "Members": "a mupscale.Family",
    "Source": "what mupscale.hf.read_gguf gave",
    "Times": "mupscale.hf.Times(…)",
}
"""What each type is to a reader, by the name of its class."""

_REMEDIES: Sequence[tuple[str, str, str]] = (
    ("Module", "Mapping", "a state dict has weights alone: build the model and call model.load_state_dict(…)"),
    (
        "Module",
        "Real",
        "build it as the other one, at that width: Net({value}); to grow by a number alone, take "
        "mupscale.Family(Net, base, inputs=…).upscale(model, width={value})",
    ),
    ("Module", "", "build the model, load its weights, and pass that"),
    ("Operator", "DepthOperator", "what new blocks are is said to mupscale.upscale, or to a Family that has a depth"),
    ("GrowsBy", "DepthOperator", "what new blocks are is said to mupscale.upscale, or to a Family that has a depth"),
    ("DepthOperator", "Operator", "how new units are filled is said to mupscale.upscale"),
    ("Optimizer", "type", "make one, with its hyperparameters: {value}(model.parameters(), lr=…)"),
    ("Optimizer", "Mapping", "load the state dict into an optimizer and pass that"),
    ("LRScheduler", "str", "make it for the optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=…)"),
    (
        "Plan",
        "",
        "pass one from the base width to the model, mupscale.plan(base, model, inputs=…), where base has the model's "
        "number of blocks, or family.plan(model); clip_grad_norm_ takes the model's optimizer instead, which knows how "
        "the model grew, and save takes a model without a plan",
    ),
    ("type", "Optimizer", "pass torch.optim.{kind} itself, with its hyperparameters beside it (lr=1e-3)"),
    ("Callable", "Module", "pass the function that builds it: lambda width: Net(width)"),
    ("Times", "float", "copies are whole, and fresh units take sizes: hidden=24, heads=6"),
    ("float", "str", "write it without quotes"),
    ("int", "str", "write it without quotes"),
)
"""What is wanted, what was given in its place (any class with that name among its bases), and what to do about it."""


def checks_arguments(public: _Public) -> _Public:
    """Check the arguments of a function, or of a class's constructor and public methods, by their type hints.

    >>> from mupscale.system import checks_arguments
    >>> @checks_arguments
    ... def half(number: float, times: int = 1) -> float:
    ...     return number / 2**times
    >>> half(3.0)
    1.5
    >>> half("3")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: half: number= is '3', but must be a number; write it without quotes
    """
    if isinstance(public, type):
        for name, method in list(vars(public).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(public, name, checks_arguments(method))
        return public
    signature = inspect.signature(public)
    label = public.__qualname__.removesuffix(".__init__")

    @functools.wraps(public)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return public(*args, **kwargs)  # Python says itself what is missing, or too much
        hints = _hints_of(public)
        for name, value in given.items():
            kind = signature.parameters[name].kind
            named = value.items() if kind is inspect.Parameter.VAR_KEYWORD else [(name, value)]
            for argument, each in named if name in hints else ():
                if (wrong := _mismatch(hints[name], each)) is not None:
                    raise _refusal(*wrong, as_asked(f"{label}: {argument}=", f"--{argument}"))
        return public(*args, **kwargs)

    return checked  # type: ignore[return-value]


@functools.cache
def _hints_of(public: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(public, include_extras=True)


def check_argument(hint: Any, value: Any, where: str) -> None:
    """An error unless the value is what the hint says; where: the function and the argument, for the message.

    >>> check_argument(float | None, [], "half: number=")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: half: number= is a list, but must be a number
    """
    if (wrong := _mismatch(hint, value)) is not None:
        raise _refusal(*wrong, where)


def _mismatch(hint: Any, value: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
    """The first thing that is not what its hint says: the hint, the thing, and where in the value it lies."""
    if type(value) is hint:  # as most are
        return None
    fitting = next((each for each in _alternatives(hint) if _fits(each, value)), _NOTHING)
    if fitting is _NOTHING:
        return hint, value, ()
    for inner, part, key in _parts(fitting, value):
        if (wrong := _mismatch(inner, part)) is not None:
            return wrong[0], wrong[1], (key, *wrong[2])
    return None


def _refusal(hint: Any, value: Any, keys: tuple[Any, ...], where: str) -> MupscaleError:
    alternatives = _alternatives(hint)
    inside = where.removesuffix("=") + "".join(f"[{show_short(key)}]" for key in keys) if keys else where
    remedy = next((f"; {r}" for each in alternatives for r in _remedies(each, value)), "")
    return MupscaleError(f"{inside} is {_shown(value)}, but must be {_all_in_words(alternatives)}{remedy}")


@functools.cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, of unions in it, too."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(each for member in get_args(hint) for each in _alternatives(member))
    return (hint,)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a type, as seen from outside: what lies in it is looked at later."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Annotated:
        kind, *musts = get_args(hint)
        return any(_fits(each, value) for each in _alternatives(kind)) and all(must.fits(value) for must in musts)
    if origin is Literal:
        return value in get_args(hint)
    if origin is type:
        return isinstance(value, type) and issubclass(value, get_args(hint)[0])
    if origin is Callable:
        return callable(value) and not (_returns_module(hint) and not isinstance(value, type) and _is(value, "Module"))
    if origin in (Iterable, Sequence):
        many = hasattr(value, "__getitem__") and (origin is Iterable or hasattr(value, "__len__"))
        return (many or (origin is Iterable and hasattr(value, "__iter__"))) and not isinstance(value, str | Mapping)
    return _is_instance(origin or hint, value)


_NOTHING = object()
_TAKEN_FOR: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike, tuple: tuple | list}


def _is_instance(kind: Any, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's, too
    if isinstance(value, bool | type) and kind is not object:  # an operator's class is no operator
        return False
    if kind is float and _is(value, "Tensor"):
        return bool(value.numel() == 1)
    return isinstance(value, _TAKEN_FOR.get(kind, kind))


def _parts(hint: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What lies in a mapping or a tuple: its hint, the value, and its key or number."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ((inner[1], each, key) for key, each in value.items())
    elif isinstance(origin, type) and issubclass(origin, tuple | Sequence):
        hints = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1] * len(value)
        yield from ((h, each, number) for number, (h, each) in enumerate(zip(hints, value, strict=False)))


def _all_in_words(alternatives: Sequence[Any]) -> str:
    """What any of these is: None is not said beside others, nor whole numbers beside numbers."""
    implied: set[Any] = {types.NoneType} if len(alternatives) > 1 else set()
    implied |= {int} if float in alternatives else set()
    return _either(dict.fromkeys(_in_words(each) for each in alternatives if each not in implied))


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _in_words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        return str(get_args(hint)[1].be)
    if origin is Literal:
        return _either(as_asked(repr(word), str(word)) for word in get_args(hint))
    if origin is type:
        return f"the class of {_in_words(get_args(hint)[0])}"
    if origin is Callable:
        return "a function that builds a model" if _returns_module(hint) else "a function"
    name = (origin or hint).__name__
    return _WORDS.get(name, f"a {name}")


def _returns_module(hint: Any) -> bool:
    return bool(inner := get_args(hint)) and getattr(inner[-1], "__name__", "") == "Module"


def _remedies(hint: Any, value: Any) -> Iterator[str]:
    origin = get_origin(hint)
    hint = get_args(hint)[0] if origin is Annotated else origin or hint
    for wanted, given, remedy in _REMEDIES:
        if getattr(hint, "__name__", "") == wanted and _is(value, given):
            shown = value.__name__ if isinstance(value, type) else show_short(value)
            yield remedy.format(value=shown, kind=type(value).__name__)


def _is(value: Any, name: str) -> bool:
    """Whether a class of this name is among the value's; any value is of no name."""
    abstract = {"Mapping": Mapping, "Real": Real}.get(name)
    if abstract is not None:
        return isinstance(value, abstract)
    return not name or any(base.__name__ == name for base in type(value).__mro__)


def _shown(value: Any) -> str:
    """The value for a sentence: whole where it is short, else what it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | Real) or type(value).__module__.startswith("mupscale"):
        return show_short(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"
