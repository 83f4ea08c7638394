"""What each optimizer is, and so its parameter groups; clipping and schedules that do not depend on the width.

traits         how an optimizer's hyperparameters and state scale
group_builder  parameters collected into groups
groups         groups and optimizers for a model, and for a wide model from a narrow one's optimizer
muon_with_adamw  Muon for hidden matrices and AdamW for the rest, as one optimizer
clipping       clipping by a norm that does not depend on the width
saved_optimizers  what torch.save wrote of one: which parameter is which
schedulers     the course of a rate over a run; a schedule carried over to a wide optimizer
"""

from mupscale.optim.clipping import clip_grad_norm_, watch_first_steps
from mupscale.optim.group_builder import (
    DECAY_RULE,
    FROM_GROUP,
    NORM_FACTOR,
    GroupBuilder,
    change_of_decay,
    inexact_in_words,
    scale,
)
from mupscale.optim.groups import (
    default_hyper,
    following_rules,
    groups_by_rules,
    grown_groups,
    make_optimizer,
    param_groups,
    per_group,
    rate_shares,
    recognise_optimizer,
)
from mupscale.optim.muon_with_adamw import MuonAdamW, muon_groups
from mupscale.optim.optimizer_traits import Traits, known_traits, register_optimizer, traits_of
from mupscale.optim.saved_optimizers import SavedOptimizer, decay_groups, read_optimizer
from mupscale.optim.schedulers import Schedule, load_schedule, saved_schedule, widen_scheduler

__all__ = [
    "DECAY_RULE",
    "FROM_GROUP",
    "NORM_FACTOR",
    "GroupBuilder",
    "MuonAdamW",
    "SavedOptimizer",
    "Schedule",
    "Traits",
    "change_of_decay",
    "clip_grad_norm_",
    "decay_groups",
    "default_hyper",
    "following_rules",
    "groups_by_rules",
    "grown_groups",
    "inexact_in_words",
    "known_traits",
    "load_schedule",
    "make_optimizer",
    "muon_groups",
    "param_groups",
    "per_group",
    "rate_shares",
    "read_optimizer",
    "recognise_optimizer",
    "register_optimizer",
    "saved_schedule",
    "scale",
    "traits_of",
    "watch_first_steps",
    "widen_scheduler",
]
