"""Options on the command line and in YAML files, through jsonargparse: help that reads well, errors of one line."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterable, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, TextIO, Union, get_args, get_origin

from mupscale.cli.spelling import HELP_ALL, as_the_parser_has_them, with_hyphens, with_underscores
from mupscale.system import MupscaleError, printable, read_regular, show

MOST_BYTES = 1 << 20
Given = tuple[str, str | None]  # --name, and its value if it has one


class UsageError(MupscaleError):
    """A command line or a file of options that cannot be understood, in one line."""


def make_parser(command: str) -> Any:
    """A jsonargparse parser, which shows help on classes alone (--model.help); see CommandLine for all other help."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=f"mupscale {command}", exit_on_error=False, allow_abbrev=False)
    parser._print_message = _print_message  # argparse's own says nothing where the help cannot be written
    dump = parser.dump  # without a format for --print-config alone, whose recipe may be somebody's file
    parser.dump = lambda *what, **how: (str if "format" in how else partial(printable, lines=True))(dump(*what, **how))
    return parser


def _print_message(message: str, file: TextIO | None = None) -> None:
    show(message, stream="stdout" if file is sys.stdout else "stderr", end="")


def parse_arguments(parser: Any, arguments: Sequence[str]) -> Any:
    """The parsed options, or a UsageError."""
    words = _with_lists(as_the_parser_has_them(arguments, parser._option_string_actions), parser)
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        raise UsageError(with_hyphens(condense_error(str(error), parser))) from error


def _with_lists(words: Sequence[str], parser: Any) -> list[str]:
    """Between brackets, what is given to options that take a list: `--skip id,name` is `--skip [id,name]`.

    What is given again is added: `--skip id --skip name` is `--skip [id] --skip+ [name]`.
    """
    lists = {name for action in parser._actions if _takes_list(action) for name in action.option_strings}
    found, given = list[str](), set[str]()
    for before, word in zip(["", *words], words, strict=False):
        is_name = word.startswith("--")
        name, equals, value = word.partition("=") if is_name else (before, "", word)
        is_bare = name in lists and not name.endswith("+") and value and value[0] not in "[{" and value != "null"
        start = f"{name}{'+' if name in given and f'{name}+' in lists else ''}{equals}" if is_name else ""
        given.add(name if is_name else "")
        found.append(f"{start}[{value}]" if is_bare else f"{start}{value}")
    return found


def _takes_list(action: Any) -> bool:
    """Whether an option's values are lists of words or numbers, or nothing."""

    def members(hint: Any) -> set[Any]:
        return set(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,))

    kinds = members(getattr(action, "_typehint", None)) - {NoneType}
    return all(get_origin(kind) is list and members(*get_args(kind)) & {str, int, float} for kind in kinds)


def read_yaml(path: str) -> dict[str, Any]:
    """A file of options as plain values, before anything is known about them."""
    import yaml

    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
        values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not valid YAML: {_joined(str(problem))}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, a date that is none, brackets
        raise UsageError(f"{path} is not valid YAML: {_joined(str(error))}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no options: it must be a YAML mapping such as 'width: 512'")
    return values


def read_value(text: str | None) -> Any:
    """The value of an option; None where it is no YAML, which the parser will say better."""
    import yaml

    try:
        return yaml.safe_load(text or "")
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def separate_options(arguments: Sequence[str], flags: Iterable[str]) -> tuple[list[str], list[Given]]:
    """Words that stand alone, and the options with their values; only `flags` have none."""
    flags = {"-h", "--help", with_underscores(HELP_ALL), *map(with_underscores, flags)}
    alone: list[str] = []
    options: list[Given] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            alone.append(word)
        elif equals or with_underscores(name) in flags or not rest:
            options.append((with_underscores(name), value if equals else None))
        else:
            options.append((with_underscores(name), rest.pop(0)))
    return alone, options


def join_options(options: Iterable[Given]) -> list[str]:
    """Options as the words that a parser takes."""
    return [word for name, value in options for word in ((name,) if value is None else (name, value))]


def condense_error(message: str, parser: Any) -> str:
    """The several indented lines in which jsonargparse explains an error as one: key, value, what was expected."""
    if match := re.search(r"unrecognized arguments: (.*)", message):
        return _unknown_option(match[1], parser)
    if match := re.search(r"""Parser key "([^"]+)":\s+Unable to load config ['"]([^'"]*)""", message):
        return f"{match[1]} is {match[2]}, but must be a mapping"
    if match := re.search(r"argument (--\S+): expected one argument", message):
        return f"{match[1]} needs a value"
    path = ".".join(f"{key}[{item}]" if item else key for key, item in re.findall(_KEY, message))
    if match := re.search(r"(?:Group '(?P<group>[^']+)' does not accept option|Option) '(?P<name>[^']+)'", message):
        classes = re.findall(r"class_path '([^']+)'", message)
        return _unknown_key(match["name"], match["group"] or path, classes[-1] if classes else None, parser)
    if match := re.search(r"arguments are required: (.*)", message):
        return f"{match[1]} must be given{f' for {path}' if path else ''}"
    return _mismatch(message, path) or _joined(message)


def _unknown_option(arguments: str, parser: Any) -> str:
    word = next((w for w in arguments.split() if w.startswith("-")), None)
    if word is None:
        return f"did not expect {arguments}"
    option = word.partition("=")[0]
    first, dot, rest = option.lstrip("-").partition(".")
    roots = {name.partition(".")[0] for name in _names(parser)}
    near = _meant(option.lstrip("-"), _names(parser), "--")
    if dot and first not in roots:  # --optimizr.lr: what comes after the dot is not for us to judge
        near = _meant(first, roots, "--", f".{rest}")
    return f"there is no option {option}{near}"


def _unknown_key(name: str, within: str, class_path: str | None, parser: Any) -> str:
    if class_path is None:
        return f"there is no key {f'{within}.' if within else ''}{name}{_meant(name, _names(parser, within))}"
    if class_path in _BASES:
        first = name.partition(".")[0]
        return f"{within} takes class_path and init_args, but not {first}: name its class first (--{within} CLASS)"
    parameters = _parameters(class_path)
    if name in parameters:
        told = f"{within}.{name} cannot be given here: the recipe's own entries, such as width, set it"
        return f"{told}. Remove it from {within}"
    return f"{class_path} has no argument {name}{_meant(name, parameters)}"


def _mismatch(message: str, path: str) -> str | None:
    """A value that is not what its type says; the innermost explanation is the first that has a value."""
    match = re.search(r"(?:Got|Given) value: (.*)", message)
    if not (path and match):
        return None
    value, inner = match[1], message[: match.start()]
    if match := re.search(r"class_path '([^']+)':\s*(?!Parser key)(\S.*)", inner):
        return f"{path}: {match[1]} cannot be used: {match[2]}"
    if match := re.search(r"does not correspond to a subclass of (\w+)", inner):
        named = re.search(r"'class_path': '([^']+)'", value)
        return f"{path} is {named[1] if named else value}, which is no {match[1]}"
    if "Not a valid subclass of" in inner:
        return f"{path} is {value}, but must be a mapping of class_path and init_args"
    if match := re.search(r"Errors:\s+- (?!Expected|Problem)(.*)", inner):
        return f"{path}: {value} cannot be used: {match[1]}"
    expected = list(dict.fromkeys(text for kind in re.findall(r"Expected an? (.*)", inner) if (text := _kind(kind))))
    if len(expected) > 1 and _TYPES["dot"] in expected:  # an lr: a number, and not also a Tensor
        expected.remove(_TYPES["dot"])
    return f"{path} is {value}, but must be {' or '.join(expected)}" if expected else None


def _kind(text: str) -> str:
    """What was expected, in words: "<class 'int'>", "typing.Literal['a', 'b']", "tuple with 2 elements" …"""
    if choices := re.search(r"Literal\[(.*?)\]", text):
        return f"one of {choices[1].replace(chr(39), '')}"
    if sized := re.match(r"tuple with \d+ elements", text):
        return f"a {sized[0]}"
    match = re.match(r"<class '([\w.]+)'>|(dot) import path", text)
    return _TYPES.get(match[1] or match[2], f"a {match[1]}") if match else ""


_KEY = r'Parser key "([^"]+)"(?: element (\d+))?'
_BASES = ("torch.nn.Module", "torch.optim.Optimizer", "mupscale.data.Data")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "a mapping",
    "list": "a list",
    "tuple": "a list",
    "NoneType": "",
    "dot": "the import path of a class",
}


def _names(parser: Any, within: str = "") -> list[str]:
    """The keys that a parser knows, or those within one of them."""
    start = f"{within}." if within else ""
    keys = [a.dest for a in parser._actions if a.dest.startswith(start) and a.dest != SUPPRESS]
    return [name.removeprefix(start) for name in keys if not name.endswith(".help")]


def _parameters(class_path: str) -> list[str]:
    from mupscale.train import import_path

    try:
        return list(inspect.signature(import_path(class_path)).parameters)
    except (MupscaleError, TypeError, ValueError):
        return []


def _meant(name: str, names: Iterable[str], before: str = "", after: str = "") -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {before}{near[0]}{after}?" if near else ""


def _joined(text: str) -> str:
    return " ".join(text.split())
