"""A study is a tree of training stretches: who trains, what is compared, and what came of it.

tree: stretches, what identifies them, budgets that branch off a trunk; training: trees of a recipe's models
contenders: who takes part, one table; settings: what a recipe may say; systems: their trees between two sizes
tuning: learning rates and noise at the smallest width; forecast: from small systems to the large one
budgets: loss against cost; verdict: the sentence and its numbers; results: all of it as plain data
pay, when: presets, each of which builds trees and reads their leaves into a sentence
pay_words, paper_words: what a preset says of them, for its page; wording: what these and the page share
own_loop: the same in a training loop of one's own
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
from mupscale.study.forecast import check_forecast, make_forecast
from mupscale.study.own_loop import LoopComparison, OwnLoop
from mupscale.study.pay import describe_plan, run_pay
from mupscale.study.results import (
    BudgetPoint,
    Card,
    ContenderRuns,
    Curve,
    Search,
    StageSpent,
    StudySummary,
    SystemRuns,
    Table,
    Trial,
)
from mupscale.study.settings import StudySettings
from mupscale.study.verdict import answer_comparison, describe_ratio
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
    "GainMark",
    "LoopComparison",
    "OwnLoop",
    "Search",
    "StageSpent",
    "StudySettings",
    "StudySummary",
    "SystemRuns",
    "Table",
    "Trial",
    "answer_comparison",
    "check_forecast",
    "compare_costs",
    "contender_named",
    "contender_or_stranger",
    "cost_to_reach",
    "describe_plan",
    "describe_ratio",
    "find_break_even",
    "find_cost_unit",
    "format_cost",
    "format_width",
    "format_widths",
    "loss_at",
    "make_forecast",
    "run_pay",
]
