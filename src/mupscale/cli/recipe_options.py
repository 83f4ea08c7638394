"""Recipes and the options on top of them, as one mapping of plain values."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mupscale.cli.arguments import (
    Given,
    UsageError,
    join_options,
    make_parser,
    parse_arguments,
    read_value,
    read_yaml,
    separate_options,
)
from mupscale.cli.command_lines import CommandLine, Option, Section
from mupscale.cli.output_places import says_nothing_is_written
from mupscale.cli.own_modules import allow_modules, named_classes
from mupscale.cli.shipped_list import find_recipe
from mupscale.cli.spelling import with_underscores
from mupscale.system import MupscaleError

NO_GROWTH: Given = ("--grow", "[]")
"""Drops the growth events read so far."""


_CLASSES = {
    "model": "mupscale.models.MLP, ResNet18, GPT2, or a module of your own",
    "data": "mupscale.data.TableFile, Text …, or your own Dataset or function",
    "optimizer": "torch.optim.SGD, AdamW …; give lr, weight decay and eps for the base width",
}
RECIPE: tuple[Option | Section, ...] = (
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
    Section("mupscale.train.Recipe", skip=frozenset({*_CLASSES, "start", "start_width"})),
    Option("--from", str, "start from this checkpoint or run, and upscale it to `width`", metavar="PATH"),
    Option("--from-width", int | dict[str, int], "width of that checkpoint, if it does not record it"),
)
"""What every command takes that reads a recipe."""


def recipe_usage(more: str = "") -> str:
    """How such a command is used."""
    return f"RECIPE.yaml [more.yaml …] [--option VALUE …] {more}".rstrip()


def read_recipe_values(
    line: CommandLine, words: Sequence[str], usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
) -> dict[str, Any]:
    """Read recipes (files, or names of those that ship) and the options that take precedence over them.

    usual: of values read, what the lists stand for that are empty, by their dotted names.
    """
    names, options = separate_options(words, flags=(*line.flags, "--print_config"))
    names += [value or "" for name, value in options if name == "--config"]
    files = {file: read_yaml(file) for file in map(find_recipe, names)}
    options = [(name, value) for name, value in options if name != "--config"]
    allow_named_classes(options)
    allow_modules(named_classes(list(files.values())))
    _announce_data(files.values(), options)
    if not files and not options:
        raise UsageError("give a recipe, such as mlp-covtype-tiny (mupscale recipes lists all of them)")
    parser = _recipe_parser(line, _width_arguments(files.values(), options))
    if files:
        name = "+".join(Path(file).stem for file in files)
        # A run of `train` and a family are folders of different kinds, so one recipe gives them different names.
        parser.set_defaults(out=str(Path("runs", f"{name}-family" if line.name == "family" else name)))
    recipes: list[Given] = []
    for file, values in files.items():
        recipes += [*([NO_GROWTH] if "grow" in values else []), ("--config", file), *_paths_of_run(file, values)]

    def parse(options: Iterable[Given]) -> dict[str, Any]:
        return plain_values(parser, parse_arguments(parser, join_options([*recipes, *replace_growth(options)])))

    adding = [name.removesuffix("+") for name, _ in options if name.endswith("+")]
    if adding:
        before = parse(option for option in options if not option[0].endswith("+"))
        options = [*_spell_out(line, dict.fromkeys(adding), before, usual(before)), *options]
    read = parse(options)
    if says_nothing_is_written(read.get("out")):
        read["out"] = None
    return read


def _spell_out(
    line: CommandLine, names: Iterable[str], values: Mapping[str, Any], usual: Mapping[str, Any]
) -> Iterator[Given]:
    """The lists that are added to: an empty one may stand for a default, which must be there for that."""
    for name in names:
        dotted, found = name.removeprefix("--"), values
        for key in dotted.split("."):
            found = found.get(key, {}) if isinstance(found, Mapping) else {}
        if found:
            continue
        if dotted in usual:
            yield name, json.dumps(usual[dotted])
            continue
        meant = (row.meaning for row in line.rows() if with_underscores(row.option).startswith(f"{name},"))
        if stands_for := re.search(r"\(default: (?!\[)(.+?)\)", next(meant, "")):
            raise UsageError(
                f"{name}+ adds to {dotted}, which is empty and stands for a default ({stands_for[1]}): give the whole "
                f"list, {name} '[…]'"
            )


def _announce_data(files: Iterable[dict[str, Any]], options: Iterable[Given]) -> None:
    """Let a recipe's data be any function: the parser takes those alone that say, by an annotation, that they give it.

    What the function gives is looked at when it is called.
    """
    from mupscale.data import Data
    from mupscale.train import import_path

    named = [values.get("data") for values in files]
    paths = [value.get("class_path") if isinstance(value, dict) else value for value in named]
    for path in [*paths, *(value for name, value in options if name in ("--data", "--data.class_path"))]:
        with suppress(MupscaleError):  # the parser says it better
            target = import_path(path) if isinstance(path, str) and "." in path else None
            if inspect.isfunction(target):
                target.__annotations__["return"] = Data


def allow_named_classes(options: Iterable[Given]) -> None:
    """Let classes that are named on the command line be found in the current folder."""
    for name, value in options:
        allow_modules(named_classes(read_value(value), name.removeprefix("--")))


def _paths_of_run(file: str, values: dict[str, Any]) -> list[Given]:
    """The paths of a recipe that lies in a run's folder, where they lead from here."""
    from mupscale.train import values_in

    if Path(file).name != "recipe.json":
        return []
    placed = values_in(values, Path(file).parent)
    return [(f"--{name}", placed[name]) for name in ("out", "from") if placed.get(name) != values.get(name)]


def _recipe_parser(line: CommandLine, width_arguments: Iterable[str]) -> Any:
    """A parser of everything in a recipe; the model's width arguments come from `width`, so they are no options."""
    from torch import nn
    from torch.optim import Optimizer

    import mupscale.train  # noqa: F401  which loads mupscale.models, so that MLP alone is enough of a name
    from mupscale.data import Data

    parser = make_parser(line.name)
    parser.add_argument("--config", action="config")
    for name, base, skip in (
        ("model", nn.Module, set(width_arguments)),
        ("data", (Data, *Data.sources), set()),
        ("optimizer", Optimizer, {"params"}),
    ):
        parser.add_subclass_arguments(base, name, as_group=False, skip=skip, required=True, fail_untyped=False)
    for part in line.parts:
        part.add_to(parser)
    return parser


def replace_growth(options: Iterable[Given]) -> Iterator[Given]:
    """Let `--grow` replace the growth events of a recipe: jsonargparse would merge them, one by one."""
    for name, value in options:
        if name == NO_GROWTH[0]:
            yield NO_GROWTH
        yield name, value


def _width_arguments(files: Iterable[dict[str, Any]], options: Iterable[Given]) -> set[str]:
    """Names of the model's arguments that `width` sets; they must be known before the rest can be read."""
    width: Any = None
    for values in files:
        width = values.get("width", width)
    for name, value in options:
        if name == "--width":
            width = read_value(value)
        elif name.startswith("--width."):
            width = {**(width if isinstance(width, dict) else {}), name.removeprefix("--width."): value}
    return set(width) if isinstance(width, dict) else {"width"}


def plain_values(parser: Any, parsed: Any) -> dict[str, Any]:
    """Parsed options as JSON has them."""
    values = json.loads(parser.dump(parsed, format="json", skip_unset=False, skip_validation=True))
    for name in parser.groups:
        if not isinstance(values.get(name, {}), dict):
            raise UsageError(f"{name} is {values[name]}, but must be a mapping")
    for value in values.values():  # arguments that a class passes on as **kwargs
        if isinstance(value, dict) and "dict_kwargs" in value:
            value["init_args"] = {**value.get("init_args", {}), **value.pop("dict_kwargs")}
    return dict(values)
