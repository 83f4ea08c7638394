"""Options of the commands for checkpoints, and what is wrong with them before anything is imported or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mupscale.cli.arguments import UsageError
from mupscale.system import check_has_config, parse_multipliers

_HOW_DEEP = ("identity", "stack", "interleaved")


def _depth(options: Any) -> tuple[str | None, dict[str, Any]]:
    """What --how says of width, and what of depth: beside --layers it may name either."""
    how, deepen = options.how, options.deepen
    if options.layers is None:
        if deepen is not None or how in _HOW_DEEP:
            raise UsageError(f"{'--deepen' if deepen else f'--how {how}'} is about new layers: add --layers N")
        return how, {}
    if how in _HOW_DEEP:
        if deepen is not None:
            raise UsageError(f"--how {how} and --deepen {deepen} both say what new layers are: leave one out")
        if any(size is not None for size in (options.times, options.hidden, options.ffn, options.heads, options.kv)):
            raise UsageError(f"beside a width --how is about the width: say --deepen {how} of the new layers")
        how, deepen = None, how
    return how, {"layers": options.layers, "deepen": deepen or "identity"}


def check_before_imports(path: str, options: Any) -> dict[str, Any]:
    """What is wrong without looking at any tensor, said before torch is imported; what is asked of depth."""
    options.how, depth = _depth(options)
    if options.how not in (None, "copies", "fresh"):
        raise UsageError(
            f"--how {options.how}: it is fresh or copies, of more units, or with --layers {', '.join(_HOW_DEEP)}"
        )
    if options.times is not None:
        parse_multipliers(options.times)
    if Path(path).is_dir() and not (Path(path) / "adapter_config.json").exists():
        check_has_config(Path(path))
    return depth


def add_times(parser: Any) -> None:
    """By how much, and where a description lies."""
    meaning = "how much wider: a whole number, or hidden=2,ffn=3,heads=2 (kv=… for key/value heads); 1 if not named; of"
    meaning += " a model of several parts text=2,vision.ffn=3"
    meaning = f"{meaning} (default: 2, or what the sizes below say)"
    parser.add_argument("--times", type=str | None, default=None, help=meaning)
    add_describe(parser)


def add_trust(parser: Any) -> None:
    """Whether code of the checkpoint's own runs."""
    meaning = "run the code that the checkpoint brings with it, of its model or its tokenizer"
    parser.add_argument("--trust-remote-code", action="store_true", help=meaning)


def add_growth(parser: Any) -> None:
    """By which operator, to which sizes."""
    meaning = "fresh for new units beside the old ones (the default), or copies (with --noise or --exact); with"
    meaning += " --layers alone identity, stack or interleaved"
    parser.add_argument("--how", type=str | None, default=None, help=meaning)
    parser.add_argument("--hidden", type=str | None, help="hidden size of the wide model, instead of --times")
    parser.add_argument("--ffn", type=str | None, help="size of its feed-forward layers; what is not named stays")
    parser.add_argument("--heads", type=str | None, help="number of its attention heads; head_dim stays")
    parser.add_argument(
        "--kv", type=str | None, help="number of its key/value heads (default: they grow with the heads)"
    )
    outgoing = "of fresh units: how much of their weight towards old ones they start with, 0 to 1 (default: 1)"
    parser.add_argument("--outgoing", type=float | None, help=outgoing)
    parser.add_argument("--lossless", action="store_true", help="fresh units that leave the function as it is")


def add_depth(parser: Any) -> None:
    """How many layers, and what new ones are."""
    meaning = "number of layers of a deeper model; the width stays unless it is given, too"
    parser.add_argument("--layers", type=int | None, help=meaning)
    meaning = "what new layers are: identity, stack or interleaved, where --how is about the width"
    parser.add_argument("--deepen", type=str | None, help=meaning)


def add_mixture(parser: Any) -> None:
    """Experts of a mixture."""
    parser.add_argument(
        "--experts", type=int | None, help="number of experts of a mixture, each the layer that there is"
    )
    parser.add_argument("--active", type=int | None, help="how many of them a token is sent to (default: 2)")


def add_dequantise(parser: Any) -> None:
    """Whether quantised numbers are read as float32."""
    meaning = "read a GGUF file: its weights as float32, as far as it has not rounded them"
    parser.add_argument("--dequantise", action="store_true", help=meaning)


def add_describe(parser: Any) -> None:
    """Where a description lies."""
    meaning = "a Python module of yours that registers the description of an architecture"
    parser.add_argument("--describe", type=str | None, metavar="MODULE", help=meaning)
