"""Modules of one's own in the current folder: those that a person names, and what these import from beside them.

The current folder is not searched for modules, for it may be a download: whoever puts a dill.py there would have it run
by the first library that looks for dill. What is installed always goes first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from mupscale.system import Typed

_FOR_CHILDREN = "MUPSCALE_OWN_MODULES"  # folder and names, for processes that are started while a command runs
_SAFE_PATH = "PYTHONSAFEPATH"  # which keeps the current folder out of the path of these
_IMPORTLIB = {"importlib", "_frozen_importlib", "_frozen_importlib_external"}
_NAME_CLASSES = {"class_path", "model", "data", "optimizer", "loss", "callbacks"}  # keys whose values do


class OwnModules:
    """Finds, in one folder, modules that were named, and those that a module which it has found asks for."""

    def __init__(self, folder: str, names: Iterable[str] = ()) -> None:
        self.folder, self.names, self.found = folder, set(names), set[str]()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where a module lies, or None: of a package only the package itself is asked for here."""
        if path is not None or not (fullname in self.names or _who_asks() in self.found):
            return None
        spec = PathFinder.find_spec(fullname, [self.folder])
        if spec is not None:
            self.found.add(fullname)
            self.allow([fullname])
        return spec

    def allow(self, names: Iterable[str]) -> None:
        """Let these be found, in processes that are started from now on, too."""
        self.names.update(names)
        os.environ[_FOR_CHILDREN] = os.pathsep.join([self.folder, *sorted(self.names)])


def _who_asks() -> str:
    """The outermost package of the module whose code asks for an import."""
    frame = sys._getframe(2)
    while (name := str(frame.f_globals.get("__name__")).partition(".")[0]) in _IMPORTLIB and frame.f_back:
        frame = frame.f_back
    return name


@contextmanager
def finding_own_modules() -> Iterator[None]:
    """While a command runs, let what `allow_modules` is told be found in the current folder, and nothing else there."""
    before = {name: os.environ.get(name) for name in (_FOR_CHILDREN, _SAFE_PATH)}
    finder = OwnModules(os.getcwd())
    sys.meta_path.append(finder)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def allow_modules(names: Iterable[str]) -> None:
    """Let the packages of these import paths be found in the current folder: a person has named them."""
    for finder in sys.meta_path:
        if isinstance(finder, OwnModules):
            finder.allow(name.partition(".")[0] for name in names)


def named_classes(values: Any, key: str = "") -> Iterator[str]:
    """The import paths in the plain values of a recipe, or in the value of an option of this name."""
    if isinstance(values, Typed):  # one, several between commas, or a list in brackets
        values = [str(each) if isinstance(each, str) else each for each in values.texts()]
    if isinstance(values, str):
        yield from [values] if key.rstrip("+").rpartition(".")[2] in _NAME_CLASSES else []
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from named_classes(value, str(name))
    elif isinstance(values, list):
        for value in values:
            yield from named_classes(value, key)


if _FOR_CHILDREN in os.environ and "multiprocessing.spawn" in sys.modules:  # started by a module of one's own
    _folder, *_names = os.environ[_FOR_CHILDREN].split(os.pathsep)
    sys.meta_path.append(OwnModules(_folder, _names))
