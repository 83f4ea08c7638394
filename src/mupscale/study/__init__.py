"""A study is a tree of training stretches: who trains, what is compared, and what came of it.

tree: stretches, what identifies them, budgets that branch off a trunk; training: trees of a recipe's models
contenders: who takes part, one table; settings: what a recipe may say; systems: their trees between two sizes
results: what a study gave, as plain data; dry_run: what a tree would cost
verdict: loss against cost, and the answer in sentences; wording: tables, cards, and what else is said in words
forecast: from small systems, and from sweeps, to the large one
pay: the preset that asks whether growing pays; tuning: its learning rates and noise, at the smallest width
paper: the paper's own comparison; coordinate_check: one picture of it
family_run: the preset that trains every size out of one growing run; when, transfer: two more presets
own_loop: pay and family in a training loop of one's own
"""

from mupscale.study.contenders import (
    CONTENDERS,
    Contender,
    GainMark,
    contender_named,
    contender_or_stranger,
    usual_contenders,
)
from mupscale.study.family_run import FamilySettings, estimate_family, run_family
from mupscale.study.own_loop import OwnLoop
from mupscale.study.paper import estimate_paper, run_paper, run_sweeps
from mupscale.study.pay import describe_plan, run_pay
from mupscale.study.results import (
    BudgetPoint,
    Card,
    ContenderRuns,
    Curve,
    PageTable,
    Search,
    StageSpent,
    StudySummary,
    SystemRuns,
)
from mupscale.study.settings import StudySettings
from mupscale.study.training import COMMAND_FILE
from mupscale.study.transfer import transfer_check
from mupscale.study.verdict import BreakEven, loss_at
from mupscale.study.when import estimate_when, run_when
from mupscale.study.wording import find_cost_unit, format_width, format_widths
from mupscale.sweep import Tried

__all__ = [
    "COMMAND_FILE",
    "CONTENDERS",
    "BreakEven",
    "BudgetPoint",
    "Card",
    "Contender",
    "ContenderRuns",
    "Curve",
    "FamilySettings",
    "GainMark",
    "OwnLoop",
    "PageTable",
    "Search",
    "StageSpent",
    "StudySettings",
    "StudySummary",
    "SystemRuns",
    "Tried",
    "contender_named",
    "contender_or_stranger",
    "describe_plan",
    "estimate_family",
    "estimate_paper",
    "estimate_when",
    "find_cost_unit",
    "format_width",
    "format_widths",
    "loss_at",
    "run_family",
    "run_paper",
    "run_pay",
    "run_sweeps",
    "run_when",
    "transfer_check",
    "usual_contenders",
]
