"""Packages that not every user needs: the one list of them, and how to install one that is missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mupscale.system.errors import MupscaleError

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
