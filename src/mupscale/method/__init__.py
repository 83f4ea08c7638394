"""The paper's procedure as one run: tuning on a small system, transfer, the large models, and the answer."""

from mupscale.method.check import transfer_check
from mupscale.method.dry_run import estimate
from mupscale.method.procedure import run_method, run_sweeps
from mupscale.method.settings import Method
from mupscale.method.summary import Curve, Runs, Summary
from mupscale.method.transfer import line_of

__all__ = [
    "Curve",
    "Method",
    "Runs",
    "Summary",
    "estimate",
    "line_of",
    "run_method",
    "run_sweeps",
    "transfer_check",
]
