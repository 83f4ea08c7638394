"""What a person gives to a command: words and options on the command line, and files of options in YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from mupscale.system import MupscaleError, Typed, did_you_mean, read_regular

MOST_BYTES = 1 << 20


def with_hyphens(text: str) -> str:
    """Text with its options as the command line spells them: hyphens wherever they are shown, underscores accepted."""
    return re.sub(r"(?<![\w-])--[a-z][\w.]*", lambda match: match[0].replace("_", "-"), text)


DIVERGED = 3
"""The exit status of a command whose training, or all of it, diverged."""


class UsageError(MupscaleError):
    """A command line or a file of options that cannot be understood, in one line."""


class Answered(Exception):
    """All that was asked for has been shown."""


class Given(NamedTuple):
    """An option: its name as Python has it, without hyphens; its value, if it has one; whether that is to be added."""

    name: str
    value: Words | None
    adds: bool = False

    @property
    def shown(self) -> str:
        """The option as a person types it."""
        return with_hyphens(f"--{self.name}")


class Words(Typed):
    """The value of an option: YAML, a text, or a list between commas."""

    def readings(self) -> Iterator[Any]:
        """What it may mean, the likeliest first."""
        value = read_value(self)
        yield value
        if value is not None:  # null is no text
            yield str(self)
            if not isinstance(value, list):
                yield [Words(part) for part in self.split(",")]

    def bracketed(self) -> list[Any] | None:
        """The entries of a YAML list in brackets, [a, b]; None where this is anything else."""
        if not (self.startswith("[") and self.endswith("]")):
            return None
        value = read_value(self)
        return value if isinstance(value, list) else None

    def texts(self) -> list[Any]:
        """What it means where a list of texts belongs: a list in brackets, or texts between commas as they stand."""
        entries = self.bracketed()
        return [Words(part) for part in self.split(",")] if entries is None else entries


@cache
def _loader() -> Any:
    """PyYAML's safe loader, which takes 1e-3 and -.5 for numbers, as YAML 1.2 does."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    number = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?)")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def read_yaml(path: str) -> dict[str, Any]:
    """A file of options as plain values, before anything is known about them."""
    import yaml

    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
        values = yaml.load(text, _loader())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not valid YAML: {' '.join(str(problem).split())}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, a date that is none, brackets
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no options: it must be a YAML mapping such as 'width: 512'")
    return values


def read_value(text: str) -> Any:
    """What an option's value means as YAML: a number, null, a list, a text in quotes; else the text as it stands.

    YAML would cut ' #2' off a name and drop &x, !!str and blanks at its ends, as if nobody had typed them.
    """
    import yaml

    try:
        value = yaml.load(text, _loader())
        is_scalar = not isinstance(value, dict | list)
        return str(text) if is_scalar and not _is_one_scalar(text) else value
    except yaml.YAMLError:
        return str(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{text[:20]}… cannot be read: {' '.join(str(error).split())}") from None


def _is_one_scalar(text: str) -> bool:
    """Whether all of a text is one scalar of YAML, without a comment, an anchor, a tag or blanks around it."""
    import yaml

    _, *tokens, _ = yaml.scan(text, _loader())
    if len(tokens) != 1 or not isinstance(tokens[0], yaml.ScalarToken):
        return False
    return bool(tokens[0].start_mark.index == 0 and tokens[0].end_mark.index == len(text))


def separate_options(
    arguments: Sequence[str],
    names: Collection[str] | None = None,
    flags: Collection[str] = (),
    lists: Collection[str] = (),
    *,
    many: bool = False,
) -> tuple[list[str], list[Given]]:
    """Words that stand alone, and the options with their values.

    names: those that exist, if any others are errors. flags: those without a value. lists: those that take a list.
    many: whether a list may follow in several words, as no word stands alone. What is given again for a list is added.
    """
    alone, options, rest = list[str](), list[Given](), list(arguments)
    while rest:
        word = rest.pop(0)
        if not word:  # the current folder, as a path
            raise UsageError(
                "an empty name was given: is a variable of the shell not set? For the current folder give ."
            )
        if not word.startswith("-") or word == "-":
            alone.append(word)
            continue
        spelled, equals, value = word.partition("=")
        name = spelled.lstrip("-").replace("-", "_") if spelled.startswith("--") else spelled.lstrip("-")
        adds, name = name.endswith("+"), name.removesuffix("+")
        if names is not None:
            _check_name(name, names)
        if name in flags:
            if equals:
                raise UsageError(f"{spelled} takes no value: leave out ={value}")
            options.append(Given(name, None))
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"{with_hyphens(spelled)} needs a value")
            value = rest.pop(0)
        while many and name in lists and rest and re.match(r"[^-]|-[\d.]", rest[0]):
            value += f",{rest.pop(0)}"
        again = name in lists and any(one.name == name for one in options)
        options.append(Given(name, Words(value), adds or again))
    return alone, options


def set_options(tree: dict[str, Any], options: Iterable[Given], sections: Collection[str] = ()) -> None:
    """Put options into a tree of values by their names, those with dots within each other.

    A mapping for one of the sections goes into what is there. What adds to a list is left to `add_to_lists`.
    """
    for option in options:
        if option.adds:
            continue
        place, (*within, last) = tree, option.name.split(".")
        for key in within:
            inner = place.get(key)
            inner = read_value(inner) if isinstance(inner, Words) else inner
            place[key] = dict(inner) if isinstance(inner, dict) else {}
            place = place[key]
        value: Any = True if option.value is None else option.value
        entries = read_value(option.value) if option.value and option.name in sections else None
        before = place.get(last) or {}
        place[last] = {**before, **entries} if isinstance(entries, dict) and isinstance(before, dict) else value


def add_to_lists(
    tree: dict[str, Any], options: Iterable[Given], usual: Callable[[str], Sequence[Any]] = lambda name: ()
) -> None:
    """Add to lists in a tree of options what is given for that. usual: what an empty one stands for, by its name."""
    for option in options:
        if option.adds:
            place, (*within, last) = tree, option.name.split(".")
            for key in within:
                place = place.setdefault(key, {})
            place[last] = [*list_items(place.get(last) or usual(option.name)), *list_items(option.value)]


def list_items(value: Any) -> Sequence[Any]:
    """The entries of what is given for a list: YAML, one entry, or several between commas."""
    if not isinstance(value, Words):
        return value if isinstance(value, list | tuple) else [value]
    read = read_value(value)
    if isinstance(read, dict):
        return [read]
    if isinstance(read, list) and any(isinstance(entry, dict | list) for entry in read):
        return read
    return value.texts()


def _check_name(name: str, known: Collection[str]) -> None:
    """Refuse an option that does not exist. What lies below one, as in --width.heads, is for its type to refuse."""
    parts, firsts = name.split("."), {each.partition(".")[0] for each in known}
    is_below = any(".".join(parts[:count]) in known for count in range(1, len(parts) + 1))
    if is_below or any(each.startswith(f"{name}.") for each in known):
        return
    first, dot, rest = name.partition(".")
    if dot and first not in firsts:  # --optimizr.lr: what comes after the dot is not for us to judge
        meant = did_you_mean(first, firsts, lambda near: with_hyphens(f"--{near}.{rest}"))
    else:
        meant = did_you_mean(name, known, lambda near: with_hyphens(f"--{near}"))
    raise UsageError(f"there is no option {with_hyphens(f'--{name}')}{meant}")
