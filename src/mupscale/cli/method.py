"""The commands for the paper's method: run --paper, sweep, transfer-check; and report, of any run."""

from __future__ import annotations

import shlex
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from mupscale.cli.arguments import UsageError, join_options, make_parser, parse_arguments, separate_options
from mupscale.cli.output_places import may_write_nothing, print_place
from mupscale.cli.recipe_options import read_recipe_values
from mupscale.system import number_in_environment, pausing_garbage_collection, print_at_once, show, wrap_text

if TYPE_CHECKING:
    from mupscale.method import Method
    from mupscale.train import Recipe

PAPER = """\
The paper's own comparison: Sweep 1 and 2 at a small width, transfer, and the upscaled model against the baselines (a)
to (e), at the learning rates and in the accounting of the paper. What it found is in docs/results.md.

  mupscale run mlp-covtype-tiny --paper                     on embedded data
  mupscale run mlp-covtype-tiny --paper --dry-run           what it would train, its FLOPs, and about how long
  mupscale run recipes/mlp-covtype.yaml --paper --data.path covtype.data.gz --method.seeds 5 --out runs/paper

The recipe's growth event tells the two widths and how long each model trains; its section `method` tells where to tune
and over what. A run that was stopped, however, goes on with the same command: what is done is not done again."""

SWEEP = """\
Step 0 alone: Sweep 1 and Sweep 2 at the small widths. Many machines can work on one study:

  mupscale sweep mlp-covtype-tiny                                          here, on a SQLite file in the run's folder
  mupscale sweep recipes/mlp-covtype.yaml --storage postgresql+psycopg://user@host/studies --worker
  mupscale run recipes/mlp-covtype.yaml --method.storage postgresql+psycopg://user@host/studies

Each worker takes trials that are free until none is left; one that is killed loses nothing but its own trials, which
another takes over."""

TRANSFER_CHECK = """\
Does the optimum stay where it is as the width grows? Loss against learning rate at a fixed noise, and against noise
at a fixed learning rate, for base models of several widths, upscaled; with a verdict in grid steps.

  mupscale transfer-check mlp-covtype-demo --widths '[8, 16, 32]' --method.seeds 2          40 seconds of one core
  mupscale transfer-check mlp-covtype-demo --widths '[16, 64]' --method.seeds 2 --at-lr 0.008 --at-noise 2

Grids, steps and how many times wider are the recipe's (method.upscaled_lrs, method.noises, grow). Wide models take
most of the time; a bar, or in a pipe a line every ten seconds, tells how much a width still needs."""

REPORT = """\
One page with the answer to what mupscale run asked: the contenders of a comparison at each budget, their curves,
learning rates and costs, and the forecast held against the outcome; or, of a run of the paper's method (--paper), its
sweeps as heatmaps, the upscaled model against the baselines, and what each cost. Opens from disk, without a network.

  mupscale report runs/mlp-covtype-demo                       a comparison
  mupscale report runs/mlp-covtype-tiny                       a run of the paper's method
  mupscale report runs/adamw runs/sgd --out both              two runs side by side"""


@may_write_nothing("--dry-run")
def run_paper(words: list[str]) -> int:
    """mupscale run RECIPE --paper."""
    from mupscale.method import estimate_run, run_method
    from mupscale.report import write_report

    def extend(parser: Any) -> None:
        parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and train nothing")

    recipe, method, options = read_method("run", PAPER, words, extend)
    folder = Path(recipe.out or "runs/method")
    if options["dry_run"]:
        show(estimate_run(recipe, method, folder))
        return 0
    summary = run_method(recipe, method, folder, command=shlex.join(["mupscale", "run", *words, "--paper"]))
    said = [*summary.verdict, *(f"Note: {warning}" for warning in summary.warnings)]
    show("", *map(wrap_text, said), "")
    print_place("Report", write_report([folder]))
    return 0


@may_write_nothing("--worker")
def sweep_command(words: list[str]) -> int:
    """mupscale sweep RECIPE."""
    from mupscale.method import run_sweeps
    from mupscale.sweep import sweep_remarks

    def extend(parser: Any) -> None:
        parser.add_argument("--worker", action="store_true", help="join the study that others work on, too")
        parser.add_argument("--storage", type=str | None, help="where the study is: the same as --method.storage")
        parser.add_argument(
            "--retries", type=int | None, help="how often to train a trial again whose worker died (default: no limit)"
        )

    recipe, method, options = read_method("sweep", SWEEP, words, extend)
    for name in ("storage", "retries"):
        if options[name] is not None:
            method = replace(method, **{name: options[name]})
    tuned = run_sweeps(recipe, method, Path(recipe.out or "runs/method"), worker=options["worker"])
    for sweep in tuned.sweeps:
        for sentence in sweep_remarks(sweep):
            show(f"{sweep.name}: {sentence}")
    choice = tuned.choice
    show(
        *tuned.sentences,
        f"For the large models: learning rate {choice.base_lr:g}; to upscale: noise {choice.noise:g}, lr {choice.lr:g}",
    )
    return 0


@may_write_nothing()
def transfer_check_command(words: list[str]) -> int:
    """mupscale transfer-check RECIPE."""
    from mupscale.method import Method, transfer_check
    from mupscale.report import save_transfer_picture

    def extend(parser: Any) -> None:
        widths = get_type_hints(Method)["widths"]
        parser.add_argument("--widths", type=widths | None, help="base widths (default: the recipe's, small and large)")
        parser.add_argument(
            "--at-lr", type=float | None, help="learning rate at which noise varies (default: the growth's)"
        )
        parser.add_argument(
            "--at-noise", type=float | None, help="noise at which the learning rate varies (the growth's)"
        )

    recipe, method, options = read_method("transfer-check", TRANSFER_CHECK, words, extend)
    folder, growth = Path(recipe.out or "runs/method"), recipe.grow[0] if recipe.grow else None
    lr = options["at_lr"] if options["at_lr"] is not None else growth.lr if growth else None
    noise = options["at_noise"] if options["at_noise"] is not None else growth.noise if growth else None
    if lr is None or not isinstance(noise, int | float):
        raise UsageError("say at which learning rate and noise the other varies: --at-lr X --at-noise Y")
    check = transfer_check(
        recipe,
        widths=options["widths"] or [*method.widths, recipe.width],
        lrs=method.upscaled_lrs,
        noises=[0.0, *method.noises],
        lr=lr,
        noise=noise,
        seeds=method.seeds,
        engine=method.engine,
        out=folder,
        note=print_at_once,
    )
    show(*map(wrap_text, check["verdict"]))
    print_place("Picture", save_transfer_picture(check, folder))
    return 0


def report_command(words: list[str]) -> int:
    """mupscale report RUN …"""
    runs, options = separate_options(words, flags=())
    parser = make_parser("report", "RUN [RUN …] [--out FOLDER]", REPORT)
    parser.add_argument("--out", type=str | None, help="folder of the page and its pictures (default: RUN/report)")
    out = parse_arguments(parser, join_options(options)).out
    if not runs:
        raise UsageError("give the folder of at least one run, such as runs/mlp-covtype-demo")
    with pausing_garbage_collection():
        from mupscale.report import write_report

        show(f"Report: {write_report(runs, None if out is None else Path(out))}")
    return 0


class MethodArguments(NamedTuple):
    """A recipe, the settings of the method, and the values of a command's own options by name."""

    recipe: Recipe
    method: Method
    options: dict[str, Any]


def read_method(command: str, about: str, words: Sequence[str], extend: Callable[[Any], None]) -> MethodArguments:
    """Read the words behind `mupscale run` and the like; extend: adds the options that a command has of its own."""
    from mupscale.method import Method
    from mupscale.train import Recipe

    if number_in_environment("WORLD_SIZE", 1) > 1:
        raise UsageError(
            "the method runs in one process: for many machines start mupscale sweep --worker --storage URL on each, "
            "without torchrun"
        )

    def complete(parser: Any) -> None:
        parser.add_class_arguments(Method, "method")
        parser.add_argument("--comparison", type=dict, help=SUPPRESS)  # what `mupscale run` reads in the same file
        extend(parser)

    values = read_recipe_values(command, "", about, words, complete, flags=("--dry-run", "--worker"), needs_method=True)
    values.pop("comparison", None)
    method = Method(**values.pop("method"))
    options = {name: values.pop(name) for name in list(values) if name not in _recipe_keys()}
    return MethodArguments(replace(Recipe.from_json(values), callbacks=[]), method, options)


def _recipe_keys() -> set[str]:
    from mupscale.train import Recipe

    return {*Recipe.__dataclass_fields__, "from", "from_width"}
