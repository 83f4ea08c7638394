"""What the library refuses and warns of, in the words of whoever asked: an argument in Python, a command's option.

Everything it refuses, it refuses with a MupscaleError; an optional package that is missing, too.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class MupscaleError(Exception):
    """Raised for anything the user can mend; the message names what is wrong and what to do about it."""


class PlanError(MupscaleError):
    """Modules alone do not tell what a parameter's width is to it; a batch (`inputs=`) or `roles=` would."""


class Diverged(MupscaleError):
    """Training, or a program at infinite width, has left the finite numbers."""


class Interrupted(MupscaleError):
    """The user asked to stop; what was done is saved where there is a place for it."""


class ReplicaWarning(UserWarning):
    """A model grows by copies without noise, which stay equal for ever, and nobody has said that this is meant."""


class UncheckedPlan(UserWarning):
    """A model grows by a plan that nobody has tried: it follows from module types and names alone."""


_OURS = {__name__.partition(".")[0], "torch", "transformers", "lightning", "pytorch_lightning"}
"""Whose frames stand between a warning and its reader's line: torch's no_grad and trainers that call back do, too."""
_BY_CLASS = "give its roles beside the model's class, with mupscale.register_roles"
_UNSAID: ContextVar[frozenset[str]] = ContextVar("unsaid", default=frozenset())
_BY_COMMAND: ContextVar[bool] = ContextVar("by_command", default=False)


@contextmanager
def asked_by_command() -> Iterator[None]:
    """While a command runs, messages name its options."""
    token = _BY_COMMAND.set(True)
    try:
        yield
    finally:
        _BY_COMMAND.reset(token)


def as_asked(argument: str, option: str) -> str:
    """The one of two ways to say a thing that the caller has.

    >>> as_asked("grow=mupscale.Fresh()", "--how fresh")
    'grow=mupscale.Fresh()'
    """
    return option if _BY_COMMAND.get() else argument


def setting(name: str, value: object = "") -> str:
    """A setting for a message, with its value if one is given.

    >>> setting("hidden", 48), setting("times", "ffn=2"), setting("kv")
    ('hidden=48', 'times="ffn=2"', 'kv=')
    """
    quoted = f'"{value}"' if isinstance(value, str) and value else value
    return as_asked(f"{name}={quoted}", f"--{name} {value}".rstrip())


def recipe_entry(path: str) -> str:
    """An entry of a recipe for a message; whoever calls from Python has no recipe, but the settings it fills.

    >>> recipe_entry("study.widths")
    'StudySettings.widths'
    """
    section, _, name = path.partition(".")
    return as_asked(f"{section.capitalize()}Settings.{name}", path)


@contextmanager
def not_advising(*settings: str) -> Iterator[None]:
    """Inside, `ways_out` names none of these: whoever asked lacks them, or has given them.

    >>> with not_advising("roles"):
    ...     ways_out(roles="pass roles=", inputs="pass a batch, inputs=")
    ': pass a batch, inputs='
    """
    token = _UNSAID.set(_UNSAID.get() | {*settings})
    try:
        yield
    finally:
        _UNSAID.reset(token)


def ways_out(before: str = ": ", /, **ways: str) -> str:
    """What may be done about an error, as the end of its sentence: by setting, those that whoever asked can make.

    roles: of a command's model they are given beside its class. inputs, no_inputs: a batch, given or left out, which
    no command takes. Any other name is a way that everybody has.

    >>> ways_out(size="leave that size as it is", roles="pass roles= for it")
    ': leave that size as it is, or pass roles= for it'
    >>> with asked_by_command():
    ...     ways_out("; ", no_inputs="leave out inputs=", roles="pass roles= for it")
    "; give its roles beside the model's class, with mupscale.register_roles"
    """
    unsaid = _UNSAID.get()
    if _BY_COMMAND.get():
        unsaid, ways = unsaid | {"inputs", "no_inputs"}, {**ways, **({"roles": _BY_CLASS} if "roles" in ways else {})}
    said = [way for setting, way in ways.items() if setting not in unsaid]
    return before + ", or ".join(said) if said else ""


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """The end of a sentence that refuses a name: the one that was meant, perhaps, as `shown` writes it.

    >>> did_you_mean("stpes", ["steps", "batch"]), did_you_mean("x", ["steps"])
    ('; did you mean steps?', '')
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {shown(near[0])}?" if near else ""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the first line outside this package, and outside the libraries that call it back: the reader's own.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as said:
    ...     warn("the batch is empty")
    >>> str(said[0].message)
    'the batch is empty'
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


EXTRAS = {
    "accelerate": "hf",
    "gguf": "hf",
    "huggingface_hub": "hf",
    "transformers": "hf",
    "optuna": "sweep",
    "psycopg": "sweep",
    "matplotlib": "plots",
    "tensorboard": "plots",
    "pyarrow": "text",
    "tokenizers": "text",
    "datasets": "all",
    "sklearn": "all",
}
"""By the name that is imported: which extra of mupscale brings a package."""


def require(module: str, *, reason: str, remedy: str = "") -> Any:
    """Import an optional package; where it is missing, say for what it is needed and how to install it.

    reason: the sentence before the pip command. remedy: what goes on after it, if there is another way.
    """
    try:
        return import_module(module)
    except ImportError:
        raise MupscaleError(f"{reason}: {_pip_line([module.partition('.')[0]])}{remedy}") from None


def check_installed(packages: Iterable[str], what: str) -> None:
    """Refuse, before anything starts, what will need packages that are not installed; they are not imported.

    >>> check_installed(["json", "absent_package"], "this command")
    Traceback (most recent call last):
    mupscale.system.errors.MupscaleError: this command needs absent_package: pip install absent_package
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise MupscaleError(f"{what} needs {' and '.join(missing)}: {_pip_line(missing)}")


def _pip_line(packages: Iterable[str]) -> str:
    extras = ",".join(dict.fromkeys(EXTRAS[name] for name in packages if name in EXTRAS))
    others = [name for name in packages if name not in EXTRAS]
    return " ".join(["pip install", *([f"'mupscale[{extras}]'"] if extras else []), *others])
