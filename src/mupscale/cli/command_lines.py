"""What a command takes, said once: its parser, its help, its flags and its completion all follow from it.

Many parameters are those of a class. Help reads these off its source, as they are written there: to import the class
would take seconds, for torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from mupscale.cli.arguments import UsageError, join_options, make_parser, parse_arguments, separate_options
from mupscale.cli.spelling import HELP_ALL, fill_help, with_hyphens
from mupscale.system import MupscaleError, Must, check_argument, terminal_width, wrap_text

_Run = TypeVar("_Run", bound=Callable[[list[str]], int])
_COLUMN = 30  # where help on an option begins, at most
_OPTIONS, _ARGUMENTS = "options", "positional arguments"


class Row(NamedTuple):
    """A line of help: under which title, how the option is written, and what it means."""

    title: str
    option: str
    meaning: str


class Option(NamedTuple):
    """An option of a command's own; or an argument, where its name has no hyphens.

    type: bool is a flag, which stands without a value; None is help alone, of what is added to the parser elsewhere. It
    may demand more than the parser knows to check (Annotated with a Must). default: without one the value may be null.
    """

    name: str
    type: Any
    help: str
    default: Any = None
    metavar: str = ""

    @property
    def kind(self) -> Any:
        """Its type, without what is demanded beyond it."""
        return _bare(self.type)

    @property
    def dest(self) -> str:
        """What the parser calls it."""
        return self.name.removeprefix("--").replace("-", "_")

    def check(self, value: Any) -> None:
        """Refuse a value that is not what is demanded."""
        try:
            check_argument(self.type | None if self.default is None else self.type, value, self.name)
        except MupscaleError as error:
            raise UsageError(str(error)) from None

    def add_to(self, parser: Any) -> None:
        """Let the parser take it."""
        if self.type is bool:
            parser.add_argument(self.name, action="store_true", default=self.default or False, help=self.help)
        elif not self.name.startswith("-"):
            parser.add_argument(self.name, type=self.type, help=self.help)
        elif self.type is not None:
            kind = self.kind | None if self.default is None else self.kind
            parser.add_argument(self.name, type=kind, default=self.default, help=self.help)

    def rows(self) -> Iterator[Row]:
        """Its help; none of one that is not for people."""
        if self.help is SUPPRESS:
            return
        if not self.name.startswith("-"):
            yield Row(_ARGUMENTS, self.name, self.help)
        elif self.type in (bool, None):
            yield Row(_OPTIONS, f"{self.name} {self.metavar}".rstrip(), self.help)
        else:
            is_list = get_origin(self.kind) is list
            kind = self.kind | None if is_list else self.kind
            row = _row(_OPTIONS, self.name, _Parameter("", kind, self.default, self.help), self.metavar)
            is_long = is_list and self.default is not None and not self.metavar
            yield row._replace(option=f"{row.option} …") if is_long else row  # of which several may follow


class Section(NamedTuple):
    """The parameters of a class or a function as options, below a prefix or by their own names.

    only: those that are taken, if not all. required: whether those without a default must be given.
    """

    path: str
    prefix: str = ""
    skip: frozenset[str] = frozenset()
    only: Callable[[], Collection[str]] | None = None
    required: bool = True

    def add_to(self, parser: Any) -> None:
        """Let the parser take them."""
        module, _, name = self.path.rpartition(".")
        target = getattr(import_module(module), name)
        skip = {each.name for each in _parameters(self.path)} - {each.name for each in self._taken()}
        if isinstance(target, type):
            parser.add_class_arguments(target, self.prefix or None, as_group=bool(self.prefix), skip=skip)
        else:
            parser.add_function_arguments(target, as_group=False, as_positional=True, skip=skip)
        for action in () if self.required else parser._actions:
            action.required = False

    def rows(self) -> Iterator[Row]:
        """Help on each of them; on those of a class within it under a title of their own."""
        found, taken = _find(self.path)[1], self._taken()
        if isinstance(found, ast.FunctionDef):  # what it must be given has a place, and no name
            yield from (Row(_ARGUMENTS, each.name, each.help) for each in taken if each.default is MISSING)
            taken = [each for each in taken if each.default is not MISSING]
        title = str(ast.get_docstring(found)).partition("\n")[0].rstrip(".") if self.prefix else _OPTIONS
        yield from _rows(taken, f"--{self.prefix}." if self.prefix else "--", title)

    def _taken(self) -> list[_Parameter]:
        only = None if self.only is None else self.only()
        taken = [each for each in _parameters(self.path) if each.name not in self.skip]
        taken = [each for each in taken if only is None or each.name in only]
        return [
            each._replace(default=None) if each.default is MISSING and not self.required else each for each in taken
        ]


@dataclass(frozen=True)
class CommandLine:
    """A command, how it is used, what it is about (with examples), and all that it takes.

    main: the options that `--help` shows, where there are many; `--help-all` shows all.
    """

    name: str
    usage: str
    about: str
    parts: tuple[Option | Section, ...]
    main: str = ""

    @property
    def flags(self) -> list[str]:
        """Its options that stand without a value."""
        return [part.name for part in self.parts if isinstance(part, Option) and part.type is bool]

    def command(self, run: _Run) -> _Run:
        """For the function that runs the command: what it takes is this."""
        run.line = self  # type: ignore[attr-defined]
        return run

    def parser(self) -> Any:
        """A parser of all that it takes."""
        parser = make_parser(self.name)
        for part in self.parts:
            part.add_to(parser)
        return parser

    def read(self, words: Sequence[str]) -> tuple[list[str], Any]:
        """The words that stand alone, and the parsed options."""
        alone, options = separate_options(words, self.flags)
        return alone, self.parse(join_options(options))

    def parse(self, words: Sequence[str]) -> Any:
        """The parsed options, where nothing else stands."""
        parsed = parse_arguments(self.parser(), words)
        for part in self.parts:
            if isinstance(part, Option) and part.type is not part.kind:
                part.check(parsed[part.dest])
        return parsed

    def rows(self, everything: bool = True) -> list[Row]:
        """The lines of its help; of its main options alone, unless everything is asked for."""
        rows = [Row(_OPTIONS, "-h, --help", "show this help message and exit")]
        rows += [Row(_OPTIONS, HELP_ALL, "show all options")] if self.main else []
        rows += [row for part in self.parts for row in part.rows()]
        shown = {"help", "help-all", *self.main.split()}
        return [row for row in rows if everything or not self.main or shown & {*option_names(row.option)}]

    def help(self, everything: bool, width: int | None = None) -> str:
        """What `mupscale COMMAND --help` shows."""
        width = width or terminal_width() or 120
        rows = self.rows(everything)
        column = min(max(len(row.option) for row in rows) + 4, _COLUMN, max(width - 20, 4))
        usage = f"usage: mupscale {self.name} {self.usage}"
        sections = [wrap_text(usage, width, hanging=" " * 7), fill_help(self.about, width)]
        for title in sorted(dict.fromkeys(row.title for row in rows), key=_ARGUMENTS.__ne__):
            lines = [f"{title}:"]
            for _, option, meaning in (row for row in rows if row.title == title):
                about = textwrap.wrap(" ".join(meaning.split()), max(width - column, 11))
                beside = len(option) <= column - 4 and about
                lines.append(f"  {option:<{column - 4}}  {about.pop(0)}" if beside else f"  {option}")
                lines += [f"{'':<{column}}{line}" for line in about]
            sections.append("\n".join(lines))
        return "\n\n".join(sections)


def at_least(number: int) -> Any:
    """A whole number of so much or more."""
    return Annotated[int, Must(f"{number} or more", lambda value: bool(value >= number))]


def _bare(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    return list[_bare(*get_args(hint))] if get_origin(hint) is list else hint  # type: ignore[misc]


def option_names(option: str) -> list[str]:
    """The names in `--grow, --grow+ ITEM`, without their hyphens."""
    return re.findall(r"(?:^|(?<=, ))-+([\w.+-]+)", option)


def _rows(parameters: Iterable[_Parameter], start: str, title: str) -> Iterator[Row]:
    for each in parameters:
        name = f"{start}{each.name}"
        if isinstance(each.type, type) and issubclass(each.type, _Unimported):
            yield from _rows(_parameters(each.type.path), f"{name}.", each.help)
            continue
        for kind in get_args(each.type):
            if isinstance(kind, type) and issubclass(kind, _Unimported):
                yield Row(title, with_hyphens(f"{name}.help"), f"show the entries of {kind.__name__}")
        yield _row(title, name, each)


def _row(title: str, name: str, each: _Parameter, metavar: str = "") -> Row:
    """An option with its choices, N or X for a number, or VALUE; and its default, if that says anything."""
    origin, said = get_origin(each.type), str(each.type)
    usual = "{true,false}" if each.type is bool else "X" if "float" in said else "N" if "int" in said else "VALUE"
    if origin is Literal:
        usual = f"{{{','.join(get_args(each.type))}}}"
    elif origin is list:
        usual = "[ITEM,...]"
    is_silent = each.default is None or each.default is False or each.default == [] or "(default" in each.help
    end = "" if is_silent else " (required)" if each.default is MISSING else f" (default: {each.default})"
    is_list = any(get_origin(kind) is list for kind in (each.type, *get_args(each.type)))
    names = f"{name}, {name}+" if is_list else name
    return Row(title, with_hyphens(f"{names} {metavar or usual}"), f"{each.help}{end}")


# ------------------------------------------------------------------------------- parameters, read off the sources


class _Parameter(NamedTuple):
    name: str
    type: Any
    default: Any
    help: str


class _Unimported:
    """Stands for a class of this package; `path` is where it is defined."""

    path: str


class _Names(dict[str, Any]):
    """The names that a module's annotations and defaults use, looked up when they are needed."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        module, found = _find(f"{self.module}.{name}")
        if found is None:
            return getattr(import_module(module), name)
        if isinstance(found, ast.Assign):
            return _evaluate(found.value, module)
        return type(name, (_Unimported,), {"path": f"{module}.{name}"})


@cache
def _statements(module: str) -> list[str]:
    """The statements of a module, unparsed: to parse all of them would take longer than the help may."""
    place = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return re.split(r"^(?=[a-zA-Z_@\"])", file.read_text(encoding="utf-8"), flags=re.M)


@cache
def _find(path: str) -> tuple[str, Any]:
    """The module that defines a name, and the statement that does; None as that of another package."""
    module, _, name = path.rpartition(".")
    for text in _statements(module):
        imported = re.match(r"from ([\w.]+) import (.*)", text, re.S)
        if imported and re.search(rf"\b{name}\b", imported[2]):
            is_ours = imported[1].partition(".")[0] == __package__.partition(".")[0]
            return _find(f"{imported[1]}.{name}") if is_ours else (imported[1], None)
        if re.match(rf"(class|def) {name}\b|{name} =", text):
            return module, ast.parse(text).body[0]
    raise KeyError(name)  # one of Python's own


def _evaluate(expression: ast.expr, module: str) -> Any:
    value = eval(compile(ast.Expression(expression), module, "eval"), {}, _Names(module))
    if isinstance(value, Field):
        return value.default if value.default_factory is MISSING else value.default_factory()
    return value


def value_of(path: str) -> Any:
    """A constant of this package, without importing its module."""
    module, found = _find(path)
    return _evaluate(found.value, module)


@cache
def _parameters(path: str) -> list[_Parameter]:
    """What a function is called with, or a class made with; of a dataclass its fields, those of its bases last."""
    module, found = _find(path)
    meanings = _meanings(ast.get_docstring(found) or "")
    called = next((each for each in found.body if getattr(each, "name", "") == "__init__"), found)
    if isinstance(called, ast.FunctionDef):
        words, bases = called.args, []
        named = [*words.args, *words.kwonlyargs]
        defaults: list[ast.expr | None] = [*words.defaults, *words.kw_defaults]
        defaults[:0] = [None] * (len(named) - len(defaults))
        fields = [(word.arg, word.annotation, usual) for word, usual in zip(named, defaults, strict=True)]
    else:
        fields = [
            (ast.unparse(each.target), each.annotation, each.value)
            for each in found.body
            if isinstance(each, ast.AnnAssign)
        ]
        bases = [each for base in found.bases for each in _parameters(f"{module}.{base.id}")]
    read = [
        _Parameter(name, _evaluate(kind, module), _evaluate(usual, module) if usual else MISSING, meanings[name])
        for name, kind, usual in fields
        if kind is not None  # as of self
    ]
    own = {each.name for each in read}  # which a base may have, too
    return [*read, *(each for each in bases if each.name not in own)]


def _meanings(docstring: str) -> dict[str, str]:
    """What the section Args of a docstring says, by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.M | re.S)
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}
