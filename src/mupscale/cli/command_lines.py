"""What a command takes, said once: its parser, its help, its flags and its completion all follow from it.

Many parameters are those of a class. Help reads these off its source, as they are written there: to import the class
would take seconds, for torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from mupscale.cli import arguments
from mupscale.system import Must, check_installed, parse_given, show, terminal_width, wrap_text

_Run = TypeVar("_Run", bound=Callable[[list[str]], int])
_COLUMN = 30  # where help on an option begins, at most
HELP_ALL = "--help-all"
_OPTIONS, _ARGUMENTS = "options", "positional arguments"
_DRAWS_NOTHING = {"--dry-run", "--print-config", "--watch"}


HIDDEN = "(not for people)"
"""The help of an option that has none."""


class Options(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Row(NamedTuple):
    """A line of help: under which title, how the option is written, and what it means."""

    title: str
    option: str
    meaning: str

    @property
    def names(self) -> list[str]:
        """Those in `--no-decay, --no-decay+ ITEM`, as Python has them."""
        return [name.replace("-", "_") for name in re.findall(r"(?:^|(?<=, ))-+([\w.+-]+)", self.option)]


class Option(NamedTuple):
    """An option of a command's own; an argument, where its name has no hyphens; or a parameter of a class or function.

    type: bool is a flag, which stands without a value; None is help alone, of what is read elsewhere. It may demand
    more than a kind (Annotated with a Must). default: without one the value may be null; MISSING of a parameter.
    """

    name: str
    type: Any
    help: str
    default: Any = None
    metavar: str = ""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if self.type is None:
            return {}
        if self.dest not in given:
            return {self.dest: self.default or False if self.type is bool else self.default}
        hint = self.type | None if self.default is None else self.type
        return {self.dest: parse_given(hint, given[self.dest], (self.name,), arguments.UsageError)}

    def rows(self) -> Iterator[Row]:
        if self.help is HIDDEN:
            return
        if not self.name.startswith("-"):
            yield Row(_ARGUMENTS, self.name, self.help)
        elif self.type in (bool, None):
            yield Row(_OPTIONS, f"{self.name} {self.metavar}".rstrip(), self.help)
        else:
            yield _row(_OPTIONS, self.name, self._replace(type=_bare(self.type)))


class Section(NamedTuple):
    """The parameters of a class or a function as options, below a prefix or by their own names.

    only: those that are taken, if not all; none of them must be given.
    """

    path: str
    prefix: str = ""
    skip: frozenset[str] = frozenset()
    only: Callable[[], Collection[str]] | None = None

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of those that are given, by name; those below a prefix become what their class makes of them."""
        target = _attribute(self.path)
        if self.prefix:
            values = given.get(self.prefix, {})
            return {self.prefix: parse_given(target, values, (self.prefix,), arguments.UsageError)}
        values = {}
        hints = get_type_hints(getattr(target, "__init__") if isinstance(target, type) else target)  # noqa: B009
        for each in self.parameters():
            if each.name in given:
                shown = each.name if each.default is MISSING else arguments.with_hyphens(f"--{each.name}")
                values[each.name] = parse_given(hints[each.name], given[each.name], (shown,), arguments.UsageError)
        return values

    def rows(self) -> Iterator[Row]:
        """Help on each of them; on those of a class within it under a title of their own."""
        found, taken = _find(self.path)[1], self.parameters()
        if isinstance(found, ast.FunctionDef):  # what it must be given has a place, and no name
            yield from (Row(_ARGUMENTS, each.name, each.help) for each in taken if each.default is MISSING)
            taken = [each for each in taken if each.default is not MISSING]
        title = str(ast.get_docstring(found)).partition("\n")[0].rstrip(".") if self.prefix else _OPTIONS
        yield from rows_of(taken, f"--{self.prefix}." if self.prefix else "--", title)

    def sections(self) -> dict[str, Sequence[Option]]:
        """The entries of its own name, if it has one, and of those parameters that are a class of this package."""
        found: dict[str, Sequence[Option]] = {self.prefix: self.parameters()} if self.prefix else {}
        for each in () if self.prefix else self.parameters():
            for kind in filter(_is_class, (each.type, *get_args(each.type))):
                found[each.name] = parameters_of(kind.path)
        return found

    def parameters(self) -> list[Option]:
        taken = [each for each in parameters_of(self.path) if each.name not in self.skip]
        if self.only is None:
            return taken
        only = self.only()
        return [
            each._replace(default=None if each.default is MISSING else each.default)
            for each in taken
            if each.name in only
        ]


@dataclass
class CommandLine:
    """A command: its name, what it is for in a line, how it is used, what it is about (with examples), what it takes.

    main: the options that `--help` shows, where there are many; `--help-all` shows all. resumable: whether it goes on
    if it is repeated. needs: optional packages, each followed by the option that asks for it, if one does. calls: a
    function that takes all options, where the command does nothing else. short: options that stand for an entry of a
    section, each with the entry (how: family.how).
    """

    name: str
    summary: str
    usage: str
    about: str
    parts: tuple[Option | Section, ...]
    main: str = ""
    resumable: bool = False
    needs: tuple[str, ...] = ()
    calls: str = ""
    short: Mapping[str, str] = field(default_factory=dict)
    function: Callable[[list[str]], int] = field(init=False)

    def command(self, run: _Run) -> _Run:
        """For the function that runs it."""
        self.function = run
        return run

    def run(self, words: list[str]) -> int:
        """Run it, or show its help."""
        given = {*map(arguments.with_hyphens, words)}
        if {"-h", "--help", HELP_ALL} & given:
            show(self.help(everything=HELP_ALL in given))
            return 0
        if not _DRAWS_NOTHING & given:
            asked = (need.partition(" ") for need in self.needs)
            check_installed([package for package, _, option in asked if option in ("", *words)], "this command")
        if not self.calls:
            return self.function(words)
        _attribute(self.calls)(**vars(self.read(words)[1]))
        return 0

    def separate(self, words: Sequence[str], *, many: bool = False) -> tuple[list[str], list[arguments.Given]]:
        """The words that stand alone, and the options, of which each exists."""
        shown = [(row, name.removesuffix("+"), name.endswith("+")) for row in self.rows() for name in row.names]
        hidden = {part.dest for part in self.parts if isinstance(part, Option)}
        flags = {name for row, name, _ in shown if " " not in row.option}
        lists = {name for _, name, adds in shown if adds}
        known = hidden | {name for _, name, _ in shown}
        alone, options = arguments.separate_options(words, known, flags, lists, many=many)
        return alone, [self._in_full(option) for option in options]

    def _in_full(self, option: arguments.Given) -> arguments.Given:
        """An option by its whole name; refused where it is of a section that a file may hold for other commands."""
        first, dot, rest = option.name.partition(".")
        for part in self.parts:
            if isinstance(part, Option) and part.help is HIDDEN and part.dest == first:
                raise arguments.UsageError(
                    f"{option.shown} has no effect here: mupscale {self.name} does not use the section '{first}'. "
                    f"Leave it out"
                )
        return option._replace(name=f"{self.short.get(first, first)}{dot}{rest}")

    def read(self, words: Sequence[str]) -> tuple[list[str], Options]:
        """The words that stand alone, and all options; of a command that takes such words by name they are options."""
        places = [row.option for part in self.parts for row in part.rows() if row.title == _ARGUMENTS]
        takes_any = self.usage.partition(" ")[0].isupper() and not places
        alone, options = self.separate(words, many=not places and not takes_any)
        if len(alone) != len(places) and not takes_any:
            expected = (
                f"give {' and '.join(map(str.upper, places))}{', not' if alone else ''}" if places else "did not expect"
            )
            raise arguments.UsageError(f"{expected} {' '.join(alone)}".rstrip())
        given: dict[str, Any] = dict(zip(places, map(arguments.Words, alone), strict=False))
        arguments.set_options(given, options)
        arguments.add_to_lists(given, options)
        values = {name: value for part in self.parts for name, value in part.read(given).items()}
        return alone, Options(**values)

    def rows(self, everything: bool = True) -> list[Row]:
        """The lines of its help; of its main options alone, unless everything is asked for."""
        rows = [Row(_OPTIONS, "-h, --help", "show this help message and exit")]
        rows += [Row(_OPTIONS, HELP_ALL, "show all options")] if self.main else []
        rows += [row for part in self.parts for row in part.rows()]
        shown = {name.replace("-", "_") for name in ("help", "help-all", *self.main.split())}
        return [row for row in rows if everything or not self.main or shown & {*row.names}]

    def help(self, everything: bool) -> str:
        width = terminal_width() or 120
        usage = f"usage: mupscale {self.name} {self.usage}"
        about = [wrap_text(usage, width, hanging=" " * 7), fill_help(self.about, width)]
        return "\n\n".join([*about, help_of_rows(self.rows(everything))])

    def sections(self) -> dict[str, Sequence[Option]]:
        """The entries of options that are mappings or lists of them, by the option's name."""
        parts = [part for part in self.parts if isinstance(part, Section)]
        return {name: entries for part in parts for name, entries in part.sections().items()}


def fill_help(text: str, width: int) -> str:
    """A description in lines of at most `width`: paragraphs are filled anew, long examples (indented) are broken."""
    lines, paragraph = list[str](), list[str]()
    for line in [*text.strip("\n").splitlines(), ""]:
        if line.strip() and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(" ".join(paragraph), width, break_long_words=False, break_on_hyphens=False)
        paragraph.clear()
        lines += _break_example(line, width) if line.strip() else [""]
    return "\n".join(lines).rstrip("\n")


def _break_example(line: str, width: int) -> list[str]:
    """A command, and what it is for below it where both are too long for a line; a long command goes on after a \\."""
    if len(line) <= width:
        return [line]
    comment = re.match(r"(\s*\S.*?)\s{3,}(.*)$", line)
    command, about = (part.rstrip() for part in comment.groups()) if comment else (line.rstrip(), "")
    lines = [command]
    while len(lines[-1]) > width and (cut := lines[-1].rfind(" --", 8, width - 2)) > 0:
        lines[-1:] = [f"{lines[-1][:cut]} \\", f"      {lines[-1][cut + 1 :]}"]
    return [*lines, *([f"      # {about}"] if about else [])]


def help_of_rows(rows: Sequence[Row]) -> str:
    """Lines of help in two columns, below their titles."""
    width = terminal_width() or 120
    column = min(max(len(row.option) for row in rows) + 4, _COLUMN, max(width - 20, 4))
    sections = []
    for title in sorted(dict.fromkeys(row.title for row in rows), key=_ARGUMENTS.__ne__):
        lines = [f"{title}:"]
        for _, option, meaning in (row for row in rows if row.title == title):
            about = textwrap.wrap(" ".join(meaning.split()), max(width - column, 11))
            beside = len(option) <= column - 4 and about
            lines.append(f"  {option:<{column - 4}}  {about.pop(0)}" if beside else f"  {option}")
            lines += [f"{'':<{column}}{line}" for line in about]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _attribute(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def at_least(number: int) -> Any:
    return Annotated[int, Must(f"{number} or more", lambda value: bool(value >= number))]


def _bare(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    return list[_bare(*get_args(hint))] if get_origin(hint) is list else hint  # type: ignore[misc]


def rows_of(parameters: Iterable[Option], start: str, title: str) -> Iterator[Row]:
    """Help on parameters; on those of a class of this package its own, below its name."""
    for each in parameters:
        name = f"{start}{each.name}"
        if _is_class(each.type):
            yield from rows_of(parameters_of(each.type.path), f"{name}.", each.help)
            continue
        for kind in filter(_is_class, get_args(each.type)):
            yield Row(title, arguments.with_hyphens(f"{name}.help"), f"show the entries of {kind.__name__}")
        yield _row(title, name, each)


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, _Unimported)


def _row(title: str, name: str, each: Option) -> Row:
    """An option with its choices, N or X for a number, or VALUE; and its default, if that says anything."""
    kinds, said = (each.type, *get_args(each.type)), str(each.type)
    usual = "{true,false}" if each.type is bool else "X" if "float" in said else "N" if "int" in said else "VALUE"
    for choices in (kind for kind in kinds if get_origin(kind) is Literal and bool not in kinds):
        usual = f"{{{','.join(get_args(choices))}}}"
    is_list = any(get_origin(kind) is list for kind in kinds)
    shown = f"{name}, {name}+ {each.metavar or f'{usual},…'}" if is_list else f"{name} {each.metavar or usual}"
    is_silent = each.default is None or each.default is False or each.default == [] or "(default" in each.help
    end = "" if is_silent else " (required)" if each.default is MISSING else f" (default: {each.default})"
    return Row(title, arguments.with_hyphens(shown), f"{each.help}{end}")


# ------------------------------------------------------------------------------- parameters, read off the sources


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
def parameters_of(path: str) -> list[Option]:
    """What a function is called with, or a class made with; of a dataclass its fields, those of its bases last."""
    module, found = _find(path)
    meant = meanings(ast.get_docstring(found) or "")
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
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) != "_"  # after which fields have names
        ]
        bases = [each for base in found.bases for each in parameters_of(f"{module}.{base.id}")]
    read = [
        Option(name, _evaluate(kind, module), meant[name], _evaluate(usual, module) if usual else MISSING)
        for name, kind, usual in fields
        if kind is not None  # as of self
    ]
    own = {each.name for each in read}  # which a base may have, too
    return [*read, *(each for each in bases if each.name not in own)]


def meanings(docstring: str) -> dict[str, str]:
    """What the section Args of a docstring says, by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.M | re.S)
    entries = re.findall(r"^    (\w+)(?: \(.*\))?: (.*(?:\n     +.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}
