"""Plain values into dataclasses, field by field: what does not fit is named, and what belongs there.

A field's type may say more than its kind, as `Positive` does (Annotated with a Must). A TypedDict stands for a mapping
that stays one, beside whose fields others may lie.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
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

from mupscale.system.errors import MupscaleError

_Record = TypeVar("_Record")
_LARGEST = 1 << 63
_RATIO = re.compile(r"-?\d{1,4000}/0*[1-9]\d{0,3999}")


@dataclass(frozen=True)
class Must:
    """What a value must be beyond its type: in words, and whether one is.

    >>> from typing import Annotated, TypedDict
    >>> from mupscale.system import Must, parse_record
    >>> even = Must("an even number", lambda value: value % 2 == 0)
    >>> Pairs = TypedDict("Pairs", {"count": Annotated[int, even]})
    >>> parse_record(Pairs, {"count": 2, "more": "x"})
    {'count': 2, 'more': 'x'}
    >>> parse_record(Pairs, {"count": 3})
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: 'count' is 3, but must be an even number
    """

    be: str
    fits: Callable[[Any], bool]


Finite = Annotated[float, Must("a number", math.isfinite)]
"""A number that is one."""
Positive = Annotated[float, Must("a number above 0", lambda value: 0 < value < math.inf)]
"""A finite number above 0."""
NotNegative = Annotated[float, Must("a number that is finite and 0 or more", lambda value: 0 <= value < math.inf)]
"""A learning rate, or a level of noise."""
NOT_EMPTY = Must("a list of 1 or more", bool)


class _Mismatch(Exception):
    """A value that is not what its field holds."""

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"'{field}' is {show_short(value)}, but must be {expected}" if field else expected)
        self.field, self.expected = field, expected


def parse_record(kind: type[_Record], values: Any, where: object = "") -> _Record:
    """A dataclass from the mapping that its `asdict` gave, all of whose fields are checked by their types.

    Of a TypedDict the mapping itself, if its fields are right.

    where: the file that an error names.
    """
    try:
        record: _Record = (_mapping if is_typeddict(kind) else _dataclass)(kind, values, "")
        return record
    except (_Mismatch, MupscaleError) as error:
        raise MupscaleError(f"{where}: {error}" if str(where) else str(error)) from None


def told_fields(record: Any) -> dict[str, Any]:
    """A dataclass as plain values, without the fields that have their defaults: `parse_record` gives it back.

    So a field that is added later, with a default, leaves what was stored before it, and hashes of that, as they are.

    >>> from dataclasses import dataclass
    >>> from mupscale.system import told_fields
    >>> @dataclass
    ... class Point:
    ...     step: int
    ...     loss: float | None = None
    >>> told_fields(Point(3))
    {'step': 3}
    """
    told = {}
    for each in fields(record):
        value = getattr(record, each.name)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if usual is MISSING or value != usual:
            told[each.name] = _plain(value)
    return told


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return told_fields(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


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


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _dataclass(kind: type, values: Any, field: str) -> Any:
    if not isinstance(values, Mapping):
        raise _Mismatch(field, values, "a mapping" if field else f"{show_short(values)} is no mapping of fields")
    by_name = {each.name: each for each in fields(kind) if each.init}
    start = f"{field}." if field else ""
    for name in values:
        if name not in by_name:
            raise _Mismatch("", values, f"there is no field '{start}{show_short(name, 40).strip(chr(39))}'")
    hints, arguments = _hints(kind), {}
    for name, each in by_name.items():
        if name in values:
            arguments[name] = _parse(hints[name], values[name], start + name)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise _Mismatch("", values, f"'{start}{name}' is missing")
    return kind(**arguments)


def _mapping(kind: type, values: Any, field: str) -> Any:
    _checked(isinstance(values, Mapping), values, field or "it", "a mapping")
    parsed = dict(values)
    for name, hint in _hints(kind).items():
        place = f"{field}.{name}" if field else name
        if name in values:
            parsed[name] = _parse(hint, values[name], place)
        elif get_origin(hint) is not NotRequired:
            raise _Mismatch("", values, f"'{place}' is missing")
    return parsed


def _constrained(hint: Any, musts: tuple[Must, ...], value: Any, field: str) -> Any:
    """A value of a type of which more is demanded."""
    try:
        parsed = _parse(hint, value, field)
    except _Mismatch as error:
        raise (_Mismatch(field, value, musts[0].be) if error.field == field else error) from None
    for must in musts:
        _checked(must.fits(parsed), value, field, must.be)
    return parsed


def _parse(hint: Any, value: Any, field: str) -> Any:
    """The value as its type has it."""
    origin = get_origin(hint)
    if origin is NotRequired:
        return _parse(get_args(hint)[0], value, field)
    if origin is Annotated:
        return _constrained(hint.__origin__, hint.__metadata__, value, field)
    if is_typeddict(hint):
        return _mapping(hint, value, field)
    if hint is Any or hint is object:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(get_args(hint), value, field)
    if origin is Literal:
        return _checked(value in get_args(hint) and not isinstance(value, float), value, field, _words(hint))
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint, value, field)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return hint(*_items(tuple(_hints(hint).values()), value, field))
    if origin is not None or hint in (dict, list, tuple):
        return _container(origin or hint, get_args(hint), value, field)
    if hint is Fraction:
        _checked(isinstance(value, str) and _RATIO.fullmatch(value) is not None, value, field, "a ratio")
        return Fraction(value)
    expected, fits = _PLAIN[hint]
    return _checked(fits(value), value, field, expected)


def _one_of(hints: tuple[Any, ...], value: Any, field: str) -> Any:
    """As the first of these types that takes it; where none does, a complaint about what lies in it goes first."""
    expected, inside = [], None
    for hint in hints:
        try:
            return _parse(hint, value, field)
        except _Mismatch as error:
            inside = inside if error.field == field else error
            expected.append(error.expected)
    raise inside or _Mismatch(field, value, " or ".join(dict.fromkeys(expected)))


def _container(kind: Any, inner: tuple[Any, ...], value: Any, field: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Mapping):
        key, item = inner or (Any, Any)
        _checked(isinstance(value, Mapping), value, field, "a mapping")
        numbered = key is int  # of which JSON makes texts
        return {
            int(name) if numbered and str(name).isdecimal() else _parse(key, name, f"{field}'s key"): _parse(
                item, each, f"{field}.{show_short(name, 40).strip(chr(39))}"
            )
            for name, each in value.items()
        }
    _checked(isinstance(value, list | tuple), value, field, "a list")
    if issubclass(kind, tuple) and inner and inner[-1] is not Ellipsis:
        return tuple(_items(inner, value, field))
    item = inner[0] if inner else Any
    if _are_plain(item, value):
        return tuple(value) if issubclass(kind, tuple) else list(value)
    items = [_parse(item, each, f"{field}[{number}]") for number, each in enumerate(value)]
    return tuple(items) if issubclass(kind, tuple) else items


def _are_plain(hint: Any, values: Collection[Any]) -> bool:
    """Whether all of many values are right at a glance: a curve may have a million."""
    kinds = set(map(type, values))
    if hint is int and kinds == {int}:
        return bool(min(values) >= -_LARGEST and max(values) < _LARGEST)
    return hint is float and kinds == {float}


def _items(hints: tuple[Any, ...], value: Any, field: str) -> list[Any]:
    fits = isinstance(value, list | tuple) and len(value) == len(hints)
    _checked(fits, value, field, f"a list of {len(hints)}")
    return [
        _parse(hint, each, f"{field}[{number}]") for number, (hint, each) in enumerate(zip(hints, value, strict=True))
    ]


def _checked(fits: bool, value: Any, field: str, expected: str) -> Any:
    if not fits:
        raise _Mismatch(field, value, expected)
    return value


def _words(hint: Any) -> str:
    *words, last = map(str, get_args(hint))
    return f"{', '.join(words)} or {last}" if words else last


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1000)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    type(None): ("null", lambda value: value is None),
}
