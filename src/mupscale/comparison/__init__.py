"""Does growing pay? Four ways to spend the same FLOPs, under one schedule, from small systems to the large one.

contenders: who takes part, one registry; settings: what a recipe may say about it
system: the training runs of every contender between two widths; stages: how they are trained
tuning: learning rates and noise at the smallest width; training: the contenders at every budget
budgets: loss against cost; forecast: from small systems to the large one; answer: the sentence and its numbers
results: all of it as plain data; pipeline: from the first small model to the answer; dry_run: what that would cost
own_loop: the same in a training loop of one's own
"""

from mupscale.comparison.answer import answer_comparison, describe_ratio
from mupscale.comparison.budgets import (
    BreakEven,
    CostRatio,
    compare_costs,
    cost_to_reach,
    find_break_even,
    loss_at,
)
from mupscale.comparison.contenders import CONTENDERS, Contender, contender_named
from mupscale.comparison.dry_run import describe_plan
from mupscale.comparison.forecast import check_forecast, make_forecast
from mupscale.comparison.own_loop import LoopComparison, OwnLoop
from mupscale.comparison.pipeline import run_comparison
from mupscale.comparison.results import (
    BudgetPoint,
    ComparisonSummary,
    ContenderRuns,
    StageSpent,
    SystemRuns,
    Tried,
    TunedContender,
)
from mupscale.comparison.settings import ComparisonSettings

__all__ = [
    "CONTENDERS",
    "BreakEven",
    "BudgetPoint",
    "ComparisonSettings",
    "ComparisonSummary",
    "Contender",
    "ContenderRuns",
    "CostRatio",
    "LoopComparison",
    "OwnLoop",
    "StageSpent",
    "SystemRuns",
    "Tried",
    "TunedContender",
    "answer_comparison",
    "check_forecast",
    "compare_costs",
    "contender_named",
    "cost_to_reach",
    "describe_plan",
    "describe_ratio",
    "find_break_even",
    "loss_at",
    "make_forecast",
    "run_comparison",
]
