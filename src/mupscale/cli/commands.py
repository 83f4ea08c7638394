"""The command `mupscale`. A subcommand is a function with a line in COMMANDS, and imports what it needs itself."""

from __future__ import annotations

import difflib
import errno
import json
import os
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mupscale.cli.arguments import Option, UsageError, make_parser, parse, read_value, read_yaml, split, together
from mupscale.system import Interrupted, MupscaleError

if TYPE_CHECKING:
    from mupscale.method import Method
    from mupscale.train import Recipe

TRAIN = """\
Train a model as a recipe says; the recipe may let it grow in the middle of the run.

  mupscale train recipes/mlp-covtype-tiny.yaml                      ten seconds on a laptop
  mupscale train recipes/gpt2-text.yaml --width.head_dim 64 --optimizer.lr 0.002 --out runs/mine
  mupscale train recipes/mlp-covtype.yaml --grow '[{at: 2000, width: 1000, noise: 1}]'
  torchrun --nproc_per_node 8 -m mupscale train recipes/gpt2-text.yaml

Every entry of a recipe can be given as an option, which then takes precedence; of several recipes, the later ones do.
A model, an optimizer or data of your own is named by its import path (class_path), also from the current folder.
--print_config shows the whole recipe with all its defaults."""

RESUME = """\
Go on with a run from its last checkpoint, exactly where it stood.

  mupscale resume runs/mlp-covtype
  mupscale resume runs/mlp-covtype --steps 20000 --grow+ '{at: 15000, width: 2000, noise: 1}'

What made the run what it is stays; what may change is below."""

CURVES = """\
Draw the losses of runs into one picture, and where they grew.

  mupscale curves runs/mlp-covtype-tiny runs/wide --against flops --out curves.png"""

RUN = """\
The whole method: tune noise and learning rate small, transfer, upscale large, compare, and a page of pictures.

  mupscale run mlp-covtype-demo                             two minutes on a laptop, data included
  mupscale run mlp-covtype-demo --dry-run                   what it would train, its FLOPs, and about how long
  mupscale run recipes/mlp-covtype.yaml --data.path covtype.data.gz --method.seeds 5 --out runs/paper

The recipe's growth event tells the two widths and how long each model trains; its section `method` tells where to tune
and over what. A run that was stopped, however, goes on with the same command: what is done is not done again."""

SWEEP = """\
Step 0 alone: Sweep 1 and Sweep 2 at the small widths. Many machines can work on one study:

  mupscale sweep mlp-covtype-tiny                                          here, on a SQLite file in the run's folder
  mupscale sweep recipes/mlp-covtype.yaml --storage postgresql+psycopg://user@host/studies --worker
  mupscale run   recipes/mlp-covtype.yaml --method.storage postgresql+psycopg://user@host/studies

Each worker takes trials that are free until none is left; one that is killed loses nothing but its own trials, which
another takes over."""

CHECK = """\
Does the optimum stay where it is as the width grows? Loss against learning rate at a fixed noise, and against noise
at a fixed learning rate, for base models of several widths, upscaled; with a verdict in grid steps.

  mupscale transfer-check mlp-covtype-tiny --widths '[32, 64, 128]' --at_lr 0.004 --at_noise 2

Grids, steps and how many times wider are the recipe's (method.upscaled_lrs, method.noises, grow)."""

REPORT = """\
One page with the answer: curves, heatmaps, costs. Opens from disk, without a network.

  mupscale report runs/mlp-covtype-tiny
  mupscale report runs/adamw runs/sgd --out both              two runs side by side"""

TOKENIZE = """\
Turn text into tokens, once: a folder of memory-mapped shards and an index, which mupscale.data.Text reads.

  mupscale data tokenize books.jsonl.gz data/books --vocab 8192     with a BPE trained on the text itself
  mupscale data tokenize 'web/*.parquet' data/web --gpt2 gpt2-bpe   with GPT-2's, from encoder.json and vocab.bpe"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status. Whatever a person can mend is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if os.getcwd() not in sys.path:  # a script has its own folder there: models of one's own are in the current one
        sys.path.insert(0, os.getcwd())
    debug = "--debug" in words or bool(os.environ.get("MUPSCALE_DEBUG"))
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(COMMANDS))
        return 0
    if words[0] == "--version":
        from mupscale import __version__

        print(f"mupscale {__version__}")
        return 0
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
    if name is None:
        return _unknown(words)
    try:
        status = COMMANDS[name].run(words[len(name.split()) :])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _say(f"mupscale {name}: interrupted{_again(name)}", 130)
    except Interrupted as error:
        return _say(f"mupscale {name}: {error}{_again(name)}", 130)
    except OSError as error:
        if debug or error.errno not in _FULL:
            raise
        where = f"{error.filename} cannot be written: " if error.filename else ""
        return _say(f"mupscale {name}: {where}{error.strerror}; free some space{_again(name)}", 1)
    except MupscaleError as error:
        if debug:
            raise
        usage = isinstance(error, UsageError)
        return _say(f"mupscale{f' {name}' if usage else ''}: {error}", 2 if usage else 1)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _again(name: str) -> str:
    going_on = ("run", "sweep", "transfer-check", "data tokenize")
    return "; run the same command again, and it goes on where it was" if name in going_on else ""


def _say(line: str, status: int) -> int:
    """An error, from one process of many; the exit status."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
    return status


def _overview(commands: dict[str, Command]) -> str:
    width = max(map(len, commands)) + 3
    lines = [f"  {name:<{width}}{command.about}" for name, command in commands.items()]
    return "\n".join(
        [
            "usage: mupscale COMMAND …",
            "",
            "Train networks, and make them wider in the middle of training.",
            "",
            *lines,
            "",
            "mupscale COMMAND --help tells more; mupscale --version; --debug shows where an error comes from.",
        ]
    )


def _unknown(words: list[str]) -> int:
    group = {name: command for name, command in COMMANDS.items() if name.split()[0] == words[0]}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_overview(group))
        return 0
    given = " ".join(words[:2]) if group else words[0]
    near = difflib.get_close_matches(given, COMMANDS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
    return _say(f"mupscale: there is no command {given}{hint}", 2)


# ------------------------------------------------------------------------------------------------ training


def _train(words: list[str]) -> int:
    from mupscale.train import run_recipe

    recipe, resume = read_recipe(words)
    return _STATUS[run_recipe(recipe, resume=resume).status]


def _resume(words: list[str]) -> int:
    from mupscale.train import run_recipe

    return _STATUS[run_recipe(read_run(words), resume=True).status]


NO_GROWTH: Option = ("--grow", "[]")
_STATUS = {"finished": 0, "diverged": 3, "interrupted": 130}


def read_recipe(words: Sequence[str]) -> tuple[Recipe, bool]:
    """The recipe that the arguments of `mupscale train` make, and whether to resume its run."""
    from mupscale.train import Recipe

    def extend(parser: Any) -> None:
        parser.add_argument("--resume", action="store_true", default=SUPPRESS, help="go on from the last checkpoint")
        parser.add_argument("--method", type=dict, help=SUPPRESS)  # what `mupscale run` reads in the same file

    values = _read_recipe("train", "[--resume]", TRAIN, words, extend, flags=("--resume",))
    values.pop("method", None)
    resume = bool(values.pop("resume", False))
    return Recipe.from_json(values), resume


def read_method(command: str, about: str, words: Sequence[str], extend: Callable[[Any], None]) -> _Asked:
    """The recipe and the settings of the method that the arguments of `mupscale run` make, and what else was asked."""
    from mupscale.method import Method
    from mupscale.train import Recipe

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the method runs in one process: for many machines start mupscale sweep --worker --storage URL on each, "
            "without torchrun"
        )

    def complete(parser: Any) -> None:
        parser.add_class_arguments(Method, "method")
        extend(parser)

    values = _read_recipe(command, "", about, words, complete, flags=("--dry-run", "--worker"), method=True)
    method = Method(**values.pop("method"))
    rest = {name: values.pop(name) for name in list(values) if name not in _recipe_keys()}
    return _Asked(Recipe.from_json(values), method, rest)


class _Asked(NamedTuple):
    recipe: Recipe
    method: Method
    rest: dict[str, Any]


def _recipe_keys() -> set[str]:
    from mupscale.train import Recipe

    return {*Recipe.__dataclass_fields__, "from", "from_width"}


def _read_recipe(
    command: str,
    usage: str,
    about: str,
    words: Sequence[str],
    extend: Callable[[Any], None],
    flags: Sequence[str],
    method: bool = False,
) -> dict[str, Any]:
    """Recipes and options as one mapping of plain values."""
    alone, options = split(words, flags=(*flags, "--print_config"))
    named = alone + [value or "" for name, value in options if name == "--config"]
    files = {file: read_yaml(file) for file in map(find_recipe, named)}
    options = [(name, value) for name, value in options if name != "--config"]
    if not files and not options:
        raise UsageError("give a recipe, such as mlp-covtype-tiny (mupscale recipes lists those that ship)")
    if method and files and not any("method" in values for values in files.values()):
        _need_method(next(iter(files)), [name for name, _ in options])
    parser = _recipe_parser(command, usage, about, _width_arguments(files.values(), options))
    extend(parser)
    if files:
        parser.set_defaults(out=str(Path("runs", "+".join(Path(file).stem for file in files))))
    given: list[Option] = []
    for file, values in files.items():
        given += [*([NO_GROWTH] if "grow" in values else []), ("--config", file)]
    return _plain(parser, parse(parser, together([*given, *_replacing(options)])))


def _need_method(file: str, options: Sequence[str]) -> None:
    if not any(name in ("-h", "--help", "--print_config") or name.startswith("--method") for name in options):
        raise UsageError(
            f"{file} has no section `method`, which says where to tune and over what: add, for example, "
            "method: {widths: [64], lrs: [0.001, 0.003, 0.01], upscaled_lrs: [0.001, 0.003, 0.01], noises: [0.5, 1, 2]}"
        )


def read_run(words: Sequence[str]) -> Recipe:
    """The recipe of a run to resume, with what the arguments of `mupscale resume` change."""
    from mupscale.train import MAY_CHANGE, Recipe

    alone, options = split(words, flags=())
    if len(alone) != 1 and not {"-h", "--help"} & {name for name, _ in options}:
        raise UsageError("give the folder of one run" + (f", not {len(alone)}: {', '.join(alone)}" if alone else ""))
    values = _saved_recipe(Path(alone[0])) if alone else {}
    changeable = (MAY_CHANGE - {"out"}) | {"grow"}
    for name, _ in options:
        field = name.lstrip("-").split(".")[0]
        if field in values and field not in changeable:
            raise UsageError(
                f"{field} cannot change in the middle of a run; start another from it: "
                f"mupscale train RECIPE --from {alone[0]} {name} …"
            )
    parser = make_parser("resume", "RUN [--option VALUE …]", RESUME)
    parser.add_class_arguments(Recipe, as_group=False, skip=set(Recipe.__dataclass_fields__) - changeable)
    for action in parser._actions:
        action.required = False
    parser.set_defaults({name: value for name, value in values.items() if name in changeable})
    changed = _plain(parser, parse(parser, together(_replacing(options))))
    return Recipe.from_json({**values, **changed, "out": alone[0]})


def _saved_recipe(run: Path) -> dict[str, Any]:
    try:
        values = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{run} is no folder of a run: cannot read its recipe.json ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{run / 'recipe.json'} is damaged: {error}") from None
    return dict(values)


def _recipe_parser(command: str, usage: str, about: str, width_arguments: Iterable[str]) -> Any:
    """Everything in a recipe; the model's width arguments come from `width` and so are not asked for again."""
    from torch import nn
    from torch.optim import Optimizer

    import mupscale.models  # noqa: F401  # so that MLP alone is enough of a name
    from mupscale.core import WholeWidth
    from mupscale.data import Data
    from mupscale.train import Recipe

    parser = make_parser(command, f"RECIPE.yaml [more.yaml …] [--option VALUE …] {usage}".rstrip(), about)
    parser.add_argument("--config", action="config", help="a recipe, as without --config")
    for name, base, skip, meaning in (
        ("model", nn.Module, set(width_arguments), "mupscale.models.MLP, ResNet18, GPT2, or a module of your own"),
        ("data", Data, set(), "mupscale.data.CoverType, CIFAR100, Text …, or a mupscale.data.Data of your own"),
        ("optimizer", Optimizer, {"params"}, "torch.optim.SGD, AdamW …; its lr, weight decay and eps are at the base"),
    ):
        parser.add_subclass_arguments(
            base, name, as_group=False, skip=skip, required=True, fail_untyped=False, metavar="CLASS", help=meaning
        )
    parser.add_class_arguments(Recipe, as_group=False, skip={"model", "data", "optimizer", "start", "start_width"})
    parser.add_argument(
        "--from", type=str | None, metavar="PATH", help="start from this checkpoint or run, upscaled to `width`"
    )
    parser.add_argument(
        "--from_width", type=WholeWidth | None, help="the width in that checkpoint, where it does not tell itself"
    )
    return parser


def _replacing(options: Iterable[Option]) -> Iterator[Option]:
    """Growth events given anew take the place of those before: jsonargparse would merge them, one by one."""
    for name, value in options:
        if name == NO_GROWTH[0]:
            yield NO_GROWTH
        yield name, value


def _width_arguments(files: Iterable[dict[str, Any]], options: Iterable[Option]) -> set[str]:
    """The model's arguments that `width` gives: their names must be known before the rest can be read."""
    width: Any = None
    for values in files:
        width = values.get("width", width)
    for name, value in options:
        if name == "--width":
            width = read_value(value)
        elif name.startswith("--width."):
            width = {**(width if isinstance(width, dict) else {}), name.removeprefix("--width."): value}
    return set(width) if isinstance(width, dict) else {"width"}


def _plain(parser: Any, parsed: Any) -> dict[str, Any]:
    """Parsed options as JSON has them."""
    values = json.loads(parser.dump(parsed, format="json", skip_unset=False, skip_validation=True))
    for name in parser.groups:
        if not isinstance(values.get(name, {}), dict):
            raise UsageError(f"{name} is {values[name]}, but must be a mapping")
    for value in values.values():  # arguments that a class passes on as **kwargs
        if isinstance(value, dict) and "dict_kwargs" in value:
            value["init_args"] = {**value.get("init_args", {}), **value.pop("dict_kwargs")}
    return dict(values)


def _curves(words: list[str]) -> int:
    from mupscale.train import draw_curves

    alone, options = split(words, flags=())
    parser = make_parser("curves", "RUN [RUN …] [--option VALUE …]", CURVES)
    parser.add_function_arguments(draw_curves, as_group=False, skip={"runs"})
    chosen = parse(parser, together(options)).as_dict()
    if not alone:
        raise UsageError("give the folder of at least one run")
    print(f"Picture: {draw_curves(alone, **chosen)}")
    return 0


# ------------------------------------------------------------------------------------------------ the method


def _run(words: list[str]) -> int:
    from mupscale.method import estimate_run, run_method
    from mupscale.report import write_report

    def extend(parser: Any) -> None:
        parser.add_argument("--dry-run", action="store_true", help="print what would be trained, and train nothing")

    recipe, method, rest = read_method("run", RUN, words, extend)
    folder = Path(recipe.out or "runs/method")
    if rest["dry_run"]:
        print(estimate_run(recipe, method, folder))
        return 0
    summary = run_method(recipe, method, folder, command=shlex.join(["mupscale", "run", *words]))
    print("", *summary.verdict, *(f"Note: {warning}" for warning in summary.warnings), "", sep="\n", flush=True)
    print(f"Report: {write_report([folder])}")
    return 0


def _sweep(words: list[str]) -> int:
    from mupscale.method import run_sweeps
    from mupscale.sweep import findings

    def extend(parser: Any) -> None:
        parser.add_argument("--worker", action="store_true", help="join the study that others work on, too")
        parser.add_argument("--storage", type=str | None, help="where the study is: the same as --method.storage")

    recipe, method, rest = read_method("sweep", SWEEP, words, extend)
    if rest["storage"] is not None:
        method = replace(method, storage=rest["storage"])
    tuned = run_sweeps(recipe, method, Path(recipe.out or "runs/method"), worker=rest["worker"])
    for sweep in tuned.sweeps:
        for sentence in findings(sweep):
            print(f"{sweep.name}: {sentence}")
    print(*tuned.sentences, sep="\n", end="\n" if tuned.sentences else "")
    choice = tuned.choice
    print(
        f"For the large models: learning rate {choice.base_lr:g}; to upscale: noise {choice.noise:g}, lr {choice.lr:g}"
    )
    return 0


def _transfer_check(words: list[str]) -> int:
    from mupscale.core import WholeWidth
    from mupscale.method import transfer_check
    from mupscale.report import save_transfer_picture

    def extend(parser: Any) -> None:
        parser.add_argument(
            "--widths", type=list[WholeWidth] | None, help="base widths (default: the recipe's, small and large)"
        )
        parser.add_argument(
            "--at_lr", type=float | None, help="learning rate at which noise varies (default: the growth's)"
        )
        parser.add_argument(
            "--at_noise", type=float | None, help="noise at which the learning rate varies (the growth's)"
        )

    recipe, method, rest = read_method("transfer-check", CHECK, words, extend)
    folder, growth = Path(recipe.out or "runs/method"), recipe.grow[0] if recipe.grow else None
    lr = rest["at_lr"] if rest["at_lr"] is not None else growth.lr if growth else None
    noise = rest["at_noise"] if rest["at_noise"] is not None else growth.noise if growth else None
    if lr is None or not isinstance(noise, int | float):
        raise UsageError("say at which learning rate and noise the other varies: --at_lr X --at_noise Y")
    found = transfer_check(
        recipe,
        widths=rest["widths"] or [*method.widths, recipe.width],
        lrs=method.upscaled_lrs,
        noises=[0.0, *method.noises],
        lr=lr,
        noise=noise,
        seeds=method.seeds,
        engine=method.engine,
        out=folder,
        note=print,
    )
    print(*found["verdict"], sep="\n")
    print(f"Picture: {save_transfer_picture(found, folder)}")
    return 0


def _report(words: list[str]) -> int:
    from mupscale.report import write_report

    alone, options = split(words, flags=())
    parser = make_parser("report", "RUN [RUN …] [--out FOLDER]", REPORT)
    parser.add_argument("--out", type=str | None, help="folder of the page and its pictures (default: RUN/report)")
    out = parse(parser, together(options)).out
    if not alone:
        raise UsageError("give the folder of at least one run of the method")
    print(f"Report: {write_report(alone, None if out is None else Path(out))}")
    return 0


# ------------------------------------------------------------------------------------------------ recipes that ship


def shipped_recipes() -> dict[str, Path]:
    """Recipes by name: inside an installed package, or beside its sources."""
    here = Path(__file__).parents[1]
    folder = next((f for f in (here / "recipes", here.parents[1] / "recipes") if f.is_dir()), here)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> str:
    """A file, or a recipe that ships, by its name."""
    if Path(name).is_file():
        return name
    shipped = shipped_recipes()
    if name in shipped:
        return str(shipped[name])
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    raise UsageError(f"there is no recipe {name}" + (f"; did you mean {near[0]}, which ships?" if near else ""))


def _recipes(words: list[str]) -> int:
    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"  {name:<24}{first.lstrip('# ')}")
    print("mupscale train NAME trains one; mupscale train NAME --print_config shows it.")
    return 0


# ------------------------------------------------------------------------------------------------ data


def _tokenize(words: list[str]) -> int:
    from mupscale.data import tokenize

    return _call("data tokenize", "SOURCE OUT [--option VALUE …]", TOKENIZE, tokenize, words)


def _info(words: list[str]) -> int:
    from mupscale.data import info

    return _call("data info", "FOLDER", "What a folder of tokens holds.", info, words)


def _call(command: str, usage: str, about: str, function: Callable[..., Any], words: list[str]) -> int:
    """A function with its own parameters as options."""
    parser = make_parser(command, usage, about)
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    function(**parse(parser, words).as_dict())
    return 0


# ------------------------------------------------------------------------------------------------ checkpoints


def _upscale(words: list[str]) -> int:
    from mupscale.cli.checkpoints import upscale_command

    return upscale_command(words)


def _verify(words: list[str]) -> int:
    from mupscale.cli.checkpoints import verify_command

    return verify_command(words)


def _inspect(words: list[str]) -> int:
    from mupscale.cli.checkpoints import inspect_command

    return inspect_command(words)


# ------------------------------------------------------------------------------------------------ infinite width


def _limit(which: str) -> Callable[[list[str]], int]:
    def command(words: list[str]) -> int:
        from mupscale.cli.limits import limit_command

        return limit_command(which, words)

    return command


class Command(NamedTuple):
    """What a command is for, in a line, and what it does with its arguments."""

    about: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "train": Command("train a model as a recipe says", _train),
    "resume": Command("go on with a run that was stopped", _resume),
    "run": Command("the whole method: tune small, transfer, upscale large, compare", _run),
    "sweep": Command("tune at the small widths alone, or help others do it", _sweep),
    "transfer-check": Command("does the optimum stay where it is as widths grow?", _transfer_check),
    "report": Command("a page of pictures from runs of the method", _report),
    "curves": Command("draw the losses of runs into one picture", _curves),
    "recipes": Command("list the recipes that ship", _recipes),
    "upscale": Command("make a Hugging Face checkpoint wider, exactly", _upscale),
    "verify": Command("do a checkpoint and its wider one compute, and train, alike?", _verify),
    "inspect": Command("what upscaling would do to a checkpoint, as a table", _inspect),
    "limit examples": Command("the paper's worked examples at infinite width, and finite networks", _limit("examples")),
    "limit mlp": Command("upscale an MLP at infinite width and at finite ones: do they meet?", _limit("mlp")),
    "limit sweep": Command("tune noise and learning rate at infinite width", _limit("sweep")),
    "data tokenize": Command("turn text into tokens, once", _tokenize),
    "data info": Command("what a folder of tokens holds", _info),
}
