"""The command `mupscale`: one table from a command's name to the function that runs it.

A new command is a function of the words behind its name, which returns the exit status and imports what it needs
itself, and one line in COMMANDS. Words are parsed by `make_parser` and `parse_arguments` of cli.arguments; what a
person can mend is raised as a MupscaleError, or as a UsageError where the command line itself is wrong.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from mupscale.cli.arguments import look_in_current_folder
from mupscale.cli.failures import failure_sentence, give_up_stdout, has_current_folder, prepare_streams, print_failure
from mupscale.system import VERSION, Interrupted


class Command(NamedTuple):
    """What a command is for, in a line; the module of cli and the function that run it; whether it goes on again.

    loads_classes: whether a recipe names classes for it, which may lie in the current folder.
    """

    about: str
    function: str
    resumable: bool = False
    loads_classes: bool = False

    def run(self, words: list[str]) -> int:
        """Import what runs the command, and run it."""
        module, name = self.function.split(".")
        return int(getattr(import_module(f"mupscale.cli.{module}"), name)(words))


COMMANDS = {
    "train": Command("train a model as a recipe says", "training.train_command", loads_classes=True),
    "resume": Command("go on with a run that was stopped", "training.resume_command", loads_classes=True),
    "run": Command(
        "does growing pay? four ways to spend the same FLOPs, tuned small", "comparison.run_command", True, True
    ),
    "sweep": Command("tune at the small widths alone, or help others do it", "method.sweep_command", True, True),
    "transfer-check": Command(
        "does the optimum stay where it is as widths grow?", "method.transfer_check_command", True, True
    ),
    "report": Command("a page of pictures from runs of the method", "method.report_command"),
    "curves": Command("draw the losses of runs into one picture", "training.curves_command"),
    "recipes": Command("list the recipes that ship", "shipped_list.recipes_command"),
    "upscale": Command("make a Hugging Face checkpoint wider, exactly", "checkpoints.upscale_command"),
    "verify": Command("do a checkpoint and its wider one compute, and train, alike?", "checkpoints.verify_command"),
    "inspect": Command("what upscaling would do to a checkpoint, as a table", "checkpoints.inspect_command"),
    "limit examples": Command(
        "the paper's worked examples at infinite width, and finite networks", "infinite_width.limit_examples_command"
    ),
    "limit mlp": Command(
        "upscale an MLP at infinite width and at finite ones: do they meet?", "infinite_width.limit_mlp_command"
    ),
    "limit sweep": Command("tune noise and learning rate at infinite width", "infinite_width.limit_sweep_command"),
    "data tokenize": Command("turn text into tokens, once", "tokens.tokenize_command", resumable=True),
    "data info": Command("what a folder of tokens holds", "tokens.info_command"),
}
"""In the order in which `mupscale --help` lists them. A name of two words, such as `data info`, is one of a group."""

_SHOW_ORIGIN = ("-v", "--verbose", "--debug")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status. What a person can mend is one line on stderr, never a traceback.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    mupscale ...
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    shows_origin = any(word in _SHOW_ORIGIN for word in words) or bool(os.environ.get("MUPSCALE_DEBUG"))
    words = [word for word in words if word not in _SHOW_ORIGIN]
    try:
        status = _dispatch(words, shows_origin)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        give_up_stdout()
        return 141
    except OSError as error:  # stdout itself: what a command meets is told by `_run`
        if shows_origin:
            raise
        give_up_stdout()
        return print_failure(f"mupscale: the output cannot be written: {error.strerror or error}", 1)
    return status


def _dispatch(words: list[str], shows_origin: bool) -> int:
    """Find the command, and run it."""
    if not has_current_folder():  # without one not even torch can be imported
        return print_failure("mupscale: the current folder does not exist any more: go to another one (cd)", 1)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(COMMANDS))
        return 0
    if words[0] == "--version":
        print(f"mupscale {VERSION}")
        return 0
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _show_group_or_refuse(words)
    return _run(name, words[len(name.split()) :], shows_origin)


def _run(name: str, words: list[str], shows_origin: bool) -> int:
    """Run a command; turn what it raises into a line and an exit status."""
    command = COMMANDS[name]
    again = "; run the same command again, and it goes on where it was" if command.resumable else ""
    try:
        if command.loads_classes:
            look_in_current_folder()
        return command.run(words)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, Interrupted) as error:
        return print_failure(*failure_sentence(error, name, again))
    except Exception as error:
        if shows_origin:
            raise
        return print_failure(*failure_sentence(error, name, again))


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
            "mupscale COMMAND --help tells more; mupscale --version; -v shows where an error comes from.",
        ]
    )


def _show_group_or_refuse(words: list[str]) -> int:
    """`mupscale data` lists the commands of the group; what names neither a command nor a group is an error."""
    group = {name: command for name, command in COMMANDS.items() if name.split()[0] == words[0]}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_overview(group))
        return 0
    unknown = " ".join(words[:2]) if group else words[0]
    near = difflib.get_close_matches(unknown, COMMANDS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
    return print_failure(f"mupscale: there is no command {unknown}{hint}", 2)
