"""The command `mupscale run`: does growing pay here, and which way?"""

from __future__ import annotations

import shlex
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mupscale.cli.arguments import UsageError
from mupscale.cli.hugging_face_base import (
    base_checkpoint,
    describe_tokens,
    is_hugging_face,
    with_hugging_face_base,
)
from mupscale.cli.method import run_paper
from mupscale.cli.output_places import may_write_nothing, print_place
from mupscale.cli.recipe_options import read_recipe_values
from mupscale.system import number_in_environment, show, wrap_text

if TYPE_CHECKING:
    from mupscale.comparison import ComparisonSettings
    from mupscale.train import Recipe

RUN = """\
Does growing pay? Four ways to spend the same FLOPs, all under one schedule, each with its own tuned learning rate:
from scratch, the base model continued, grown from copies, grown with fresh units.

  mupscale run mlp-covtype-demo                             on a laptop, data included
  mupscale run mlp-covtype-demo --dry-run                   what it would train, and its FLOPs
  mupscale run mlp-covtype-demo --forecast                  the small models alone, and what they foretell
  mupscale run RECIPE --from my-model.safetensors --width 512    from a checkpoint of your own
  mupscale run RECIPE --from FOLDER --width 1536            from a Hugging Face folder; the recipe names a text
  mupscale run RECIPE --paper                               the paper's own comparison, in its letters

The recipe's growth event tells the two widths and how long each model trains. Learning rates and noise are tuned at
small widths; a section `comparison` may say where and over what. A run that was stopped, however, goes on with the same
command: what is done is not done again."""


@may_write_nothing("--dry-run", "--forecast", "--paper")
def run_command(words: list[str]) -> int:
    """mupscale run RECIPE."""
    if "--paper" in words:
        return run_paper([word for word in words if word != "--paper"])
    from mupscale.comparison import describe_plan, run_comparison
    from mupscale.report import write_report

    recipe, settings, options = read_comparison(words)
    folder = Path(recipe.out or "runs/comparison")
    base_name, notes = recipe.start or "", describe_tokens(recipe) if is_hugging_face(recipe.start) else []
    if options["dry_run"]:
        with TemporaryDirectory() as kept:
            own = _own_checkpoint(recipe, Path(kept))
            show(describe_plan(own, settings, folder, base_name=base_name, notes=notes))
        return 0
    recipe = _own_checkpoint(recipe, folder)
    command = shlex.join(["mupscale", "run", *words])
    summary = run_comparison(
        recipe, settings, folder, command=command, forecast_only=options["forecast"], base_name=base_name, notes=notes
    )
    said = [summary.answer["sentence"]] if summary.answer else [summary.forecast["sentence"]]
    said += [f"Note: {note}" for note in summary.notes]
    show("", *map(wrap_text, said), "")
    print_place("Report", write_report([folder]))
    return 0


def _own_checkpoint(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe; with a Hugging Face folder's weights in a checkpoint of ours, where it starts from one."""
    return base_checkpoint(recipe, folder) if is_hugging_face(recipe.start) else recipe


def read_comparison(words: Sequence[str]) -> tuple[Recipe, ComparisonSettings, dict[str, Any]]:
    """The recipe, the settings of the comparison, and the command's own options."""
    from mupscale.comparison import ComparisonSettings
    from mupscale.train import Recipe

    if number_in_environment("WORLD_SIZE", 1) > 1:
        raise UsageError("a comparison runs in one process: start it without torchrun")

    def extend(parser: Any) -> None:
        parser.add_class_arguments(ComparisonSettings, "comparison")
        parser.add_argument("--method", type=dict, help=SUPPRESS)  # what --paper reads in the same file
        parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and train nothing")
        parser.add_argument("--forecast", action="store_true", help="stop after the small models, with their forecast")

    flags = ("--dry-run", "--forecast")
    values = read_recipe_values("run", "", RUN, with_hugging_face_base(words, flags), extend, flags=flags)
    values.pop("method", None)
    settings = ComparisonSettings(**values.pop("comparison"))
    options = {name: values.pop(name) for name in ("dry_run", "forecast")}
    return replace(Recipe.from_json(values), callbacks=[]), settings, options
