"""A zoo of small models in plain torch, each with one awkward pattern of real code, to be widened exactly or refused.

The narrow model is `build(1)`, and `build(k)` has k times its width. Attributes have names that give no hint.
"""

from __future__ import annotations

import patterns_attention
import patterns_blocks
import patterns_graph
import patterns_habits
import patterns_mlp
import patterns_others
import patterns_products
import patterns_sequence
import patterns_units
import patterns_vision
from patterns_kit import REGISTERED, Pattern

__all__ = ["PATTERNS", "Pattern"]

# importing one of these modules puts its patterns on the list
_SOURCES = (
    patterns_attention,
    patterns_blocks,
    patterns_graph,
    patterns_habits,
    patterns_mlp,
    patterns_others,
    patterns_products,
    patterns_sequence,
    patterns_units,
    patterns_vision,
)
PATTERNS: list[Pattern] = list(REGISTERED)
