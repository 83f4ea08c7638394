"""Recipes and the options on top of them: one tree of plain values, and what is made of it."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from mupscale.cli.arguments import Answered, Given, UsageError, Words, add_to_lists, read_value, read_yaml, set_options
from mupscale.cli.command_lines import CommandLine, Option, Section, help_of_rows, meanings, rows_of
from mupscale.cli.own_modules import allow_modules, named_classes
from mupscale.system import (
    MupscaleError,
    did_you_mean,
    number_in_environment,
    parse_given,
    print_at_once,
    show,
    told_fields,
    wrap_text,
)

if TYPE_CHECKING:
    from mupscale.train import Recipe

Tree = dict[str, Any]
_CLASSES = {
    "model": "mupscale.models.MLP, ResNet18, GPT2, or a module of your own",
    "data": "mupscale.data.TableFile, Text …, or your own Dataset or function",
    "optimizer": "torch.optim.SGD, AdamW …; give lr, weight decay and eps for the base width",
}
_KINDS = {"model": "torch.nn.Module", "data": "mupscale.data.Data", "optimizer": "torch.optim.Optimizer"}
_SHORT_NAMES = {"model": ["mupscale.models"], "data": ["mupscale.data"], "optimizer": ["torch.optim", "mupscale.optim"]}
"""Modules whose classes need no module's name."""
_PARAMETERS = ("params",)
_RECIPE_CLASS = "mupscale.train.Recipe"


def recipe_parts(but: Collection[str] = ()) -> tuple[Option | Section, ...]:
    """What a command takes that reads a recipe. but: entries of the recipe that this command does not use."""
    return (
        Option("--config", None, "a recipe file; the same as naming it without --config", metavar="FILE"),
        Option("--print-config", None, "print the whole recipe and exit"),
        *(
            option
            for name, meaning in _CLASSES.items()
            for option in (
                Option(f"--{name}.help", None, "show the options of such a class", metavar="CLASS"),
                Option(f"--{name}", None, meaning, metavar="CLASS"),
            )
        ),
        Section(_RECIPE_CLASS, skip=frozenset({*_CLASSES, "start", "start_width", *but})),
        Option("--from", None, "start from this checkpoint or run, and upscale it to `width`", metavar="PATH"),
        Option("--from-width", None, "width of that checkpoint, if it does not record it", metavar="N"),
    )


RECIPE = recipe_parts()
"""What most commands take that read a recipe."""


def _is_of_recipe(part: Option | Section) -> bool:
    return part in RECIPE or (isinstance(part, Section) and part.path == _RECIPE_CLASS)


def shipped_recipes() -> dict[str, Path]:
    """Recipes by name: inside an installed package, or beside its sources."""
    here = Path(__file__).parents[1]
    folder = next((f for f in (here / "recipes", here.parents[1] / "recipes") if f.is_dir()), here)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> str:
    """A recipe that ships, by its name, or a file; a file of such a name is given as ./NAME."""
    shipped = shipped_recipes()
    if name in shipped:
        return str(shipped[name])
    if Path(name).is_file():
        return name
    meant = did_you_mean(Path(name).stem, shipped, lambda near: f"{near}, which ships")
    raise UsageError(f"there is no recipe {name}{meant}")


def recipe_usage(more: str = "") -> str:
    return f"RECIPE.yaml [more.yaml …] [--option VALUE …] {more}".rstrip()


def read_recipe_and_options(
    line: CommandLine,
    words: Sequence[str],
    adjust: Callable[[Tree], None] = lambda tree: None,
    usual: Callable[[Tree], Mapping[str, Any]] = lambda tree: {},
) -> tuple[Recipe, Tree]:
    """Read recipes (files, or names of those that ship) and the options that take precedence over them.

    Of the options the second part has those that are not the recipe's own. adjust: what a command changes of the values
    before they are looked at. usual: what lists stand for that are empty, by their dotted names.
    """
    from mupscale.core import WholeWidth
    from mupscale.train import Recipe

    names, options = line.separate(words)
    names += [option.value or "" for option in options if option.name == "config"]
    options = [option for option in options if option.name != "config"]
    if not names and not options:
        raise UsageError("give a recipe, such as mlp-covtype-tiny (mupscale recipes lists all of them)")
    _show_help(line, options)
    tree = _merged(line, [find_recipe(name) for name in names], options)
    adjust(tree)
    allow_modules(named_classes(tree))
    allow_modules(named_classes({option.name: option.value for option in options}))  # what is added to lists, too
    width = parse_given(WholeWidth | None, tree.get("width"), ("width",), UsageError)
    for name in _CLASSES:
        tree[name] = _complete(name, tree.get(name), {*width} if isinstance(width, dict) else {"width"})
    stand_for = usual(tree) if any(option.adds for option in options) else {}
    add_to_lists(tree, options, lambda name: stand_for[name] if name in stand_for else _nothing_usual(line, name))
    others = [part for part in line.parts if not _is_of_recipe(part)]
    values = {name: value for part in others for name, value in part.read(tree).items()}
    own = {name: value for name, value in tree.items() if name not in {*values, "print_config"}}
    if own.get("out", "") is None and not number_in_environment("RANK", 0):  # as YAML reads 'out: #2', too
        note = "Note: the recipe's out is null, so nothing is written. To write a run, name its folder (--out FOLDER)."
        print_at_once(wrap_text(note), "stderr")
    if says_nothing_is_written(own.get("out")):
        own["out"] = None
    recipe = Recipe.from_json(own, parse=parse_recipe)
    if "print_config" in tree:
        _print_config(recipe, {part.prefix: values[part.prefix] for part in others if isinstance(part, Section)})
    return recipe, values


def parse_recipe(kind: type[Recipe], values: Any, where: object) -> Recipe:
    recipe: Recipe = parse_given(kind, values, (), UsageError)
    return recipe


def _merged(line: CommandLine, files: Sequence[str], options: Sequence[Given]) -> Tree:
    tree: Tree = {}
    if files or line.name != "train":
        name = "+".join(Path(file).stem for file in files) or "study"
        # A run of `train` and a family are folders of different kinds, so one recipe gives them different names.
        tree["out"] = str(Path("runs", f"{name}-family" if line.name == "family" else name))
    sections = line.sections()
    for file in files:
        values: Mapping[str, Any] = read_yaml(file)
        if Path(file).name == "recipe.json":  # it lies in a run's folder: its paths lead from here
            from mupscale.train import values_in

            values = values_in(values, Path(file).parent)
        for name, value in values.items():  # those of a section one by one, and any other mapping as a whole
            before = tree.get(name)
            if name in _CLASSES:
                tree[name] = _merged_class(name, before, value)
            else:
                within = before if name in sections and isinstance(before, dict) and isinstance(value, dict) else None
                tree[name] = value if within is None else {**within, **value}
    classes = [option for option in options if option.name.removesuffix(".class_path") in _CLASSES]
    for option in classes:
        name = option.name.removesuffix(".class_path")
        tree[name] = _merged_class(name, tree.get(name), option.value)
    others = [option for option in options if option not in classes]
    for number, option in enumerate(others):  # --model.depth is model.init_args.depth
        name, _, rest = option.name.partition(".")
        if name in _CLASSES and rest.partition(".")[0] != "init_args":
            others[number] = option._replace(name=f"{name}.init_args.{rest}")
    set_options(tree, others, sections)
    return tree


def _merged_class(name: str, before: Tree | None, value: Any) -> Tree:
    """A class with its arguments. `kept` are arguments of an earlier class, if this one has them, too."""
    if isinstance(value, Words):  # a mapping in YAML, or the class's name as it was typed
        read = read_value(value)
        value = read if isinstance(read, dict) else str(value)
    value = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value}, but must be a mapping of class_path and init_args")
    for key in value.keys() - {"class_path", "init_args"}:
        raise UsageError(f"{name} takes class_path and init_args, but not {key}: name its class first (--{name} CLASS)")
    arguments, before = value.get("init_args") or {}, before or {}
    if not isinstance(arguments, dict):
        raise UsageError(f"{name}.init_args is {arguments}, but must be a mapping")
    path, kept, own = value.get("class_path"), before.get("kept", {}), before.get("init_args", {})
    if path not in (None, before.get("class_path")):
        kept, own = {**kept, **own}, {}
    return {"class_path": path or before.get("class_path"), "init_args": {**own, **arguments}, "kept": kept}


def _complete(name: str, given: Tree | None, widths: Collection[str]) -> Tree:
    """A class and all of its arguments: those that are given, checked by their types, and the defaults of the others.

    widths: the model's arguments that the recipe's width sets, so that nobody else may.
    """
    if given is None or given.get("class_path") is None:
        raise UsageError(f"{name} must be given" + (f": name its class (--{name} CLASS)" if given else ""))
    path, target = _load(name, given["class_path"])
    known, is_open = class_arguments(target)
    set_elsewhere = {"model": widths, "optimizer": _PARAMETERS}.get(name, ())
    kept = {argument: value for argument, value in given.get("kept", {}).items() if argument in known}
    arguments = {**kept, **given["init_args"]}
    for argument in arguments:
        if argument in set_elsewhere:
            raise UsageError(
                f"{name}.{argument} cannot be given here: the recipe's own entries, such as width, set it. Remove it "
                f"from {name}"
            )
        if argument not in known and not is_open:
            raise UsageError(f"{path} has no argument {argument}{did_you_mean(argument, known)}")
    values = {}
    for argument, parameter in known.items():
        if argument in arguments:
            value = arguments.pop(argument)
            value = _as_its_default(parameter, value) if parameter.type is Any else value
            values[argument] = parse_given(parameter.type, value, (name, argument), UsageError)
        elif argument in set_elsewhere:
            continue
        elif parameter.default is MISSING:
            raise UsageError(f"{argument} must be given for {name} ({path})")
        elif _is_plain(default := parameter.default):
            is_number = parameter.type is float and default is not None
            values[argument] = float(default) if is_number else [*default] if isinstance(default, tuple) else default
    return {"class_path": path, "init_args": {**values, **_read_all(arguments)}}


def _as_its_default(parameter: Option, value: Any) -> Any:
    """A value for an argument without a type: text where the default is text, as that of a path is, else YAML."""
    is_text = isinstance(value, Words) and isinstance(parameter.default, str)
    return str(value) if is_text else _read_all(value)


def _load(name: str, path: str) -> tuple[str, Any]:
    """The whole import path of a class or function of the user's choice, and itself."""
    from mupscale.train import import_path, load_of_kind

    if "." not in path:
        short = {each: f"{module}.{each}" for module in _SHORT_NAMES[name] for each in dir(import_module(module))}
        if path not in short:
            meant = did_you_mean(path, short, short.__getitem__)
            raise UsageError(f"{name} is {path}, but must be the import path of a class{meant}")
        path = short[path]
    try:
        return path, load_of_kind(path, import_path(_KINDS[name]))
    except MupscaleError as error:
        raise UsageError(f"{name}: {error}") from None
    except Exception as error:  # whatever a module of one's own does
        raise UsageError(f"{name}: {path} cannot be imported: {error}") from error


def class_arguments(target: Any) -> tuple[dict[str, Option], bool]:
    """What a class or function takes, by name; and whether it takes any other, too.

    A class that takes any (**kwargs) is taken to pass them on to its base.
    """
    is_class, found = isinstance(target, type), dict[str, Option]()
    makers = [vars(each).get("__init__") for each in target.__mro__] if is_class else [target]
    for maker in filter(None, makers):
        try:
            parameters, hints = [*inspect.signature(maker).parameters.values()], get_type_hints(maker)
        except Exception:  # a builtin has no signature, and an annotation may be any expression
            return found, True
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        for each in named[1:] if is_class else named:
            default = MISSING if each.default is each.empty else each.default
            found.setdefault(each.name, Option(each.name, _plain_hint(hints.get(each.name, Any)), "", default))
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return found, False
    return found, True


_SCALARS = (int, float, bool, str, NoneType)


def _plain_hint(hint: Any) -> Any:
    """What of a type a file can hold: a number, not a Tensor, too; of a path its text; Any where that is nothing."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Path, os.PathLike) or origin is os.PathLike:
        return str
    if origin in (Union, UnionType):
        plain = [each for each in map(_plain_hint, inner) if each is not Any]
        return reduce(or_, plain) if plain else Any
    if origin in (list, tuple, dict):
        return origin[tuple(each if each is ... else _plain_hint(each) for each in inner)]
    return hint if hint in (*_SCALARS, list, dict) or origin is Literal else Any


def _is_plain(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, (*_SCALARS, list, tuple, dict)) and all(map(_is_plain, inside))


def _read_all(value: Any) -> Any:
    """A value with all in it that somebody typed read as YAML."""
    if isinstance(value, dict):
        return {name: _read_all(each) for name, each in value.items()}
    return read_value(value) if isinstance(value, Words) else value


def _nothing_usual(line: CommandLine, name: str) -> Sequence[Any]:
    """No entries; an error where an empty list stands for a default that is not known yet."""
    meant = (row.meaning for row in line.rows() if f"{name}+" in row.names)
    if stands_for := re.search(r"\(default: (?!\[)(.+?)\)", next(meant, "")):
        raise UsageError(
            f"--{name}+ adds to {name}, which is empty and stands for a default ({stands_for[1]}): give the whole "
            f"list, --{name} '[…]'"
        )
    return []


def _show_help(line: CommandLine, options: Sequence[Given]) -> None:
    """What `--grow.help` and `--model.help CLASS` ask for, if they do."""
    for option in options:
        name = option.name.removesuffix(".help")
        if name == option.name:
            continue
        if name in _CLASSES:
            allow_modules([option.value or ""])
            path, target = _load(name, option.value or "")
            documented = (inspect.getdoc(one) or "" for one in (target, getattr(target, "__init__", None)))
            meant = {n: text for each in documented for n, text in meanings(each).items()}
            title, start = f"arguments of {path}", f"--{name}."
            hidden = {"model": ("width",), "optimizer": _PARAMETERS}.get(name, ())  # which nobody gives
            found = [each for each in class_arguments(target)[0].values() if each.name not in hidden]
            entries: Sequence[Option] = [each._replace(help=meant.get(each.name, "")) for each in found]
        else:
            title, start, entries = f"entries of {name}", "", line.sections()[name]
        show(help_of_rows([*rows_of(entries, start, title)]))
        raise Answered


def _print_config(recipe: Recipe, sections: Mapping[str, Any]) -> None:
    import yaml

    values = {**dict.fromkeys(_CLASSES), **told_fields(recipe, all_of_them=True)}
    values |= {"from": values.pop("start"), "from_width": values.pop("start_width")}
    values |= {name: told_fields(section, all_of_them=True) for name, section in sections.items()}
    show(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    raise Answered


_thrown_away: list[Path] = []


def says_nothing_is_written(out: object) -> bool:
    """Whether a value of --out asks for no files at all: the word none, or a recipe's null."""
    return out is None or out == "none"


@contextmanager
def folder_to_write(out: str | None) -> Iterator[Path]:
    """The folder to write into; where nothing is to be written, one that is gone in the end."""
    if not says_nothing_is_written(out):
        yield Path(str(out))
        return
    with tempfile.TemporaryDirectory(prefix="mupscale-") as folder:
        _thrown_away.append(Path(folder))
        try:
            yield Path(folder, "out")
        finally:
            _thrown_away.pop()


def print_place(what: str, path: str | Path) -> None:
    """Tell where something was written, unless it is not kept."""
    if not any(Path(path).absolute().is_relative_to(folder) for folder in _thrown_away):
        show(f"{what}: {path}")
