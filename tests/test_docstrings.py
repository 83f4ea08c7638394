"""What the package says of itself, and how it is named: examples that run, names that mean one thing.

The examples themselves are run by pytest (--doctest-modules).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syntax import face, tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mupscale"
PACKAGES = sorted(".".join(path.parent.relative_to(SOURCE.parent).parts) for path in SOURCE.glob("**/__init__.py"))
MIRRORED = {"plan", "upscale", "verify", "param_groups", "inspect"}
"""The core's verbs, which mupscale.hf has under the same names, for checkpoints on disk."""


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package: its path below src, and its tree."""
    for path in sorted(SOURCE.glob("**/*.py")):
        yield path.relative_to(SOURCE.parent).as_posix(), tree(path)


def public(kind: type | tuple[type, ...]) -> dict[str, list[str]]:
    """Where classes or functions without an underscore are defined at the top of a module, by name."""
    places = defaultdict(list)
    for path, module in parsed():
        for node in module.body:
            is_overload = any(ast.unparse(d) == "overload" for d in getattr(node, "decorator_list", ()))
            if isinstance(node, kind) and not node.name.startswith("_") and not is_overload:  # type: ignore[attr-defined]
                places[node.name].append(path)  # type: ignore[attr-defined]
    return dict(places)


def listed() -> Iterator[tuple[str, Any]]:
    """Every function and class in the face of a package of this one, once."""
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in face(package):
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("mupscale")
            if is_ours and (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{package}.{name}", value


def shown_as_code() -> set[str]:
    """Every word in the code of README and the pages in docs: between backticks, fenced, or indented."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    code = re.findall(r"^```.*?^```|`[^`\n]+`|^ {4}.*?$", text, flags=re.DOTALL | re.MULTILINE)
    return {word for part in code for word in re.findall(r"\w+", part)}


def assert_none(wrong: list[str], rule: str) -> None:
    """All that breaks a rule, in one message."""
    assert not wrong, f"{len(wrong)} × {rule}:\n  " + "\n  ".join(wrong)


def test_every_function_that_the_docs_show_has_an_example() -> None:
    pytest.importorskip("transformers")  # mupscale.hf.Clip is imported with it
    shown = shown_as_code()
    functions = [(name, value) for name, value in listed() if inspect.isfunction(value)]
    needed = [(name, value) for name, value in functions if name.rpartition(".")[2] in shown]
    assert len(needed) > 50  # else the docs are not read
    missing = [name for name, value in needed if ">>>" not in (value.__doc__ or "")]
    assert_none(missing, "listed in __all__ and shown in the docs, without an example (>>>) in its docstring")


def test_every_listed_class_has_a_docstring() -> None:
    pytest.importorskip("transformers")
    missing = [name for name, value in listed() if inspect.isclass(value) and not _own_docstring(value)]
    assert_none(missing, "listed in __all__, without a docstring")


def _own_docstring(cls: type) -> bool:
    """A dataclass is given its signature for a docstring where it has none."""
    text = (vars(cls).get("__doc__") or "").strip()
    return bool(text) and not text.startswith(f"{cls.__name__}(")


def test_no_class_name_is_defined_twice() -> None:
    twice = [f"{name}: {', '.join(places)}" for name, places in public(ast.ClassDef).items() if len(places) > 1]
    assert_none(twice, "a public class defined in several modules")


def test_no_function_name_is_defined_twice() -> None:
    twice = []
    for name, places in public((ast.FunctionDef, ast.AsyncFunctionDef)).items():
        elsewhere = [place for place in places if not (name in MIRRORED and place.startswith("mupscale/hf/"))]
        if len(elsewhere) > 1 or len(places) - len(elsewhere) > 1:
            twice.append(f"{name}: {', '.join(places)}")
    assert_none(twice, "a public function defined in several modules")


def test_no_module_is_named_like_a_function() -> None:
    functions = public((ast.FunctionDef, ast.AsyncFunctionDef))
    modules = [
        (Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem, path) for path, _ in parsed()
    ]
    same = [f"{path}: {', '.join(functions[name])}" for name, path in modules if name in functions]
    assert_none(same, "a module named like a public function")
