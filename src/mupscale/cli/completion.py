"""`mupscale --completion bash|zsh|fish`: a script for the shell, made from what the commands take."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from mupscale.cli.arguments import UsageError
from mupscale.cli.command_lines import option_names
from mupscale.cli.shipped_list import shipped_recipes

SHELLS = ("bash", "zsh", "fish")
_TAKE_RECIPES = ("train", "run", "sweep", "transfer-check")
_GLOBAL = ("--help", "--version", "--completion", "--debug", "--quiet", "--verbose")
_BASH = """\
# mupscale --completion bash > ~/.local/share/bash-completion/completions/mupscale
_mupscale() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} name=${{COMP_WORDS[1]}} words=
    if ((COMP_CWORD == 1)); then
        words='{commands}'
    else
        case "$name ${{COMP_WORDS[2]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ $current == -* ]] || ((COMP_CWORD == 1)) || COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _mupscale mupscale
"""
_ZSH = """\
#compdef mupscale
# mupscale --completion zsh > ~/.zfunc/_mupscale   (with fpath+=~/.zfunc before compinit in ~/.zshrc)
_mupscale() {{
    local -a choices
    if ((CURRENT == 2)); then
        choices=({commands})
    else
        case "${{words[2]}} ${{words[3]}}" in
{cases}
        esac
    fi
    compadd -- $choices
    [[ $PREFIX == -* ]] || ((CURRENT == 2)) || _files
}}
if [[ ${{funcstack[1]}} == _mupscale ]]; then _mupscale "$@"; else compdef _mupscale mupscale; fi
"""
_FISH = """\
# mupscale --completion fish > ~/.config/fish/completions/mupscale.fish
complete -c mupscale -n __fish_use_subcommand -f -a '{commands}'
"""


def completion_script(shell: str, options: Mapping[str, list[str]]) -> str:
    """The script for a shell; options: those of each command."""
    if shell not in SHELLS:
        raise UsageError(f"there is completion for {', '.join(SHELLS)}, not for {shell or 'nothing'}")
    recipes = list(shipped_recipes())
    words = {n: [*own, *(recipes if n in _TAKE_RECIPES else [])] for n, own in options.items()}
    first = list(dict.fromkeys([*(name.split()[0] for name in words), *_GLOBAL]))
    for group in {name.split()[0] for name in words if " " in name}:
        words[group] = [name.split()[1] for name in words if name.startswith(f"{group} ")]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](first, words)


def options_of(command: Any) -> list[str]:
    """The options that the function of a command takes."""
    rows = command.line.rows() if hasattr(command, "line") else []
    names = {name for row in rows for name in option_names(row.option)}
    return sorted(f"--{name}" for name in names if len(name) > 1 and not name.endswith((".help", "+")))


def _cases(words: Mapping[str, list[str]], indent: str, action: str) -> str:
    """Branches of a shell's `case`, longer names first."""
    lines = []
    for name in sorted(words, key=lambda name: -len(name.split())):
        pattern = shlex.quote(name) if " " in name else f"{shlex.quote(f'{name} ')}*"
        lines.append(f"{indent}{pattern}) {action.format(shlex.join(words[name]))} ;;")
    return "\n".join(lines)


def _bash(first: list[str], words: Mapping[str, list[str]]) -> str:
    return _BASH.format(commands=" ".join(first), cases=_cases(words, " " * 12, "words='{}'"))


def _zsh(first: list[str], words: Mapping[str, list[str]]) -> str:
    return _ZSH.format(commands=" ".join(first), cases=_cases(words, " " * 12, "choices=({})"))


def _fish(first: list[str], words: Mapping[str, list[str]]) -> str:
    lines = [_FISH.format(commands=" ".join(first)).rstrip()]
    for name, choices in words.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for choice in choices:
            what = f"-l {choice[2:]}" if choice.startswith("--") else f"-a {shlex.quote(choice)}"
            lines.append(f"complete -c mupscale -n {shlex.quote(seen)} {what}")
    return "\n".join(lines) + "\n"
