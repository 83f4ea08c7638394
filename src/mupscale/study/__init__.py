"""A study is a tree of training stretches: who trains, what is compared, and what came of it.

tree: stretches, what identifies them, budgets that branch off a trunk
training: trees of a recipe's models, and what they would cost
contenders: who takes part, one table; systems: their trees between two sizes, and what a recipe may say
results: what a study gave, as plain data
verdict: loss against cost, and the answer in sentences; wording: tables, cards, and what else is said in words
forecast: from small systems, and from sweeps, to the large one
pay: the preset that asks whether growing pays, and the tuning of its contenders at the smallest width
paper: the paper's own comparison
family_run: the preset that trains every size out of one growing run; when, transfer: more presets
own_loop: pay and family in a training loop of one's own
code_identity: which version of the user's code a stretch was trained by, told by its first steps

Sweeps, by any number of workers that share a storage:
space: what is searched, what was found, and what to know of it
search: take trials, train them, store the results; who is at work, and who died
trials: all trials of a sweep in its storage, which is SQLite, a journal or a database; when to stop one
"""

from mupscale.study.contenders import CONTENDERS, Contender, contender_named, contender_or_stranger, usual_contenders
from mupscale.study.family_run import FamilySettings, estimate_family, run_family
from mupscale.study.own_loop import OwnLoop
from mupscale.study.paper import estimate_paper, run_paper, run_sweeps
from mupscale.study.pay import describe_plan, run_pay
from mupscale.study.results import BreakEven, ContenderRuns, Curve, StudySummary, SystemRuns, load_summary
from mupscale.study.search import run_sweep
from mupscale.study.space import Cell, Space, Sweep, SweepJob, Tried, sweep_remarks
from mupscale.study.systems import StudySettings
from mupscale.study.training import COMMAND_FILE
from mupscale.study.transfer import (
    TRANSFER_FILE,
    RuleComparison,
    TransferCheck,
    WidthLine,
    compare_rules,
    nothing_finished,
    read_width_line,
    rules_table,
    transfer_check,
    what_was_measured,
)
from mupscale.study.verdict import loss_at
from mupscale.study.when import estimate_when, run_when
from mupscale.study.wording import find_cost_unit, format_width, format_widths

__all__ = [
    "BreakEven",
    "FamilySettings",
    "OwnLoop",
    "Space",
    "StudySettings",
    "StudySummary",
    "Sweep",
    "SweepJob",
    "compare_rules",
    "run_paper",
    "run_pay",
    "run_sweep",
    "run_when",
    "transfer_check",
]
