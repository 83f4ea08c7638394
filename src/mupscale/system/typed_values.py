"""Values by their type hints: the arguments of public functions, and plain values that become records.

One walk along a hint serves both. What does not fit is named, with what belongs there and the remedy. A hint may demand
more than its kind, as `Positive` does (Annotated with a Must). Plain values are JSON's, whose lists become tuples where
a field has one; a TypedDict stands for a mapping that stays one, beside whose fields others may lie.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from mupscale.system.errors import MupscaleError, as_asked, did_you_mean

_Public = TypeVar("_Public", bound=Callable[..., Any])
_Record = TypeVar("_Record")
_Mode = Literal["argument", "stored", "given"]
"""Where a value comes from: a caller in Python, a file of ours, or a person who writes recipes and options."""
_LARGEST = 1 << 63
_RATIO = re.compile(r"-?\d{1,4000}/0*[1-9]\d{0,3999}")


@dataclass(frozen=True)
class Must:
    """What a value must be beyond its type: in words, and whether one is."""

    be: str
    fits: Callable[[Any], bool]


Finite = Annotated[float, Must("a number", math.isfinite)]
"""A number that is one."""
Positive = Annotated[float, Must("a number above 0", lambda value: 0 < value < math.inf)]
"""A finite number above 0."""
NotNegative = Annotated[float, Must("a number that is finite and 0 or more", lambda value: 0 <= value < math.inf)]
"""A learning rate, or a level of noise."""
NOT_EMPTY = Must("a list of 1 or more", bool)


class Typed(str):
    """A value as a person typed it for an option. What it means depends on what belongs there."""

    def readings(self) -> Iterator[Any]:
        """What it may mean, the likeliest first."""
        yield str(self)

    def bracketed(self) -> list[Any] | None:
        """The entries where it is written as a list in brackets, else None."""
        return None

    def texts(self) -> list[Any]:
        """What it means where a list of texts belongs."""
        return [str(self)]


class _Mismatch(Exception):
    """A value that is not what its hint says, and the keys that lead to it; or another problem with it, in words."""

    def __init__(self, hint: Any, value: Any, place: tuple[Any, ...], expected: str = "", problem: str = "") -> None:
        super().__init__(problem)
        self.hint, self.value, self.place, self.expected, self.problem = hint, value, place, expected, problem


def parse_record(kind: type[_Record], values: Any, where: object = "") -> _Record:
    """A dataclass from the mapping that its `asdict` gave, all of whose fields are checked by their types.

    Of a TypedDict the mapping itself, if its fields are right.

    where: the file that an error names.
    """
    try:
        return _parse(kind, values, (), "stored", MupscaleError)  # type: ignore[no-any-return]
    except MupscaleError as error:
        raise (MupscaleError(f"{where}: {error}") if str(where) else error) from None


def parse_given(hint: Any, value: Any, keys: tuple[Any, ...], refusal: type[MupscaleError]) -> Any:
    """What a person gives in files and options becomes by any type hint; a number is a float where its hint says so.

    keys: those that lead to the value, for an error. refusal: what is raised if a value is not of its type.
    """
    return _parse(hint, value, keys, "given", refusal)


def _parse(hint: Any, value: Any, keys: tuple[Any, ...], mode: _Mode, refusal: type[MupscaleError]) -> Any:
    try:
        return _fit(hint, value, keys, mode)
    except _Mismatch as error:
        path, expected = _path(error.place) or "it", error.expected or _in_words(error.hint, plain=True)
        named = path if path.startswith("--") else f"'{path}'"
        is_unquoted = mode == "given" and _text_kind(error.hint) == "one" and _is_scalar(error.value)
        if is_unquoted and not isinstance(error.value, str):
            read = _as_yaml_read_it(error.value)
            raise refusal(f"{named} was read as {read}, but must be text: put what you wrote in quotes") from None
        raise refusal(error.problem or f"{named} is {show_short(error.value)}, but must be {expected}") from None


def _path(place: Iterable[Any]) -> str:
    """Keys as one writes them: study.noises[2]."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{show_short(key, 40).strip(chr(39))}" for key in place)
    return "".join(parts).removeprefix(".")


def _fit(hint: Any, value: Any, place: tuple[Any, ...], mode: _Mode) -> Any:
    """The value as its hint has it: itself as an argument, and what plain values become in a record."""
    if type(value) is hint and (hint is not int or mode == "argument" or _is_whole(value)):  # as most are
        return value
    if isinstance(value, Typed):
        return _fit_typed(hint, value, place, mode)
    origin, inner = _origin_and_args(hint)
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return value
    if origin is NotRequired:
        return _fit(inner[0], value, place, mode)
    if origin is Annotated:  # of which more is demanded
        kind, *musts = inner
        try:
            fitting = _fit(kind, value, place, mode)
        except _Mismatch as error:
            is_inside = error.place != place or error.problem
            raise (error if is_inside else _Mismatch(hint, value, place)) from None
        for must in musts:
            if not must.fits(fitting):
                raise _Mismatch(hint, value, place, must.be)
        return fitting
    if origin in (Union, types.UnionType):  # the first that takes it; else a complaint about what lies in it goes first
        inside = None
        for each in inner:
            try:
                return _fit(each, value, place, mode)
            except _Mismatch as error:
                inside = inside if error.place == place and not error.problem else error
        raise inside or _Mismatch(hint, value, place)
    if not (_is_argument if mode == "argument" else _is_plain)(hint, value):
        raise _Mismatch(hint, value, place)
    plain = mode != "argument"
    if plain and hint is Fraction:
        return Fraction(value)
    if mode == "given" and hint is float:
        return float(value)
    if plain and _has_fields(hint):
        return _record(hint, value, place, mode)
    return _container(origin or hint, inner, value, place, mode)


@functools.cache
def _origin_and_args(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


_TEXTS = (str, Path, os.PathLike)
_TextKind = Literal["one", "many", "one or many", "other"]


@functools.cache
def _text_kind(hint: Any) -> _TextKind:
    """Whether a hint takes text and nothing else: one (a name, a path), a list of them, or either."""
    origin, inner = _origin_and_args(hint)
    if hint in _TEXTS or origin in _TEXTS:
        return "one"
    if origin is Annotated:
        return _text_kind(inner[0])
    if origin in (list, tuple, Sequence):
        entries = {_text_kind(each) for each in inner if each is not Ellipsis}
        return "many" if entries == {"one"} else "other"
    if origin not in (Union, types.UnionType):
        return "other"
    kinds = {_text_kind(each) for each in inner if each is not types.NoneType}
    if "other" in kinds:
        return "other"
    return kinds.pop() if len(kinds) == 1 else "one or many"


def _fit_typed(hint: Any, text: Typed, place: tuple[Any, ...], mode: _Mode) -> Any:
    """What somebody typed. A name is taken as it was typed: no file, folder or column is called what YAML makes of it.

    Elsewhere the first reading that fits; where none does, the complaint about what lies deepest.
    """
    kind = _text_kind(hint)
    if kind == "many":
        return _fit(hint, text.texts(), place, mode)
    entries = text.bracketed() if kind == "one or many" else None
    if entries is not None:
        return _fit(hint, entries, place, mode)
    if kind != "other":
        if not text:  # as an unset variable of a shell gives it: an empty path is the current folder
            raise _Mismatch(hint, "", place, "a text that is not empty")
        return _fit(hint, str(text), place, mode)
    complaint = None
    for reading in text.readings():
        try:
            return _fit(hint, reading, place, mode)
        except _Mismatch as error:
            is_deeper = complaint is None or len(error.place) > len(complaint.place)
            complaint = error if is_deeper else complaint
    raise complaint or _Mismatch(hint, str(text), place)


def _has_fields(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields") or is_typeddict(hint))


def _record(kind: Any, values: Any, place: tuple[Any, ...], mode: _Mode) -> Any:
    hints = _hints_of(kind)
    shown = {}  # of a field that files spell in another way than Python can, for an error
    if hasattr(kind, "_fields"):
        return kind(*(_fit(hint, values[n], (*place, n), mode) for n, hint in enumerate(hints.values())))
    if is_typeddict(kind):
        needed = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    else:
        own = [each for each in fields(kind) if each.init]
        hints = {each.name: hints[each.name] for each in own}
        shown = {each.name: each.metadata["in_files"] for each in own if "in_files" in each.metadata}
        needed = {each.name for each in own if each.default is MISSING and each.default_factory is MISSING}
        for name in (name for name in values if name not in hints):
            meant = did_you_mean(str(name), hints)
            raise _Mismatch(kind, values, place, problem=f"there is no field '{_path((*place, name))}'{meant}")
    for name in (name for name in hints if name in needed and name not in values):
        raise _Mismatch(kind, values, place, problem=f"'{_path((*place, name))}' is missing")
    found = {}
    for name, hint in hints.items():
        if name in values:
            found[name] = _fit(hint, values[name], (*place, shown.get(name, name)), mode)
    return {**values, **found} if is_typeddict(kind) else kind(**found)


def _container(kind: Any, inner: tuple[Any, ...], value: Any, place: tuple[Any, ...], mode: _Mode) -> Any:
    plain = mode != "argument"
    if not isinstance(kind, type) or not issubclass(kind, Mapping | Sequence) or issubclass(kind, str):
        return value
    if issubclass(kind, Mapping):
        key, item = inner or (Any, Any)
        found = {name: _fit(item, each, (*place, name), mode) for name, each in value.items()}
        return {_key(key, name, place): each for name, each in found.items()} if plain else value
    if not plain and not inner:
        return value
    is_tuple = issubclass(kind, tuple)
    if not (plain and _are_numbers(inner, value)):
        hints = inner if is_tuple and inner and inner[-1] is not Ellipsis else itertools.repeat((*inner, Any)[0])
        each = enumerate(zip(hints, value, strict=False))
        items = [_fit(hint, part, (*place, number), mode) for number, (hint, part) in each]
        value = items if plain else value
    return (tuple(value) if is_tuple else list(value)) if plain else value


def _key(hint: Any, name: Any, place: tuple[Any, ...]) -> Any:
    """A mapping's key; of numbers JSON makes texts."""
    return int(name) if hint is int and str(name).isdecimal() else _fit(hint, name, (*place, "key"), "stored")


def _are_numbers(inner: tuple[Any, ...], values: Any) -> bool:
    """Whether all of many numbers are right at a glance: a curve may have a million."""
    kinds = set(map(type, values)) if inner[:1] in ((int,), (float,)) and inner[1:] in ((), (Ellipsis,)) else set()
    return kinds == {*inner[:1]} and (kinds == {float} or (_is_whole(min(values)) and _is_whole(max(values))))


def _is_plain(hint: Any, value: Any) -> bool:
    """Whether a plain value may become what the hint says, as seen from outside."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return value in get_args(hint) and not isinstance(value, float)
    if hint in _PLAIN:
        return bool(_PLAIN[hint](value))
    if _is_fixed(hint):
        return isinstance(value, list | tuple) and len(value) == _length(hint)
    return isinstance(value, Mapping if _has_fields(hint) or issubclass(kind, Mapping) else list | tuple)


@functools.cache
def _is_fixed(hint: Any) -> bool:
    inner = get_args(hint)
    return hasattr(hint, "_fields") or (get_origin(hint) is tuple and inner[-1] is not Ellipsis)


def _length(hint: Any) -> int:
    return len(getattr(hint, "_fields", None) or get_args(hint))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Mapping | list | tuple)


def _as_yaml_read_it(value: Any) -> str:
    """What a word without quotes became: on is a boolean, 1e3 a number, 2024-01-01 a date."""
    if value is None or isinstance(value, bool):
        return {None: "null (nothing)", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"the number {show_short(value)}"
    return f"the {type(value).__name__} {show_short(str(value)).strip(chr(39))}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


_PLAIN: dict[Any, Callable[[Any], object]] = {
    int: _is_whole,
    float: lambda value: isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1000),
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
    Fraction: lambda value: isinstance(value, str) and _RATIO.fullmatch(value),
}


def told_fields(record: Any, *, all_of_them: bool = False) -> dict[str, Any]:
    """A dataclass as plain values, without the fields that have their defaults: `parse_record` gives it back.

    So a field that is added later, with a default, leaves what was stored before it, and hashes of that, as they are.
    """
    told = {}
    for each in fields(record):
        value = getattr(record, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if all_of_them or usual is MISSING or value != usual:
            told[each.name] = _plain(value, all_of_them)
    return told


def _plain(value: Any, all_of_them: bool) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return told_fields(value, all_of_them=all_of_them)
    if isinstance(value, list | tuple):
        return [_plain(item, all_of_them) for item in value]
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return {key: _plain(item, all_of_them) for key, item in value.items()} if isinstance(value, Mapping) else value


def show_short(value: Any, most: int = 60) -> str:
    """A value for an error message, on one line and not longer than fits there.

    >>> from mupscale.system import show_short
    >>> show_short("a" * 1000, most=8)
    "'aaaaaaa…"
    """
    if isinstance(value, int) and abs(value) >= 10**most:
        return f"a whole number of more than {most} digits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


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
_PLAIN_WORDS = {"bool": "true or false", "NoneType": "null", "Fraction": "a ratio"}

_REMEDIES: Sequence[tuple[str, str, str]] = (
    ("Module", "Mapping", "a state dict has weights alone: build the model and call model.load_state_dict(…)"),
    (
        "Module",
        "Real",
        "build it as the other one, at that width: Net({value}); to grow by a number alone, take "
        "mupscale.Family(Net, base, inputs=…).upscale(model, width={value})",
    ),
    ("Module", "", "build the model, load its weights, and pass that"),
    ("Operator", "DepthOperator", "say what new blocks are in mupscale.upscale, or in a Family that has a depth"),
    ("GrowsBy", "DepthOperator", "say what new blocks are in mupscale.upscale, or in a Family that has a depth"),
    ("DepthOperator", "Operator", "say how new units are filled in mupscale.upscale"),
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
    ("Times", "float", "copies need whole multiples, and fresh units take sizes: hidden=24, heads=6"),
    ("float", "str", "write it without quotes"),
    ("int", "str", "write it without quotes"),
)
"""What is wanted, what was given in its place (any class with that name among its bases), and what to do about it."""


def checks_arguments(public: _Public) -> _Public:
    """Check the arguments of a function, or of a class's constructor and public methods, by their type hints."""
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
                check_argument(hints[name], each, as_asked(f"{label}: {argument}=", f"--{argument}"))
        return public(*args, **kwargs)

    return checked  # type: ignore[return-value]


@functools.cache
def _hints_of(public: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(public, include_extras=True)


def check_argument(hint: Any, value: Any, where: str) -> None:
    """An error unless the value is what the hint says; where: the function and the argument, for the message."""
    try:
        _fit(hint, value, (), "argument")
    except _Mismatch as error:
        wrong = error
    else:
        return
    keys = "".join(f"[{show_short(key)}]" for key in wrong.place)
    is_union = get_origin(wrong.hint) in (Union, types.UnionType)
    alternatives = get_args(wrong.hint) if is_union else (wrong.hint,)
    remedy = next((f"; {r}" for each in alternatives for r in _remedies(each, wrong.value)), "")
    inside = f"{where.removesuffix('=')}{keys}" if keys else where
    expected = wrong.expected or _in_words(wrong.hint)
    raise MupscaleError(f"{inside} is {_shown(wrong.value)}, but must be {expected}{remedy}")


def _is_argument(hint: Any, value: Any) -> bool:
    """Whether a value is of a type, as seen from outside: what lies in it is looked at later."""
    origin = get_origin(hint)
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


_TAKEN_FOR: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike, tuple: tuple | list}


def _is_instance(kind: Any, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's, too
    if isinstance(value, bool | type) and kind is not object:  # an operator's class is no operator
        return False
    if kind is float and _is(value, "Tensor"):
        return bool(value.numel() == 1)
    return isinstance(value, _TAKEN_FOR.get(kind, kind))


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _in_words(hint: Any, plain: bool = False) -> str:
    """What a hint takes; None is not said beside others, nor whole numbers beside numbers. plain: in JSON's words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        implied = {types.NoneType, int} if float in inner else {types.NoneType}
        return _either(dict.fromkeys(_in_words(each, plain) for each in inner if each not in implied))
    if origin is NotRequired:
        return _in_words(inner[0], plain)
    if origin is Annotated:
        return str(inner[1].be)
    if origin is Literal:
        return _either(str(word) if plain else as_asked(repr(word), str(word)) for word in inner)
    if origin is type:
        return f"the class of {_in_words(inner[0])}"
    if origin is Callable:
        return "a function that builds a model" if _returns_module(hint) else "a function"
    kind = origin or hint
    if plain and hint not in _PLAIN:
        is_list = issubclass(kind, list | tuple)
        return f"a list of {_length(hint)}" if _is_fixed(hint) else "a list" if is_list else "a mapping"
    if plain and kind.__name__ in _PLAIN_WORDS:
        return _PLAIN_WORDS[kind.__name__]
    return _WORDS.get(kind.__name__, f"a {kind.__name__}")


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
    is_short = isinstance(value, list) and all(isinstance(each, str | Real) for each in value)
    if value is None or is_short or isinstance(value, str | Real) or type(value).__module__.startswith("mupscale"):
        return show_short(value)
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"
