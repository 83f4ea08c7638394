"""A study is a tree of training stretches: who trains, what is compared, and what came of it.

tree: stretches, what identifies them, budgets that branch off a trunk; training: trees of a recipe's models
contenders: who takes part, one table; settings: what a recipe may say; dry_run: what a tree would cost
results: what a study gave, as plain data; budgets: loss against cost
pay: the preset that asks whether growing pays; systems: its trees between two sizes; tuning: learning rates and noise
at the smallest width; forecast: from small systems to the large one; verdict: the sentence; pay_words: tables and cards
paper: the paper's own comparison; extrapolation: of what its sweeps found; paper_verdict: its costs and sentences;
paper_words: tables and cards; coordinate_check: one picture
family_run: the preset that trains every size out of one growing run; when, transfer: two more presets
own_loop: pay and family in a training loop of one's own; wording: what the words of presets and the page share
"""

from mupscale.study.budgets import (
    BreakEven,
    CostRatio,
    compare_costs,
    cost_to_reach,
    find_break_even,
    loss_at,
)
from mupscale.study.contenders import CONTENDERS, Contender, GainMark, contender_named, contender_or_stranger
from mupscale.study.family_run import FamilySettings, estimate_family, run_family
from mupscale.study.forecast import check_forecast, make_forecast
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
    Tried,
)
from mupscale.study.settings import StudySettings
from mupscale.study.transfer import read_width_line, transfer_check
from mupscale.study.verdict import answer_comparison, describe_ratio
from mupscale.study.when import estimate_when, run_when
from mupscale.study.wording import find_cost_unit, format_cost, format_width, format_widths

__all__ = [
    "CONTENDERS",
    "BreakEven",
    "BudgetPoint",
    "Card",
    "Contender",
    "ContenderRuns",
    "CostRatio",
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
    "answer_comparison",
    "check_forecast",
    "compare_costs",
    "contender_named",
    "contender_or_stranger",
    "cost_to_reach",
    "describe_plan",
    "describe_ratio",
    "estimate_family",
    "estimate_paper",
    "estimate_when",
    "find_break_even",
    "find_cost_unit",
    "format_cost",
    "format_width",
    "format_widths",
    "loss_at",
    "make_forecast",
    "read_width_line",
    "run_family",
    "run_paper",
    "run_pay",
    "run_sweeps",
    "run_when",
    "transfer_check",
]
