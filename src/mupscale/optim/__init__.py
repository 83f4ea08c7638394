"""What each optimizer is, and so its parameter groups; clipping and schedules that do not depend on the width.

optimizer_traits  how an optimizer's hyperparameters and state scale; Muon and AdamW as one optimizer
optimizer_trials  what an optimizer does, found by taking steps with it
registration   teaching the library an optimizer, with the steps of optimizer_trials as its test
groups         parameters collected into groups for a model, and for a wide model from a narrow one's optimizer
clipping       clipping by a norm that does not depend on the width
saved_optimizers  what torch.save wrote of one: which parameter is which
schedulers     the course of a rate over a run; a schedule carried over to a wide optimizer
"""

from mupscale.optim.clipping import clip_grad_norm_, watch_first_steps
from mupscale.optim.groups import (
    DECAY_RULE,
    FROM_GROUP,
    NORM_FACTOR,
    RATE_CHANGE,
    GroupBuilder,
    change_of_decay,
    following_rules,
    groups_by_rules,
    grown_groups,
    inexact_in_words,
    make_optimizer,
    param_groups,
    per_group,
    rate_shares,
    recognise_optimizer,
)
from mupscale.optim.optimizer_traits import MuonAdamW, Traits, default_hyper, known_traits, muon_groups, scale
from mupscale.optim.registration import register_optimizer, traits_of
from mupscale.optim.saved_optimizers import SavedOptimizer, decay_groups, name_parameters, read_optimizer
from mupscale.optim.schedulers import Schedule, load_schedule, saved_schedule, widen_scheduler

__all__ = ["MuonAdamW", "load_schedule", "muon_groups"]
