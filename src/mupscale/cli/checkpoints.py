"""The commands for checkpoints: upscale, verify and inspect, of Hugging Face and of torch.distributed.checkpoint."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from mupscale import system
from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import CommandLine, Option, parameters_of
from mupscale.cli.own_modules import allow_modules


def check_before_imports(options: Any) -> dict[str, Any]:
    """What is wrong without looking at any tensor; what is asked of depth. torch is imported for words alone.

    Beside --layers, --how may name what new units or what new layers are: `options.how` is then left with the former.
    """
    _describe(options.describe)
    path = Path(options.checkpoint)
    if options.times is not None:
        system.parse_multipliers(options.times)
    if path.is_dir() and not (path / "adapter_config.json").exists():
        system.check_has_config(path)
    how, deepen = options.how, options.deepen
    if how is None and deepen is None:
        return {} if options.layers is None else {"layers": options.layers, "deepen": "identity"}
    from mupscale.growth import DEPTH_OPERATORS, word_in_table

    if options.layers is None:
        if deepen is not None or how in DEPTH_OPERATORS:
            raise UsageError(f"{'--deepen' if deepen else f'--how {how}'} is for new layers: add --layers N")
    elif how in DEPTH_OPERATORS:
        if deepen is not None:
            raise UsageError(f"--how {how} and --deepen {deepen} both describe the new layers: give one of them")
        if any(size is not None for size in (options.times, options.hidden, options.ffn, options.heads, options.kv)):
            raise UsageError(
                f"if the width grows as well, --how is for the width: use --deepen {how} for the new layers"
            )
        how, deepen = None, how
    try:
        word_in_table(how or "fresh")
    except system.MupscaleError as error:
        raise UsageError(f"--{error}") from None
    options.how = how
    return {} if options.layers is None else {"layers": options.layers, "deepen": deepen or "identity"}


def _of_one_number(kind: Any) -> Any:
    """The type of an option, where a recipe may have a number for each parameter instead of one."""
    return next((each for each in get_args(kind) if each is float), kind)


_EXPERTS = ("experts", "top_k")

_OPERATOR_SETTINGS = tuple(
    Option(f"--{each.name.replace('_', '-')}", _of_one_number(each.type), each.help)
    for each in parameters_of("mupscale.growth.settings.GrowthSettings")
    if each.name not in ("how", "deepen")
)
"""The settings of all operators, as the classes beside them have them: another one is another option."""

_FOR_BOTH = {*_EXPERTS, "how", "exact", "deepen", "seed", "optimizer", "overwrite"}
_FOR_BOTH |= {each.dest for each in _OPERATOR_SETTINGS}

DCP = tuple(
    Option(f"--{name}", str, f"for a DCP folder: {meaning}", metavar=metavar)
    for name, metavar, meaning in (
        ("model", "MODULE.FUNCTION", "your function that builds the model from its sizes, such as llama.build"),
        ("inputs", "MODULE.FUNCTION", "your function that returns a small batch, on which small models are tried"),
        ("to", "SIZES", "the sizes to grow to, such as dim=512,heads=8,layers=12"),
        ("from", "SIZES", "the sizes of its model (default: what the function has as defaults)"),
        ("base", "SIZES", "sizes of a small model that is tried instead of a large one (default: as --from)"),
    )
)
"""Of a folder of torch.distributed.checkpoint: the model, which it does not describe."""
DCP_OPTIMIZER = Option(
    "--optimizer", str, "for a DCP folder: the class of its optimizer, if it is not torch's", metavar="MODULE.CLASS"
)
_DESCRIBE = Option(
    "--describe",
    str,
    "your Python module that says what tensors of your own are (mupscale.hf.register)",
    None,
    "MODULE",
)
_TRUST = Option("--trust-remote-code", bool, "allow the checkpoint to run its own model or tokenizer code")
_DEQUANTISE = Option("--dequantise", bool, "read a quantised GGUF file as float32; the rounding of its weights remains")
_RULES = Option("--rules", str, "rules for the optimizer, such as decay=fixed")
_CHECKPOINT = Option("checkpoint", str, "a folder of save_pretrained, a name on the hub, a GGUF file or a DCP folder")
_GROWTH = (
    _CHECKPOINT,
    Option(
        "--times",
        str,
        "factor by which the width grows: 2, or hidden=2,ffn=3,heads=2 (kv for key/value heads; what you leave out "
        "stays). For a model of several parts: text=2,vision.ffn=3 (default: 2, unless you give a size below)",
    ),
    _DESCRIBE,
    Option(
        "--how",
        str,
        "how to fill new units: fresh (new ones; the default), lossless (the same as --lossless), copies (with "
        "--noise or --exact) or paired (copies whose noise cancels at first); for comparison net2net or naive. "
        "If only --layers is given: identity, stack or interleaved",
    ),
    Option("--hidden", str, "hidden size of the large model, instead of --times"),
    Option("--ffn", str, "size of its feed-forward layers (default: unchanged)"),
    Option("--heads", str, "number of its attention heads; head_dim does not change"),
    Option("--kv", str, "number of its key/value heads (default: they grow with the heads)"),
    *_OPERATOR_SETTINGS,
    Option("--lossless", bool, "fresh units that leave the outputs unchanged at first"),
    Option("--layers", int, "number of layers of the large model; can be combined with a width"),
    Option("--deepen", str, "what new layers are, if the width grows as well: identity, stack or interleaved"),
    Option(
        "--experts", int, "make a mixture of so many experts, each a copy of the feed-forward layer or of an expert"
    ),
    Option(
        "--top-k", int, "number of experts that each token uses (default: 2, or as many more as there are more experts)"
    ),
)

UPSCALE = CommandLine(
    "upscale",
    "grow a Hugging Face checkpoint in width or depth",
    "CHECKPOINT OUT [--option VALUE …]",
    """\
Grow a Hugging Face checkpoint in width, in depth, or in experts. The result is an ordinary checkpoint.

  mupscale upscale path/to/checkpoint path/to/wide --times 2
  mupscale upscale path/to/checkpoint path/to/wide --hidden 1536 --ffn 4096 --heads 24 --kv 8
  mupscale upscale path/to/checkpoint path/to/wide --hidden 1536 --heads 24 --lossless
  mupscale upscale path/to/checkpoint path/to/wide --times hidden=2,ffn=3,heads=2 --how copies --noise 0.3 --seed 0
  mupscale upscale path/to/checkpoint path/to/wide --times 2 --exact
  mupscale upscale path/to/checkpoint-500 path/to/wide --optimizer-state path/to/checkpoint-500/optimizer.pt
  mupscale upscale path/to/checkpoint path/to/deep --layers 24 --how identity
  mupscale upscale path/to/checkpoint path/to/large --times 2 --layers 24 --deepen stack
  mupscale upscale path/to/checkpoint path/to/mixture --experts 8 --top-k 2
  mupscale upscale path/to/model-Q8_0.gguf path/to/wide --dequantise
  mupscale upscale checkpoint/step-1000 wide/step-1000 --model llama.build --inputs llama.tokens --to dim=512,heads=8

Width. --how fresh (the default) keeps the trained units and adds new ones, initialised as the model would do it at the
large width. You can choose any larger size. New units change the outputs at first. With
--lossless they do not: the new units contribute nothing yet, and the outputs stay the same, up to the eps of the norms.
--how copies copies every unit a whole number of times, and --noise makes the copies differ. With --exact the copies
stay equal: the wide model computes the same as the small one and stays a replica of it in training. Use --exact only
for verification.

Depth. --layers adds layers. --how identity (the default) adds layers that change nothing at first. stack and
interleaved copy layers, which changes the outputs. stack appends the copies at the end; interleaved puts each copy
after its original. To grow the width as well, give --times or a size. Then --how is for the width and --deepen for
the layers.

Experts. --experts makes LLaMA and Mistral a Mixtral, and Qwen3 a Qwen3-MoE. Every expert is a copy of the feed-forward
layer, and the outputs do not change. The router is drawn, or zero with --exact. In a mixture every expert is copied
equally often, and the outputs stay if --top-k grows as much. To grow the width as well, give --times or a size.

A folder of torch.distributed.checkpoint (DCP), such as torchtitan writes, grows with its optimizer. It does not
describe its model, so name your function that builds it (--model) and the sizes to grow to (--to); a number of layers
may be one of them. --experts and --top-k are the function's arguments experts and top_k. Under torchrun, processes
divide the work.

Tensors are processed in pieces, so a model of any size needs little memory. The file mupscale.json next to the weights
lets mupscale.hf.param_groups set the learning rate of every parameter from the small model's. OUT appears only when it
is complete. If the command stops early, the next one removes what it left behind.""",
    (
        *_GROWTH,
        Option("out", str, "folder for the large checkpoint"),
        Option("--exact", bool, "copies without noise: a replica of the small model, for verification"),
        Option("--seed", int, "seed of the noise or the fresh units", 0),
        Option("--dtype", str, "dtype of the output: float32, bfloat16, float16 or float64 (default: unchanged)"),
        Option("--shard-size", str, "largest size of a weights file", "5GB"),
        Option("--optimizer-state", str, "a saved torch optimizer (optimizer.pt) to grow as well", metavar="FILE"),
        DCP_OPTIMIZER,
        _RULES,
        Option("--no-verify", bool, "do not compare the two models at the end"),
        _TRUST,
        Option("--overwrite", bool, "replace OUT if mupscale wrote it"),
        Option("--threads", int, "number of threads (default: one per core)"),
        _DEQUANTISE,
        *DCP,
    ),
    main="times hidden heads layers how noise lossless experts dtype optimizer-state overwrite",
)

VERIFY = CommandLine(
    "verify",
    "check that a checkpoint and its grown version compute the same",
    "SMALL WIDE [--option VALUE …]",
    """\
Check that two checkpoints compute the same, and still do after training. The exit status is 0 if they do and 1 if not.
Noise and fresh units change the outputs. In that case the command reports by how much, and checks everything else
against mupscale.json. Of two DCP folders, it lists the tensors that are not what the small one becomes.

  mupscale verify path/to/checkpoint path/to/wide
  mupscale verify path/to/checkpoint path/to/wide --dtype float64 --train 20 --text book.txt""",
    (
        Option("small", str, "the small checkpoint"),
        Option("wide", str, "the one that it grew into"),
        Option("--dtype", str, "dtype of the computation: float32 or float64", "float32"),
        Option("--train", int, "also compare the models over this many training steps", 0),
        Option("--text", str, "a text file to compare them on (default: random tokens)"),
        Option("--tokens", int, "number of tokens in each text", 64),
        Option("--tolerance", float, "largest allowed relative difference (default: depends on the dtype)"),
        Option("--seed", int, "seed of the random tokens", 0),
        _TRUST,
        _DESCRIBE,
        _DEQUANTISE,
        *DCP,
    ),
    main="dtype train text tokens tolerance trust-remote-code",
)

INSPECT = CommandLine(
    "inspect",
    "show what upscaling would do to a checkpoint",
    "CHECKPOINT [--option VALUE …]",
    """\
Show what upscaling would do: a table of tensors with their axes, their scaling rule and the optimizer's factors.

  mupscale inspect path/to/checkpoint
  mupscale inspect path/to/checkpoint --hidden 1536 --ffn 4096 --heads 24 --kv 8
  mupscale inspect path/to/checkpoint --times hidden=2,ffn=3,heads=2 --how copies --optimizer sgd
  mupscale inspect path/to/checkpoint --layers 24
  mupscale inspect checkpoint/step-1000 --model llama.build --inputs llama.tokens --to dim=512,heads=8
  mupscale inspect path/to/checkpoint --experts 8 --top-k 2

`2× by 64` means that an axis becomes twice as long, in blocks of 64 units such as attention heads. A rule is three
numbers: the factor by which the output grows, the factor by which the input grows, and a constant that is multiplied
into the weight. For fresh units the table shows the factor of old weights, the initialisation of new ones (± standard
deviation, or a constant), and the scale of the weights from new units into old ones.""",
    (
        *_GROWTH,
        Option("--optimizer", str, "the class of torch.optim to show factors for", "AdamW"),
        _RULES,
        _TRUST,
        _DEQUANTISE,
        *DCP,
    ),
    main="times hidden heads layers how lossless experts optimizer",
)


@UPSCALE.command
def upscale_command(words: list[str]) -> int:
    options, is_dcp = _read(UPSCALE, words)
    path, out = options.checkpoint, options.out
    if is_dcp:
        place = system.place_for(Path(out), options.overwrite)
        said = upscale_dcp_folder(path, place, options)
        if said and place != Path(out):
            system.replace_folder(place, Path(out))
        system.show(said.replace(str(place), out, 1)) if said else None
        return 0
    depth = check_before_imports(options)
    system.place_for(Path(out), options.overwrite)  # which is refused before anything is imported
    from mupscale.hf import upscale

    upscaled = upscale(
        _checkpoint(path, options),
        out,
        **depth,
        **_taken_over(options, *_ALIKE, "exact", "seed", "shard_size", "dtype", "threads", "overwrite"),
        optimizer=options.optimizer_state,
        grow=_operator(options),
        rules=_rules(options),
        verify=not options.no_verify,
        note=lambda line: system.print_at_once(system.wrap_text(system.printable(line)), "stderr"),
    )
    system.show(system.wrap_text(str(upscaled)))
    return 0


@VERIFY.command
def verify_command(words: list[str]) -> int:
    options, is_dcp = _read(VERIFY, words)
    if is_dcp:
        from mupscale.train import compare_dcp, import_path

        allow_modules([options.model or ""])
        build = options.model and import_path(options.model)
        report: Any = compare_dcp(options.small, options.wide, build=build)
    else:
        from mupscale.hf import verify

        _describe(options.describe)
        report = verify(
            _checkpoint(options.small, options),
            _checkpoint(options.wide, options),
            **_taken_over(options, "dtype", "train", "text", "tokens", "tolerance", "seed", "trust_remote_code"),
        )
    system.show(str(report))
    return 0 if report.ok else 1


@INSPECT.command
def inspect_command(words: list[str]) -> int:
    options, is_dcp = _read(INSPECT, words)
    path = options.checkpoint
    if is_dcp:
        return inspect_dcp_folder(path, options)
    depth = check_before_imports(options)
    from mupscale import hf

    overview = hf.inspect(
        _checkpoint(path, options),
        **depth,
        **_taken_over(options, *_ALIKE, "optimizer"),
        grow=_operator(options),
        rules=_rules(options),
    )
    system.show(str(overview))
    return 0


_ALIKE = ("times", "hidden", "ffn", "heads", "kv", "experts", "top_k", "trust_remote_code")


def _taken_over(options: Any, *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


def _rules(options: Any) -> Any:
    from mupscale.core import RuleSet

    return None if options.rules is None else RuleSet.of(options.rules)


def _growth_settings(options: Any, usual_how: str | None = None) -> Any:
    """What the options say of new units and new blocks; None if they say nothing and there is no usual `how`."""
    from mupscale.growth import GrowthSettings, words_that_take

    if options.lossless and options.how not in (None, "fresh", "lossless"):
        raise UsageError(f"--lossless is for fresh units: leave out --how {options.how}, or --lossless")
    given = {each.dest: options[each.dest] for each in _OPERATOR_SETTINGS if options[each.dest] is not None}
    how = "lossless" if options.lossless else options.how
    if how is None and given:
        how = words_that_take(next(iter(given)))[0]
    if how is None and usual_how is None:
        return None
    settings = GrowthSettings(how=how or usual_how, deepen=options.deepen or "identity", **given)
    for name in settings.foreign_settings:
        option, taker = name.replace("_", "-"), words_that_take(name)[0]
        said = "--lossless" if options.lossless else f"--how {settings.how}"
        raise UsageError(f"--{option} goes with --how {taker}, and not with {said}: leave out one of the two")
    return settings


def _operator(options: Any) -> Any:
    """The operator that --how, --lossless and an operator's own options name; None where they name none."""
    settings = _growth_settings(options)
    return None if settings is None else settings.build_operator()


def _checkpoint(path: str, options: Any) -> Any:
    """What the path names: a folder or a hub name as it is, a GGUF file read where that is asked for."""
    from mupscale.hf import is_gguf, read_gguf

    if not options.dequantise or not is_gguf(path):
        return path
    system.print_at_once(system.wrap_text(f"reading {system.printable(path)} as float32"), "stderr")
    return read_gguf(path)


def _describe(module: str | None) -> None:
    if module is None:
        return
    name = module.removesuffix(".py")
    allow_modules([name])
    try:
        import_module(name)
    except ImportError as error:
        raise UsageError(f"--describe {module}: {error}; modules are imported from the current folder") from None
    except (Exception, SystemExit) as error:  # whatever the module does
        raise UsageError(f"--describe {module}: the module raises {type(error).__name__}: {error}") from error


def _read(line: CommandLine, words: list[str]) -> tuple[Any, bool]:
    """The options, and whether they are about folders of torch.distributed.checkpoint."""
    _, options = line.read(words)
    is_dcp = system.is_dcp_folder(options["small" if line is VERIFY else "checkpoint"])
    check_which(options, line, is_dcp)
    return options, is_dcp


def check_which(options: Any, line: CommandLine, dcp: bool) -> None:
    for each in line.parts:
        assert isinstance(each, Option)
        name = each.dest
        if not each.name.startswith("-"):
            continue
        is_strange = name not in _FOR_BOTH and each not in DCP if dcp else each in (*DCP, DCP_OPTIMIZER)
        if is_strange and options[name] is not False and options[name] != each.default:
            if each is DCP_OPTIMIZER:
                raise UsageError(
                    f"{each.name} is the class of a DCP folder's optimizer. A saved one is --optimizer-state FILE"
                )
            kind = "Hugging Face checkpoints" if dcp else "folders of torch.distributed.checkpoint"
            raise UsageError(f"{each.name} is for {kind}: leave it out")


def upscale_dcp_folder(path: str, out: Path, options: Any) -> str:
    """Write the grown folder; what to say of it."""
    from mupscale.growth import is_replica, replica_in_words
    from mupscale.train import join_processes, upscale_dcp, what_grows

    with join_processes("cpu", "ddp") as processes:
        family, sizes = _family(options)
        grows = what_grows(family, *sizes)
        growth = _growth_of_dcp(options, grows)
        if "units" in grows and is_replica(growth.build_operator()) and not options.exact and processes.main:
            system.print_at_once(system.wrap_text(replica_in_words()), "stderr")
        known: dict[str, Any] = {"seed": options.seed, "optimizer": _optimizer(options), "processes": processes}
        known["router"] = "silent" if options.exact else "drawn"
        upscaled = upscale_dcp(path, out, family, *sizes, growth, **known)
        return str(upscaled) if processes.main else ""


def _growth_of_dcp(options: Any, grows: set[Any]) -> Any:
    """How new parts are filled; experts alone are copies."""
    is_exact = getattr(options, "exact", False)
    return _growth_settings(options, usual_how="copies" if is_exact or grows == {"experts"} else "fresh")


def inspect_dcp_folder(path: str, options: Any) -> int:
    """What is in a folder, or, where sizes are given, what growing to them would do."""
    from mupscale.train import DcpFolder, describe_dcp_growth, what_grows

    if any(getattr(options, name) is not None for name in ("to", *_EXPERTS)):
        family, sizes = _family(options)
        system.show(describe_dcp_growth(path, family, *sizes, _growth_of_dcp(options, what_grows(family, *sizes))))
        return 0
    folder, rows = DcpFolder(path), Counter[tuple[str, str, str]]()
    for name in (*folder.shapes, *folder.objects):
        of_any_layer, what = system.printable(re.sub(r"(?<=\.)\d+(?=\.)", "*", name)), ("", "object")
        if name in folder.shapes:
            shape, dtype = folder.shapes[name], str(folder.dtypes[name]).removeprefix("torch.")
            what = "×".join(map(str, shape)) or "a number", dtype
        rows[of_any_layer, *what] += 1
    cells = [(name, shape, dtype, str(count) if count > 1 else "") for (name, shape, dtype), count in rows.items()]
    system.show(system.text_table(("name", "shape", "dtype", "layers"), cells, left=3))
    return 0


def _family(options: Any) -> tuple[Any, tuple[dict[str, int], dict[str, int]]]:
    """The family of the models that --model builds, and the sizes from which and to which one of them grows."""
    from mupscale.family import BuiltMembers, Family
    from mupscale.train import import_path

    wide = _sizes(options, "to") | {n: v for n in _EXPERTS if (v := getattr(options, n)) is not None}
    if options.model is None or not wide:
        raise UsageError(
            "a folder of torch.distributed.checkpoint does not describe its model: give --model MODULE.FUNCTION, which "
            "builds it, and --to SIZES"
        )
    allow_modules([name for name in (options.model, options.inputs) if name])
    build, given = import_path(options.model), _sizes(options, "from")
    takes = inspect.signature(build).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        for name in (name for name in {**given, **wide} if name not in takes):
            raise UsageError(f"{options.model} has no argument {name}: it takes {', '.join(takes) or 'none'}")
    usual = {name: parameter.default for name, parameter in takes.items() if type(parameter.default) is int} | given
    mixture = {name: usual.pop(name) for name in _EXPERTS if name in usual}
    mixture = mixture if mixture.get("experts") else {}  # of a dense model
    alone = wide.keys() <= {*_EXPERTS}  # then every size that has a default may be the base's
    narrow = {n: size for n, size in usual.items() if alone or n in {**given, **wide}}
    if unknown := [name for name in wide if name not in {**narrow, **mixture} and name not in _EXPERTS]:
        raise UsageError(f"{options.model} has no default for {unknown[0]}: give the folder's sizes (--from)")
    few, after = mixture.get("experts", 0), {**narrow, **mixture}
    if few > 1 and "top_k" in mixture:  # so many more active ones as there are more experts, unless that is given
        after["top_k"] = mixture["top_k"] * wide.get("experts", few) // few
    base, to = {**narrow, **_sizes(options, "base")}, {**after, **wide}
    inputs = None if options.inputs is None else import_path(options.inputs)()
    build = partial(build, **mixture)
    family = BuiltMembers(build, base, inputs=inputs) if alone else Family(build, base, init_at=narrow, inputs=inputs)
    return family, ({**narrow, **mixture}, to)


def _sizes(options: Any, option: str) -> dict[str, int]:
    text = getattr(options, option) or ""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(name.strip() and value.strip().isdecimal() for name, _, value in pairs):
        raise UsageError(f"--{option} is {text}, but must be names with whole numbers, such as dim=512,layers=12")
    return {name.strip(): int(value) for name, _, value in pairs}


def _optimizer(options: Any) -> Any:
    """The class that --optimizer names, for one that is not torch's."""
    from torch.optim import Optimizer

    from mupscale.train import import_path

    if options.optimizer is None:
        return None
    allow_modules([options.optimizer])
    found = import_path(options.optimizer)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise system.MupscaleError(f"{options.optimizer} is not a torch.optim.Optimizer")
    return found
