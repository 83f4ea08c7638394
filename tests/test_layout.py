"""The house: which package may import which, what is private, and names that say one thing each.

Everything here is read off the sources, so that a test fails where the layout does, and says which line.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from syntax import face, nodes, tree

SOURCE = Path(__file__).parents[1] / "src" / "mupscale"
HEAVY = ["matplotlib", "optuna", "transformers", "tokenizers", "rich", "jinja2", "yaml", "sklearn", "datasets"]

FLOORS = [
    ["system"],
    ["core", "plots"],
    ["planning", "optim", "models", "data", "theory"],
    ["growth"],
    ["checks", "checkpoint"],
    ["family"],
    ["train"],
    ["engine"],
    ["study", "hf"],
    ["report"],
    ["cli"],
    ["__init__", "__main__"],
]
"""Packages and files of the package, from the ground up: each imports only from floors below its own."""

PACKAGES = sorted(path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.glob("**/__init__.py"))[1:]


def modules() -> Iterator[Path]:
    yield from sorted(SOURCE.glob("**/*.py"))


def room(path: Path) -> str:
    """The package or file directly below mupscale that a module is part of."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str, str]]:
    """Line, module and name of every import from this package, those inside functions included."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mupscale":
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names if alias.name.startswith("mupscale.")]
    return found


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_import_needs_no_extras() -> None:
    script = f"import sys, mupscale; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names() -> None:
    import mupscale

    assert sorted(mupscale.__all__) == mupscale.__all__
    for name in mupscale.__all__:
        assert (getattr(mupscale, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_every_part_has_a_floor() -> None:
    parts = {room(path) for path in modules()}
    assert parts == {part for floor in FLOORS for part in floor}


def test_every_part_is_in_the_picture() -> None:
    module = tree(SOURCE.parents[1] / "tools" / "draw_layout.py")
    names = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    assert isinstance(names["BOXES"], ast.Dict)
    drawn = {ast.literal_eval(key) for key in names["BOXES"].keys if key is not None}
    assert drawn == {room(path) for path in modules() if not room(path).startswith("__")}


def test_imports_go_down() -> None:
    """Imports inside functions are lazy, and go down all the same."""
    height = {part: number for number, floor in enumerate(FLOORS) for part in floor}
    for path in modules():
        for line, module, name in imports(path):
            full = f"{module}.{name}"
            target = (full if is_module(full) else module).split(".")[1:2]
            if not target or target[0] == room(path) or room(path).startswith("__"):
                continue
            where = f"{path.relative_to(SOURCE)}:{line} imports {full}"
            assert height[target[0]] < height[room(path)], where


def test_other_packages_are_asked_through_their_face() -> None:
    """Outside its package a name is imported from the package itself, whose face has it."""
    for path in modules():
        own = f"mupscale.{room(path)}"
        for line, module, name in imports(path):
            if not name or module.startswith(own) or module == "mupscale" or room(path).startswith("__"):
                continue
            where = f"{path.relative_to(SOURCE)}:{line} imports {name} from {module}"
            assert module.count(".") == 1, f"{where}: ask mupscale.{module.split('.')[1]}"
            if (SOURCE / module.split(".")[1] / "__init__.py").is_file():
                assert name in face(module), f"{where}, whose face does not have it"


def test_private_names_stay_at_home() -> None:
    for path in modules():
        for line, module, name in imports(path):
            assert not name.startswith("_") or name == "__version__", (
                f"{path.relative_to(SOURCE)}:{line} {module}.{name}"
            )


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_what_they_are(package: str) -> None:
    module = importlib.import_module(f"mupscale.{package.replace('/', '.')}")
    assert module.__doc__, f"{package} has no docstring"
    for name in face(module.__name__):
        assert hasattr(module, name), f"{package} lists {name}, which it does not have"


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_no_circles_within_a_package(package: str) -> None:
    """Imports for types included."""
    folder = SOURCE / package
    prefix = ".".join(["mupscale", *Path(package).parts])
    within: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem == "__init__":
            continue
        targets = within.setdefault(path.stem, set())
        for _, module, name in imports(path):
            if module == prefix:
                targets.add(name)
            elif module.startswith(f"{prefix}."):
                targets.add(module.removeprefix(f"{prefix}.").split(".")[0])
    ready: set[str] = {name for targets in within.values() for name in targets if name not in within}
    while left := [name for name in within if name not in ready]:
        free = [name for name in left if within[name] <= ready | {name}]
        assert free, f"{package or 'mupscale'} imports in a circle: {', '.join(left)}"
        ready.update(free)


def test_warnings_go_through_the_one_function_that_finds_the_readers_line() -> None:
    found = [p for p in modules() if "warnings.warn(" in p.read_text(encoding="utf-8") and p.name != "errors.py"]
    assert found == []
