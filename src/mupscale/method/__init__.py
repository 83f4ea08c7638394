"""The paper's procedure as one run: tuning on a small system, transfer, the large models, and the answer.

contenders: the models that are compared, one registry (contender_types: what an entry consists of)
settings, protocol: what a recipe says, and the training runs that follow from it
tuning, extrapolation: Step 0, the sweeps at small widths and what they say about the large one
method_run, contender_training, pipeline: the stages in their folder, the large models, all of it as one run
summary, costs, verdict: what a run gave, in numbers and in sentences
transfer_trials, transfer_verdict: the transfer check; dry_run: what a run would cost; coordinate_check: one picture
other_widenings: Net2Net and naive widening, for comparison
"""

from mupscale.method.contender_types import GainMark, PaperContender
from mupscale.method.contenders import CONTENDERS, RANKED, SCRATCH, UPSCALED, find_contender
from mupscale.method.dry_run import estimate_run
from mupscale.method.pipeline import run_method, run_sweeps
from mupscale.method.settings import Method
from mupscale.method.summary import Choice, Curve, Runs, Summary
from mupscale.method.transfer_trials import transfer_check
from mupscale.method.transfer_verdict import read_width_line

__all__ = [
    "CONTENDERS",
    "RANKED",
    "SCRATCH",
    "UPSCALED",
    "Choice",
    "Curve",
    "GainMark",
    "Method",
    "PaperContender",
    "Runs",
    "Summary",
    "estimate_run",
    "find_contender",
    "read_width_line",
    "run_method",
    "run_sweeps",
    "transfer_check",
]
