"""A zoo of small models in plain torch, each with one awkward pattern of real code, to be widened exactly or refused.

The narrow model is `build(1)`, and `build(k)` has k times its width. Attributes have names that give no hint.
"""

from __future__ import annotations

from importlib import import_module

from patterns_kit import REGISTERED, Pattern

__all__ = ["PATTERNS", "Pattern"]

for subject in ("attention", "graph", "habits", "layers", "sequence", "units", "vision"):
    import_module(f"patterns_{subject}")  # which puts its patterns on the list
PATTERNS: list[Pattern] = list(REGISTERED)
