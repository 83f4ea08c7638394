"""The commands for studies: run, sweep, transfer-check; and report, of any of them.

The base model of a study may be a Hugging Face folder: its model in recipes, its weights as a checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from mupscale import system
from mupscale.cli import recipe_options
from mupscale.cli.arguments import DIVERGED, UsageError, list_items, read_value
from mupscale.cli.command_lines import HIDDEN, CommandLine, Option, Section

if TYPE_CHECKING:
    from mupscale.study import StudySettings, StudySummary
    from mupscale.train import Recipe

_DRY_RUN = Option("--dry-run", bool, "show what would be trained, but train nothing")
_STUDY = (
    *recipe_options.RECIPE,
    Section("mupscale.study.StudySettings", "study"),
    Option("--family", dict, HIDDEN),  # whose section may stand in the same file
)
RUN = CommandLine(
    "run",
    "does growing pay? compare four ways to spend the same FLOPs",
    recipe_options.recipe_usage(),
    """\
Does growing pay? Compare four ways to spend the same FLOPs (the contenders): train from scratch, continue the base
model, grow it with copies, or grow it with fresh units. All follow one schedule, each at its own tuned learning rate.

  mupscale run mlp-covtype-demo                             on a laptop, data included
  mupscale run mlp-covtype-demo --dry-run                   show what it would train, the FLOPs and the time
  mupscale run mlp-covtype-demo --forecast                  train only small models, and forecast the answer
  mupscale run RECIPE --from my-model.safetensors --width 512    start from your own checkpoint
  mupscale run RECIPE --from FOLDER --width 1536            start from a Hugging Face folder; the recipe names a text
  mupscale run RECIPE --when                                when to grow: after 10, 25 or 50 % of the FLOPs
  mupscale run mlp-covtype-tiny --paper                     repeat the paper's comparison
  mupscale run mlp-covtype-tiny --paper --dry-run           show its FLOPs, and about how long it takes

The recipe's growth event sets the two widths and how long each model trains. Learning rates and noise are tuned at
small widths; the recipe's section `study` can set which ones. If a run stops, repeat the command, and it continues
where it stopped. If you add seeds or contenders later, only the new ones train.""",
    (
        *_STUDY,
        _DRY_RUN,
        Option("--forecast", bool, "train only small models, and forecast the answer"),
        Option("--paper", bool, "repeat the paper's comparison"),
        Option("--when", bool, "compare growing early and late"),
    ),
    main="dry-run forecast paper when from out device study.seeds study.widths study.contenders study.storage",
    resumable=True,
    needs=("matplotlib", "optuna --paper"),
)

_GROWING = ("how", "noise", "noise_unit", "shrink", "outgoing", "spread", "deepen", "state")
"""What a recipe says of growing from a checkpoint, and its section `family` of the trunk, which alone counts there."""
_FAMILYS_OWN = (
    Option("--how", None, "how to fill new units: fresh (the default), lossless, copies or paired", metavar="WORD"),
    Option("--noise", None, "how much noise copies get, such as 1", metavar="X"),
    *(
        Option(f"--{name}".replace("_", "-"), None, f"the same as --family.{name.replace('_', '-')}", metavar="VALUE")
        for name in _GROWING[2:]
    ),
)
FAMILY = CommandLine(
    "family",
    "train every size of a model in one growing run",
    recipe_options.recipe_usage(),
    """\
Train every size of a model in one run. The run (the trunk) trains the smallest size, grows to the next and continues.
At each size, a copy of the trunk (a branch) decays its learning rate to zero and gives a finished model. The cost of a
size includes everything that the trunk has spent so far.

  mupscale family recipes/gpt2-text-tiny.yaml --sizes 32,48,64,96 --dry-run     show steps, FLOPs and time
  mupscale family recipes/gpt2-text-tiny.yaml --sizes 32,48,64,96
  mupscale family recipes/gpt2-text-tiny.yaml --sizes 32,48,64,96 --check 64    also train 64 from scratch, equal FLOPs
  mupscale family recipes/gpt2-text-tiny.yaml --sizes 32,48,64,96,128           add a size: only the new part trains
  mupscale family RECIPE --from my-model.safetensors --sizes 512,768,1024       start from a trained model
  mupscale family RECIPE --from FOLDER --sizes 512,768,1024                     start from a Hugging Face folder

Each finished size is an ordinary run in OUT/sizes. A transformers model is also saved as a Hugging Face folder with a
model card (OUT/sizes/SIZE/hf). The recipe's section `family` sets everything else, such as budgets and learning rates.
If the run stops, repeat the command, and it continues. Under torchrun all processes train each model together, with
the recipe's parallel: ddp or fsdp.""",
    (
        *recipe_options.recipe_parts(but=_GROWING),
        Section("mupscale.study.FamilySettings", "family"),
        Option("--study", dict, HIDDEN),  # whose section may stand in the same file
        _DRY_RUN,
        *_FAMILYS_OWN,
        Option("--sizes", str, "sizes to train, such as 32,48,64,96"),
        Option("--check", str, "sizes to also train from scratch: 64,96, all or none"),
    ),
    main="sizes check dry-run from out device how noise family.budget family.unit family.seeds",
    resumable=True,
    needs=("matplotlib",),
    short={name: f"family.{name}" for name in _GROWING},
)

SWEEP = CommandLine(
    "sweep",
    "run only the tuning at small widths; several machines can share it",
    recipe_options.recipe_usage(),
    """\
Run only the tuning: the paper's Sweep 1 (before growing) and Sweep 2 (after) at small widths. Several machines can
share one study:

  mupscale sweep mlp-covtype-tiny                                          here; a SQLite file in the run's folder
  mupscale sweep recipes/mlp-covtype.yaml --storage postgresql+psycopg://user@host/studies --worker
  mupscale run recipes/mlp-covtype.yaml --paper --study.storage postgresql+psycopg://user@host/studies

Each worker takes free trials until none are left. If you kill a worker, another one repeats its unfinished trials.""",
    (
        *_STUDY,
        Option("--worker", bool, "join a study that other workers share"),
        Option("--storage", str, "where the study is stored: the same as --study.storage"),
        Option("--retries", int, "how often to repeat a trial whose worker died (default: no limit)"),
    ),
    main="worker storage retries out device study.widths study.lrs study.noises study.small-seeds study.sampler",
    resumable=True,
    needs=("optuna",),
)

TRANSFER_CHECK = CommandLine(
    "transfer-check",
    "does the best learning rate or noise stay the same as the width grows?",
    recipe_options.recipe_usage(),
    """\
Do the best learning rate and noise stay the same as the width grows? This command grows base models of several widths.
It measures the loss for each learning rate at a fixed noise, and for each noise at a fixed learning rate. The verdict
says by how many grid steps the best value moves.

  mupscale transfer-check mlp-covtype-demo --widths '[8, 16, 32]' --study.seeds 2           half a minute of one core
  mupscale transfer-check mlp-covtype-demo --widths '[16, 64]' --study.seeds 2 --at-lr 0.008 --at-noise 2
  mupscale transfer-check mlp-covtype-demo --dry-run                        show what it would train, FLOPs and time

The recipe sets the grids, the steps and how much wider the models grow (study.grown_lrs, study.noises, grow). Wide
models take most of the time. A progress bar shows how long a width still needs; in a pipe it is a line every ten
seconds.

With --compare it compares rule sets instead: it trains models from scratch at several widths, batches or numbers of
steps, each with every learning rate. Three numbers say how well the best rate transfers with each rule set.

  mupscale transfer-check mlp-covtype-demo --compare '[default, decay=fixed]' --widths '[8, 32]' --study.seeds 2""",
    (
        *_STUDY,
        Option(
            "--widths", list[int | dict[str, int]], "widths of the base models (default: the recipe's, small and large)"
        ),
        Option("--at-lr", float, "learning rate while noise varies (default: the growth event's, or lr)"),
        Option("--at-noise", float, "noise of copies while the learning rate varies (default: the growth event's)"),
        Option("--compare", list[str], "rule sets to compare, such as '[default, decay=fixed]'"),
        Option("--batches", list[int], "compare them over batches instead of widths"),
        Option("--durations", list[int], "compare them over numbers of steps instead"),
        _DRY_RUN,
    ),
    main="widths at-lr at-noise compare batches durations out device study.seeds study.lrs study.grown-lrs",
    resumable=True,
    needs=("matplotlib",),
)

REPORT = CommandLine(
    "report",
    "write a page with the results of a study",
    "RUN [RUN …] [--out FOLDER] [--watch]",
    """\
Write a page with the results of mupscale run: the answer, the models that were compared, their costs, loss curves and
tuning. The page opens from disk and needs no network.

  mupscale report runs/mlp-covtype-demo                       one study
  mupscale report runs/adamw runs/sgd --out both              two studies side by side
  mupscale report runs/mlp-covtype-demo --watch               show the losses in a browser while it trains""",
    (
        Option("--out", str, "folder for the page and its pictures (default: RUN/report)"),
        Option("--watch", bool, "show the losses in a browser, on this machine only"),
        Option("--port", int, "port of that page", 6007),
    ),
    needs=("matplotlib",),
)


@RUN.command
def run_command(words: list[str]) -> int:
    asked = read_study(RUN, words, lambda tree: None if tree.get("paper") else adopt_hugging_face_base(tree))
    if sum(asked.options[name] for name in ("forecast", "paper", "when")) > 1:
        raise UsageError("--forecast, --paper and --when exclude each other: give one of them")
    preset = _run_another if asked.options["paper"] or asked.options["when"] else _run_pay
    with recipe_options.folder_to_write(asked.recipe.out) as folder:
        summary = preset(asked, folder, shlex.join(["mupscale", "run", *words]))
        return 0 if summary is None else _tell(summary, folder)


@FAMILY.command
def family_command(words: list[str]) -> int:
    from mupscale.study import estimate_family, run_family

    unused: list[str] = []
    recipe, _, options = read_study(FAMILY, words, partial(_family_of, unused))
    settings, is_main = options["family"], not system.number_in_environment("RANK", 0)
    if unused and is_main:
        note = (
            f"Note: a family does not use these entries of the recipe: {', '.join(unused)}. The trunk grows from size "
            f"to size, as the section `family` says."
        )
        system.print_at_once(system.wrap_text(note))
    if options["dry_run"]:
        with TemporaryDirectory() as kept:
            system.show(estimate_family(base_checkpoint(recipe, Path(kept)), settings))
        return 0
    notes = describe_tokens(recipe)
    with recipe_options.folder_to_write(recipe.out) as folder:
        own, command = base_checkpoint(recipe, folder), shlex.join(["mupscale", "family", *words])
        summary = run_family(own, settings, folder, command=command, notes=notes)
        return _tell(summary, folder) if is_main else 0


def _family_of(unused: list[str], tree: recipe_options.Tree) -> None:
    """A family's sizes as the recipe's section has them; what the recipe says of growing is left out, and named."""
    from mupscale.train import Recipe

    adopt_hugging_face_base(tree, unasked=("width", "base_steps"))
    for name in _GROWING:
        usual = Recipe.__dataclass_fields__[name].default
        if tree.pop(name, usual) not in (None, usual):
            unused.append(name)
    if list_items(tree.get("grow") or []):
        unused.append("grow")
    tree["grow"] = []
    section = tree.setdefault("family", {})
    if "sizes" in tree:
        section["sizes"] = _read_sizes("--sizes", tree["sizes"])
    if "check" in tree:
        named = {"all": section.get("sizes", []), "none": []}
        section["check"] = named[tree["check"]] if tree["check"] in named else _read_sizes("--check", tree["check"])


def _read_sizes(option: str, text: str) -> list[Any]:
    """Widths between commas, or a YAML list of sizes by name."""
    if text.lstrip().startswith("["):
        value = read_value(text)
        if isinstance(value, list):
            return value
    elif all(part.strip().isdigit() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    raise UsageError(f"{option} is {text!r}: give widths, such as 32,48,64, or a list: '[{{width: 64, layers: 2}}, …]'")


def _tell(summary: StudySummary, folder: Path) -> int:
    """The answer, what to keep in mind, and where the page is."""
    from mupscale.report import write_report

    said = [*summary.sentences, *(f"Note: {note}" for note in summary.notes)]
    system.show("", *map(system.wrap_text, said), "")
    recipe_options.print_place("Report", write_report([folder]))
    return DIVERGED if summary.diverged else 0


def _run_pay(asked: StudyArguments, folder: Path, command: str) -> StudySummary | None:
    from mupscale.study import describe_plan, run_pay

    recipe = asked.recipe
    base_name, notes = recipe.start or "", describe_tokens(recipe)
    told = {"forecast_only": asked.options["forecast"], "base_name": base_name, "notes": notes}
    if asked.options["dry_run"]:
        with TemporaryDirectory() as kept:
            system.show(describe_plan(base_checkpoint(recipe, Path(kept)), asked.settings, folder, **told))
        return None
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        system.print_at_once(text)

    summary = run_pay(base_checkpoint(recipe, folder), asked.settings, folder, command=command, note=note, **told)
    return replace(summary, notes=[one for one in summary.notes if f"Note: {one}" not in said])


def _run_another(asked: StudyArguments, folder: Path, command: str) -> StudySummary | None:
    """The paper's comparison, or when to grow."""
    from mupscale.study import estimate_paper, estimate_when, run_paper, run_when

    recipe, settings, is_paper = asked.recipe, asked.settings, asked.options["paper"]
    if not asked.options["dry_run"]:
        return (run_paper if is_paper else run_when)(recipe, settings, folder, command=command)
    system.show(estimate_paper(recipe, settings, folder) if is_paper else estimate_when(recipe, settings))
    return None


@SWEEP.command
def sweep_command(words: list[str]) -> int:
    from mupscale.study import run_sweeps, sweep_remarks

    recipe, settings, options = read_study(SWEEP, words)
    for name in ("storage", "retries"):
        if options[name] is not None:
            settings = replace(settings, **{name: options[name]})
    with recipe_options.folder_to_write(recipe.out) as folder:
        tuned = run_sweeps(recipe, settings, folder, worker=options["worker"])
    assert tuned.choice is not None
    for sweep in tuned.sweeps:
        for sentence in sweep_remarks(sweep):
            system.show(f"{sweep.name}: {sentence}")
    choice = tuned.choice
    chosen = f"learning rate {choice.base_lr:g}; to grow: noise {choice.noise:g}, lr {choice.lr:g}"
    if settings.embeddings:
        chosen += f"; rules.embeddings {tuned.recipe.rules.embeddings:g}"
    system.show(*tuned.sentences, *tuned.remarks, f"For the large models: {chosen}")
    return 0


@TRANSFER_CHECK.command
def transfer_check_command(words: list[str]) -> int:
    from mupscale.study import TransferCheck, nothing_finished, transfer_check, what_was_measured

    recipe, settings, options = read_study(TRANSFER_CHECK, words)
    from mupscale.report import save_transfer_picture  # before anything is trained, for what it lacks to be told

    growth = recipe.grow[0] if recipe.grow else None
    if options["compare"]:
        return _compare_rules(recipe, settings, options)
    if options["batches"] or options["durations"]:
        raise UsageError("--batches and --durations are for comparing rule sets: give --compare, too")
    own = float(recipe.optimizer.init_args["lr"])  # which a growth leaves as it is, unless it sets another
    lr = options["at_lr"] if options["at_lr"] is not None else growth.lr if growth and growth.lr else own
    noise = options["at_noise"] if options["at_noise"] is not None else growth.noise if growth else None
    if growth is None:
        raise UsageError(
            "the recipe has no growth event, whose widths are compared: add one (grow), or compare learning rates "
            "without growing: --compare '[default]'"
        )
    if not isinstance(noise, int | float):
        raise UsageError("the growth event sets no single noise: give --at-noise Y")
    if noise and growth.how == "fresh":  # a growth that says nothing is fresh, and asks for no noise
        growth = replace(growth, how="copies")
        recipe = replace(recipe, grow=[growth])
    small = settings.small_widths(recipe.width, growth.width)
    asked: dict[str, Any] = {
        "widths": options["widths"] or [*small, recipe.width],
        "lrs": settings.grown_lrs or settings.rates(own),
        "lr": lr,
        **({"noises": [0.0, *settings.noises], "noise": noise} if growth.takes_noise else {}),
        "seeds": settings.seeds,
    }
    if options["dry_run"]:
        system.show(TransferCheck(recipe, **asked).describe(settings.engine))
        return 0
    with recipe_options.folder_to_write(recipe.out) as folder:
        check = transfer_check(recipe, **asked, engine=settings.engine, out=folder, note=system.print_at_once)
        system.show(*map(system.wrap_text, [what_was_measured(check), *check["verdict"]]))
        recipe_options.print_place("Picture", save_transfer_picture(check, folder))
    return DIVERGED if nothing_finished([*check["lr"], *check["noise"]]) else 0


def _compare_rules(recipe: Recipe, settings: StudySettings, options: recipe_options.Tree) -> int:
    from mupscale.core import RuleSet
    from mupscale.study import RuleComparison, compare_rules, nothing_finished, rules_table

    sizes = {name: options[name] for name in ("widths", "batches", "durations") if options[name]}
    if not sizes and recipe.grow:
        sizes = {"widths": [*(settings.widths or []), recipe.width, recipe.grow[0].width]}
    asked: dict[str, Any] = {
        "rules": [RuleSet.of(text) for text in options["compare"]],
        "lrs": settings.rates(float(recipe.optimizer.init_args["lr"])),
        "seeds": settings.seeds,
        **sizes,
    }
    if options["dry_run"]:
        system.show(RuleComparison(recipe, **asked).describe(settings.engine))
        return 0
    with recipe_options.folder_to_write(recipe.out) as folder:
        compared = compare_rules(recipe, **asked, engine=settings.engine, out=folder, note=system.print_at_once)
    system.show(rules_table(compared), *map(system.wrap_text, compared["verdict"]))
    trained = [size for lines in compared["rules"].values() for size in lines["sizes"]]
    return DIVERGED if nothing_finished(trained) else 0


@REPORT.command
def report_command(words: list[str]) -> int:
    runs, parsed = REPORT.read(words)
    out = parsed.out
    if not runs:
        raise UsageError("give the folder of at least one run, such as runs/mlp-covtype-demo")
    if parsed.watch:
        from mupscale.cli.live_page import make_server

        if len(runs) > 1:
            raise UsageError(f"--watch shows one folder, not {len(runs)}: give the folder that contains the runs")
        with make_server(Path(runs[0]), parsed.port) as server, suppress(KeyboardInterrupt):
            system.print_at_once(f"http://127.0.0.1:{server.server_address[1]}/ shows {runs[0]}; Ctrl-C ends it")
            server.serve_forever()
        return 0
    with system.pausing_garbage_collection():
        from mupscale.report import write_report

        system.show(f"Report: {write_report(runs, None if out is None else Path(out))}")
    return 0


class StudyArguments(NamedTuple):
    """A recipe, the settings of the study, and the values of a command's own options by name."""

    recipe: Recipe
    settings: StudySettings
    options: recipe_options.Tree


def read_study(
    line: CommandLine, words: Sequence[str], adjust: Callable[[recipe_options.Tree], None] = lambda tree: None
) -> StudyArguments:
    """Read the words behind `mupscale run` and the like. adjust: see `read_recipe_and_options`."""
    if line is not FAMILY and system.number_in_environment("WORLD_SIZE", 1) > 1:
        raise UsageError(
            "a study runs in one process: to use many machines, start mupscale sweep --worker --storage URL on each, "
            "without torchrun"
        )
    recipe, options = recipe_options.read_recipe_and_options(line, words, adjust, lambda tree: _usual_lists(line, tree))
    settings = options.pop("study")
    if options.get("dry_run"):
        from mupscale.train import with_absent_data_replaced

        recipe, said = with_absent_data_replaced(recipe)
        if said:
            system.show(system.wrap_text(f"Note: {said}."))
    return StudyArguments(recipe if line is FAMILY else replace(recipe, callbacks=[]), settings, options)


def _usual_lists(line: CommandLine, tree: recipe_options.Tree) -> dict[str, Sequence[Any]]:
    """What empty lists stand for, where that is known before anything is trained or built."""
    from mupscale.study import FamilySettings, StudySettings, usual_contenders

    lists: dict[str, Sequence[Any]] = {
        "study.contenders": usual_contenders(paper=line is SWEEP or tree.get("paper", False))
    }
    lr = tree["optimizer"]["init_args"].get("lr")
    if isinstance(lr, int | float):
        given = (tree.get("study") or {}).get("lrs")
        lists["study.lrs"] = StudySettings().rates(lr)
        lists["study.grown_lrs"] = list_items(given) if given else lists["study.lrs"]
        lists["family.lrs"] = FamilySettings().rates(lr)
        if not (tree.get("family") or {}).get("tune"):
            lists["family.check_lrs"] = FamilySettings().check_rates(lr)
    return lists


_ASKED = {
    "optimizer": "the learning rate it was trained with (--optimizer AdamW --optimizer.lr 3e-4)",
    "steps": "how many steps the grown model trains (--steps 2000)",
    "batch": "the batch (--batch 32)",
    "data": "a text to train on (--data Text --data.tokens FOLDER --data.source my.txt --data.tokenizer hf:FOLDER)",
    "width": "the hidden size to grow to (--width 1536)",
    "base_steps": "how many steps it was trained, which count as its cost; the small models that stand in for it train "
    "as long (--study.base_steps 2000)",
}


def is_hugging_face(path: str | None) -> bool:
    return path is not None and (Path(path) / "config.json").is_file() and not (Path(path) / "recipe.json").exists()


def adopt_hugging_face_base(tree: dict[str, Any], unasked: Sequence[str] = ()) -> None:
    """Take the model of a Hugging Face folder over into a recipe that starts from it; what it lacks is asked for.

    Such a folder tells the model and its width, and nothing of how it was trained. unasked: what the command knows.
    """
    folder = tree.get("from")
    if not is_hugging_face(folder):
        return
    told = {*tree} - {"base_steps"} | {*(tree.get("study") or {})} & {"base_steps"}
    if "base_steps" not in {*told, *unasked} and (steps := _steps_of_trainer(Path(str(folder)))):
        tree["study"] = {**(tree.get("study") or {}), "base_steps": steps}
        told.add("base_steps")
    if lacking := [what for name, what in _ASKED.items() if name not in told and name not in unasked]:
        raise UsageError(
            f"{folder} is a Hugging Face folder, which does not say how to train the model further: give "
            f"{'; '.join(lacking)}"
        )
    from mupscale.hf import hidden_size

    tree["model"] = {"class_path": "mupscale.hf.LanguageModel", "init_args": {"folder": str(folder)}, "kept": {}}
    for name in ("base", "width"):
        tree.setdefault(name, hidden_size(str(folder)))


def _steps_of_trainer(folder: Path) -> int | None:
    path = folder / "trainer_state.json"
    steps = system.read_json(path).get("global_step") if path.is_file() else None
    return steps if isinstance(steps, int) and steps > 0 else None


def base_checkpoint(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe; where it starts from a Hugging Face folder, with its weights, and its Trainer's optimizer.pt, in a
    checkpoint of ours, written into a folder once.

    Its name tells which weights it holds, so that other ones are never taken for them.
    """
    if recipe.start is None or not is_hugging_face(recipe.start):
        return recipe
    from mupscale.hf import load_language_model, load_language_optimizer
    from mupscale.train import save_model_at

    source = Path(recipe.start)
    files = (
        path
        for path in source.iterdir()
        if path.name in ("config.json", "optimizer.pt") or path.suffix in (".safetensors", ".bin", ".gguf")
    )
    path = folder / f"base-model-{system.fingerprint_files(sorted(files))}.safetensors"
    if not path.exists():
        model, width = load_language_model(recipe.start)
        optimizer = None
        with suppress(system.MupscaleError):  # of another class than the recipe's: a note says that it is not read
            optimizer = load_language_optimizer(recipe.start, model, recipe.optimizer_class())
        save_model_at(path, model, width, optimizer)
    return replace(recipe, start=str(path))


def describe_tokens(recipe: Recipe) -> list[str]:
    """What is to be kept in mind where the data may be in another tokenizer's tokens than a Hugging Face folder's."""
    tokenizer = str(recipe.data.init_args.get("tokenizer", ""))
    if recipe.start is None or not is_hugging_face(recipe.start):
        return []
    own, named = (Path(folder) / "tokenizer.json" for folder in (recipe.start, tokenizer.removeprefix("hf:")))
    alike = own.is_file() and named.is_file() and own.read_bytes() == named.read_bytes()
    if tokenizer.startswith("hf:") and (alike or own.resolve() == named.resolve()):
        return []
    name = f" (data.tokenizer: hf:{recipe.start})" if own.is_file() else ", and that folder has no tokenizer.json"
    return [
        f"the recipe does not name the tokenizer of {recipe.start}{name}, so its tokens may differ from those that the "
        f"model was trained on"
    ]
