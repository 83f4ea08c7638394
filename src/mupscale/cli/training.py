"""The commands for training: train, resume, curves; and those for what it takes: recipes, data tokenize, data info."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.cli import recipe_options
from mupscale.cli.arguments import UsageError, add_to_lists, separate_options, set_options
from mupscale.cli.command_lines import HIDDEN, CommandLine, Option, Section, value_of
from mupscale.cli.own_modules import allow_modules, named_classes
from mupscale.system import pausing_garbage_collection, print_at_once, printable, read_regular, show, wrap_text

if TYPE_CHECKING:
    from mupscale.train import Recipe, Result, StoredRecipe

_TRUST = "a package or module whose classes the recipe may load; you can give this option several times"


def _changeable() -> set[str]:
    return {*value_of("mupscale.train.MAY_CHANGE"), "grow"} - {"out"}


TRAIN = CommandLine(
    "train",
    "train the model that a recipe describes",
    recipe_options.recipe_usage("[--resume | --overwrite]"),
    """\
Train the model that a recipe describes. The recipe can grow the model in the middle of the run.

  mupscale train recipes/mlp-covtype-tiny.yaml                      ten seconds of one core
  mupscale train recipes/gpt2-text.yaml --width.head-dim 64 --optimizer.lr 0.002 --out runs/mine
  mupscale train recipes/mlp-covtype.yaml --grow '[{at: 2000, width: 1000, noise: 1}]'
  torchrun --nproc_per_node 8 -m mupscale train recipes/gpt2-text.yaml

You can override every entry of a recipe with an option. If you give several recipes, later ones override earlier ones.
To use your own model, optimizer or data, give its import path (class_path); the current folder is searched, too.
--print-config shows the whole recipe with all its defaults.""",
    (
        *recipe_options.RECIPE,
        Option("--resume", bool, "resume from the last checkpoint"),
        Option("--overwrite", bool, "replace a run that is already in the folder"),
        *(Option(f"--{section}", dict, HIDDEN) for section in ("study", "family")),  # of the same file, for others
    ),
    main="out resume overwrite from width steps grow device precision tensorboard print-config",
)

RESUME = CommandLine(
    "resume",
    "resume a run from its last checkpoint",
    "RUN [--option VALUE …]",
    """\
Resume a run from its last checkpoint, exactly where it stopped.

  mupscale resume runs/mlp-covtype
  mupscale resume runs/mlp-covtype --steps 20000 --grow+ '{at: 15000, width: 2000, noise: 1}'
  mupscale resume runs/theirs --trust their_models                  allow classes from their_models.py

A run that you started on this machine can load your own classes. A run from anywhere else can load only classes of
mupscale, torch.nn and torch.optim, and of packages that you name with --trust. The options below can change when you
resume. Everything else stays as it was.""",
    (Section("mupscale.train.Recipe", only=_changeable), Option("--trust", list[str], _TRUST, [], metavar="PACKAGE")),
    main="steps grow trust device checkpoints.every evaluation.every log-every tensorboard",
)

CURVES = CommandLine(
    "curves",
    "plot the losses of several runs",
    "RUN [RUN …] [--option VALUE …]",
    """\
Plot the losses of several runs in one picture, with marks where they grew.

  mupscale curves runs/mlp-covtype-tiny runs/wide --against flops --out curves.png""",
    (Section("mupscale.train.draw_curves", skip=frozenset({"runs"})),),
    needs=("matplotlib",),
)

RECIPES = CommandLine(
    "recipes",
    "list the recipes that come with mupscale",
    "",
    "List the recipes that come with mupscale, each with what it trains.",
    (),
)


@RECIPES.command
def recipes_command(words: list[str]) -> int:
    for name, path in recipe_options.shipped_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        show(wrap_text(f"  {name:<24}{first.lstrip('# ')}", hanging=" " * 26))
    show(wrap_text("mupscale train NAME trains one; mupscale train NAME --print-config shows it."))
    return 0


TOKENIZE = CommandLine(
    "data tokenize",
    "tokenize text and store the tokens",
    "SOURCE OUT [--option VALUE …]",
    """\
Turn text into tokens, once: a folder of memory-mapped shards and an index, which mupscale.data.Text reads.

  mupscale data tokenize books.jsonl.gz data/books --vocab 8192     with a BPE trained on the text itself
  mupscale data tokenize 'web/*.parquet' data/web --gpt2 gpt2-bpe   with GPT-2's, from encoder.json and vocab.bpe""",
    (Section("mupscale.data.tokenize"),),
    resumable=True,
    calls="mupscale.data.tokenize",
)

INFO = CommandLine(
    "data info",
    "show what a folder of tokens, or a CSV or Parquet file, holds",
    "FOLDER | FILE [--target COLUMN] [--option VALUE …]",
    """\
What a folder of tokens holds, or what a table in a file becomes.

  mupscale data info data/books
  mupscale data info plants.csv --target kind --skip id --missing mean""",
    (
        Option("tokens", str, "the folder, or a CSV or Parquet file"),
        Section("mupscale.data.TableFile", skip=frozenset({"path"})),
    ),
    calls="mupscale.data.info",
)

_STATUS = {"finished": 0, "diverged": 3, "interrupted": 130}


@TRAIN.command
def train_command(words: list[str]) -> int:
    from mupscale.train import run_recipe

    recipe, options = read_recipe(words)
    return _tell_end(run_recipe(recipe, resume=options["resume"], overwrite=options["overwrite"]))


@RESUME.command
def resume_command(words: list[str]) -> int:
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


@CURVES.command
def curves_command(words: list[str]) -> int:
    from mupscale.train import draw_curves

    runs, settings = CURVES.read(words)
    if not runs:
        raise UsageError("give the folder of at least one run")
    with pausing_garbage_collection():
        show(f"Picture: {draw_curves(runs, **vars(settings))}")
    return 0


def read_recipe(words: Sequence[str]) -> tuple[Recipe, recipe_options.Tree]:
    """The recipe that the words behind `mupscale train` describe, and the command's other options."""
    recipe, options = recipe_options.read_recipe_and_options(TRAIN, words)
    if options["resume"] and options["overwrite"]:
        raise UsageError("--resume continues the run that --overwrite removes: give one of them")
    return recipe, options


def read_run(words: Sequence[str]) -> Recipe:
    """The recipe of a run to resume, with what the words behind `mupscale resume` change."""
    from mupscale.train import Recipe

    runs, options = separate_options(words)
    if len(runs) != 1:
        raise UsageError("give the folder of one run" + (f", not {len(runs)}: {', '.join(runs)}" if runs else ""))
    stored, changeable = _stored_recipe(Path(runs[0])), _changeable()
    for option in options:
        field = option.name.partition(".")[0]
        if field in {*Recipe.__dataclass_fields__, "from", "from_width"} - changeable:
            raise UsageError(
                f"{field} cannot change in the middle of a run. Start a new run from it: "
                f"mupscale train RECIPE --from {runs[0]} {option.shown} …"
            )
    _, options = RESUME.separate(words)
    packages = [name for each in options if each.name == "trust" for name in (each.value or "").split(",")]
    for name in packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--trust takes the name of a package or module, such as my_models, and not {name!r}")
    trust = packages + stored.packages_if_own()
    options = [option for option in options if option.name != "trust"]
    values = {name: value for name, value in stored.to_json().items() if name in changeable}
    set_options(values, options, RESUME.sections())
    add_to_lists(values, options)
    allow_modules([*trust, *named_classes({option.name: option.value for option in options})])
    changed = Recipe.from_json({**stored.load(trust).to_json(), **values}, parse=recipe_options.parse_recipe)
    return replace(changed, out=runs[0])


def _stored_recipe(run: Path) -> StoredRecipe:
    from mupscale.train import StoredRecipe

    if not (run / "recipe.json").exists() and (run / "stretches").is_dir():
        from mupscale.study import COMMAND_FILE

        how = "repeat the command or the call that began it"
        with suppress(OSError, UnicodeDecodeError):  # somebody else's command is shown, and never run
            command = read_regular(run / COMMAND_FILE, 1 << 16).decode("utf-8").strip()
            how = f"repeat its command where you gave it: {printable(command)}"
        raise UsageError(f"{run} holds a study, not a single run. To continue it, {how}")
    try:
        return StoredRecipe.read(run / "recipe.json")
    except OSError as error:
        raise UsageError(f"{run} is not the folder of a run: cannot read its recipe.json ({error.strerror})") from None
