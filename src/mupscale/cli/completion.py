"""`mupscale --completion bash|zsh|fish`: a script for the shell, which asks `mupscale --complete` what may follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mupscale.cli.arguments import UsageError, with_hyphens
from mupscale.cli.command_lines import CommandLine
from mupscale.cli.recipe_options import RECIPE, shipped_recipes

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


def shell_script(shell: str) -> str:
    """The script for a shell."""
    if shell not in _SCRIPTS:
        raise UsageError(f"there is completion for {', '.join(_SCRIPTS)}, not for {shell or 'nothing'}")
    return _SCRIPTS[shell]


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
    """The options of a command."""
    names = {with_hyphens(f"--{name}") for row in command.rows() for name in row.names if len(name) > 1}
    return sorted(name for name in names if not name.endswith((".help", "+")))
