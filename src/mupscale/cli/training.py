"""The commands for training: train, resume, curves."""

from __future__ import annotations

import os
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from mupscale.cli.arguments import (
    Option,
    UsageError,
    check_words,
    join_options,
    make_parser,
    parse_arguments,
    separate_options,
)
from mupscale.cli.own_modules import allow_modules
from mupscale.cli.recipe_options import allow_named_classes, plain_values, read_recipe_values, replace_growth
from mupscale.system import pausing_garbage_collection, print_at_once, printable, read_regular, show

if TYPE_CHECKING:
    from mupscale.train import Recipe, Result, StoredRecipe

TRAIN = """\
Train the model that a recipe describes. The recipe can grow the model in the middle of the run.

  mupscale train recipes/mlp-covtype-tiny.yaml                      ten seconds of one core
  mupscale train recipes/gpt2-text.yaml --width.head-dim 64 --optimizer.lr 0.002 --out runs/mine
  mupscale train recipes/mlp-covtype.yaml --grow '[{at: 2000, width: 1000, noise: 1}]'
  torchrun --nproc_per_node 8 -m mupscale train recipes/gpt2-text.yaml

You can override every entry of a recipe with an option. If you give several recipes, later ones override earlier ones.
To use your own model, optimizer or data, give its import path (class_path); the current folder is searched, too.
--print-config shows the whole recipe with all its defaults."""

RESUME = """\
Resume a run from its last checkpoint, exactly where it stopped.

  mupscale resume runs/mlp-covtype
  mupscale resume runs/mlp-covtype --steps 20000 --grow+ '{at: 15000, width: 2000, noise: 1}'
  mupscale resume runs/theirs --trust their_models                  allow classes from their_models.py

A run that you started on this machine can load your own classes. A run from anywhere else can load only classes of
mupscale, torch.nn and torch.optim, and of packages that you name with --trust. The options below can change when you
resume. Everything else stays as it was."""

CURVES = """\
Plot the losses of several runs in one picture, with marks where they grew.

  mupscale curves runs/mlp-covtype-tiny runs/wide --against flops --out curves.png"""

OTHER_SECTIONS = ("study", "family")
"""Of a recipe's file, for `mupscale run` and `mupscale family`."""
TRUST = "a package or module whose classes the recipe may load; you can give this option several times"
Beginning = Literal["new", "resume", "overwrite"]
_STATUS = {"finished": 0, "diverged": 3, "interrupted": 130}


def train_command(words: list[str]) -> int:
    """mupscale train RECIPE."""
    from mupscale.train import run_recipe

    recipe, begin = read_recipe(words)
    return _tell_end(run_recipe(recipe, resume=begin == "resume", overwrite=begin == "overwrite"))


def resume_command(words: list[str]) -> int:
    """mupscale resume RUN."""
    from mupscale.train import run_recipe

    return _tell_end(run_recipe(read_run(words), resume=True))


def _tell_end(result: Result) -> int:
    """Say where a finished run is saved, from one process of many; the exit status."""
    from mupscale.train import RunFolder

    if result.status == "finished" and result.out is not None and os.environ.get("RANK", "0") == "0":
        last = RunFolder(result.out).last()
        where = "" if last is None else f"{last.relative_to(result.out)}, "
        print_at_once(f"saved in {result.out}: {where}metrics.jsonl, recipe.json")
    return _STATUS[result.status]


def curves_command(words: list[str]) -> int:
    """mupscale curves RUN …"""
    from mupscale.train import draw_curves

    runs, options = separate_options(words, flags=())
    parser = make_parser("curves", "RUN [RUN …] [--option VALUE …]", CURVES)
    parser.add_function_arguments(draw_curves, as_group=False, skip={"runs"})
    settings = parse_arguments(parser, join_options(options)).as_dict()
    if not runs:
        raise UsageError("give the folder of at least one run")
    with pausing_garbage_collection():
        show(f"Picture: {draw_curves(runs, **settings)}")
    return 0


def read_recipe(words: Sequence[str]) -> tuple[Recipe, Beginning]:
    """The recipe that the words behind `mupscale train` describe, and what to do with a run that is there already."""
    from mupscale.train import Recipe

    def extend(parser: Any) -> None:
        parser.add_argument("--resume", action="store_true", default=SUPPRESS, help="resume from the last checkpoint")
        parser.add_argument(
            "--overwrite", action="store_true", default=SUPPRESS, help="replace a run that is already in the folder"
        )
        for section in OTHER_SECTIONS:
            parser.add_argument(f"--{section}", type=dict, help=SUPPRESS)

    values = read_recipe_values(
        "train", "[--resume | --overwrite]", TRAIN, words, extend, flags=("--resume", "--overwrite")
    )
    for section in OTHER_SECTIONS:
        values.pop(section, None)
    asked = [name for name in ("resume", "overwrite") if values.pop(name, False)]
    if len(asked) == 2:
        raise UsageError("--resume continues the run that --overwrite removes: give one of them")
    return Recipe.from_json(values), cast(Beginning, asked[0] if asked else "new")


def read_run(words: Sequence[str]) -> Recipe:
    """The recipe of a run to resume, with what the words behind `mupscale resume` change."""
    from mupscale.train import MAY_CHANGE, Recipe

    runs, options = separate_options(words, flags=())
    if len(runs) != 1 and not {"-h", "--help", "--help_all"} & {name for name, _ in options}:
        raise UsageError("give the folder of one run" + (f", not {len(runs)}: {', '.join(runs)}" if runs else ""))
    stored = _stored_recipe(Path(runs[0])) if runs else None
    values = {} if stored is None else stored.to_json()
    changeable = (MAY_CHANGE - {"out"}) | {"grow"}
    for name, _ in options:
        field = name.lstrip("-").split(".")[0]
        if values and field in {*Recipe.__dataclass_fields__, "from", "from_width"} - changeable:
            raise UsageError(
                f"{field} cannot change in the middle of a run. Start a new run from it: "
                f"mupscale train RECIPE --from {runs[0]} {name} …"
            )
    parser = make_parser("resume", "RUN [--option VALUE …]", RESUME)
    parser.add_class_arguments(Recipe, as_group=False, skip=set(Recipe.__dataclass_fields__) - changeable)
    for action in parser._actions:
        action.required = False
    parser.set_defaults({name: value for name, value in values.items() if name in changeable})
    parser.add_argument("--trust", type=list[str], default=[], metavar="PACKAGE", help=TRUST)
    trust, others = _separate_trust(options)
    check_words(words)
    trust += [] if stored is None else stored.packages_if_own()
    allow_modules(trust)
    allow_named_classes(others)
    changed = plain_values(parser, parse_arguments(parser, join_options(replace_growth(others))))
    del changed["trust"]
    assert stored is not None  # without a run there is only the help, and the parser has shown it
    return Recipe.from_json({**stored.load(trust).to_json(), **changed, "out": runs[0]}, stored.path)


def _separate_trust(options: Sequence[Option]) -> tuple[list[str], list[Option]]:
    """The packages behind --trust, which may be given several times, and all other options."""
    packages = [name for option, value in options if option == "--trust" for name in (value or "").split(",")]
    for name in packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--trust takes the name of a package or module, such as my_models, and not {name!r}")
    return packages, [option for option in options if option[0] != "--trust"]


def _stored_recipe(run: Path) -> StoredRecipe:
    """What the folder of a run says about it."""
    from mupscale.train import StoredRecipe

    if not (run / "recipe.json").exists() and (run / "stretches").is_dir():
        raise UsageError(f"{run} holds a study, not a single run. To continue it, {_how_to_continue(run)}")
    try:
        return StoredRecipe.read(run / "recipe.json")
    except OSError as error:
        raise UsageError(f"{run} is not the folder of a run: cannot read its recipe.json ({error.strerror})") from None


def _how_to_continue(study: Path) -> str:
    """The command that began a study, or that there is none; somebody else's is shown, and never run."""
    from mupscale.study import COMMAND_FILE

    try:
        command = read_regular(study / COMMAND_FILE, 1 << 16).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return "repeat the command or the call that began it"
    return f"repeat its command where you gave it: {printable(command)}"
