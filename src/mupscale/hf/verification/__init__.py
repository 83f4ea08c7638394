"""Is a wide checkpoint the small one, grown? Its files, its outputs, its training.

verifying: all of it, as `verify`. relation: the growths between two checkpoints, and the tensors of the files.
"""

from mupscale.hf.verification.relation import find_record, is_exact
from mupscale.hf.verification.verifying import (
    Comparison,
    ComparisonRow,
    compare_outputs,
    load_pretrained,
    needed_bytes,
    verify,
)

__all__ = [
    "Comparison",
    "ComparisonRow",
    "compare_outputs",
    "find_record",
    "is_exact",
    "load_pretrained",
    "needed_bytes",
    "verify",
]
