"""upscale, verify and inspect for folders of torch.distributed.checkpoint, such as torchtitan's."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import CommandLine, Option
from mupscale.cli.own_modules import allow_modules
from mupscale.system import MupscaleError, print_at_once, printable, show, text_table, wrap_text

_EXPERTS = ("experts", "top_k")
_FOR_BOTH = {*_EXPERTS, "how", "noise", "exact", "outgoing", "deepen", "seed", "optimizer", "overwrite"}

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


def check_which(options: Any, line: CommandLine, dcp: bool) -> None:
    """An error where an option is for the other kind of checkpoint."""
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
        growth = _growth(options, grows)
        if "units" in grows and is_replica(growth.build_operator()) and not options.exact and processes.main:
            print_at_once(wrap_text(replica_in_words()), "stderr")
        known: dict[str, Any] = {"seed": options.seed, "optimizer": _optimizer(options), "processes": processes}
        known["router"] = "silent" if options.exact else "drawn"
        upscaled = upscale_dcp(path, out, family, *sizes, growth, **known)
        return str(upscaled) if processes.main else ""


def _growth(options: Any, grows: set[Any]) -> Any:
    """How new parts are filled; experts alone are copies."""
    from mupscale.train import Growth

    noise = getattr(options, "noise", None) or 0.0
    copies = getattr(options, "exact", False) or noise or grows == {"experts"}
    how = options.how or ("copies" if copies else "fresh")
    outgoing = 1.0 if options.outgoing is None else options.outgoing
    return Growth(0, how=how, noise=noise, outgoing=outgoing, deepen=options.deepen or "identity")


def verify_dcp_folders(small: str, large: str, options: Any) -> int:
    """Compare two folders."""
    from mupscale.train import compare_dcp, import_path

    allow_modules([options.model or ""])
    comparison = compare_dcp(small, large, build=options.model and import_path(options.model))
    show(str(comparison))
    return 0 if comparison.ok else 1


def inspect_dcp_folder(path: str, options: Any) -> int:
    """What is in a folder, or, where sizes are given, what growing to them would do."""
    from mupscale.train import DcpFolder, describe_dcp_growth, what_grows

    if any(getattr(options, name) is not None for name in ("to", *_EXPERTS)):
        family, sizes = _family(options)
        show(describe_dcp_growth(path, family, *sizes, _growth(options, what_grows(family, *sizes))))
        return 0
    folder, rows = DcpFolder(path), Counter[tuple[str, str, str]]()
    for name in (*folder.shapes, *folder.objects):
        of_any_layer, what = printable(re.sub(r"(?<=\.)\d+(?=\.)", "*", name)), ("", "object")
        if name in folder.shapes:
            shape, dtype = folder.shapes[name], str(folder.dtypes[name]).removeprefix("torch.")
            what = "×".join(map(str, shape)) or "a number", dtype
        rows[of_any_layer, *what] += 1
    cells = [(name, shape, dtype, str(count) if count > 1 else "") for (name, shape, dtype), count in rows.items()]
    show(text_table(("name", "shape", "dtype", "layers"), cells, left=3))
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
        raise MupscaleError(f"{options.optimizer} is not a torch.optim.Optimizer")
    return found
