"""The commands for checkpoints: upscale, verify, inspect."""

from __future__ import annotations

import secrets
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mupscale.cli.arguments import UsageError, join_options, make_parser, parse_arguments, separate_options
from mupscale.cli.dcp_commands import (
    add_dcp,
    check_which,
    inspect_dcp_folder,
    upscale_dcp_folder,
    verify_dcp_folders,
)
from mupscale.cli.own_modules import allow_modules
from mupscale.system import (
    MupscaleError,
    check_has_config,
    is_dcp_folder,
    is_taken,
    move,
    parse_multipliers,
    print_at_once,
    printable,
    remove,
    show,
    wrap_text,
)


def _depth(options: Any) -> tuple[str | None, dict[str, Any]]:
    """What --how says of width, and what of depth: beside --layers it may name either."""
    how, deepen = options.how, options.deepen
    if how is None and deepen is None:
        return None, {} if options.layers is None else {"layers": options.layers, "deepen": "identity"}
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
    except MupscaleError as error:
        raise UsageError(f"--{error}") from None
    return how, {} if options.layers is None else {"layers": options.layers, "deepen": deepen or "identity"}


def check_before_imports(path: str, options: Any) -> dict[str, Any]:
    """What is wrong without looking at any tensor; what is asked of depth. torch is imported for words alone."""
    if options.times is not None:
        parse_multipliers(options.times)
    if Path(path).is_dir() and not (Path(path) / "adapter_config.json").exists():
        check_has_config(Path(path))
    options.how, depth = _depth(options)
    return depth


def add_times(parser: Any) -> None:
    """By how much, and where a description lies."""
    meaning = (
        "factor by which the width grows: 2, or hidden=2,ffn=3,heads=2 (kv for key/value heads; what you leave out"
    )
    meaning += " stays). For a model of several parts: text=2,vision.ffn=3 (default: 2, unless you give a size below)"
    parser.add_argument("--times", type=str | None, default=None, help=meaning)
    add_describe(parser)


def add_trust(parser: Any) -> None:
    """Whether code of the checkpoint's own runs."""
    meaning = "allow the checkpoint to run its own model or tokenizer code"
    parser.add_argument("--trust-remote-code", action="store_true", help=meaning)


def add_growth(parser: Any) -> None:
    """By which operator, to which sizes."""
    meaning = "how to fill new units: fresh (new ones; the default), lossless (the same as --lossless), copies (with"
    meaning += " --noise or --exact) or paired (copies whose noise cancels at first); for comparison net2net or naive."
    meaning += " If only --layers is given: identity, stack or interleaved"
    parser.add_argument("--how", type=str | None, default=None, help=meaning)
    parser.add_argument("--hidden", type=str | None, help="hidden size of the large model, instead of --times")
    parser.add_argument("--ffn", type=str | None, help="size of its feed-forward layers (default: unchanged)")
    parser.add_argument("--heads", type=str | None, help="number of its attention heads; head_dim does not change")
    parser.add_argument(
        "--kv", type=str | None, help="number of its key/value heads (default: they grow with the heads)"
    )
    outgoing = "scale of the weights from fresh units into old ones, 0 to 1 (default: 1, as initialised)"
    parser.add_argument("--outgoing", type=float | None, help=outgoing)
    parser.add_argument("--lossless", action="store_true", help="fresh units that leave the outputs unchanged at first")


def add_depth(parser: Any) -> None:
    """How many layers, and what new ones are."""
    meaning = "number of layers of the large model; can be combined with a width"
    parser.add_argument("--layers", type=int | None, help=meaning)
    meaning = "what new layers are, if the width grows as well: identity, stack or interleaved"
    parser.add_argument("--deepen", type=str | None, help=meaning)


def add_mixture(parser: Any) -> None:
    """Experts of a mixture."""
    meaning = "make a mixture of this many experts, each a copy of the feed-forward layer or of an expert"
    parser.add_argument("--experts", type=int | None, help=meaning)
    meaning = "number of experts that each token uses (default: 2, or as many more as there are more experts)"
    parser.add_argument("--top-k", type=int | None, help=meaning)


def add_dequantise(parser: Any) -> None:
    """Whether quantised numbers are read as float32."""
    meaning = "read a quantised GGUF file as float32; the rounding of its weights remains"
    parser.add_argument("--dequantise", action="store_true", help=meaning)


def add_describe(parser: Any) -> None:
    """Where a description lies."""
    meaning = "your Python module that says what tensors of your own are (mupscale.hf.register)"
    parser.add_argument("--describe", type=str | None, metavar="MODULE", help=meaning)


UPSCALE = """\
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
large width. You can choose any larger size, and there is nothing to tune. New units change the outputs at first. With
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
is complete. If the command stops early, the next one removes what it left behind."""

VERIFY = """\
Check that two checkpoints compute the same, and still do after training. The exit status is 0 if they do and 1 if not.
Noise and fresh units change the outputs. In that case the command reports by how much, and checks everything else
against mupscale.json. Of two DCP folders, it lists the tensors that are not what the small one becomes.

  mupscale verify path/to/checkpoint path/to/wide
  mupscale verify path/to/checkpoint path/to/wide --dtype float64 --train 20 --text book.txt"""

INSPECT = """\
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
deviation, or a constant), and the scale of the weights from new units into old ones."""


def _upscale_parser() -> Any:
    """All options of mupscale upscale."""
    parser = make_parser("upscale", "CHECKPOINT OUT [--option VALUE …]", UPSCALE)
    add_times(parser)
    add_growth(parser)
    add_depth(parser)
    add_mixture(parser)
    meaning = "noise of copies; 1 is the size of a fresh initialisation"
    parser.add_argument("--noise", type=float | None, default=None, help=meaning)
    parser.add_argument(
        "--exact", action="store_true", help="copies without noise: a replica of the small model, for verification"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise or the fresh units")
    parser.add_argument(
        "--dtype",
        type=str | None,
        help="dtype of the output: float32, bfloat16, float16 or float64 (default: unchanged)",
    )
    parser.add_argument("--shard-size", type=str, default="5GB", help="largest size of a weights file")
    meaning = "a saved torch optimizer (optimizer.pt) to grow as well"
    parser.add_argument("--optimizer-state", type=str | None, metavar="FILE", help=meaning)
    meaning = "for a DCP folder: the class of its optimizer, if it is not torch's"
    parser.add_argument("--optimizer", type=str | None, metavar="MODULE.CLASS", help=meaning)
    _add_rules(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not compare the two models at the end")
    add_trust(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if mupscale wrote it")
    parser.add_argument("--threads", type=int | None, help="number of threads (default: one per core)")
    add_dequantise(parser)
    add_dcp(parser)
    return parser


def upscale_command(words: list[str]) -> int:
    """mupscale upscale SOURCE OUT."""
    flags = ("--no-verify", "--lossless", "--exact", "--overwrite", "--trust-remote-code", "--dequantise")
    parser = _upscale_parser()
    (path, out), options = _paths(parser, words, ("CHECKPOINT", "OUT"), flags=flags)
    check_which(options, parser, is_dcp_folder(path))
    if is_dcp_folder(path):
        place = _check_place(Path(out), options.overwrite)
        said = upscale_dcp_folder(path, place, options)
        if said and place != Path(out):
            _replace_folder(place, Path(out))
        show(said.replace(str(place), out, 1)) if said else None
        return 0
    _describe(options.describe)
    depth, place = check_before_imports(path, options), _check_place(Path(out), options.overwrite)
    from mupscale.hf import upscale

    upscaled = upscale(
        _checkpoint(path, options),
        place,
        times=options.times,
        hidden=options.hidden,
        ffn=options.ffn,
        heads=options.heads,
        kv=options.kv,
        grow=_operator(options, options.noise),
        exact=options.exact,
        **depth,
        experts=options.experts,
        top_k=options.top_k,
        seed=options.seed,
        shard_size=options.shard_size,
        dtype=options.dtype,
        optimizer=options.optimizer_state,
        rules=_rules(options),
        verify=not options.no_verify,
        trust_remote_code=options.trust_remote_code,
        threads=options.threads,
        note=lambda line: print_at_once(wrap_text(printable(line)), "stderr"),
    )
    if place != Path(out):
        _replace_folder(place, Path(out))
        upscaled = replace(upscaled, path=Path(out))
    show(wrap_text(str(upscaled)))
    return 0


def _check_place(out: Path, overwrite: bool) -> Path:
    """Where to write; what stands at `out` already is refused, unless it is mupscale's and is to be replaced."""
    if overwrite:
        return _beside(out)
    if is_taken(out):
        own = (
            "Use --overwrite to replace it"
            if (out / "mupscale.json").is_file() and not out.is_symlink()
            else "Remove it"
        )
        raise MupscaleError(f"{out} already exists. {own}, or choose a different name")
    return out


def _beside(out: Path) -> Path:
    """Where a checkpoint is written that is to replace the one at `out`."""
    if out.is_symlink() or (out.exists() and not (out / "mupscale.json").is_file()):
        raise UsageError(f"--overwrite: mupscale did not write {out}: remove it yourself, or choose another OUT")
    return out.with_name(f".{out.name}.new") if out.exists() else out


def _replace_folder(new: Path, old: Path) -> None:
    """Put a finished folder into the place of another, which is gone only then."""
    aside = old.with_name(f".{old.name}.{secrets.token_hex(8)}")
    move(old, aside)
    move(new, old)
    remove(aside)


def verify_command(words: list[str]) -> int:
    """mupscale verify SMALL WIDE."""
    parser = make_parser("verify", "SMALL WIDE [--option VALUE …]", VERIFY)
    parser.add_argument("--dtype", type=str, default="float32", help="dtype of the computation: float32 or float64")
    parser.add_argument("--train", type=int, default=0, help="also compare the models over this many training steps")
    parser.add_argument("--text", type=str | None, help="a text file to compare them on (default: random tokens)")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens in each text")
    parser.add_argument(
        "--tolerance", type=float | None, help="largest allowed relative difference (default: depends on the dtype)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    add_trust(parser)
    add_describe(parser)
    add_dequantise(parser)
    add_dcp(parser)
    (small, wide), options = _paths(parser, words, ("SMALL", "WIDE"), flags=("--trust-remote-code", "--dequantise"))
    check_which(options, parser, is_dcp_folder(small))
    if is_dcp_folder(small):
        return verify_dcp_folders(small, wide, options)
    from mupscale.hf import verify

    _describe(options.describe)
    report = verify(
        _checkpoint(small, options),
        _checkpoint(wide, options),
        dtype=options.dtype,
        train=options.train,
        text=options.text,
        tokens=options.tokens,
        tolerance=options.tolerance,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
    )
    show(str(report))
    return 0 if report.ok else 1


def inspect_command(words: list[str]) -> int:
    """mupscale inspect CHECKPOINT."""
    parser = make_parser("inspect", "CHECKPOINT [--option VALUE …]", INSPECT)
    add_times(parser)
    add_growth(parser)
    add_depth(parser)
    add_mixture(parser)
    parser.add_argument("--optimizer", type=str, default="AdamW", help="the class of torch.optim to show factors for")
    _add_rules(parser)
    add_trust(parser)
    add_dequantise(parser)
    add_dcp(parser)
    flags = ("--lossless", "--trust-remote-code", "--dequantise")
    (path,), options = _paths(parser, words, ("CHECKPOINT",), flags=flags)
    check_which(options, parser, is_dcp_folder(path))
    if is_dcp_folder(path):
        return inspect_dcp_folder(path, options)
    _describe(options.describe)
    depth = check_before_imports(path, options)
    from mupscale.hf import inspect

    overview = inspect(
        _checkpoint(path, options),
        times=options.times,
        hidden=options.hidden,
        ffn=options.ffn,
        heads=options.heads,
        kv=options.kv,
        grow=_operator(options),
        **depth,
        experts=options.experts,
        top_k=options.top_k,
        optimizer=options.optimizer,
        rules=_rules(options),
        trust_remote_code=options.trust_remote_code,
    )
    show(str(overview))
    return 0


def _add_rules(parser: Any) -> None:
    parser.add_argument("--rules", type=str | None, help="rules for the optimizer, such as decay=fixed")


def _rules(options: Any) -> Any:
    from mupscale.core import RuleSet

    return None if options.rules is None else RuleSet.of(options.rules)


def _operator(options: Any, noise: float | None = None) -> Any:
    """The operator that --how, --noise, --outgoing and --lossless name; None where they name none."""
    from mupscale.growth import word_in_table
    from mupscale.train import Filling

    given = {"--lossless": options.lossless, "--outgoing": options.outgoing is not None}
    how: Any = options.how or ("fresh" if any(given.values()) else None if noise is None else "copies")
    if how is None:
        return None
    if noise and "noise" not in word_in_table(how).takes:
        raise UsageError("--noise is for copies: leave it out, or add --how copies (fresh units differ without it)")
    if any(given.values()) and how not in ("fresh", "lossless"):
        name = next(name for name, value in given.items() if value)
        raise UsageError(f"{name} is for fresh units: leave out --how {how} and --noise, or {name}")
    how = "lossless" if options.lossless else how
    if how == "lossless" and options.outgoing is not None:
        raise UsageError("--lossless and --outgoing both set how fresh units start: give one of them")
    outgoing = 1.0 if options.outgoing is None else options.outgoing
    return Filling(how=how, noise=noise or 0.0, outgoing=outgoing).build_operator()


def _checkpoint(path: str, options: Any) -> Any:
    """What the path names: a folder or a hub name as it is, a GGUF file read where that is asked for."""
    from mupscale.hf import is_gguf, read_gguf

    if not options.dequantise or not is_gguf(path):
        return path
    print_at_once(wrap_text(f"reading {printable(path)} as float32"), "stderr")
    return read_gguf(path)


def _describe(module: str | None) -> None:
    """Import a module that registers descriptions of architectures."""
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


def _paths(parser: Any, words: list[str], names: tuple[str, ...], flags: tuple[str, ...] = ()) -> tuple[list[str], Any]:
    """The paths that stand alone, and the parsed options."""
    paths, options = separate_options(words, flags=flags)
    parsed = parse_arguments(parser, join_options(options))
    if len(paths) != len(names):
        raise UsageError(f"give {' and '.join(names)}" + (f", not {' '.join(paths)}" if paths else ""))
    return paths, parsed
