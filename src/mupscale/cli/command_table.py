"""The command `mupscale`: one table of its commands.

A new command is a CommandLine, the function that it is the `command` of, which takes the words behind its name, returns
the exit status and imports what it needs itself, and a place in COMMANDS. What a person can mend is raised as a
MupscaleError, or as a UsageError where the command line itself is wrong.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from mupscale import system
from mupscale.cli import checkpoints, infinite_width, studies, training
from mupscale.cli.arguments import DIVERGED, Answered, UsageError, with_hyphens
from mupscale.cli.command_lines import HELP_ALL, CommandLine
from mupscale.cli.own_modules import finding_own_modules
from mupscale.cli.recipe_options import RECIPE, shipped_recipes

COMMANDS: dict[str, CommandLine] = {
    line.name: line
    for line in (
        training.TRAIN,
        training.RESUME,
        studies.FAMILY,
        studies.RUN,
        studies.SWEEP,
        studies.TRANSFER_CHECK,
        studies.REPORT,
        training.CURVES,
        training.RECIPES,
        checkpoints.UPSCALE,
        checkpoints.VERIFY,
        checkpoints.INSPECT,
        infinite_width.GROW,
        infinite_width.EXAMPLES,
        infinite_width.MLP,
        infinite_width.SWEEP,
        training.TOKENIZE,
        training.INFO,
    )
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
    """Run a command line and return its exit status. What a person can mend is one line on stderr, no traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    atexit.register(gc.disable)  # the system takes all memory back, without a last search for cycles
    given = set(words)
    shows_origin = bool(given & {"--debug", *_VERBOSE})
    status = 0
    try:
        if words[:1] == ["--complete"]:  # a shell asks
            system.show(*completions(COMMANDS, words[2:]))
            return 0
        words = [word for word in words if word not in {"--debug", *_QUIET, *_VERBOSE}]
        with (
            system.asked_by_command(),
            system.at_loudness("quiet" if _QUIET & given else "verbose" if _VERBOSE & given else "normal"),
        ):
            status = _dispatch(words, shows_origin)
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
    if not words or words[0] in ("-h", "--help", HELP_ALL, "help"):
        system.show(_overview(COMMANDS))
        return 0
    if words[0] == "--version":
        system.show(f"mupscale {system.VERSION}")
        return 0
    if words[0] == "--completion":
        if (shell := " ".join(words[1:])) not in _SCRIPTS:
            told = f"there is completion for {', '.join(_SCRIPTS)}, not for {shell or 'nothing'}"
            return print_failure(f"mupscale: {told}", 2)
        system.show(_SCRIPTS[shell], end="")
        return 0
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        return _show_group_or_refuse(words)
    return _run(COMMANDS[name], words[len(name.split()) :], shows_origin)


def _run(command: CommandLine, words: list[str], shows_origin: bool) -> int:
    again = "; run the same command again to continue where it stopped" if command.resumable else ""
    try:
        with finding_own_modules():
            return command.run(words)
    except Answered:
        return 0
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, system.Interrupted) as error:
        return print_failure(*failure_sentence(error, command.name, again))
    except Exception as error:
        if shows_origin:
            raise
        return print_failure(*failure_sentence(error, command.name, again))


def _overview(commands: Mapping[str, CommandLine]) -> str:
    width = max(map(len, commands)) + 5
    lines = [
        system.wrap_text(f"  {name:<{width - 2}}{command.summary}", hanging=" " * width)
        for name, command in commands.items()
    ]
    head = ["usage: mupscale COMMAND …", "", "Train networks, and grow them in the middle of training.", ""]
    return "\n".join([*head, *lines, "", *map(system.wrap_text, _ENDING)])


def _show_group_or_refuse(words: list[str]) -> int:
    """`mupscale data` lists the commands of the group; what names neither a command nor a group is an error."""
    group = {name: command for name, command in COMMANDS.items() if name.split()[0] == words[0]}
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        system.show(_overview(group))
        return 0
    unknown = " ".join(words[:2]) if group else words[0]
    known = {**{name: name for name in COMMANDS}, **_OTHER_WORDS}
    meant = system.did_you_mean(unknown, known, known.__getitem__) or f"; there are {', '.join(COMMANDS)}"
    return print_failure(f"mupscale: there is no command {unknown}{meant}", 2)


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 600


def failure_sentence(error: BaseException, command: str, again: str) -> tuple[str, int]:
    """The line that tells what went wrong, and the exit status. again: what to add where a command can go on."""
    of_command = f"mupscale {command}"
    if isinstance(error, KeyboardInterrupt):
        return f"{of_command}: interrupted{again}", 130
    if isinstance(error, system.Interrupted):
        return f"{of_command}: {error}{again}", 130
    if isinstance(error, UsageError):
        return f"{of_command}: {error}", 2
    if isinstance(error, system.MupscaleError):
        return f"{of_command}: {error}", DIVERGED if isinstance(error, system.Diverged) else 1
    if isinstance(error, OSError):
        named, reason = error.filename, error.strerror or _first_words(error)
        if error.errno in _DISK_FULL:
            named, reason = named and f"{named} cannot be written", f"{reason}; free some space"
        return f"{of_command}: {f'{named}: ' if named else ''}{reason}{again}", 1
    if system.is_out_of_memory(error):
        return f"{of_command}: there is not enough memory ({_first_words(error)}); use smaller sizes{again}", 1
    if isinstance(error, RecursionError):
        return f"{of_command}: the input is nested too deeply", 1
    if isinstance(error, ValueError) and "null byte" in str(error):
        return f"{of_command}: a path contains a NUL character, which no system accepts", 1
    return f"{of_command}: {_first_words(error)}; -v shows where it comes from", 1


def _first_words(error: BaseException) -> str:
    """The kind of an error and what it says, on one line."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # of a class of the user's, perhaps
        said = ""
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def print_failure(line: str, status: int) -> int:
    """Print an error on one line, from one process of many; return the exit status."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_another = rank.isdecimal() and int(rank) > 0 and not (world.isdecimal() and int(rank) >= int(world))
    if not is_another:  # nor one whose rank is none
        system.show(system.printable(line), stream="stderr")
    return status


def prepare_streams() -> None:
    """Let every text be printed: into nothing where a stream is closed, written out where it is ASCII alone.

    Warnings and errors with their origin are shown as all that is printed.
    """
    system.show_foreign_errors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def give_up_stdout() -> None:
    """Whoever read the output is gone, or its disk is full: what is left of it goes nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # it has no descriptor of its own
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


_GLOBAL = ("--help", "--version", "--completion", "--debug", "--quiet", "--verbose")
_SCRIPTS = {
    "bash": """\
# mupscale --completion bash > ~/.local/share/bash-completion/completions/mupscale
_mupscale() {
    local IFS=$'\\n' current=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=($(mupscale --complete "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null))
    [[ $current == -* ]] || ((COMP_CWORD == 1)) || COMPREPLY+=($(compgen -f -- "$current"))
}
complete -o filenames -F _mupscale mupscale
""",
    "zsh": """\
#compdef mupscale
# mupscale --completion zsh > ~/.zfunc/_mupscale   (with fpath+=~/.zfunc before compinit in ~/.zshrc)
_mupscale() {
    local -a choices
    choices=("${(@f)$(mupscale --complete "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    compadd -- $choices
    [[ $PREFIX == -* ]] || ((CURRENT == 2)) || _files
}
if [[ ${funcstack[1]} == _mupscale ]]; then _mupscale "$@"; else compdef _mupscale mupscale; fi
""",
    "fish": """\
# mupscale --completion fish > ~/.config/fish/completions/mupscale.fish
complete -c mupscale -n __fish_use_subcommand -f
complete -c mupscale -a '(mupscale --complete (commandline -opc) (commandline -ct) 2>/dev/null)'
""",
}


def completions(commands: Mapping[str, CommandLine], words: Sequence[str]) -> list[str]:
    """What the last of the words behind `mupscale` may become; files are the shell's."""
    *before, current = words or [""]
    return sorted(word for word in {*_choices(commands, before)} if word.startswith(current))


def _choices(commands: Mapping[str, CommandLine], before: Sequence[str]) -> Iterator[str]:
    if not before:
        yield from (*(name.split()[0] for name in commands), *_GLOBAL)
    elif len(before) == 1:
        yield from (name.split()[1] for name in commands if name.startswith(f"{before[0]} "))
    for name in {" ".join(before[:count]) for count in (1, 2)} & commands.keys():
        yield from options_of(commands[name])
        yield from shipped_recipes() if RECIPE[0] in commands[name].parts else ()


def options_of(command: CommandLine) -> list[str]:
    names = {with_hyphens(f"--{name}") for row in command.rows() for name in row.names if len(name) > 1}
    return sorted(name for name in names if not name.endswith((".help", "+")))
