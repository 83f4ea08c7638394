"""The sources that several tests read, parsed once."""

from __future__ import annotations

import ast
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
