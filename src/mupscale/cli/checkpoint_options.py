"""Options of the commands for checkpoints, and what is wrong with them before anything is imported or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.cli.arguments import UsageError
from mupscale.system import MupscaleError, check_has_config, parse_multipliers


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
