"""Is a wide checkpoint the small one, grown? Its files, its outputs, its training.

verifying: all of it, as `verify`. relation: the growths between two checkpoints. weights: the tensors of the files.
loading: models and batches. model_outputs: what models compute. joint_training: both trained side by side.
fresh_growth: new units, and what they move. comparison: the result. deep_outputs: a checkpoint with more layers.
"""

from mupscale.hf.verification.comparison import Comparison, ComparisonRow
from mupscale.hf.verification.loading import load_pretrained
from mupscale.hf.verification.model_outputs import compare_outputs
from mupscale.hf.verification.relation import find_record
from mupscale.hf.verification.verifying import needed_bytes, verify
from mupscale.hf.verification.weights import is_exact

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
