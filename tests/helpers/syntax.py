"""The sources that several tests read, parsed once."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree, which nobody may change."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the tree."""
    return list(ast.walk(tree(path)))


def face(package: str) -> list[str]:
    """The names that others may take from a package: those in its __all__, and all that it imports from this one."""
    module = importlib.import_module(package)
    found = [node for node in tree(Path(str(module.__file__))).body if isinstance(node, ast.ImportFrom)]
    ours = [alias.name for node in found if str(node.module).startswith("mupscale") for alias in node.names]
    return [*getattr(module, "__all__", []), *ours]
