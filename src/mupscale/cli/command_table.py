"""The command `mupscale`: one table from a command's name to the function that runs it.

A new command is a function of the words behind its name, which returns the exit status and imports what it needs
itself, and one line in COMMANDS. What it takes is a CommandLine, of which it is the `command`. What a person can mend
is raised as a MupscaleError, or as a UsageError where the command line itself is wrong.
"""

from __future__ import annotations

import atexit
import difflib
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from mupscale.cli.arguments import UsageError
from mupscale.cli.failures import failure_sentence, give_up_stdout, prepare_streams, print_failure
from mupscale.cli.own_modules import finding_own_modules
from mupscale.cli.spelling import HELP_ALL, with_hyphens
from mupscale.system import VERSION, Interrupted, asked_by_command, check_installed, set_loudness, show, wrap_text


class Command(NamedTuple):
    """What a command is for, in a line; the module of cli and the function that run it; whether it goes on again.

    needs: optional packages that it will need, each followed by the option that asks for it, if one does.
    """

    about: str
    function: str
    resumable: bool = False
    needs: tuple[str, ...] = ()

    def load(self) -> Any:
        """The function that runs it; its `line` says what it takes, if it takes anything."""
        module, name = self.function.split(".")
        return getattr(import_module(f"mupscale.cli.{module}"), name)

    def run(self, words: list[str]) -> int:
        """Run the command, or show its help."""
        function, given = self.load(), {*map(with_hyphens, words)}
        if {"-h", "--help", HELP_ALL} & given and hasattr(function, "line"):
            show(function.line.help(everything=HELP_ALL in given))
            raise SystemExit(0)  # as a parser ends
        if not _DRAWS_NOTHING & given:
            asked = (need.partition(" ") for need in self.needs)
            check_installed([package for package, _, option in asked if option in ("", *words)], "this command")
        return int(function(words))


_PICTURES = ("matplotlib",)
_DRAWS_NOTHING = {"--dry-run", "--print-config", "--watch"}
COMMANDS = {
    "train": Command("train the model that a recipe describes", "training.train_command"),
    "resume": Command("resume a run from its last checkpoint", "training.resume_command"),
    "family": Command("train every size of a model in one growing run", "studies.family_command", True, _PICTURES),
    "run": Command(
        "does growing pay? compare four ways to spend the same FLOPs",
        "studies.run_command",
        True,
        (*_PICTURES, "optuna --paper"),
    ),
    "sweep": Command(
        "run only the tuning at small widths; several machines can share it", "studies.sweep_command", True, ("optuna",)
    ),
    "transfer-check": Command(
        "does the best learning rate or noise stay the same as the width grows?",
        "studies.transfer_check_command",
        True,
        _PICTURES,
    ),
    "report": Command("write a page with the results of a study", "studies.report_command", needs=_PICTURES),
    "curves": Command("plot the losses of several runs", "training.curves_command", needs=_PICTURES),
    "recipes": Command("list the recipes that come with mupscale", "shipped_list.recipes_command"),
    "upscale": Command("grow a Hugging Face checkpoint in width or depth", "checkpoints.upscale_command"),
    "verify": Command("check that a checkpoint and its grown version compute the same", "checkpoints.verify_command"),
    "inspect": Command("show what upscaling would do to a checkpoint", "checkpoints.inspect_command"),
    "limit grow": Command(
        "compare copies and fresh units at infinite and finite width",
        "infinite_width.limit_grow_command",
    ),
    "limit examples": Command(
        "the paper's worked examples, at infinite and finite width",
        "infinite_width.limit_examples_command",
        needs=_PICTURES,
    ),
    "limit mlp": Command(
        "upscale an MLP: do finite widths approach the infinite one?",
        "infinite_width.limit_mlp_command",
        needs=_PICTURES,
    ),
    "limit sweep": Command(
        "tune noise and learning rate at infinite width", "infinite_width.limit_sweep_command", needs=_PICTURES
    ),
    "data tokenize": Command("tokenize text and store the tokens", "tokens.tokenize_command", resumable=True),
    "data info": Command("show what a folder of tokens, or a CSV or Parquet file, holds", "tokens.info_command"),
}
"""In the order in which `mupscale --help` lists them. A name of two words, such as `data info`, is one of a group."""

_ENDING = (
    "See also: mupscale COMMAND --help; mupscale --version; mupscale --completion bash (or zsh, fish).",
    "-q shows only results. -v shows all progress, and the traceback of an error. --debug shows only the traceback.",
    "Exit status: 0 done; 1 refused, or models differ; 2 a wrong command line; 3 training diverged; 130 interrupted.",
)
_OTHER_WORDS = {"theory": "limit", "widen": "upscale", "grow": "upscale", "compare": "run"}
"""What a command might be called, and is not."""
_QUIET, _VERBOSE = {"-q", "--quiet"}, {"-v", "--verbose"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status. What a person can mend is one line on stderr, never a traceback.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    mupscale ...
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    atexit.register(gc.disable)  # the system takes all memory back, without a last search for cycles
    given = set(words)
    shows_origin = bool(given & {"--debug", *_VERBOSE} or os.environ.get("MUPSCALE_DEBUG"))
    set_loudness("quiet" if _QUIET & given else "verbose" if _VERBOSE & given else "normal")
    words = [word for word in words if word not in {"--debug", *_QUIET, *_VERBOSE}]
    status = 0
    try:
        try:
            with asked_by_command():
                status = _dispatch(words, shows_origin)
        finally:  # a parser that has printed its help goes by SystemExit
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        give_up_stdout()
        return 141
    except OSError as error:  # stdout itself: what a command meets is told by `_run`
        if shows_origin:
            raise
        give_up_stdout()
        return status or print_failure(f"mupscale: the output cannot be written: {error.strerror or error}", 1)
    return status


def _dispatch(words: list[str], shows_origin: bool) -> int:
    """Find the command, and run it."""
    if not words or words[0] in ("-h", "--help", HELP_ALL, "help"):
        show(_overview(COMMANDS))
        return 0
    if words[0] == "--version":
        show(f"mupscale {VERSION}")
        return 0
    if words[0] == "--completion":
        return _complete(" ".join(words[1:]))
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _show_group_or_refuse(words)
    return _run(name, words[len(name.split()) :], shows_origin)


def _run(name: str, words: list[str], shows_origin: bool) -> int:
    """Run a command; turn what it raises into a line and an exit status."""
    command = COMMANDS[name]
    again = "; run the same command again, and it goes on where it was" if command.resumable else ""
    try:
        with finding_own_modules():
            return command.run(words)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, Interrupted) as error:
        return print_failure(*failure_sentence(error, name, again))
    except Exception as error:
        if shows_origin:
            raise
        return print_failure(*failure_sentence(error, name, again))


def _complete(shell: str) -> int:
    """Print the script that completes command lines in a shell."""
    from mupscale.cli.completion import completion_script, options_of

    try:
        show(completion_script(shell, {name: options_of(command.load()) for name, command in COMMANDS.items()}), end="")
    except UsageError as error:
        return print_failure(f"mupscale: {error}", 2)
    return 0


def _overview(commands: dict[str, Command]) -> str:
    width = max(map(len, commands)) + 5
    lines = [
        wrap_text(f"  {name:<{width - 2}}{command.about}", hanging=" " * width) for name, command in commands.items()
    ]
    head = ["usage: mupscale COMMAND …", "", "Train networks, and grow them in the middle of training.", ""]
    return "\n".join([*head, *lines, "", *map(wrap_text, _ENDING)])


def _show_group_or_refuse(words: list[str]) -> int:
    """`mupscale data` lists the commands of the group; what names neither a command nor a group is an error."""
    group = {name: command for name, command in COMMANDS.items() if name.split()[0] == words[0]}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        show(_overview(group))
        return 0
    unknown = " ".join(words[:2]) if group else words[0]
    near = [_OTHER_WORDS[unknown]] if unknown in _OTHER_WORDS else difflib.get_close_matches(unknown, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
    return print_failure(f"mupscale: there is no command {unknown}{hint}", 2)
